// Brownout, decisions, requests in flight, and edge sites.

import { html, useState } from "./preact.js";
import { Bar, Figures, Table, amount, clock, percent, seconds } from "./parts.js";

export function Brownout({ state }) {
  const { brownout } = state;
  const workers = state.services.filter((service) => service.load);
  return html`<section class="card"><h2>Policy</h2>${brownout ? html`<${Figures} of=${[
      ["mode", brownout.mode],
      ["target, first token", seconds(brownout.slo_ttft_s)],
      ["target, later tokens", seconds(brownout.slo_tpot_s)],
      ["least threshold, prompts", brownout.min_prefill_threshold.toFixed(2)],
      ["least threshold, tokens", brownout.min_decode_threshold.toFixed(2)],
    ]} />` : html`<p class="weak">No scheduler has told a policy yet.</p>`}</section>
  <section class="card"><${Table} caption="Workers" columns=${["worker", "mode", "threshold, prompts", "threshold, tokens", "#degraded choices", "#first token p90", "#later tokens p90", "new requests"]}
    empty="No worker takes requests." rows=${workers.map(({ id, load }) => ({ key: id, cells: [id, load.mode,
      html`${load.prefill_threshold.toFixed(2)}<${Bar} share=${load.prefill_threshold} label=${`prompt threshold of ${id}`} />`,
      html`${load.decode_threshold.toFixed(2)}<${Bar} share=${load.decode_threshold} label=${`token threshold of ${id}`} />`,
      percent(load.degraded_share), seconds(load.ttft_p90_s), seconds(load.tpot_p90_s), load.shedding ? html`<span class="bad">refused</span>` : "taken"] }))} />
    <p class="weak">A threshold of 1 is exact: all chosen experts serve. At 0.5, half of the choices keep their experts.</p></section>`;
}

export function Decisions({ state }) {
  const [kind, setKind] = useState("");
  const found = state.decisions.filter((each) => !kind || each.kind === kind);
  const { scaling } = state;
  return html`${scaling ? html`<section class="card"><h2>Scaling</h2><${Figures} of=${[
      ["mode", scaling.mode], ["attention workers", scaling.attention], ["expert workers", scaling.experts],
      ["wanted", scaling.wanted_attention == null ? "–" : `${scaling.wanted_attention} and ${scaling.wanted_experts}`],
    ]} />${scaling.trouble ? html`<p class="bad">${scaling.trouble}</p>` : null}</section>` : null}
  <section class="card">
    <form class="fields" onSubmit=${(event) => event.preventDefault()}><label>kind<select value=${kind} onChange=${(event) => setKind(event.target.value)}>
      <option value="">all</option><option value="placement">placement</option><option value="scaling">scaling</option><option value="brownout">brownout</option></select></label></form>
    <${Table} caption="Decisions, newest first" columns=${["time", "kind", "cause", "change", "predicted", "measured", "reason"]} empty="No decisions yet."
      rows=${found.map((each) => ({ key: `${each.kind} ${each.id}`, cells: [clock(each.at), each.kind, each.cause, html`${each.change}${each.adopted ? "" : html` <span class="weak">(not adopted)</span>`}`, each.predicted || "–", each.measured || "–", each.reason] }))} />
  </section>`;
}

export function Requests({ state }) {
  return html`<section class="card"><${Table} caption=${`Requests in flight: ${state.traffic.inflight}`} columns=${["request", "route", "tenant", "#age", "waits for", "#prompt tokens", "#tokens", "workers"]}
    empty="No requests are in flight."
    rows=${state.requests.map((each, i) => ({ key: i, cells: [each.id, each.route, each.tenant, seconds(each.age_s), each.waits_for, each.prompt_tokens, each.tokens, each.workers.join(", ")] }))} /></section>`;
}

function SiteMap({ sites, links }) {
  const place = (i) => {
    const turn = 2 * Math.PI * i / sites.length - Math.PI / 2;
    return sites.length === 1 ? [300, 160] : [300 + 210 * Math.cos(turn), 160 + 110 * Math.sin(turn)];
  };
  const at = Object.fromEntries(sites.map((site, i) => [site.id, place(i)]));
  const drawn = links.filter((link) => at[link.source] && at[link.target] && link.source < link.target);
  return html`<svg class="map" viewBox="0 0 600 320" role="img" aria-label=${`Map of ${sites.length} sites; the tables below have their numbers`}>
    ${drawn.map((link) => {
      const [[x1, y1], [x2, y2]] = [at[link.source], at[link.target]];
      return html`<g key=${`${link.source} ${link.target}`}><line x1=${x1} y1=${y1} x2=${x2} y2=${y2} /><text x=${(x1 + x2) / 2} y=${(y1 + y2) / 2 - 4} text-anchor="middle">${seconds(link.rtt_s)}, ${amount(link.bytes_per_s == null ? null : 8 * link.bytes_per_s, "bit/s")}</text></g>`;
    })}
    ${sites.map((site) => html`<g key=${site.id}><circle cx=${at[site.id][0]} cy=${at[site.id][1]} r="26" /><text x=${at[site.id][0]} y=${at[site.id][1] + 4} text-anchor="middle">${site.site}</text></g>`)}
  </svg>`;
}

export function Edge({ state }) {
  const links = state.links.filter((link) => link.rtt_s != null || link.bytes_per_s != null);
  if (!state.sites.length) return html`<section class="card"><p>There are no edge agents in this cluster.</p></section>`;
  return html`<section class="card"><h2>Sites</h2><${SiteMap} sites=${state.sites} links=${links} />
    <${Table} caption="Sites" columns=${["site", "agent", "#memory", "#limit", "#experts here", "#choices at own site"]} empty=""
      rows=${state.sites.map((site) => ({ key: site.id, cells: [site.site, site.id, amount(site.memory_used_bytes, "B"), site.memory_limit_bytes ? amount(site.memory_limit_bytes, "B") : "none", site.held, percent(site.local_share)] }))} />
    <${Table} caption="Links" columns=${["from", "to", "#round trip", "#rate"]} empty="No link was measured yet."
      rows=${links.map((link) => ({ key: `${link.source} ${link.target}`, cells: [link.source, link.target, seconds(link.rtt_s), amount(link.bytes_per_s == null ? null : 8 * link.bytes_per_s, "bit/s")] }))} /></section>`;
}
