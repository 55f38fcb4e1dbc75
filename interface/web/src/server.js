// Whether the server answers, and what it serves. It is asked when the page opens, when a request has failed, and when the page is looked at
// again; never in between, so that an open page leaves no lines in the server's log.

import * as api from "./api.js";
import { state, update } from "./state.js";

const WAITS_MS = [1000, 1000, 2000, 4000, 8000];
let watching = false;

function set(patch) {
  update({ server: { ...state.server, ...patch } });
}

export async function learn() {
  try {
    set(await api.about());
    return true;
  } catch (error) {
    if (error.kind === "key") update({ dialog: { kind: "key", wrong: api.key() !== "" } });
    else if (["network", "busy"].includes(error.kind)) watch(WAITS_MS[0]);
    return false;
  }
}

// Asks until the server is well again; the first time after a while.
export async function watch(after_ms = 0) {
  if (watching) return;
  watching = true;
  await new Promise((resolve) => setTimeout(resolve, after_ms));
  for (let turn = 0; ; turn++) {
    const now = await api.health();
    if (now === "ok") break;
    set({ state: now, back: false });
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, WAITS_MS[Math.min(turn, WAITS_MS.length - 1)]);
      addEventListener("online", () => (clearTimeout(timer), resolve()), { once: true });
    });
  }
  watching = false;
  const was = state.server.state;
  set({ state: "ok", back: was !== "ok" });
  if (was !== "ok" || !state.server.model) await learn();
}

export function acknowledge() {
  set({ back: false });
}

export async function start() {
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible" && !state.runs.size) watch();
  });
  addEventListener("offline", () => watch());
  await learn();
}
