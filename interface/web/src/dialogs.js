// Questions that the page asks, each in a dialog of its own.

import { Component } from "preact";
import * as api from "./api.js";
import * as actions from "./chat.js";
import { LANGUAGES, t } from "./i18n.js";
import * as library from "./library.js";
import { withoutTurns } from "./markdown.js";
import { learn } from "./server.js";
import { ConversationSettings } from "./settings.js";
import { setPrefs, state, toast, update } from "./state.js";
import { copy, html, IconButton } from "./ui.js";

export const close = () => update({ dialog: null });

// Native dialogs keep the focus inside, close with Escape, and give the focus back. They tell that they have closed only some time after it: by
// then the next one may have been opened, perhaps in the same element.
class Dialog extends Component {
  componentDidMount() {
    this.show();
  }

  componentDidUpdate() {
    this.show();
  }

  componentWillUnmount() {
    this.node.close();
  }

  show() {
    if (state.dialog === this.shown) return;
    this.shown = state.dialog;
    if (!this.node.open) this.node.showModal();
  }

  render({ title, children, class: more = "" }) {
    const outside = (event) => event.target === event.currentTarget && close();
    const closed = (event) => !event.target.open && state.dialog === this.shown && close();
    return html`<dialog ref=${(node) => (this.node = node)} class=${more} aria-label=${title} onClose=${closed} onMouseDown=${outside}>
      <div class="dialog">
        <header><h2>${title}</h2><${IconButton} icon="close" label=${t("close")} onClick=${close} /></header>
        ${children}
      </div>
    </dialog>`;
  }
}

function onEnter(action) {
  return (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    action();
  };
}

class Key extends Component {
  render({ dialog }) {
    const save = async () => {
      const value = this.input.value.trim();
      if (!value) return;
      api.setKey(value);
      close();
      if (await learn()) {
        if (dialog.then) await actions.again(dialog.then);
      } else if (state.dialog?.kind === "key") {
        state.dialog.then = dialog.then;
      }
    };
    return html`<${Dialog} title=${t("keyTitle")}>
      <p>${t("keyText")}</p>
      ${dialog.wrong && html`<p class="bad" role="alert">${t("keyWrong")}</p>`}
      <input ref=${(node) => (this.input = node)} type="password" autocomplete="off" autofocus aria-label=${t("key")} placeholder=${t("key")} onKeyDown=${onEnter(save)} />
      <div class="row"><button type="button" onClick=${close}>${t("cancel")}</button><button type="button" class="primary" onClick=${save}>${t("save")}</button></div>
    <//>`;
  }
}

function Link({ dialog }) {
  const open = () => {
    window.open(dialog.url, "_blank", "noopener,noreferrer");
    close();
  };
  return html`<${Dialog} title=${t("linkTitle")}>
    <p>${t("linkText")}</p>
    <p class="address" dir="ltr">${dialog.url}</p>
    <div class="row">
      <button type="button" onClick=${() => (close(), setTimeout(() => copy(dialog.url)))}>${t("copyLink")}</button>
      <button type="button" class="primary" autofocus onClick=${open}>${t("open")}</button>
    </div>
  <//>`;
}

function Sure({ text, action }) {
  return html`<${Dialog} title=${t("delete")}>
    <p>${text}</p>
    <div class="row">
      <button type="button" autofocus onClick=${close}>${t("cancel")}</button>
      <button type="button" class="danger" onClick=${() => (close(), action())}>${t("delete")}</button>
    </div>
  <//>`;
}

class Rename extends Component {
  render({ dialog }) {
    const save = () => {
      const title = this.input.value.trim().slice(0, 200);
      if (title) library.change(dialog.conversation, { title });
      close();
    };
    return html`<${Dialog} title=${t("rename")}>
      <input ref=${(node) => (this.input = node)} type="text" autofocus aria-label=${t("title")} value=${withoutTurns(dialog.conversation.title)} onKeyDown=${onEnter(save)} />
      <div class="row"><button type="button" onClick=${close}>${t("cancel")}</button><button type="button" class="primary" onClick=${save}>${t("save")}</button></div>
    <//>`;
  }
}

function Export({ dialog }) {
  return html`<${Dialog} title=${t("exportOne")}>
    <p dir="auto">${withoutTurns(dialog.conversation.title)}</p>
    <div class="column">
      <button type="button" autofocus onClick=${() => (library.exportMarkdown(dialog.conversation), close())}>${t("asMarkdown")}</button>
      <button type="button" onClick=${() => (library.exportOne(dialog.conversation), close())}>${t("asJson")}</button>
    </div>
  <//>`;
}

function Choice({ label, value, options, onChange }) {
  return html`<label class="field"><span>${label}</span>
    <select value=${value} onChange=${(e) => onChange(e.target.value)}>${Object.entries(options).map(([key, text]) => html`<option value=${key} selected=${key === value}>${text}</option>`)}</select>
  </label>`;
}

function Preferences() {
  const { theme, language, enterSends } = state.prefs;
  const take = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      toast(t("imported", { count: await library.importFile(file) }));
      close();
    } catch {
      toast(t("importFailed", { name: file.name }));
    }
  };
  const pick = (event) => event.currentTarget.nextElementSibling.click();
  const count = state.conversations.length;
  return html`<${Dialog} title=${t("preferences")}>
    <${Choice} label=${t("theme")} value=${theme} options=${{ auto: t("auto"), light: t("light"), dark: t("dark") }} onChange=${(v) => setPrefs({ theme: v })} />
    <${Choice} label=${t("language")} value=${language} options=${{ auto: t("auto"), ...LANGUAGES }} onChange=${(v) => setPrefs({ language: v })} />
    <${Choice} label=${t("enter")} value=${enterSends ? "sends" : "breaks"} options=${{ sends: t("enterSends"), breaks: t("enterBreaks") }} onChange=${(v) => setPrefs({ enterSends: v === "sends" })} />
    <h3>${t("data")}</h3>
    <p class="hint">${t("dataHint")}</p>
    <div class="row wrap">
      <button type="button" disabled=${!count} onClick=${() => library.exportJson(state.conversations)}>${t("exportAll")}</button>
      <button type="button" onClick=${pick}>${t("import")}</button>
      <input type="file" accept=".json,application/json" class="away" tabindex="-1" aria-hidden="true" onChange=${take} />
      <button type="button" class="danger" disabled=${!count} onClick=${() => update({ dialog: { kind: "deleteAll" } })}>${t("deleteAll")}</button>
    </div>
    ${api.key() && html`<div class="row wrap"><button type="button" onClick=${() => (api.setKey(""), close())}>${t("forgetKey")}</button></div>`}
  <//>`;
}

const KEYS = [
  ["Ctrl Shift O", "keyNew"],
  ["Ctrl K", "keySearch"],
  ["Ctrl B", "keySidebar"],
  ["Ctrl J", "keyFocus"],
  ["Esc", "keyStop"],
  ["↑", "keyEdit"],
  ["Ctrl ,", "keySettings"],
  ["Ctrl Shift L", "keyTheme"],
  ["Ctrl /", "keyHelp"],
];

const ON_MAC = navigator.platform.startsWith("Mac");

function Shortcuts() {
  return html`<${Dialog} title=${t("shortcuts")}>
    <dl class="keys">
      ${KEYS.map(([keys, text]) => html`<div><dt>${(ON_MAC ? keys.replace("Ctrl", "⌘") : keys).split(" ").map((key) => html`<kbd>${key}</kbd>`)}</dt><dd>${t(text)}</dd></div>`)}
    </dl>
  <//>`;
}

export function Dialogs({ dialog }) {
  if (!dialog) return null;
  const { kind, conversation } = dialog;
  if (kind === "key") return html`<${Key} dialog=${dialog} />`;
  if (kind === "link") return html`<${Link} dialog=${dialog} />`;
  if (kind === "rename") return html`<${Rename} dialog=${dialog} />`;
  if (kind === "export") return html`<${Export} dialog=${dialog} />`;
  if (kind === "delete") return html`<${Sure} text=${t("deleteSure", { title: withoutTurns(conversation.title) })} action=${() => library.remove(conversation.id)} />`;
  if (kind === "deleteAll") return html`<${Sure} text=${t("deleteAllSure", { count: state.conversations.length })} action=${library.removeAll} />`;
  if (kind === "preferences") return html`<${Preferences} />`;
  if (kind === "settings") return html`<${Dialog} title=${t("conversationSettings")} class="side"><${ConversationSettings} /><//>`;
  return html`<${Shortcuts} />`;
}
