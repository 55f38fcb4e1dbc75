// Conversations and messages in IndexedDB. Two stores: `conversations` by id, and `messages` by id with an index on their conversation.
// Where a browser keeps nothing (private windows of some), the same calls work on memory, and `kept` is false: the page says so.

export let kept = true;

const memory = { conversations: new Map(), messages: new Map() };
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("fastllm") : null;
let opened = null;

function promise(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export async function open() {
  try {
    const request = indexedDB.open("fastllm", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    opened = await promise(request);
    opened.onversionchange = () => opened.close();
  } catch {
    kept = false;
  }
}

// Calls `listener` with the id of a conversation that another tab has changed.
export function onChangeElsewhere(listener) {
  if (channel) channel.onmessage = (event) => listener(String(event.data));
}

function tell(id) {
  channel?.postMessage(id);
}

function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

export async function conversations() {
  if (!opened) return [...memory.conversations.values()];
  return promise(opened.transaction("conversations").objectStore("conversations").getAll());
}

export async function conversation(id) {
  if (!opened) return memory.conversations.get(id);
  return promise(opened.transaction("conversations").objectStore("conversations").get(id));
}

export async function messages(id) {
  if (!opened) return [...memory.messages.values()].filter((m) => m.conversation === id);
  return promise(opened.transaction("messages").objectStore("messages").index("conversation").getAll(id));
}

export async function allMessages() {
  if (!opened) return [...memory.messages.values()];
  return promise(opened.transaction("messages").objectStore("messages").getAll());
}

// Writes a conversation and messages of it in one transaction.
export async function save(conversation, messages = []) {
  if (!opened) {
    memory.conversations.set(conversation.id, conversation);
    for (const message of messages) memory.messages.set(message.id, message);
    return;
  }
  const transaction = opened.transaction(["conversations", "messages"], "readwrite");
  transaction.objectStore("conversations").put(conversation);
  for (const message of messages) transaction.objectStore("messages").put(message);
  await finished(transaction);
  tell(conversation.id);
}

export async function remove(id) {
  if (!opened) {
    memory.conversations.delete(id);
    for (const message of [...memory.messages.values()]) if (message.conversation === id) memory.messages.delete(message.id);
    return;
  }
  const transaction = opened.transaction(["conversations", "messages"], "readwrite");
  transaction.objectStore("conversations").delete(id);
  const store = transaction.objectStore("messages");
  for (const key of await promise(store.index("conversation").getAllKeys(id))) store.delete(key);
  await finished(transaction);
  tell(id);
}

export async function clear() {
  memory.conversations.clear();
  memory.messages.clear();
  if (!opened) return;
  const transaction = opened.transaction(["conversations", "messages"], "readwrite");
  transaction.objectStore("conversations").clear();
  transaction.objectStore("messages").clear();
  await finished(transaction);
  tell("*");
}
