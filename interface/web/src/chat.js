// Asking the model: what is sent, what comes back, and what happens when it does not.

import * as api from "./api.js";
import { keep, open as openConversation, titleOf } from "./library.js";
import { watch } from "./server.js";
import { newId, pathTo, state, update } from "./state.js";

const SAVE_MS = 1000; // while an answer is written, so that a reload loses at most so much
const DRAW_MS = 50;
const BUSY_TRIES = 8; // a server that loads or is full says when to come again

export function newMessage(conversation, role, parent, more = {}) {
  return { id: newId(), conversation, role, parent, content: "", created: Date.now(), status: "done", ...more };
}

// How files stand in the text that the model reads: in a fence that is longer than any inside of them.
export function withFiles({ content, files = [] }) {
  const parts = files.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
    return `${name}\n${fence}${name.match(/\.([\w+-]{1,12})$/)?.[1] ?? ""}\n${text}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

function wire(message) {
  if (message.role === "user") return { role: "user", content: withFiles(message) };
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  const sent = { role: "assistant", content: message.content };
  if (message.calls?.length) {
    sent.tool_calls = message.calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
  }
  return sent;
}

function body(conversation, path) {
  const { settings = {}, system } = conversation;
  const sent = { model: state.server.model || "default", stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "seed"]) {
    if (settings[name] !== undefined) sent[name] = settings[name];
  }
  if (settings.stop?.length) sent.stop = settings.stop;
  if (settings.tools?.length) sent.tools = settings.tools;
  if (settings.reasoning_effort) sent.reasoning_effort = settings.reasoning_effort;
  if (settings.thinking !== undefined) sent.chat_template_kwargs = { enable_thinking: settings.thinking };
  sent.messages = system?.trim() ? [{ role: "system", content: system }] : [];
  for (const message of path) {
    if (message.role === "assistant" && !message.content && !message.calls?.length) continue;
    const next = wire(message);
    const last = sent.messages.at(-1);
    if (next.role === "user" && last?.role === "user") last.content += `\n\n${next.content}`; // a question without an answer, and the next one
    else sent.messages.push(next);
  }
  return sent;
}

// A question: it is kept, shown, and answered.
export async function ask(text, files) {
  let conversation = state.current;
  if (!conversation) {
    const now = Date.now();
    const title = titleOf(text || files[0]?.name || "");
    conversation = { id: newId(), title, created: now, updated: now, head: null, ...structuredClone(state.draft) };
    update({ current: conversation, messages: new Map(), conversations: [conversation, ...state.conversations], search: "", found: null });
  }
  const question = newMessage(conversation.id, "user", conversation.head, { content: text, ...(files.length ? { files } : {}) });
  state.messages.set(question.id, question);
  conversation.head = question.id;
  conversation.updated = Date.now();
  await keep(conversation, [question]);
  await answer(conversation, question.id);
}

// The same question in other words, as another branch.
export async function edit(message, text) {
  const conversation = state.current;
  const question = { ...newMessage(conversation.id, "user", message.parent), content: text, ...(message.files ? { files: message.files } : {}) };
  state.messages.set(question.id, question);
  conversation.head = question.id;
  update({ editing: null });
  await keep(conversation, [question]);
  await answer(conversation, question.id);
}

// Results of the calls that a message ends with.
export async function giveResults(message, results) {
  const conversation = state.current;
  const made = [];
  let parent = message.id;
  for (const [index, call] of message.calls.entries()) {
    const result = newMessage(conversation.id, "tool", parent, { content: results[index], callId: call.id, name: call.name });
    made.push(result);
    state.messages.set(result.id, result);
    parent = result.id;
  }
  conversation.head = parent;
  await keep(conversation, made);
  await answer(conversation, parent);
}

// Another answer beside this one; one that never began is written in its place.
export async function regenerate(message) {
  const empty = !message.content && !message.reasoning && !message.calls?.length;
  await answer(state.current, message.parent, empty ? { place: message } : {});
}

// Goes on where an answer was cut.
export async function goOn(message) {
  await answer(state.current, message.parent, { place: message, more: true });
}

export function stop(conversationId = state.current?.id) {
  state.runs.get(conversationId)?.controller.abort();
}

// Writes an answer below `parent`. place: the message to write into; more: what it holds is kept and continued.
async function answer(conversation, parent, { place, more = false } = {}) {
  if (state.runs.has(conversation.id)) return;
  const { messages } = state;
  const message = place ?? newMessage(conversation.id, "assistant", parent);
  Object.assign(message, { status: "streaming", error: "", model: state.server.model }, more ? {} : { content: "", reasoning: "", calls: [] });
  messages.set(message.id, message);
  conversation.head = message.id;
  const run = { controller: new AbortController(), message, messages, began: performance.now(), first: 0, pieces: 0, waiting: 0 };
  state.runs.set(conversation.id, run);
  update();
  message.saved = Date.now();
  keep(conversation, [message]);
  const isThere = () => !state.deleted.has(conversation.id);
  let saved = -SAVE_MS;
  let drawn = 0;
  let timer = 0;
  const draw = () => {
    timer = 0;
    const before = performance.now();
    update();
    queueMicrotask(() => (drawn = performance.now() - before)); // long texts are drawn less often
    if (before - saved > SAVE_MS && isThere()) {
      saved = before;
      message.saved = Date.now();
      keep(conversation, [message]);
    }
  };
  const on = (event) => {
    if (take(run, event) && !timer) timer = setTimeout(draw, Math.max(DRAW_MS, 4 * drawn));
  };
  try {
    const sent = body(conversation, pathTo(messages, more ? message.id : parent));
    if (more) Object.assign(sent, { continue_final_message: true, add_generation_prompt: false });
    await patiently(run, () => api.chat(sent, run.controller.signal, on));
    message.status = message.finish === "length" ? "length" : "done";
  } catch (error) {
    fail(run, error);
  }
  clearTimeout(timer);
  state.runs.delete(conversation.id);
  if (!isThere()) return;
  conversation.updated = Date.now();
  update({ conversations: [...state.conversations].sort((a, b) => b.updated - a.updated) });
  await keep(conversation, [message]);
}

// Sends again while the server says that it is busy and nothing has come.
async function patiently(run, send) {
  for (let turn = 0; ; turn++) {
    try {
      return await send();
    } catch (error) {
      if (error.kind !== "busy" || run.first || turn === BUSY_TRIES) throw error;
      run.waiting = Date.now() + error.retryAfter * 1000;
      update();
      const clock = setInterval(update, 1000); // the seconds that are shown
      try {
        await new Promise((resolve, reject) => {
          setTimeout(resolve, error.retryAfter * 1000);
          run.controller.signal.addEventListener("abort", () => reject(new DOMException("", "AbortError")), { once: true });
        });
      } finally {
        clearInterval(clock);
      }
      run.waiting = 0;
    }
  }
}

function fail(run, error) {
  const { message } = run;
  const some = message.content || message.reasoning || message.calls?.length;
  if (run.controller.signal.aborted) {
    message.status = "stopped";
  } else if (["network", "cut", "busy"].includes(error.kind) || (error.kind === "stream" && some)) {
    message.status = some ? "cut" : "error";
    message.error = error.message;
    message.errorKind = error.kind;
    watch();
  } else {
    message.status = "error";
    message.error = error.kind ? error.message : String(error);
    message.errorKind = error.kind ?? "page";
    if (error.kind === "key") update({ dialog: { kind: "key", wrong: api.key() !== "", then: message.id } });
  }
}

// Adds an event of a stream to the message. Says whether there is something new to see.
function take(run, event) {
  const { message } = run;
  if (event.usage) message.usage = { prompt: event.usage.prompt_tokens, completion: event.usage.completion_tokens };
  if (event.timings) message.timings = { rate: event.timings.predicted_per_second, prompt: event.timings.prompt_ms, cached: event.timings.cache_n };
  const choice = event.choices?.[0];
  if (!choice) return true;
  const { delta = {} } = choice;
  if (choice.finish_reason) message.finish = choice.finish_reason;
  if (delta.reasoning_content) {
    message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
    message.thoughtMs = Math.round(performance.now() - run.began);
  }
  if (delta.content) message.content += delta.content;
  for (const call of delta.tool_calls ?? []) {
    const at = ((message.calls ??= [])[call.index ?? 0] ??= { id: "", name: "", args: "" });
    at.id ||= call.id ?? "";
    at.name ||= call.function?.name ?? "";
    at.args += call.function?.arguments ?? "";
  }
  if (!(delta.content || delta.reasoning_content || delta.tool_calls)) return false;
  run.pieces += 1;
  if (!run.first) {
    run.first = performance.now();
    message.firstMs = Math.round(run.first - run.began);
  }
  return true;
}

// After the key was given: what was asked without it is asked again.
export async function again(id) {
  const message = state.messages.get(id);
  if (message) await regenerate(message);
}

// What is on its way when the page goes is kept as it is.
addEventListener("pagehide", () => {
  for (const { message } of state.runs.values()) {
    const conversation = state.conversations.find((c) => c.id === message.conversation);
    if (conversation) keep(conversation, [{ ...message, status: message.content || message.reasoning ? "cut" : "error" }]);
  }
});

// A copy of the conversation up to a message, as one of its own.
export async function branch(message) {
  const from = state.current;
  const now = Date.now();
  const conversation = { ...structuredClone(from), id: newId(), title: `${from.title} ⑂`, created: now, updated: now };
  let parent = null;
  const copies = pathTo(state.messages, message.id).map((m) => {
    const copy = { ...structuredClone(m), id: newId(), conversation: conversation.id, parent };
    parent = copy.id;
    return copy;
  });
  conversation.head = parent;
  await keep(conversation, copies);
  update({ conversations: [conversation, ...state.conversations] });
  await openConversation(conversation.id);
}
