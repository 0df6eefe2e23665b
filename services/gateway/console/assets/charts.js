// Throughput and latency of the last minutes.

import { html, useEffect, useRef } from "./preact.js";
import { Figures, amount, seconds } from "./parts.js";

function Chart({ title, unit, names, series, theme }) {
  const place = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const colors = [color("--accent"), color("--warn"), color("--bad")];
    const told = (value) => (unit === "s" ? seconds(value) : amount(value, ""));
    const axis = { stroke: color("--weak"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
    plot.current = new uPlot({
      width: Math.max(260, place.current.clientWidth), height: 190,
      series: [{}, ...names.map((label, i) => ({ label, stroke: colors[i], width: 2, spanGaps: false, value: (_, value) => told(value) }))],
      axes: [axis, { ...axis, size: 62, values: (_, ticks) => ticks.map(told) }],
      scales: { y: { range: (_, low, high) => [0, Math.max(high || 0, unit === "s" ? 1e-3 : 1) * 1.1] } },
      cursor: { y: false },
    }, series, place.current);
    const fit = new ResizeObserver(() => plot.current.setSize({ width: Math.max(260, place.current.clientWidth), height: 190 }));
    fit.observe(place.current);
    return () => {
      fit.disconnect();
      plot.current.destroy();
    };
  }, [theme]);
  useEffect(() => plot.current.setData(series), [series]);
  return html`<section class="card"><h2>${title}</h2><div ref=${place}></div></section>`;
}

export function Charts({ history, state, theme }) {
  const { traffic } = state;
  const times = history.map((each) => each.at);
  const of = (read) => history.map((each) => read(each.traffic) ?? null);
  return html`
    <section class="card"><h2>Now</h2><${Figures} of=${[
      ["tokens/s", amount(traffic.tokens_per_s, "")],
      ["requests/s", amount(traffic.requests_per_s, "")],
      ["in flight", traffic.inflight],
      ["queued", traffic.queued],
      ["first token, p50", seconds(traffic.ttft?.p50_s)],
      ["first token, p99", seconds(traffic.ttft?.p99_s)],
      ["between tokens, p50", seconds(traffic.itl?.p50_s)],
      ["between tokens, p99", seconds(traffic.itl?.p99_s)],
    ]} /></section>
    <div class="row">
      <${Chart} theme=${theme} title="Tokens a second" unit="" names=${["tokens/s"]} series=${[times, of((t) => t.tokens_per_s)]} />
      <${Chart} theme=${theme} title="Requests" unit="" names=${["ended/s", "in flight", "queued"]} series=${[times, of((t) => t.requests_per_s), of((t) => t.inflight), of((t) => t.queued)]} />
      <${Chart} theme=${theme} title="Time to the first token" unit="s" names=${["p50", "p90", "p99"]} series=${[times, ...["p50_s", "p90_s", "p99_s"].map((p) => of((t) => t.ttft?.[p]))]} />
      <${Chart} theme=${theme} title="Time between tokens" unit="s" names=${["p50", "p90", "p99"]} series=${[times, ...["p50_s", "p90_s", "p99_s"].map((p) => of((t) => t.itl?.[p]))]} />
    </div>`;
}
