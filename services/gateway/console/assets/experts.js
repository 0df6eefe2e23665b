// Layers by experts: load, replicas or holders of each, and the changes of the last placement.

import { html, useEffect, useRef, useState } from "./preact.js";
import { call } from "./api.js";
import { Table, percent } from "./parts.js";

const CHANGED_MS = 15000;
const CELL = 14;
const ROW = 16;

function hues(count) {
  return Array.from({ length: count }, (_, i) => `hsl(${(i * 137.5) % 360} 60% 55%)`);
}

// Pairs of layer and expert whose holders differ.
function differences(before, after) {
  const names = (map, held) => held.map((idx) => map.workers[idx]).sort().join();
  const changed = [];
  after.layers.forEach((layer, row) => {
    const old = before.layers.indexOf(layer);
    after.holders[row].forEach((held, expert) => {
      if (old < 0 || names(before, before.holders[old][expert] || []) !== names(after, held)) changed.push([row, expert]);
    });
  });
  return changed;
}

function color(map, row, expert, view, dark, holderHues) {
  const held = map.holders[row][expert];
  if (view === "holder") return held.length ? holderHues[held[0]] : "transparent";
  const value = view === "replicas" ? held.length / map.workers.length : Math.min(1, ((map.share[row] || [])[expert] || 0) * map.num_experts / 4);
  return dark ? `hsl(215 70% ${16 + 55 * value}%)` : `hsl(215 75% ${95 - 62 * value}%)`;
}

export function Experts({ state, theme }) {
  const [map, setMap] = useState(null);
  const [error, setError] = useState("");
  const [view, setView] = useState("load");
  const [cell, setCell] = useState([0, 0]);
  const [change, setChange] = useState(null);
  const canvas = useRef(null);
  const known = useRef(null);
  const asking = useRef(null);
  useEffect(() => () => asking.current?.abort(), []);
  useEffect(() => {
    // A slow answer is waited for: to ask again and again would show none.
    if (asking.current) return;
    const leaving = (asking.current = new AbortController());
    call("v1/moesaic/experts", { signal: leaving.signal }).then((response) => response.json()).then((found) => {
      if (known.current && known.current.epoch && known.current.epoch !== found.epoch) {
        const changed = differences(known.current, found);
        setChange({ epoch: found.epoch, cells: changed, until: Date.now() + CHANGED_MS });
      }
      known.current = found;
      setMap(found);
      setError("");
    }).catch((failure) => leaving.signal.aborted || setError(failure.message)).finally(() => { asking.current = null; });
  }, [state.epoch, Math.floor(state.at / 6)]);
  useEffect(() => {
    if (!map || !map.layers.length) return;
    const target = canvas.current;
    target.width = map.num_experts * CELL;
    target.height = map.layers.length * ROW;
    const paint = target.getContext("2d");
    const colors = hues(map.workers.length);
    map.layers.forEach((_, row) => {
      for (let expert = 0; expert < map.num_experts; expert += 1) {
        paint.fillStyle = color(map, row, expert, view, theme === "dark", colors);
        paint.fillRect(expert * CELL + 1, row * ROW + 1, CELL - 2, ROW - 2);
      }
    });
    const frame = (row, expert, style) => {
      paint.strokeStyle = style;
      paint.lineWidth = 2;
      paint.strokeRect(expert * CELL + 1, row * ROW + 1, CELL - 2, ROW - 2);
    };
    if (change && Date.now() < change.until) change.cells.forEach(([row, expert]) => frame(row, expert, "#e0701b"));
    frame(...cell, theme === "dark" ? "#ffffff" : "#000000");
  }, [map, view, cell, change, theme, state.at]);
  const wrong = error ? html`<p class="bad" role="alert">${error}</p>` : null;
  if (!map) return wrong || html`<p class="weak">Asking for the experts …</p>`;
  if (!map.layers.length) return html`<section class="card"><p>There is no placement: every attention worker has all experts.</p></section>`;
  const [row, expert] = [Math.min(cell[0], map.layers.length - 1), Math.min(cell[1], map.num_experts - 1)];
  const holders = map.holders[row][expert].map((idx) => map.workers[idx]);
  const share = (map.share[row] || [])[expert];
  const busiest = map.layers.flatMap((layer, i) => (map.share[i] || []).map((part, e) => ({ layer, e, part, held: map.holders[i][e] }))).sort((a, b) => b.part - a.part).slice(0, 15);
  const select = (event) => {
    const box = canvas.current.getBoundingClientRect();
    setCell([Math.floor((event.clientY - box.top) / box.height * map.layers.length), Math.floor((event.clientX - box.left) / box.width * map.num_experts)]);
  };
  const recent = change && Date.now() < change.until;
  return html`<section class="card">${wrong}
    <h2>Experts of epoch ${map.epoch}: ${map.layers.length} layers × ${map.num_experts} experts on ${map.workers.length} workers</h2>
    <p role="status">${recent ? `Epoch ${change.epoch} is in force: ${change.cells.length} experts have other holders.` : ""}</p>
    <form class="fields" onSubmit=${(event) => event.preventDefault()}>
      <label>colour<select value=${view} onChange=${(event) => setView(event.target.value)}>
        <option value="load">share of its layer's rows</option><option value="replicas">replicas</option><option value="holder">first holder</option></select></label>
      <label>layer<input type="number" min="0" max=${Math.max(...map.layers)} value=${map.layers[row]} onInput=${(event) => { const at = map.layers.indexOf(Number(event.target.value)); if (at >= 0) setCell([at, expert]); }} /></label>
      <label>expert<input type="number" min="0" max=${map.num_experts - 1} value=${expert} onInput=${(event) => { const at = Number(event.target.value); if (at >= 0 && at < map.num_experts) setCell([row, at]); }} /></label>
      <p aria-live="polite">Layer ${map.layers[row]}, expert ${expert}${expert >= map.num_experts - map.num_united ? " (united)" : ""}: ${holders.length ? `on ${holders.join(", ")}` : "on no worker"}; ${share == null ? "no rows yet" : `${percent(share)} of the layer's rows`}.</p>
    </form>
    <canvas ref=${canvas} onClick=${select} role="img" aria-label=${`Map of ${map.layers.length} layers by ${map.num_experts} experts, coloured by ${view}. The table below lists the busiest experts.`}></canvas>
    <p class="weak">Layers from top to bottom, experts from left to right. The strongest colour means four times the even share of rows, or more.</p>
    <${Table} caption="Busiest experts" columns=${["#layer", "#expert", "#share of rows", "holders"]} empty="No rows yet."
      rows=${busiest.map((each) => ({ key: `${each.layer} ${each.e}`, cells: [each.layer, each.e, percent(each.part), each.held.map((idx) => map.workers[idx]).join(", ")] }))} />
  </section>`;
}
