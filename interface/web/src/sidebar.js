// The list of conversations.

import { t } from "./i18n.js";
import * as library from "./library.js";
import { withoutTurns } from "./markdown.js";
import { state, update } from "./state.js";
import { html, Icon, IconButton, Logo } from "./ui.js";

const DAY_MS = 86_400_000;

function group(conversation) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (conversation.updated >= midnight) return "today";
  if (conversation.updated >= midnight - DAY_MS) return "yesterday";
  return conversation.updated >= midnight - 6 * DAY_MS ? "week" : "earlier";
}

function Entry({ conversation }) {
  const here = conversation.id === state.current?.id;
  const title = withoutTurns(conversation.title);
  const dialog = (kind) => () => update({ dialog: { kind, conversation } });
  return html`<li class=${here ? "here" : ""}>
    <a href=${`#${conversation.id}`} aria-current=${here ? "page" : null} onClick=${(e) => (e.preventDefault(), library.open(conversation.id))}>
      ${state.runs.has(conversation.id) && html`<span class="pulse" aria-label=${t("writing")}></span>`}<span dir="auto">${title}</span>
    </a>
    <span class="entry-actions">
      <${IconButton} icon="pen" label=${`${t("rename")}: ${title}`} onClick=${dialog("rename")} />
      <${IconButton} icon="share" label=${`${t("exportOne")}: ${title}`} onClick=${dialog("export")} />
      <${IconButton} icon="trash" label=${`${t("delete")}: ${title}`} onClick=${dialog("delete")} />
    </span>
  </li>`;
}

export function Sidebar() {
  const shown = state.found ? state.conversations.filter((c) => state.found.has(c.id)) : state.conversations;
  const groups = grouped(shown);
  const empty = state.found ? t("nothingFound") : t("noConversations");
  return html`<nav class="sidebar" aria-label=${t("conversations")} inert=${!state.sidebar}>
    <div class="brand">
      <${Logo} /><strong>fastllm</strong><span class="grow"></span>
      <${IconButton} icon="panel" label=${t("closeSidebar")} onClick=${() => update({ sidebar: false })} />
    </div>
    <button type="button" class="new-chat" onClick=${library.startNew}><${Icon} name="plus" />${t("newChat")}</button>
    <label class="search"><${Icon} name="search" />
      <input type="search" id="search" placeholder=${t("search")} aria-label=${t("search")} value=${state.search} onInput=${(e) => library.search(e.target.value)} />
    </label>
    <div class="list">
      ${shown.length === 0 && html`<p class="empty">${empty}</p>`}
      ${["today", "yesterday", "week", "earlier"].map(
        (name) => groups.get(name) && html`<h2>${t(name)}</h2><ul>${groups.get(name).map((c) => html`<${Entry} key=${c.id} conversation=${c} />`)}</ul>`,
      )}
    </div>
    <div class="foot">
      <button type="button" onClick=${() => update({ dialog: { kind: "preferences" } })}><${Icon} name="gear" />${t("preferences")}</button>
      <${IconButton} icon="keyboard" label=${t("shortcuts")} onClick=${() => update({ dialog: { kind: "shortcuts" } })} />
    </div>
  </nav>`;
}

function grouped(conversations) {
  const groups = new Map();
  for (const conversation of conversations) {
    const name = group(conversation);
    groups.set(name, [...(groups.get(name) ?? []), conversation]);
  }
  return groups;
}
