// Small parts that all views use.

import { html } from "./preact.js";

export const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`);

export function seconds(value) {
  if (value == null) return "–";
  return value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

export function amount(value, unit) {
  if (value == null) return "–";
  const steps = ["", "k", "M", "G", "T"];
  let step = 0;
  while (value >= 1000 && step < steps.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${value >= 100 || (step === 0 && Number.isInteger(value)) ? value.toFixed(0) : value.toFixed(1)} ${steps[step]}${unit}`.trim();
}

// Of another day, with its date.
export function clock(at) {
  const time = new Date(1000 * at);
  return time.toDateString() === new Date().toDateString() ? time.toLocaleTimeString() : time.toLocaleString();
}

export function Figures({ of }) {
  return html`<dl class="figures">${of.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export function Table({ caption, columns, rows, empty }) {
  if (!rows.length) return html`<p class="weak">${empty}</p>`;
  const kind = (column) => (column.startsWith("#") ? "number" : "");
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table>
    <caption>${caption}</caption>
    <thead><tr>${columns.map((column) => html`<th scope="col" class=${kind(column)}>${column.replace("#", "")}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key}>${row.cells.map((cell, i) => html`<td class=${kind(columns[i])}>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

export function Bar({ share, label }) {
  const width = Math.max(0, Math.min(1, share || 0));
  return html`<span class="bar" role="img" aria-label=${`${label}: ${percent(width)}`}><span style=${{ width: `${100 * width}%` }}></span></span>`;
}
