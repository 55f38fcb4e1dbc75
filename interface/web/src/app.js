// The page: list on the left, conversation on the right; and the keys that work everywhere.

import { render } from "preact";
import { useEffect, useLayoutEffect, useReducer, useRef, useState } from "preact/hooks";
import { stop } from "./chat.js";
import { Composer } from "./composer.js";
import { Dialogs } from "./dialogs.js";
import { language, number, t } from "./i18n.js";
import * as library from "./library.js";
import { withoutTurns } from "./markdown.js";
import { Message, onContentClick } from "./message.js";
import { acknowledge, start } from "./server.js";
import { Sidebar } from "./sidebar.js";
import { applyTheme, pathTo, setPrefs, state, subscribe, update } from "./state.js";
import { html, Icon, IconButton, Logo } from "./ui.js";

function used(path, run) {
  const counted = path.findLast((m) => m.usage);
  return (counted ? counted.usage.prompt + counted.usage.completion : 0) + (run ? run.pieces : 0);
}

function Header({ path, run }) {
  const { current, server } = state;
  const tokens = used(path, run);
  const share = server.context ? Math.min(1, tokens / server.context) : 0;
  const label = t("contextUsed", { used: number(tokens), all: number(server.context) });
  return html`<header class="top">
    ${!state.sidebar && html`<${IconButton} icon="panel" label=${t("openSidebar")} onClick=${() => update({ sidebar: true })} />`}
    <div class="titles">
      <h1 dir="auto">${current ? withoutTurns(current.title) : t("newChat")}</h1>
      ${server.model && html`<span class="model" title=${withoutTurns(server.model)}>${withoutTurns(server.model)}</span>`}
    </div>
    ${
      server.context > 0 &&
      tokens > 0 &&
      html`<div class=${`meter ${share > 0.9 ? "full" : ""}`} title=${label}>
        <meter min="0" max=${server.context} high=${0.9 * server.context} value=${tokens} aria-label=${label}></meter><span>${Math.round(100 * share)} %</span>
      </div>`
    }
    ${!state.sidebar && html`<${IconButton} icon="plus" label=${t("newChat")} onClick=${library.startNew} />`}
    <${IconButton} icon="sliders" label=${t("conversationSettings")} onClick=${() => update({ dialog: { kind: "settings" } })} />
  </header>`;
}

function Banner() {
  const { state: now, back } = state.server;
  const text = { loading: "serverLoading", stalled: "serverStalled" }[now] ?? "serverDown";
  if (now !== "ok") return html`<div class="banner bad" role="status"><span class="pulse"></span>${t(text)}</div>`;
  if (back) return html`<div class="banner" role="status"><${Icon} name="check" />${t("serverBack")}<${IconButton} icon="close" label=${t("close")} onClick=${acknowledge} /></div>`;
  return state.kept ? null : html`<div class="banner" role="status">${t("notKept")}</div>`;
}

function Hello({ onIdea }) {
  const ideas = ["idea1", "idea2", "idea3", "idea4"];
  return html`<div class="hello">
    <${Logo} />
    <h2>${t("hello")}</h2>
    ${state.server.model && html`<p>${t("helloSub", { model: state.server.model })}</p>`}
    <div class="ideas">${ideas.map((idea) => html`<button type="button" onClick=${() => onIdea(t(idea))}>${t(idea)}</button>`)}</div>
  </div>`;
}

// The messages; it stays at the end while the reader is there.
function Messages({ path, run }) {
  const scroller = useRef(null);
  const follows = useRef(true);
  const [away, setAway] = useState(false);
  const lastTop = useRef(0);
  const toEnd = () => scroller.current?.scrollTo({ top: scroller.current.scrollHeight });
  const onScroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = scroller.current;
    const left = scrollHeight - scrollTop - clientHeight;
    if (left < 60) follows.current = true;
    else if (scrollTop < lastTop.current) follows.current = false; // up is the reader; that more is below may be new text
    lastTop.current = scrollTop;
    setAway(left >= 60 && !follows.current);
  };
  const head = path.at(-1)?.id;
  const versions = new Map(); // place -> how many messages stand for it
  const place = (message) => `${message.role} ${message.parent}`;
  for (const message of state.messages.values()) versions.set(place(message), (versions.get(place(message)) ?? 0) + 1);
  const question = path.findLast((m) => m.role === "user")?.id;
  useLayoutEffect(() => {
    follows.current = true;
    toEnd();
  }, [state.current?.id, question]);
  useEffect(() => {
    const observer = new ResizeObserver(() => follows.current && toEnd());
    observer.observe(scroller.current.firstElementChild);
    observer.observe(scroller.current);
    return () => observer.disconnect();
  }, []);
  return html`<div class="scroller" ref=${scroller} onScroll=${onScroll}>
    <div class="messages" role="log" aria-live="off" aria-label=${t("messages")} onClick=${onContentClick} onAuxClick=${onContentClick}>
      ${path.map((message) => {
        const own = run?.message === message ? run : null;
        const key = `${message.status}${message.content.length} ${message.reasoning?.length} ${message.calls?.map((c) => c.args.length)}`;
        return html`<${Message} key=${message.id} message=${message} run=${own} drawn=${own ? `${key} ${own.pieces} ${Math.ceil((own.waiting - Date.now()) / 1000)}` : key} busy=${Boolean(run)} language=${language()}
          last=${message.id === head} editing=${state.editing === message.id} versions=${versions.get(place(message))} />`;
      })}
    </div>
    ${away && html`<${IconButton} icon="down" class="latest round" label=${t("latest")} onClick=${() => (toEnd(), (follows.current = true))} />`}
  </div>`;
}

// Says to a screen reader that an answer has begun or ended; its text is read when the reader wants it.
function Announcer({ run }) {
  const before = useRef(null);
  const said = useRef("");
  if (run && !before.current) said.current = t("writing");
  if (!run && before.current) said.current = t("written");
  before.current = run;
  return html`<div class="away" role="status">${said.current}</div>`;
}

function onKey(event) {
  const ctrl = event.ctrlKey || event.metaKey;
  const name = event.key.toLowerCase();
  const open = (kind) => update({ dialog: state.dialog?.kind === kind ? null : { kind } });
  if (event.key === "Escape") {
    if (state.dialog || state.editing) return;
    if (state.current && state.runs.has(state.current.id)) stop();
    else if (state.search) library.search("");
    else if (state.sidebar && window.innerWidth < 900) update({ sidebar: false });
    else return;
  } else if (!ctrl || event.altKey) return;
  else if (name === "o" && event.shiftKey) library.startNew();
  else if (name === "l" && event.shiftKey) {
    const dark = state.prefs.theme === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : state.prefs.theme === "dark";
    setPrefs({ theme: dark ? "light" : "dark" });
  } else if (event.shiftKey) return;
  else if (name === "k") {
    const toSearch = () => document.getElementById("search").focus();
    if (state.sidebar) toSearch();
    else {
      update({ sidebar: true });
      setTimeout(toSearch); // when it is drawn
    }
  } else if (name === "b") update({ sidebar: !state.sidebar });
  else if (name === "j") document.getElementById("composer").focus();
  else if (name === ",") open("settings");
  else if (name === "/") open("shortcuts");
  else return;
  event.preventDefault();
}

function App() {
  const [, redraw] = useReducer((n) => n + 1, 0);
  const [suggestion, setSuggestion] = useState({ text: "" });
  useEffect(() => subscribe(redraw), []);
  useEffect(() => {
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  const { current } = state;
  const run = current ? state.runs.get(current.id) : undefined;
  const path = current ? pathTo(state.messages, current.head) : [];
  useEffect(() => {
    document.documentElement.lang = language();
    document.title = current ? `${withoutTurns(current.title)} – fastllm` : "fastllm";
    library.nameAddress();
  });
  return html`<div class=${`app ${state.sidebar ? "with-sidebar" : ""}`}>
    <a class="skip" href="#composer" onClick=${(e) => (e.preventDefault(), document.getElementById("composer").focus())}>${t("skip")}</a>
    <${Sidebar} />
    ${state.sidebar && html`<div class="shade" onClick=${() => update({ sidebar: false })}></div>`}
    <main>
      <${Header} path=${path} run=${run} />
      <${Banner} />
      ${path.length ? html`<${Messages} path=${path} run=${run} />` : html`<div class="scroller"><${Hello} onIdea=${(text) => setSuggestion({ text })} /></div>`}
      <${Composer} conversation=${current} running=${Boolean(run)} suggestion=${suggestion} />
    </main>
    <${Announcer} run=${run} />
    <${Dialogs} dialog=${state.dialog} />
    ${state.toast && html`<div class="toast" role="status">${state.toast}</div>`}
  </div>`;
}

async function main() {
  applyTheme();
  await library.load();
  render(html`<${App} />`, document.getElementById("app"));
  await start();
}

main();
