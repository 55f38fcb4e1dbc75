// One message: a question in a bubble, an answer as a document, with what can be done with it.

import { Component } from "preact";
import { useState } from "preact/hooks";
import * as actions from "./chat.js";
import { number, t } from "./i18n.js";
import { choose } from "./library.js";
import { blocks, sanitize, withoutTurns } from "./markdown.js";
import { siblings, state, update } from "./state.js";
import { copy, html, Icon, IconButton, Still } from "./ui.js";

// A block of rendered Markdown. The nodes are made by `sanitize`; preact leaves them alone.
class Block extends Component {
  shouldComponentUpdate(next) {
    return next.raw !== this.props.raw;
  }

  componentDidMount() {
    this.fill();
  }

  componentDidUpdate() {
    this.fill();
  }

  fill() {
    const fragment = sanitize(this.props.html());
    for (const button of fragment.querySelectorAll("button.copy")) {
      button.setAttribute("aria-label", t("copy"));
      button.textContent = t("copy");
    }
    for (const scroller of fragment.querySelectorAll(".scroll, pre")) scroller.setAttribute("tabindex", "0");
    this.node.replaceChildren(fragment);
  }

  render() {
    return html`<div class="block" dir="auto" ref=${(node) => (this.node = node)} />`;
  }
}

export function Markdown({ text }) {
  return html`<div class="markdown">${blocks(text).map((block, i) => html`<${Block} key=${i} raw=${block.raw} html=${block.html} />`)}</div>`;
}

// Clicks inside of rendered text: copy a code block, ask before a link is followed.
// Of every button of a mouse: the middle one would open a link in a tab. The right one is the browser's menu.
export function onContentClick(event) {
  if (event.button === 2) return;
  const button = event.target.closest("button.copy");
  if (button && event.type === "click") {
    copy(button.closest(".code").querySelector("code").textContent);
    return;
  }
  const link = event.target.closest(".markdown a[href]");
  if (link) {
    event.preventDefault();
    update({ dialog: { kind: "link", url: link.href } });
  }
}

export class Message extends Still {
  render({ message, run, last, editing, versions }) {
    const name = message.role === "tool" ? t("tool", { name: withoutTurns(message.name ?? "") }) : t(message.role === "user" ? "you" : "assistant");
    const body =
      message.role === "user"
        ? html`<${Question} message=${message} editing=${editing} versions=${versions} />`
        : message.role === "tool"
          ? html`<details class="fold"><summary><${Icon} name="wrench" />${name}</summary><pre tabindex="0">${withoutTurns(message.content)}</pre></details>`
          : html`<${Answer} message=${message} run=${run} last=${last} versions=${versions} />`;
    return html`<article class=${`message ${message.role}`} aria-label=${name} data-status=${message.status}>${body}</article>`;
  }
}

function Versions({ message }) {
  const all = siblings(state.messages, message);
  if (all.length < 2) return null;
  const at = all.indexOf(message);
  return html`<span class="versions">
    <${IconButton} icon="left" label=${t("previous")} disabled=${at === 0} onClick=${() => choose(all[at - 1])} />
    <span aria-label=${t("version", { n: at + 1, count: all.length })}>${at + 1}/${all.length}</span>
    <${IconButton} icon="right" label=${t("next")} disabled=${at === all.length - 1} onClick=${() => choose(all[at + 1])} />
  </span>`;
}

function Question({ message, editing }) {
  if (editing) return html`<${Editor} message=${message} />`;
  const busy = state.runs.has(message.conversation);
  return html`
    ${message.files?.map((file) => html`<details class="file"><summary><${Icon} name="file" />${withoutTurns(file.name)}</summary><pre tabindex="0">${withoutTurns(file.text)}</pre></details>`)}
    ${message.content && html`<div class="bubble" dir="auto">${withoutTurns(message.content)}</div>`}
    <div class="actions">
      <${Versions} message=${message} />
      <${IconButton} icon="copy" label=${t("copy")} onClick=${() => copy(message.content)} />
      <${IconButton} icon="pen" label=${t("edit")} disabled=${busy} onClick=${() => update({ editing: message.id })} />
    </div>`;
}

class Editor extends Component {
  componentDidMount() {
    const { area } = this;
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  render({ message }) {
    const send = () => {
      const text = this.area.value;
      if (text.trim()) actions.edit(message, text);
    };
    const onKeyDown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        update({ editing: null });
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && (state.prefs.enterSends || event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        send();
      }
    };
    return html`<div class="editor">
      <textarea ref=${(node) => (this.area = node)} aria-label=${t("editing")} rows="4" onKeyDown=${onKeyDown} dir="auto">${message.content}</textarea>
      <div class="row">
        <button type="button" onClick=${() => update({ editing: null })}>${t("cancel")}</button>
        <button type="button" class="primary" onClick=${send}>${t("sendEdited")}</button>
      </div>
    </div>`;
  }
}

function Answer({ message, run, last }) {
  const streaming = Boolean(run);
  const empty = !message.content && !message.reasoning && !message.calls?.length;
  return html`
    ${message.reasoning && html`<${Reasoning} message=${message} streaming=${streaming} />`}
    ${message.content && html`<${Markdown} text=${message.content} />`}
    ${message.calls?.length > 0 && html`<${Calls} message=${message} open=${last && !streaming} />`}
    ${streaming && empty && html`<${Waiting} run=${run} />`}
    ${!streaming && html`<${Notice} message=${message} empty=${empty} last=${last} />`}
    <div class="actions">
      ${
        streaming
          ? !empty && html`<span class="pulse"></span>`
          : html`<${Versions} message=${message} />
          ${message.content && html`<${IconButton} icon="copy" label=${t("copy")} onClick=${() => copy(message.content)} />`}
          <${IconButton} icon="again" label=${t("regenerate")} disabled=${state.runs.has(message.conversation)} onClick=${() => actions.regenerate(message)} />
          ${!empty && html`<${IconButton} icon="fork" label=${t("branch")} onClick=${() => actions.branch(message)} />`}`
      }
      <${Figures} message=${message} run=${run} />
    </div>`;
}

function Waiting({ run }) {
  const seconds = Math.max(1, Math.ceil((run.waiting - Date.now()) / 1000));
  if (run.waiting) return html`<p class="notice">${t("busy", { seconds })}</p>`;
  return html`<p class="waiting" aria-label=${t("waiting")}><i></i><i></i><i></i></p>`;
}

function Reasoning({ message, streaming }) {
  const now = streaming && !message.content && !message.calls?.length;
  const seconds = ((message.thoughtMs ?? 0) / 1000).toFixed(1);
  const label = now ? t("thinking") : message.thoughtMs ? t("thought", { seconds }) : t("thoughts");
  return html`<details class="fold reasoning"><summary class=${now ? "now" : ""}>${label}</summary><${Markdown} text=${message.reasoning} /></details>`;
}

function pretty(args) {
  try {
    return JSON.stringify(JSON.parse(args), null, 2);
  } catch {
    return args;
  }
}

function Calls({ message, open }) {
  const [results, setResults] = useState(message.calls.map(() => ""));
  const set = (index, value) => setResults(message.calls.map((_, i) => (i === index ? value : results[i] ?? "")));
  const give = () => actions.giveResults(message, message.calls.map((_, i) => results[i] ?? ""));
  return html`<div class="calls">
    ${message.calls.map(
      (call, i) => html`<details class="fold call" open=${open}>
        <summary><${Icon} name="wrench" />${t("call", { name: withoutTurns(call.name) })}</summary>
        <pre tabindex="0" aria-label=${t("arguments")}>${withoutTurns(pretty(call.args))}</pre>
        ${open && html`<textarea rows="2" aria-label=${t("giveResult", { name: call.name })} placeholder=${t("result")} onInput=${(e) => set(i, e.target.value)}>${results[i]}</textarea>`}
      </details>`,
    )}
    ${open && html`<button type="button" class="primary" onClick=${give}>${t("sendResults")}</button>`}
  </div>`;
}

// Why an answer is not what it could be, and what can be done about it.
function Notice({ message, empty, last }) {
  const { status, error, errorKind } = message;
  const busy = state.runs.has(message.conversation);
  const again = html`<button type="button" disabled=${busy} onClick=${() => actions.regenerate(message)}>${t("retry")}</button>`;
  const more =
    message.content && !message.calls?.length && html`<button type="button" class="primary" disabled=${busy} onClick=${() => actions.goOn(message)}>${t("continue")}</button>`;
  if (status === "error") {
    const unreached = errorKind === "network" || errorKind === "cut" || !error;
    const text = errorKind === "key" ? t("needsKey") : unreached ? t("unreachable") : t("failed", { why: withoutTurns(error) });
    return html`<div class="notice bad" role="alert"><${Icon} name="warn" /><span>${text}</span>${again}</div>`;
  }
  if (status === "cut") return html`<div class="notice bad" role="alert"><${Icon} name="warn" /><span>${t("cut")}</span>${last && more}${again}</div>`;
  if (status === "length") return html`<div class="notice"><span>${t("cutLength")}</span>${last && more}</div>`;
  if (status === "stopped") return html`<div class="notice"><span>${t("stopped")}</span>${last && !empty && more}</div>`;
  return null;
}

function Figures({ message, run }) {
  const seconds = run?.first ? (performance.now() - run.first) / 1000 : 0;
  const rate = run ? (run.pieces > 1 && seconds > 0.3 ? (run.pieces - 1) / seconds : 0) : message.timings?.rate;
  const parts = [];
  if (rate) parts.push(t("rate", { rate: rate.toFixed(1) }));
  if (message.usage && !run) parts.push(t(message.usage.completion === 1 ? "token" : "tokens", { count: number(message.usage.completion) }));
  if (message.firstMs && !run) parts.push(t("first", { seconds: (message.firstMs / 1000).toFixed(2) }));
  return parts.length ? html`<span class="figures">${parts.join(" · ")}</span>` : null;
}
