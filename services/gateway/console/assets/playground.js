// Try the model: chat, classification and decisions, with the facts of each answer.

import { html, useEffect, useRef, useState } from "./preact.js";
import { post, readEvents } from "./api.js";
import { Bar, Figures, percent, seconds } from "./parts.js";

const TEXTS = {
  chat: "What is a mixture of experts?",
  classify: "my card was declined at the petrol station",
  decisions: "my card was declined at the petrol station",
};

function Facts({ answer, state }) {
  const told = answer.moesaic;
  if (!told) return null;
  const workers = told.workers || [];
  const routed = state.services.some((service) => workers.includes(service.id) && service.layer_bytes_per_s != null);
  const hosts = routed ? state.services.filter((service) => service.layers).map((service) => service.id) : [];
  return html`<${Figures} of=${[
    ["epoch", (told.epochs || []).map((each) => each.epoch).join(", ") || "–"],
    ["threshold", told.quality ? told.quality.mean_threshold.toFixed(2) : "–"],
    ["degraded choices", told.quality ? percent(told.quality.degraded_share) : "–"],
    ["cached tokens", told.cached_tokens],
    ["prompt tokens", answer.usage?.prompt_tokens ?? "–"],
    ["answer tokens", answer.usage?.completion_tokens ?? "–"],
    ["first result", seconds(answer.first_s)],
    ["whole answer", seconds(answer.took_s)],
    ["attention workers", workers.join(", ") || "–"],
    ["experts on", hosts.join(", ") || (workers.length ? "the same workers" : "–")],
  ]} />`;
}

export function Playground({ state }) {
  const [kind, setKind] = useState("chat");
  const [text, setText] = useState(TEXTS.chat);
  const [labels, setLabels] = useState("banking, travel, home");
  const [maxTokens, setMaxTokens] = useState(64);
  const [threshold, setThreshold] = useState(0);
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState("");
  const running = useRef(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => () => running.current?.abort(), []);
  const choose = (next) => {
    running.current?.abort();
    setKind(next);
    setText(TEXTS[next]);
    setAnswer(null);
  };
  const send = async (event) => {
    event.preventDefault();
    const leaving = (running.current = new AbortController());
    const began = performance.now();
    const since = () => (performance.now() - began) / 1000;
    const moesaic = { provenance: true, ...(threshold > 0 ? { min_threshold: Number(threshold) } : {}) };
    const names = labels.split(",").map((label) => label.trim()).filter(Boolean);
    setBusy(true);
    setError("");
    setAnswer(null);
    try {
      if (kind === "chat") {
        const grown = { text: "", first_s: null };
        const body = { messages: [{ role: "user", content: text }], max_tokens: Number(maxTokens), stream: true, stream_options: { include_usage: true }, moesaic };
        await readEvents(await post("v1/chat/completions", body, leaving.signal), (chunk) => {
          const delta = chunk.choices[0]?.delta;
          grown.text += delta?.content || delta?.reasoning_content || "";
          if ((delta?.content || delta?.reasoning_content) && grown.first_s == null) grown.first_s = since();
          if (chunk.moesaic) grown.moesaic = chunk.moesaic;
          if (chunk.usage) grown.usage = chunk.usage;
          setAnswer({ ...grown, took_s: since() });
        });
      } else {
        const body = kind === "classify" ? { input: text, labels: names, moesaic }
          : { input: text, questions: [{ type: "choice", instructions: "Which area is it?", choices: names.map((value) => ({ value })) }], moesaic };
        const found = await (await post(kind === "classify" ? "v1/classify" : "v1/decisions", body, leaving.signal)).json();
        const bars = kind === "classify" ? found.data[0].labels.map((each) => [each.label, each.prob]) : found.answers[0].probabilities.map((each) => [each.value, each.probability]);
        setAnswer({ ...found, bars, took_s: since() });
      }
    } catch (failure) {
      if (!leaving.signal.aborted) setError(failure.message);
    }
    setBusy(false);
  };
  return html`<section class="card"><h2>Playground</h2>
    <form class="fields" onSubmit=${send}>
      <label>kind<select value=${kind} onChange=${(event) => choose(event.target.value)}><option value="chat">chat</option><option value="classify">classification</option><option value="decisions">decision</option></select></label>
      ${kind === "chat" ? html`<label>most tokens<input type="number" min="1" max="4096" value=${maxTokens} onInput=${(event) => setMaxTokens(event.target.value)} /></label>`
        : html`<label>labels, with commas<input value=${labels} onInput=${(event) => setLabels(event.target.value)} /></label>`}
      <label>least threshold of brownout<input type="number" min="0" max="1" step="0.1" value=${threshold} onInput=${(event) => setThreshold(event.target.value)} /></label>
      <label class="wide">text<textarea value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>
      <button class="main" disabled=${busy || !text.trim()}>Send</button>
      <button type="button" disabled=${!busy} onClick=${() => running.current.abort()}>Stop</button>
    </form>
    ${error ? html`<p class="bad" role="alert">${error}</p>` : null}
    <div aria-live="polite" aria-busy=${busy ? "true" : "false"}>
      ${answer?.text ? html`<p class="answer">${answer.text}</p>` : null}
      ${answer?.bars ? html`<div class="labels">${answer.bars.map(([label, prob]) => html`<span>${label}</span><${Bar} share=${prob} label=${label} /><span>${percent(prob)}</span>`)}</div>` : null}
    </div>
    ${answer ? html`<${Facts} answer=${answer} state=${state} />` : null}
  </section>`;
}

