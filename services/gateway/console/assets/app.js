// The console: one stream of states, and a view of them for each tab.

import { html, render, useEffect, useRef, useState } from "./preact.js";
import { followState, setKey } from "./api.js";
import { Charts } from "./charts.js";
import { Brownout, Decisions, Edge, Requests } from "./control.js";
import { Experts } from "./experts.js";
import { clock } from "./parts.js";
import { Playground } from "./playground.js";
import { Topology } from "./topology.js";

const VIEWS = [["overview", "Overview", Topology], ["traffic", "Traffic", Charts], ["experts", "Experts", Experts], ["brownout", "Brownout", Brownout],
  ["decisions", "Decisions", Decisions], ["requests", "Requests", Requests], ["edge", "Edge", Edge], ["playground", "Playground", Playground]];
const KEPT = 450; // times of traffic, of a quarter of an hour
const THEME = "moesaic-theme";

function firstTheme() {
  return localStorage.getItem(THEME) || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function Tabs({ view, choose }) {
  const list = useRef(null);
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = VIEWS.findIndex(([name]) => name === view);
    const next = VIEWS[(at + step + VIEWS.length) % VIEWS.length][0];
    choose(next);
    list.current.querySelector(`#tab-${next}`).focus();
  };
  return html`<nav aria-label="Views"><div role="tablist" ref=${list} onKeyDown=${move}>${VIEWS.map(([name, title]) => html`<button key=${name} id=${`tab-${name}`} role="tab" aria-selected=${name === view ? "true" : "false"}
    aria-controls="view" tabindex=${name === view ? "0" : "-1"} onClick=${() => choose(name)}>${title}</button>`)}</div></nav>`;
}

function KeyForm({ message, submit }) {
  const [key, setTyped] = useState("");
  return html`<section class="card"><h2>Key</h2><p>${message}</p><form class="fields" onSubmit=${(event) => { event.preventDefault(); submit(key.trim()); }}>
    <label>API key with the scope console<input type="password" autocomplete="off" value=${key} onInput=${(event) => setTyped(event.target.value)} /></label>
    <button class="main" disabled=${!key.trim()}>Open</button></form></section>`;
}

// Add the traffic of a state. Charts go from left to right, so a gateway with another clock begins them anew.
function grown(history, { at, gateway, traffic }) {
  const last = history[history.length - 1];
  const goesOn = last && last.gateway === gateway && last.at < at;
  return [...(goesOn ? history.slice(1 - KEPT) : []), { at, gateway, traffic }];
}

function App() {
  const [theme, setTheme] = useState(firstTheme);
  const [view, setView] = useState(() => (VIEWS.some(([name]) => `#${name}` === location.hash) ? location.hash.slice(1) : "overview"));
  const [state, setState] = useState(null);
  const [history, setHistory] = useState([]);
  const [error, setError] = useState(null);
  const [login, setLogin] = useState(0);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  useEffect(() => {
    const changed = () => setView(VIEWS.some(([name]) => `#${name}` === location.hash) ? location.hash.slice(1) : "overview");
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  useEffect(() => {
    const leaving = new AbortController();
    followState((told) => {
      setError(null);
      setState(told);
      setHistory((before) => grown(before, told));
    }, setError, leaving.signal);
    return () => leaving.abort();
  }, [login]);
  const needsKey = error && (error.status === 401 || error.status === 403);
  const [, title, View] = VIEWS.find(([name]) => name === view);
  const toggle = () => {
    const next = theme === "dark" ? "light" : "dark";
    localStorage.setItem(THEME, next);
    setTheme(next);
  };
  return html`
    <header><h1>Moesaic</h1>
      ${state ? html`<span>${state.model}</span><span class=${state.ready ? "good" : "bad"}>${state.ready ? "ready" : `not ready: ${state.waiting_for.join("; ")}`}</span>
        <span class="weak">epoch ${state.epoch || "–"}, told by ${state.gateway}</span>` : null}
      <span class="grow"></span>
      ${error && state ? html`<span class="bad" role="alert">${error.message}; shown is the state of ${clock(state.at)}</span>` : null}
      <button onClick=${toggle}>${theme === "dark" ? "Light" : "Dark"} colours</button></header>
    <${Tabs} view=${view} choose=${(name) => { location.hash = name; setView(name); }} />
    <main><div id="view" role="tabpanel" aria-label=${title} tabindex="-1">
      ${needsKey ? html`<${KeyForm} message=${error.message} submit=${(key) => { setKey(key); setError(null); setLogin(login + 1); }} />`
        : state ? html`<${View} state=${state} history=${history} theme=${theme} />`
        : html`<p class=${error ? "bad" : "weak"} role="status">${error ? error.message : "Asking the gateway …"}</p>`}
    </div></main>`;
}

render(html`<${App} />`, document.getElementById("app"));
