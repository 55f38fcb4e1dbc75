// The conversations that are kept: opening, searching, renaming, deleting, writing to a file and reading from one.

import * as db from "./db.js";
import { newestLeaf, newId, pathTo, state, update } from "./state.js";

const MAX_IMPORT = 100 << 20; // bytes of a file
const ELSEWHERE_MS = 2500; // an answer that was saved so recently is being written in another tab
const FORMAT = "fastllm-conversations";
const STATUSES = ["done", "length", "stopped", "cut", "error"];

export function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "…";
}

export async function load() {
  await db.open();
  const conversations = (await db.conversations()).sort((a, b) => b.updated - a.updated);
  update({ conversations, kept: db.kept });
  db.onChangeElsewhere(changed);
  addEventListener("hashchange", () => show(location.hash.slice(1)));
  await show(location.hash.slice(1));
}

async function changed(id) {
  const conversations = (await db.conversations()).sort((a, b) => b.updated - a.updated);
  const running = new Set(state.runs.keys());
  const kept = conversations.map((c) => (running.has(c.id) ? state.conversations.find((own) => own.id === c.id) ?? c : c));
  update({ conversations: kept });
  if (state.current && !running.has(state.current.id)) {
    if (!kept.some((c) => c.id === state.current.id)) await show("");
    else if (id === state.current.id) await show(id);
  }
}

// Writes to the browser's storage; where that is full or gone, the page goes on and says that it keeps nothing.
export async function keep(conversation, messages = []) {
  try {
    await db.save(conversation, messages);
  } catch {
    update({ kept: false });
  }
}

let shown = 0;

// Shows a conversation, or for "" a new one. The address names it, so back and forward work.
export async function show(id) {
  const turn = ++shown;
  const conversation = state.conversations.find((c) => c.id === id) ?? null;
  if (!conversation) {
    const draft = { settings: { ...state.prefs.settings }, system: state.prefs.system };
    update({ current: null, messages: new Map(), editing: null, draft });
    return;
  }
  const run = state.runs.get(id);
  let messages = run?.messages;
  if (!messages) {
    messages = new Map((await db.messages(id)).map((m) => [m.id, m]));
    for (const message of messages.values()) {
      if (message.status !== "streaming") continue;
      if (Date.now() - message.saved < ELSEWHERE_MS) setTimeout(() => state.current?.id === id && show(id), ELSEWHERE_MS);
      else message.status = message.content || message.reasoning ? "cut" : "error"; // the page went meanwhile
    }
  }
  if (turn === shown) update({ current: conversation, messages, editing: null }); // unless another was chosen meanwhile
}

export async function open(id) {
  if (location.hash.slice(1) !== id) history.pushState(null, "", `#${id}`);
  await show(id);
  if (window.innerWidth < 900) update({ sidebar: false });
}

// The address follows the state where an action, not the user, has changed what is shown.
export function nameAddress() {
  const wanted = state.current?.id ?? "";
  if (location.hash.slice(1) !== wanted) history.replaceState(null, "", `${location.pathname}${location.search}${wanted ? `#${wanted}` : ""}`);
}

export async function startNew() {
  history.pushState(null, "", location.pathname + location.search);
  await show("");
  if (window.innerWidth < 900) update({ sidebar: false });
}

let searched = 0;

export async function search(text) {
  const turn = ++searched;
  const wanted = text.trim().toLowerCase();
  update({ search: text, ...(wanted ? {} : { found: null }) });
  if (!wanted) return;
  const found = new Set(state.conversations.filter((c) => c.title.toLowerCase().includes(wanted)).map((c) => c.id));
  for (const message of await db.allMessages()) {
    if (message.content.toLowerCase().includes(wanted)) found.add(message.conversation);
  }
  if (turn === searched) update({ found });
}

export async function change(conversation, patch) {
  Object.assign(conversation, patch);
  update();
  await keep(conversation);
}

export async function remove(id) {
  state.deleted.add(id);
  state.runs.get(id)?.controller.abort();
  await db.remove(id);
  update({ conversations: state.conversations.filter((c) => c.id !== id) });
  if (state.current?.id === id) await startNew();
}

export async function removeAll() {
  for (const { id } of state.conversations) state.deleted.add(id);
  for (const run of state.runs.values()) run.controller.abort();
  await db.clear();
  update({ conversations: [] });
  await startNew();
}

export async function choose(message) {
  await change(state.current, { head: newestLeaf(state.messages, message.id) });
}

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function fileName(conversation) {
  return conversation.title.replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[-.]+|-+$/g, "").slice(0, 60) || "conversation";
}

export async function exportJson(conversations, name = "fastllm-conversations") {
  const all = [];
  for (const conversation of conversations) all.push({ ...conversation, messages: await db.messages(conversation.id) });
  download(`${name}.json`, "application/json", JSON.stringify({ format: FORMAT, version: 1, conversations: all }, null, 1));
}

export async function exportOne(conversation) {
  await exportJson([conversation], fileName(conversation));
}

export async function exportMarkdown(conversation) {
  const messages = new Map((await db.messages(conversation.id)).map((m) => [m.id, m]));
  const parts = [`# ${conversation.title}`];
  if (conversation.system) parts.push(`> ${conversation.system.replaceAll("\n", "\n> ")}`);
  for (const message of pathTo(messages, conversation.head)) {
    parts.push(`## ${{ user: "User", assistant: "Assistant", tool: "Tool" }[message.role]}`);
    for (const file of message.files ?? []) parts.push(`*${file.name}*`);
    for (const call of message.calls ?? []) parts.push(`\`${call.name}(${call.args})\``);
    parts.push(message.content);
  }
  download(`${fileName(conversation)}.md`, "text/markdown", `${parts.join("\n\n")}\n`);
}

function text(value, limit = 10 << 20) {
  if (typeof value !== "string" || value.length > limit) throw new Error("text");
  return value;
}

function moment(value) {
  return Number.isFinite(value) && value > 0 ? value : Date.now();
}

// A message of a file: only what is known is taken over, and everything is checked.
function message(given, conversation) {
  if (!["user", "assistant", "tool"].includes(given.role)) throw new Error("role");
  const made = { id: newId(), conversation, role: given.role, parent: null };
  Object.assign(made, { content: text(given.content), created: moment(given.created), status: STATUSES.includes(given.status) ? given.status : "done" });
  for (const name of ["reasoning", "model", "error", "callId", "name", "finish"]) if (given[name]) made[name] = text(given[name]);
  for (const name of ["firstMs", "thoughtMs"]) if (Number.isFinite(given[name])) made[name] = given[name];
  if (given.files) made.files = given.files.map((f) => ({ name: text(f.name, 300), text: text(f.text), size: f.text.length }));
  if (given.calls) made.calls = given.calls.map((c) => ({ id: text(c.id, 200), name: text(c.name, 200), args: text(c.args) }));
  for (const name of ["usage", "timings"]) {
    if (given[name]) made[name] = Object.fromEntries(Object.entries(given[name]).filter(([, v]) => Number.isFinite(v)));
  }
  return made;
}

// The messages of a conversation of a file, under new ids (an id of a file must not replace what another conversation holds).
function messagesOf(given, conversation) {
  const made = new Map(given.map((m) => [text(m.id, 64), message(m, conversation)]));
  let reached = 0;
  for (let level = [null]; level.length; ) {
    const here = given.filter((m) => level.includes(m.parent));
    for (const m of here) made.get(m.id).parent = made.get(m.parent)?.id ?? null;
    reached += here.length;
    level = here.map((m) => m.id);
  }
  if (reached !== given.length || made.size !== given.length) throw new Error("tree");
  return made;
}

// Reads a file of `exportJson`. Conversations that are there already are left as they are. Returns how many were added; throws for another file.
export async function importFile(file) {
  if (file.size > MAX_IMPORT) throw new Error("size");
  const data = JSON.parse(await file.text());
  if (data?.format !== FORMAT || data.version !== 1 || !Array.isArray(data.conversations)) throw new Error("format");
  const known = new Set(state.conversations.map((c) => c.id));
  const checked = data.conversations.map((given) => {
    const id = /^[0-9a-f]{24}$/.test(given.id) ? given.id : newId();
    const settings = typeof given.settings === "object" && given.settings ? given.settings : {};
    const conversation = { id, title: text(given.title, 1000), created: moment(given.created), updated: moment(given.updated), settings };
    Object.assign(conversation, { system: text(given.system ?? ""), head: null });
    const messages = messagesOf(given.messages, id);
    conversation.head = (messages.get(given.head) ?? [...messages.values()].at(-1))?.id ?? null;
    return { conversation, messages: [...messages.values()] };
  });
  const added = checked.filter(({ conversation }) => !known.has(conversation.id));
  for (const { conversation, messages } of added) {
    state.deleted.delete(conversation.id);
    await db.save(conversation, messages);
  }
  const conversations = [...state.conversations, ...added.map((a) => a.conversation)].sort((a, b) => b.updated - a.updated);
  update({ conversations });
  return added.length;
}
