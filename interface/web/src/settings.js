// System prompt and sampling settings of a conversation. An empty field is not sent: the server's default, which is shown, holds.

import { useState } from "preact/hooks";
import { t } from "./i18n.js";
import { change } from "./library.js";
import { setPrefs, state, toast, update } from "./state.js";
import { html } from "./ui.js";

// name, least, most, step; with a slider from `from` to `to`, which stands at `off` if no default is known
const FIELDS = [
  { name: "temperature", min: 0, max: 5, step: 0.05, to: 2, off: 1 },
  { name: "top_p", min: 0, max: 1, step: 0.01, to: 1, off: 1 },
  { name: "top_k", min: -1, max: 2 ** 31 - 1, step: 1 },
  { name: "min_p", min: 0, max: 1, step: 0.01, to: 1, off: 0 },
  { name: "repetition_penalty", min: 0.01, max: 10, step: 0.01, from: 0.5, to: 2, off: 1 },
  { name: "presence_penalty", min: -2, max: 2, step: 0.1, from: -2, to: 2, off: 0 },
  { name: "frequency_penalty", min: -2, max: 2, step: 0.1, from: -2, to: 2, off: 0 },
  { name: "max_tokens", min: 1, max: 2 ** 31 - 1, step: 1 },
  { name: "seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
];

function target() {
  return state.current ?? state.draft;
}

function store(patch) {
  if (state.current) change(state.current, patch);
  else update({ draft: { ...state.draft, ...patch } });
}

function set(name, value) {
  const settings = { ...target().settings };
  if (value === undefined) delete settings[name];
  else settings[name] = value;
  store({ settings });
}

function Field({ field }) {
  const { name, min, max, step, to, off, from = 0 } = field;
  const value = target().settings[name];
  const fallback = state.server.defaults[name];
  const [wrong, setWrong] = useState(false);
  const take = (event) => {
    const given = event.target.value.trim();
    const number = Number(given);
    const bad = event.target.validity.badInput || (given !== "" && !(number >= min && number <= max && (step < 1 || Number.isInteger(number))));
    setWrong(bad);
    if (!bad) set(name, given === "" ? undefined : number);
  };
  const hint = `hint-${name}`;
  return html`<div class="field number">
    <label for=${`set-${name}`}>${t(name)}</label>
    ${to !== undefined && html`<input type="range" aria-label=${t(name)} min=${from} max=${to} step=${step} value=${value ?? fallback ?? off} onInput=${take} />`}
    <input type="number" id=${`set-${name}`} min=${min} max=${max} step=${step < 1 ? "any" : 1} inputmode="decimal" value=${value ?? ""} placeholder=${fallback ?? t("default")}
      aria-invalid=${wrong} aria-describedby=${hint} onInput=${take} />
    <small id=${hint} class=${wrong ? "bad" : "hint"}>${wrong ? t("outOfRange", { min, max }) : t(`${name}Hint`)}</small>
  </div>`;
}

function Tools() {
  const given = target().settings.tools;
  const [text, setText] = useState(given ? JSON.stringify(given, null, 2) : "");
  const [wrong, setWrong] = useState(false);
  const take = (event) => {
    setText(event.target.value);
    try {
      const tools = event.target.value.trim() ? JSON.parse(event.target.value) : undefined;
      if (tools && !(Array.isArray(tools) && tools.every((tool) => tool?.type === "function" && tool.function?.name))) throw new Error("form");
      setWrong(false);
      set("tools", tools);
    } catch {
      setWrong(true);
    }
  };
  return html`<label class="field"><span>${t("tools")}</span>
    <textarea class="code-box" rows="4" spellcheck=${false} aria-invalid=${wrong} onInput=${take} placeholder='[{"type": "function", "function": {"name": "weather", …}}]'>${text}</textarea>
    <small class=${wrong ? "bad" : "hint"}>${t(wrong ? "toolsWrong" : "toolsHint")}</small>
  </label>`;
}

function Select({ label, value, options, onChange }) {
  return html`<label class="field"><span>${label}</span>
    <select onChange=${(e) => onChange(e.target.value)}>${options.map(([key, text]) => html`<option value=${key} selected=${key === value}>${text}</option>`)}</select>
  </label>`;
}

export function ConversationSettings() {
  const { settings, system = "" } = target();
  const { template } = state.server;
  const thinking = settings.thinking === undefined ? "" : String(settings.thinking);
  const reset = () => store({ settings: {}, system: "" });
  const keep = () => {
    setPrefs({ settings: structuredClone(settings), system });
    toast(t("savedDefault"));
  };
  return html`<div class="settings">
    <label class="field"><span>${t("system")}</span>
      <textarea rows="5" dir="auto" placeholder=${t("systemHint")} value=${system} onInput=${(e) => store({ system: e.target.value })}></textarea>
    </label>
    ${
      template.includes("enable_thinking") &&
      html`<${Select} label=${t("thinkingSwitch")} value=${thinking} options=${[["", t("byDefault")], ["true", t("on")], ["false", t("off")]]}
        onChange=${(v) => set("thinking", v === "" ? undefined : v === "true")} />`
    }
    ${
      template.includes("reasoning_effort") &&
      html`<${Select} label=${t("effort")} value=${settings.reasoning_effort ?? ""} options=${[["", t("byDefault")], ...["low", "medium", "high"].map((name) => [name, t(name)])]}
        onChange=${(v) => set("reasoning_effort", v || undefined)} />`
    }
    <h3>${t("sampling")}</h3>
    ${FIELDS.map((field) => html`<${Field} key=${field.name} field=${field} />`)}
    <label class="field"><span>${t("stops")}</span>
      <textarea rows="2" value=${(settings.stop ?? []).join("\n")} onChange=${(e) => set("stop", e.target.value.split("\n").filter(Boolean).slice(0, 16))}></textarea>
      <small class="hint">${t("stopsHint")}</small>
    </label>
    <${Tools} />
    <div class="row wrap">
      <button type="button" onClick=${reset}>${t("reset")}</button>
      <button type="button" onClick=${keep}>${t("asDefault")}</button>
    </div>
  </div>`;
}
