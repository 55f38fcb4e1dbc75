// Small things that every part of the page uses: the template tag, icons, buttons, copying.

import htm from "htm";
import { Component, h } from "preact";
import { t } from "./i18n.js";
import { toast } from "./state.js";

export const html = htm.bind(h);

const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 6h16M4 12h16M4 18h16",
  panel: "M4 5h16v14H4zM9 5v14",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16 16l4 4",
  pen: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  share: "M12 15V4M8 8l4-4 4 4M5 13v6h14v-6",
  sliders: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  gear: "M12 9a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM12 3v3M12 18v3M3 12h3M18 12h3M5.6 5.6l2.2 2.2M16.2 16.2l2.2 2.2M5.6 18.4l2.2-2.2M16.2 7.8l2.2-2.2",
  up: "M12 19V5M6 11l6-6 6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  stop: "M7 7h10v10H7z",
  clip: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.5 3.5 0 0 1 5 5l-8.500 8.500a2 2 0 0 1-3-3L14 7",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  play: "M8 5l11 7-11 7z",
  fork: "M7 4v16M7 15h4a5 5 0 0 0 5-5V6M12.500 9L16 5.500 19.500 9",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  close: "M6 6l12 12M18 6L6 18",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  keyboard: "M3 7h18v10H3zM7 11h.01M11 11h.01M15 11h.01M8 14h8",
  wrench: "M20 7a5 5 0 0 1-6.500 4.800L7 19l-2-2 7-6.500A5 5 0 0 1 17 4l-3 3 3 3z",
  warn: "M12 4l9 16H3zM12 10v4M12 17h.01",
};

export function Icon({ name }) {
  return html`<svg class=${`icon icon-${name}`} viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`;
}

export function Logo() {
  return html`<svg class="logo" viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="9" /><path d="M18.200 5.500 8.600 17.400h6l-1.200 9.100 10-12.600h-6.200z" /></svg>`;
}

// A button that is only an icon; its name is for the pointer and for screen readers.
export function IconButton({ icon, label, children, class: more = "", ...rest }) {
  return html`<button type="button" class=${`icon-button ${more}`} title=${label} aria-label=${label} ...${rest}><${Icon} name=${icon} />${children}</button>`;
}

// Drawn again only when a property has changed.
export class Still extends Component {
  shouldComponentUpdate(next) {
    const names = new Set([...Object.keys(next), ...Object.keys(this.props)]);
    return [...names].some((name) => next[name] !== this.props[name]);
  }
}

export async function copy(text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyByHand(text); // pages that are not served securely, on another machine
    toast(t("copied"));
    return true;
  } catch {
    toast(t("copyFailed"));
    return false;
  }
}

function copyByHand(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "away";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("copy");
}
