// What the page shows, in one object, and who is told when it changes. Actions that change it are in `chat.js`, `library.js` and `server.js`.

const PREFS = "fastllm-prefs"; // in local storage: theme, language, what Enter does, settings of new conversations

const prefs = {
  theme: "auto",
  language: "auto",
  enterSends: true,
  system: "",
  settings: {},
  ...readPrefs(),
};

export const state = {
  conversations: [], // newest first
  current: null, // the conversation that is shown; null: a new one
  messages: new Map(), // id -> message, of the current conversation
  runs: new Map(), // id of a conversation -> the answer that is being written
  deleted: new Set(), // ids: an answer that is still being written must not bring its conversation back
  search: "",
  found: null, // ids of conversations that match `search`; null: no search
  server: { state: "ok", model: "", context: 0, defaults: {}, template: "", back: false },
  prefs,
  dialog: null, // {kind, ...}
  sidebar: window.innerWidth >= 900,
  editing: null, // id of a message
  toast: "",
  kept: true, // conversations outlive the tab
  draft: { settings: { ...prefs.settings }, system: prefs.system }, // of a new conversation
};

function readPrefs() {
  try {
    return JSON.parse(localStorage.getItem(PREFS)) ?? {};
  } catch {
    return {};
  }
}

const listeners = new Set();
let due = false;

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

// Changes the state, and has the page drawn again.
export function update(patch = {}) {
  Object.assign(state, patch);
  if (due) return;
  due = true;
  queueMicrotask(() => {
    due = false;
    for (const listener of listeners) listener();
  });
}

export function setPrefs(patch) {
  Object.assign(state.prefs, patch);
  try {
    localStorage.setItem(PREFS, JSON.stringify(state.prefs));
  } catch {
    // no storage: it holds for this tab
  }
  applyTheme();
  update();
}

export function applyTheme() {
  const { theme } = state.prefs;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

let toastTimer = 0;

export function toast(text) {
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => update({ toast: "" }), 4000);
  update({ toast: text });
}

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
}

// From the first message to `head`.
export function pathTo(messages, head) {
  const path = [];
  for (let at = messages.get(head); at; at = messages.get(at.parent)) path.unshift(at);
  return path;
}

// Messages that stand for the same place, the oldest first: answers that were written again, questions that were edited.
export function siblings(messages, message) {
  return [...messages.values()].filter((m) => m.parent === message.parent && m.role === message.role).sort((a, b) => a.created - b.created);
}

// The last message below one, along the newest of each place.
export function newestLeaf(messages, id) {
  for (;;) {
    const below = [...messages.values()].filter((m) => m.parent === id).sort((a, b) => b.created - a.created);
    if (!below.length) return id;
    id = below[0].id;
  }
}
