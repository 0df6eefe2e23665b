// Calls to the gateway: the key of this page's session, errors as texts, and streams of events.

const KEY = "moesaic-key";
// The gateway says something every two seconds; a connection that is cut off without a word says nothing.
const SILENCE_MS = 20000;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export async function call(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...options.headers };
  const key = sessionStorage.getItem(KEY);
  // A browser would not even send it.
  if (/[^\x20-\x7e]/.test(key || "")) throw new ApiError(401, "the key has characters that no key has");
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy's page, or nothing: the status has to do.
  }
  throw new ApiError(response.status, message);
}

export async function post(path, body, signal) {
  return call(path, { method: "POST", body: JSON.stringify(body), signal });
}

// Give each event of a stream to `take`, until it ends.
export async function readEvents(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(500, event.error.message);
      take(event);
    }
  }
}

// Follow the state of the cluster for ever; after a break, again and again.
export async function followState(take, fail, signal) {
  for (let pause = 500; !signal.aborted; pause = Math.min(pause * 2, 8000)) {
    const silent = new AbortController();
    let timer;
    const hear = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(new ApiError(0, "the gateway is silent")), SILENCE_MS);
    };
    hear();
    try {
      await readEvents(await call("v1/moesaic/events", { signal: AbortSignal.any([signal, silent.signal]) }), (state) => {
        hear();
        pause = 500;
        take(state);
      });
      fail(new ApiError(0, "the gateway has ended the stream"));
    } catch (error) {
      if (signal.aborted) return;
      // A stream that is cut off names no reason.
      fail(silent.signal.aborted ? silent.signal.reason : error);
      if (error.status === 401 || error.status === 403) return;
    } finally {
      clearTimeout(timer);
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}
