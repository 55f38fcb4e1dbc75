// The server's interface as the page uses it. The address is that of the page itself: this file is served at ROOT/assets/app.js.

const ROOT = new URL("..", import.meta.url);
const KEY = "fastllm-key"; // in session storage: gone when the tab is closed
const QUIET_MS = 40_000; // of a stream, after which the server is asked whether it is there at all
const PROBE_MS = 10_000;

// kind: network (not reachable), key (401), busy (503), http (another status), stream (an error inside of a stream), cut (a stream without end).
export class ApiError extends Error {
  constructor(kind, message, more = {}) {
    super(message);
    this.kind = kind;
    Object.assign(this, more); // status, code, retryAfter (seconds)
  }
}

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { headers, signal, cache: "no-store", credentials: "same-origin", method: body === undefined ? "GET" : "POST" };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(new URL(path, ROOT), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("network", "");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // a proxy's page, not the server's answer
  }
  const message = typeof said.message === "string" ? said.message : `HTTP ${response.status}`;
  const kind = response.status === 401 ? "key" : [502, 503, 504].includes(response.status) ? "busy" : "http";
  const retryAfter = Math.min(60, Number(response.headers.get("retry-after")) || 2);
  return new ApiError(kind, message, { status: response.status, code: said.code ?? null, retryAfter });
}

// "ok", "loading", "stalled", "failed", or "down".
export async function health() {
  try {
    const response = await fetch(new URL("health", ROOT), { cache: "no-store", signal: AbortSignal.timeout(PROBE_MS) });
    const said = await response.json();
    return response.ok ? "ok" : String(said.status ?? "down");
  } catch {
    return "down";
  }
}

// The model's name, its context, the template and the default of each setting.
export async function about() {
  const models = await (await request("v1/models")).json();
  const props = await (await request("props")).json();
  const settings = props.default_generation_settings ?? {};
  return {
    model: String(models.data?.[0]?.id ?? ""),
    context: Number(settings.n_ctx) || 0,
    defaults: settings.params ?? {},
    template: String(props.chat_template ?? ""),
  };
}

// Streams an answer: calls `on` with each event. Returns when the server has said that the answer is complete.
export async function chat(body, signal, on) {
  const quiet = new AbortController();
  const response = await request("v1/chat/completions", { body, signal: AbortSignal.any([signal, quiet.signal]) });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let done = false;
  let heard = performance.now();
  const watch = setInterval(async () => {
    if (performance.now() - heard < QUIET_MS) return;
    heard = performance.now();
    if ((await health()) === "down") quiet.abort();
  }, 1000);
  try {
    for (;;) {
      const part = await reader.read();
      if (part.done) break;
      heard = performance.now();
      rest += decoder.decode(part.value, { stream: true }).replaceAll("\r\n", "\n");
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        for (const line of block.split("\n")) {
          if (!line.startsWith("data:")) continue;
          const data = line.slice(5).trim();
          if (data === "[DONE]") done = true;
          else on(event(data));
        }
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
    throw new ApiError("cut", "");
  } finally {
    clearInterval(watch);
    reader.cancel().catch(() => {});
  }
  if (!done) throw new ApiError("cut", "");
}

function event(data) {
  let said;
  try {
    said = JSON.parse(data);
  } catch {
    throw new ApiError("cut", "");
  }
  if (said.error) throw new ApiError("stream", String(said.error.message ?? ""), { code: said.error.code ?? null });
  return said;
}
