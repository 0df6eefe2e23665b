// All processes by role, and the links between attention and expert workers.

import { html, useLayoutEffect, useRef, useState } from "./preact.js";
import { Bar, Table, amount, percent } from "./parts.js";

const ROLES = [["gateway", "Gateways"], ["scheduler", "Schedulers"], ["attention", "Attention workers"], ["expert", "Expert workers"], ["edge-agent", "Edge agents"]];
const FEW = 12; // processes of one role that are shown with all facts, and links with their rates
const MOST_LINKS = 64;
const MOST_LISTED = 200;

function facts(service) {
  const { load } = service;
  if (load) return `${load.running} running, ${load.waiting} waiting, ${amount(load.rows_per_s, "")} rows/s`;
  if (service.role === "expert") return `${service.experts} replicas${service.expert_share == null ? "" : `, ${percent(service.expert_share)} of rows`}`;
  return service.version ? `version ${service.version}` : "";
}

function Node({ service, selected, select, anchor }) {
  const used = service.load?.kv_blocks ? service.load.kv_blocks_used / service.load.kv_blocks : service.expert_share;
  const kind = service.load?.kv_blocks ? "KV blocks in use" : "share of rows";
  return html`<li><button class=${`node ${service.state}`} aria-pressed=${selected === service.id ? "true" : "false"} onClick=${() => select(service.id)} ref=${(node) => anchor(service.id, node)} title=${`${service.id}: ${service.state}. ${facts(service)}`}>
    <span class="name">${service.id}</span>
    <span class="more weak">${service.state}${service.node ? ` on ${service.node}` : ""}<br />${facts(service)}</span>
    ${used == null ? null : html`<${Bar} share=${used} label=${`${kind} of ${service.id}`} />`}
  </button></li>`;
}

function Links({ links, frame, nodes }) {
  const [paths, setPaths] = useState([]);
  useLayoutEffect(() => {
    const draw = () => {
      const box = frame.current?.getBoundingClientRect();
      if (!box) return;
      const most = Math.max(1, ...links.map((link) => link.bytes_per_s || 0));
      setPaths(links.flatMap((link) => {
        const [a, b] = [nodes.current.get(link.source), nodes.current.get(link.target)].map((node) => node?.getBoundingClientRect());
        if (!a || !b) return [];
        const [x1, y1, x2, y2] = [a.right - box.left, a.top + a.height / 2 - box.top, b.left - box.left, b.top + b.height / 2 - box.top];
        const middle = (x1 + x2) / 2;
        return [{ key: `${link.source} ${link.target}`, d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`, width: 1 + 4 * (link.bytes_per_s || 0) / most, x: middle, y: (y1 + y2) / 2, rate: amount(link.bytes_per_s, "B/s") }];
      }));
    };
    draw();
    const fit = new ResizeObserver(draw);
    fit.observe(frame.current);
    return () => fit.disconnect();
  }, [links]);
  return html`<svg class="links" aria-hidden="true">${paths.map((path) => html`<g key=${path.key}><path d=${path.d} stroke-width=${path.width} />
    ${paths.length <= FEW ? html`<text x=${path.x} y=${path.y - 4} text-anchor="middle">${path.rate}</text>` : null}</g>`)}</svg>`;
}

export function Topology({ state }) {
  const [chosen, select] = useState("");
  const selected = state.services.some((service) => service.id === chosen) ? chosen : "";
  const frame = useRef(null);
  const nodes = useRef(new Map());
  const anchor = (id, node) => (node ? nodes.current.set(id, node) : nodes.current.delete(id));
  const touches = (link) => !selected || link.source === selected || link.target === selected;
  const senders = state.services.filter((service) => service.role === "attention" && service.layer_bytes_per_s != null);
  const holders = state.services.filter((service) => service.layers);
  const sent = senders.flatMap((from) => holders.map((to) => ({ source: from.id, target: to.id, bytes_per_s: from.layer_bytes_per_s * to.layers })));
  const shown = sent.filter(touches);
  const columns = ROLES.map(([role, title]) => [role, title, state.services.filter((service) => service.role === role)]).filter(([, , found]) => found.length);
  return html`<section class="card">
    <h2>Processes</h2>
    <div class="columns" ref=${frame}>
      ${shown.length <= MOST_LINKS ? html`<${Links} links=${shown} frame=${frame} nodes=${nodes} />` : null}
      ${columns.map(([role, title, found]) => html`<div key=${role}><h3>${title} (${found.length})</h3>
        <ul class=${found.length > FEW ? "many" : ""} tabindex=${found.length > FEW ? "0" : null}>${found.map((service) => html`<${Node} key=${service.id} service=${service} selected=${selected} select=${(id) => select(id === selected ? "" : id)} anchor=${anchor} />`)}</ul></div>`)}
    </div>
    <p class="weak">Select a process to see its links alone. Links show the hidden states that attention workers send, if all rows go directly.</p>
    <${Table} caption=${`${selected ? `Links of ${selected}` : "Links"}${shown.length > MOST_LISTED ? `: the first ${MOST_LISTED} of ${shown.length}` : ""}`} columns=${["from", "to", "#sent"]} empty="There are no links between workers: all experts are in the attention workers."
      rows=${shown.slice(0, MOST_LISTED).map((link) => ({ key: `${link.source} ${link.target}`, cells: [link.source, link.target, amount(link.bytes_per_s, "B/s")] }))} />
  </section>`;
}
