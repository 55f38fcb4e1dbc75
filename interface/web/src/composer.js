// The box where a message is written; text files come in by the button, by paste or by drop.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import * as actions from "./chat.js";
import { t } from "./i18n.js";
import { withoutTurns } from "./markdown.js";
import { pathTo, state, toast, update } from "./state.js";
import { html, Icon, IconButton } from "./ui.js";

const MAX_FILE = 1 << 20; // bytes
const drafts = new Map(); // id of a conversation -> {text, files}, while the page is open

// A file as text; null, with a word why, for what is none.
async function read(file) {
  if (file.size > MAX_FILE) {
    toast(t("tooLarge", { name: withoutTurns(file.name), size: "1 MiB" }));
    return null;
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new Error("binary");
    return { name: file.name.slice(0, 200) || "text", text, size: file.size };
  } catch {
    toast(t("notText", { name: withoutTurns(file.name) }));
    return null;
  }
}

export function Composer({ conversation, running, suggestion }) {
  const id = conversation?.id ?? "";
  const [text, setText] = useState(drafts.get(id)?.text ?? "");
  const [files, setFiles] = useState(drafts.get(id)?.files ?? []);
  const [over, setOver] = useState(false);
  const box = useRef(null);
  const picker = useRef(null);

  useLayoutEffect(() => {
    const draft = drafts.get(id); // at once: what is typed next belongs to this conversation
    setText(draft?.text ?? "");
    setFiles(draft?.files ?? []);
    if (window.innerWidth >= 900) box.current.focus();
  }, [id]);
  useEffect(() => {
    if (suggestion.text) {
      setText(suggestion.text);
      box.current.focus();
    }
  }, [suggestion]);
  useEffect(() => {
    drafts.set(id, { text, files });
    const area = box.current;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, window.innerHeight * 0.4)}px`;
  }, [text, files]);

  const add = async (list) => {
    const read_all = await Promise.all([...list].map(read));
    setFiles((before) => [...before, ...read_all.filter(Boolean)]);
  };
  useEffect(() => {
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    const onDragOver = (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      setOver(true);
    };
    const onDragLeave = (event) => {
      if (!event.relatedTarget) setOver(false);
    };
    const onDrop = (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      setOver(false);
      add(event.dataTransfer.files);
    };
    addEventListener("dragover", onDragOver);
    addEventListener("dragleave", onDragLeave);
    addEventListener("drop", onDrop);
    return () => {
      removeEventListener("dragover", onDragOver);
      removeEventListener("dragleave", onDragLeave);
      removeEventListener("drop", onDrop);
    };
  }, []);

  const ready = (text.trim() || files.length) && !running;
  const send = () => {
    if (!ready) return;
    drafts.delete(id);
    setText("");
    setFiles([]);
    actions.ask(text.trim(), files);
  };
  const onKeyDown = (event) => {
    if (event.isComposing || event.keyCode === 229) return; // Enter that ends a word of an input method
    if (event.key === "Enter" && !event.shiftKey && (state.prefs.enterSends || event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      send();
    } else if (event.key === "ArrowUp" && !text && conversation && !running) {
      const last = pathTo(state.messages, conversation.head).findLast((m) => m.role === "user");
      if (last) {
        event.preventDefault();
        update({ editing: last.id });
      }
    }
  };
  const onPaste = (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  };

  return html`<div class=${`composer ${over ? "over" : ""}`}>
    ${over && html`<div class="drop">${t("dropHere")}</div>`}
    ${
      files.length > 0 &&
      html`<ul class="chips">
        ${files.map(
          (file, i) => html`<li><${Icon} name="file" /><span>${withoutTurns(file.name)}</span>
            <${IconButton} icon="close" label=${t("removeFile", { name: withoutTurns(file.name) })} onClick=${() => setFiles(files.filter((_, at) => at !== i))} />
          </li>`,
        )}
      </ul>`
    }
    <textarea id="composer" ref=${box} rows="1" dir="auto" value=${text} placeholder=${t("ask")} aria-label=${t("ask")} enterkeyhint=${state.prefs.enterSends ? "send" : "enter"}
      onInput=${(e) => setText(e.target.value)} onKeyDown=${onKeyDown} onPaste=${onPaste}></textarea>
    <div class="row">
      <${IconButton} icon="clip" label=${t("attach")} onClick=${() => picker.current.click()} />
      <input ref=${picker} type="file" multiple class="away" tabindex="-1" aria-hidden="true" onChange=${(e) => (add(e.target.files), (e.target.value = ""))} />
      <span class="grow"></span>
      ${
        running
          ? html`<${IconButton} icon="stop" class="primary round" label=${t("stop")} onClick=${() => actions.stop()} />`
          : html`<${IconButton} icon="up" class="primary round" label=${t("send")} disabled=${!ready} onClick=${send} />`
      }
    </div>
  </div>`;
}
