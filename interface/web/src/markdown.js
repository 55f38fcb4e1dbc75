// Text of a model as something to look at. Nothing of it is ever executed, loaded or followed:
// 1. HTML in the text stays text (the renderer escapes it), and pictures become links.
// 2. What is rendered passes through DOMPurify with a short list of tags, attributes and classes.
// 3. The page's Content-Security-Policy allows no other script, style, picture or connection.
// Text that would be slow to parse (very long, very deep) is shown as it is.

import DOMPurify from "dompurify";
import hljs from "highlight.js/lib/common";
import { Marked } from "marked";
import temml from "temml";

const MAX_TEXT = 200_000; // characters of Markdown
const MAX_LINE = 20_000;
const MAX_DEPTH = 40; // of quotes and lists
const MAX_HIGHLIGHT = 20_000; // characters of a code block
const MAX_MATH = 4_000;

const MATH_TAGS = "math mrow mi mn mo ms mtext mspace mfrac msqrt mroot mstyle merror mpadded mphantom menclose msub msup msubsup munder mover munderover mmultiscripts mprescripts mtable mtr mtd".split(" ");
const TAGS = "p br hr h1 h2 h3 h4 h5 h6 strong em del code pre blockquote ul ol li table thead tbody tr th td a div span button".split(" ");
const ATTRIBUTES = (
  "href rel target title class start type dir scope accent accentunder columnalign columnspacing columnlines depth display displaystyle fence form height " +
  "largeop linethickness lspace mathvariant maxsize minsize movablelimits notation rowalign rowlines rowspacing rspace scriptlevel separator stretchy symmetric voffset width"
).split(" ");
const CLASS = /^(hljs(-[\w-]+)?|language-[\w+#.-]{1,40}|tml-[\w-]+|code|code-head|copy|lang|math|plain|scroll|bad|left|center|right|[\w]{1,20}_)$/;

DOMPurify.addHook("uponSanitizeAttribute", (node, data) => {
  if (data.attrName === "class") data.attrValue = data.attrValue.split(/\s+/).filter((name) => CLASS.test(name)).join(" ");
  if (data.attrName === "href" && (node.nodeName !== "A" || !safeUrl(data.attrValue))) data.keepAttr = false;
  if (data.attrName === "type" && (node.nodeName !== "BUTTON" || data.attrValue !== "button")) data.keepAttr = false;
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("target", "_blank");
});

// A fragment without anything active in it.
export function sanitize(html) {
  return DOMPurify.sanitize(html, {
    ALLOWED_TAGS: [...TAGS, ...MATH_TAGS],
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}

export function safeUrl(text) {
  if (!/^(https?:\/\/|mailto:)/i.test(text)) return null;
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

export function escape(text) {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}

// Characters that turn the direction of what follows would make code read as something else than what it is; they are shown by number.
const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;

export function withoutTurns(text) {
  return text.replace(TURNS, (c) => `⟦U+${c.charCodeAt(0).toString(16).toUpperCase()}⟧`);
}

function math(tex, display) {
  try {
    if (tex.length > MAX_MATH) throw new Error("long");
    const html = temml.renderToString(tex, { displayMode: display, throwOnError: true, maxExpand: 200, maxSize: [20, 20], trust: false }).replaceAll(/ style="[^"]*"/g, ""); // the policy forbids styles of elements
    return display ? `<div class="math scroll">${html}</div>` : html;
  } catch {
    const shown = escape(display ? `$$${tex}$$` : `$${tex}$`);
    return display ? `<pre class="plain">${shown}</pre>` : `<code>${shown}</code>`;
  }
}

function code({ text, lang }) {
  const name = (lang ?? "").match(/^[\w+#.-]{1,40}/)?.[0] ?? "";
  let inner = escape(text);
  if (text.length <= MAX_HIGHLIGHT && hljs.getLanguage(name)) {
    inner = hljs.highlight(text, { language: name, ignoreIllegals: true }).value;
  }
  const head = `<div class="code-head"><span class="lang">${escape(name || "text")}</span><button type="button" class="copy"></button></div>`;
  return `<div class="code">${head}<pre><code class="hljs" dir="ltr">${inner}</code></pre></div>`;
}

const marked = new Marked({ gfm: true, async: false, breaks: true });
marked.use({
  extensions: [
    {
      name: "mathBlock",
      level: "block",
      start: (text) => text.match(/(^|\n) {0,3}(\$\$|\\\[)/)?.index,
      tokenizer(text) {
        const found = /^ {0,3}(?:\$\$([\s\S]{1,4000}?)\$\$|\\\[([\s\S]{1,4000}?)\\\])[ \t]*(?:\n+|$)/.exec(text);
        return found ? { type: "mathBlock", raw: found[0], text: (found[1] ?? found[2]).trim() } : undefined;
      },
      renderer: (token) => math(token.text, true),
    },
    {
      name: "mathInline",
      level: "inline",
      start: (text) => text.match(/\$|\\[([]/)?.index,
      tokenizer(text) {
        const found =
          /^\\\(((?:[^\\\n]|\\[^)\n]){1,1000}?)\\\)/.exec(text) ??
          /^\$\$((?:[^$\n]){1,1000}?)\$\$/.exec(text) ??
          /^\\\[((?:[^\\\n]|\\[^\]\n]){1,1000}?)\\\]/.exec(text) ??
          /^\$(?![\s$])((?:[^$\\\n]|\\[^\n]){1,500}?)(?<![\s\\])\$(?![\d$])/.exec(text);
        return found ? { type: "mathInline", raw: found[0], text: found[1] } : undefined;
      },
      renderer: (token) => math(token.text, false),
    },
  ],
  renderer: {
    html: (token) => escape(token.text),
    code,
    image: ({ href, text }) => link(href, escape(`🖼 ${text || href}`)),
    link({ href, tokens }) {
      return link(href, this.parser.parseInline(tokens));
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    table(token) {
      const cells = (row, tag) =>
        `<tr>${row.map((c) => `<${tag}${c.align ? ` class="${c.align}"` : ""}>${this.parser.parseInline(c.tokens)}</${tag}>`).join("")}</tr>`;
      const body = token.rows.map((row) => cells(row, "td")).join("");
      return `<div class="scroll"><table><thead>${cells(token.header, "th")}</thead><tbody>${body}</tbody></table></div>`;
    },
  },
});

function link(href, inner) {
  const url = safeUrl(href);
  return url ? `<a href="${escape(url)}" title="${escape(url)}">${inner}</a>` : inner;
}

function slow(text) {
  if (text.length > MAX_TEXT) return true;
  for (const line of text.split("\n")) {
    if (line.length > MAX_LINE) return true;
    const head = /^[\s>*+-]*/.exec(line)[0];
    if ((head.match(/>/g) ?? []).length > MAX_DEPTH || head.search(/\S|$/) > 4 * MAX_DEPTH || (head.match(/[*+-]\s/g) ?? []).length > MAX_DEPTH) return true;
  }
  return false;
}

// Top-level blocks of a text: [{raw, html()}]. A block whose `raw` is the same looks the same, so only the last one changes in a stream.
export function blocks(text) {
  const shown = withoutTurns(text);
  if (!slow(shown)) {
    try {
      return marked
        .lexer(shown)
        .filter((token) => token.type !== "space" && token.type !== "def")
        .map((token) => ({ raw: token.raw, html: () => part(token) }));
    } catch {
      // deeper than the parser can go
    }
  }
  return [{ raw: shown, html: () => `<pre class="plain">${escape(shown)}</pre>` }];
}

function part(token) {
  try {
    return marked.parser([token]);
  } catch {
    return `<pre class="plain">${escape(token.raw)}</pre>`;
  }
}
