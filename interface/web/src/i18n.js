// Texts in the language of the reader.

import en from "./en.js";
import { state } from "./state.js";
import zh from "./zh.js";

export const LANGUAGES = { en: "English", zh: "中文" };

export function language() {
  const wanted = state.prefs.language;
  if (wanted in LANGUAGES) return wanted;
  return navigator.languages.find((name) => name.slice(0, 2) in LANGUAGES)?.slice(0, 2) ?? "en";
}

// The text of a key; {name} is replaced by `values.name`.
export function t(key, values = {}) {
  const text = (language() === "zh" ? zh : en)[key];
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));
}

export function number(value) {
  return value.toLocaleString(language());
}
