"""How model families write tool calls: where a call region begins, and what it holds.

A `CallFormat` reads a region that starts with one of its markers and answers with the calls and where the region ends, with `None`
while it may still go on, or raises `ValueError` if it can be no call: then the text is content. Each reader is a pure function of the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .json_values import json_end, typed_value

__all__ = ["FORMATS", "CallFormat", "ParsedCall", "Tools", "detect_format"]

Tools = Mapping[str, Any]
"""Name of a tool -> JSON schema of its parameters."""


@dataclass(frozen=True)
class ParsedCall:
    """name, and arguments as JSON text of an object."""

    name: str
    arguments: str


Read = Callable[[str, Tools, bool], "tuple[list[ParsedCall], int] | None"]


@dataclass(frozen=True)
class CallFormat:
    """name: of `--tool-parser`. markers: texts that begin a call region. read: (text from the marker on, tools, final) → (calls, length of
    the region), or None while more text can change that; final: no more text comes. ValueError: no call. at_start: without a marker, only the start of an answer can be a
    call. in_template: texts of a chat template that tell this format. inner: markup inside of a region, which may be special tokens. dropped: markers around content, which are nobody's text."""

    name: str
    markers: tuple[str, ...]
    read: Read
    at_start: bool = False
    in_template: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def _loads(text: str) -> Any:
    """JSON without NaN and infinities, which are no JSON."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, allow_nan=False)  # 1e999
    return value


def _arguments(value: Any) -> str:
    """Arguments as JSON text; some models write them as a string that holds JSON."""
    if isinstance(value, str):
        value = _loads(value) if value.strip() else {}
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    return json.dumps(value, ensure_ascii=False)


def _call(value: Any, keys: tuple[str, ...] = ("arguments", "parameters")) -> ParsedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("a call without a name")
    found: Any = next((value[k] for k in keys if k in value), {})
    return ParsedCall(value["name"], _arguments(found))


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _expect(text: str, at: int, literal: str) -> int | None:
    """The index after a literal at text[at]; None: the text ends inside of it. Raises ValueError for another text."""
    piece = text[at : at + len(literal)]
    if not literal.startswith(piece):
        raise ValueError(f"{literal!r} is missing")
    return at + len(literal) if len(piece) == len(literal) else None


def _json_at(text: str, at: int) -> tuple[Any, int] | None:
    """A JSON object or array at text[at], and where it ends."""
    end = json_end(text, at)
    return None if end is None else (_loads(text[at:end]), end)


# hermes: <tool_call>{"name": …, "arguments": …}</tool_call> -------------------------------------------------------------


def _read_hermes(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    at = _skip(text, len("<tool_call>"))
    if at == len(text):
        return None
    found = _json_at(text, at)
    if found is None:
        return None
    call = _call(found[0])
    end = _expect(text, _skip(text, found[1]), "</tool_call>")
    return None if end is None else ([call], end)


# qwen3-coder: <tool_call><function=N><parameter=K>V</parameter>…</function></tool_call> ---------------------------------

_FUNCTION = re.compile(r"<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>")


def _read_qwen3_coder(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    at = _skip(text, len("<tool_call>"))
    head = _FUNCTION.match(text, at)
    if head is None:
        _check_start(text[at:], "<function=", ">")
        return None
    name, at = head[1], head.end()
    properties = _properties(tools, name)
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(text, at):
        end = text.find("</parameter>", parameter.end())
        if end < 0:
            return None
        value = text[parameter.end() : end]
        arguments[parameter[1]] = typed_value(value.removeprefix("\n").removesuffix("\n"), properties.get(parameter[1]))
        at = end + len("</parameter>")
    at = _skip(text, at)
    if "<parameter=".startswith(text[at : at + 11]) or (text.startswith("<parameter=", at) and ">" not in text[at:]):
        return None
    closed = _expect(text, at, "</function>")
    end_call = None if closed is None else _expect(text, _skip(text, closed), "</tool_call>")
    return None if end_call is None else ([ParsedCall(name, json.dumps(arguments, ensure_ascii=False))], end_call)


def _check_start(text: str, opening: str, closing: str) -> None:
    """Raises ValueError unless the text may still become `opening … closing`."""
    if not (opening.startswith(text) or (text.startswith(opening) and closing not in text and "<" not in text[1:])):
        raise ValueError(f"no {opening}…{closing}")


def _properties(tools: Tools, name: str) -> Mapping[str, Any]:
    schema = tools.get(name)
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


# llama3: {"name": …, "parameters": …}, after <|python_tag|> or at the start ---------------------------------------------


def _read_llama3(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    at = _skip(text, len("<|python_tag|>") if text.startswith("<|python_tag|>") else 0)
    calls: list[ParsedCall] = []
    while True:
        found = None if at == len(text) else _json_at(text, at)
        if found is None:
            return (calls, at) if final and calls else None
        calls.append(_call(found[0], ("parameters", "arguments")))
        at = found[1]
        after = _skip(text, at)
        if after == len(text) and not final:
            return None
        if text.startswith(";", after):  # several calls are separated so
            at = _skip(text, after + 1)
            continue
        return calls, at


# pythonic: [f(a=1), g(b="x")] -------------------------------------------------------------------------------------------


def _read_pythonic(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    start = len("<|python_start|>") if text.startswith("<|python_start|>") else 0
    start = _skip(text, start)
    if start == len(text):
        return None
    if not re.match(r"\[\s*(?:$|[A-Za-z_][\w.]*\s*(?:$|\())", text[start:]):
        raise ValueError("no list of calls")
    end = _bracket_end(text, start)
    if end is None:
        return None
    try:
        tree = ast.parse(text[start:end], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"no list of calls: {error}") from None
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
            raise ValueError("an element is no call with named arguments")
        values = {k.arg: _literal(k.value) for k in node.keywords}
        calls.append(ParsedCall(ast.unparse(node.func), json.dumps(values, ensure_ascii=False)))
    tail = "<|python_end|>"
    if text.startswith(tail, end):
        return calls, end + len(tail)
    return None if tail.startswith(text[end:]) and not final else (calls, end)


def _literal(node: ast.expr) -> Any:
    """A Python literal, and JSON's true, false and null."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(e) for e in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(k)): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    value = ast.literal_eval(node)
    json.dumps(value, allow_nan=False)  # raises TypeError for bytes, sets, complex numbers
    return value


def _bracket_end(text: str, start: int) -> int | None:
    """Where the bracket at text[start] closes, Python strings skipped; None: not yet."""
    depth, quote, at = 0, "", start
    while at < len(text):
        c = text[at]
        if quote:
            if c == "\\":
                at += 1
            elif c == quote:
                quote = ""
        elif c in "\"'":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return None


# mistral: [TOOL_CALLS][{…}, …], and [TOOL_CALLS]N[ARGS]{…} ---------------------------------------------------------------


def _read_mistral(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    at = _skip(text, len("[TOOL_CALLS]"))
    if at == len(text):
        return None
    if text[at] == "[":
        found = _json_at(text, at)
        return None if found is None else ([_call(item) for item in found[0]], found[1])
    name = re.compile(r"([\w.:/-]+)(?:\[CALL_ID\][\w-]+)?\[ARGS\]").match(text, at)
    if name is None:
        if "{" in text[at:] or not re.match(r"[\w.:/-]+(\[[\w\]-]*)*$", text[at:]):
            raise ValueError("no name before [ARGS]")
        return None
    found = _json_at(text, _skip(text, name.end()))
    return None if found is None else ([ParsedCall(name[1], _arguments(found[0]))], found[1])


# deepseek ---------------------------------------------------------------------------------------------------------------

_DS_BEGIN, _DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _read_deepseek(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    """Both forms: `function<sep>N` with a fenced JSON (V3), and `N<sep>{…}` (V3.1)."""
    at, calls = len(_DS_BEGIN), list[ParsedCall]()
    while True:
        at = _skip(text, at)
        if text.startswith(_DS_END, at) and calls:
            return calls, at + len(_DS_END)
        if _DS_END.startswith(text[at:]) or _DS_CALL.startswith(text[at:]):
            return None
        begun = _expect(text, at, _DS_CALL)
        end = -1 if begun is None else text.find(_DS_CALL_END, begun)
        if begun is None or end < 0:
            return None
        head, separator, rest = text[begun:end].partition(_DS_SEP)
        if not separator:
            raise ValueError("a call without a separator")
        if head.strip() == "function" and "```" in rest:
            name, _, body = rest.partition("\n")
            body = body.strip().removeprefix("```json").removesuffix("```")
        else:
            name, body = head, rest
        calls.append(ParsedCall(_name(name), _arguments(_loads(body))))
        at = end + len(_DS_CALL_END)


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w.:/-]+", text.strip()):
        raise ValueError("no name of a tool")
    return text.strip()


# glm: <tool_call>N <arg_key>K</arg_key><arg_value>V</arg_value>… </tool_call> --------------------------------------------

_GLM_INNER: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_GLM_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_glm(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    start = len("<tool_call>")
    end = text.find("</tool_call>", start)
    name_end = min((i for i in (text.find("<arg_key>", start), end) if i >= 0), default=-1)
    if name_end < 0:
        if not re.match(r"\s*[\w.:/-]*\s*(<|$)", text[start:]):
            raise ValueError("no name of a tool")
        return None
    name, at = _name(text[start:name_end]), name_end
    arguments: dict[str, Any] = {}
    while pair := _GLM_PAIR.match(text, at):
        key = pair[1].strip()
        arguments[key] = typed_value(pair[2], _properties(tools, name).get(key))
        at = pair.end()
    at = _skip(text, at)
    if text.startswith("</tool_call>", at):
        return [ParsedCall(name, json.dumps(arguments, ensure_ascii=False))], at + len("</tool_call>")
    if "</tool_call>".startswith(text[at:]) or "<arg_key>".startswith(text[at : at + 9]):
        return None
    raise ValueError("no argument")


# kimi -------------------------------------------------------------------------------------------------------------------

_KIMI_HEAD = re.compile(r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w./-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>")
_KIMI_CALL_END: Final = "<|tool_call_end|>"
_KIMI_INNER: Final = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", _KIMI_CALL_END, "<|tool_calls_section_end|>")


def _read_kimi(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    begin, close = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    at, calls = len(begin), list[ParsedCall]()
    while head := _KIMI_HEAD.match(text, at):
        end = text.find(_KIMI_CALL_END, head.end())
        if end < 0:
            return None
        calls.append(ParsedCall(head[1], _arguments(_loads(text[head.end() : end]))))
        at = end + len(_KIMI_CALL_END)
    at = _skip(text, at)
    if text.startswith(close, at):
        if not calls:
            raise ValueError("a section without calls")
        return calls, at + len(close)
    if close.startswith(text[at:]) or "<|tool_call_begin|>".startswith(text[at : at + 19]):
        return None
    raise ValueError("no call in the section")


# minimax ----------------------------------------------------------------------------------------------------------------

_MM_INVOKE = re.compile(r'\s*<invoke name="([^"]+)">(.*?)</invoke>', re.DOTALL)
_MM_PARAMETER = re.compile(r'\s*<parameter name="([^"]+)">(.*?)</parameter>', re.DOTALL)


def _read_minimax(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    """M1: lines of JSON between <tool_calls> and </tool_calls>; M2: <invoke> elements."""
    modern = text.startswith("<minimax:tool_call>")
    opening, closing = ("<minimax:tool_call>", "</minimax:tool_call>") if modern else ("<tool_calls>", "</tool_calls>")
    end = text.find(closing)
    if end < 0:
        return None
    body, calls = text[len(opening) : end], list[ParsedCall]()
    if modern:
        for invoke in _MM_INVOKE.finditer(body):
            known = _properties(tools, invoke[1])
            values = {p[1]: typed_value(p[2].strip("\n"), known.get(p[1])) for p in _MM_PARAMETER.finditer(invoke[2])}
            calls.append(ParsedCall(invoke[1], json.dumps(values, ensure_ascii=False)))
    else:
        calls = [_call(_loads(line)) for line in body.splitlines() if line.strip()]
    if not calls:
        raise ValueError("a section without calls")
    return calls, end + len(closing)


# lists of JSON after a marker: phi-4, granite ---------------------------------------------------------------------------


def _read_list(marker: str, closing: str = "") -> Read:
    def read(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
        at = _skip(text, len(marker))
        if at == len(text):
            return None
        found = _json_at(text, at)
        if found is None:
            return None
        items = found[0] if isinstance(found[0], list) else [found[0]]
        calls = [_call(item) for item in items]
        if not calls:
            raise ValueError("an empty list of calls")
        if not closing:
            return calls, found[1]
        end = _expect(text, _skip(text, found[1]), closing)
        return None if end is None else (calls, end)

    return read


def _read_phi(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    if text.startswith("functools"):
        return _read_list("functools")(text, tools, final)
    return _read_list("<|tool_call|>", "<|/tool_call|>")(text, tools, final)


# gpt-oss (harmony) ------------------------------------------------------------------------------------------------------

_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>commentary to=functions\.([\w./-]+)\s*(?:<\|constrain\|>\s*json)?\s*(?:json)?<\|message\|>(.*?)(<\|call\|>|<\|end\|>|$)",
    re.DOTALL,
)


def _read_harmony(text: str, tools: Tools, final: bool) -> tuple[list[ParsedCall], int] | None:
    found = _HARMONY.match(text)
    if found is not None and (found[3] or final):  # <|call|> ends the answer, so its text may never come
        return [ParsedCall(found[1], _arguments(_loads(found[2])))], found.end()
    if found is not None:
        return None
    if "<|call|>" in text or "<|end|>" in text:
        raise ValueError("a commentary that is no call")
    return None


FORMATS: Final[dict[str, CallFormat]] = {
    f.name: f
    for f in (
        CallFormat("hermes", ("<tool_call>",), _read_hermes, in_template=("<tool_call>",), inner=("</tool_call>",)),
        CallFormat("qwen3-coder", ("<tool_call>",), _read_qwen3_coder, in_template=("<function=",), inner=("</tool_call>",)),
        CallFormat("llama3-json", ("<|python_tag|>", "{"), _read_llama3, at_start=True, in_template=('"parameters"', "<|python_tag|>")),
        CallFormat("llama-pythonic", ("<|python_start|>", "["), _read_pythonic, at_start=True, in_template=("<|python_start|>", "[func_name1("), inner=("<|python_end|>",)),
        CallFormat("mistral", ("[TOOL_CALLS]",), _read_mistral, in_template=("[TOOL_CALLS]",), inner=("[ARGS]", "[CALL_ID]")),
        CallFormat("deepseek-v3", (_DS_BEGIN,), _read_deepseek, in_template=(_DS_BEGIN,), inner=(_DS_CALL, _DS_SEP, _DS_CALL_END, _DS_END)),
        CallFormat("glm4.5", ("<tool_call>",), _read_glm, in_template=("<arg_key>",), inner=_GLM_INNER),
        CallFormat("kimi-k2", ("<|tool_calls_section_begin|>",), _read_kimi, in_template=("<|tool_calls_section_begin|>",), inner=_KIMI_INNER),
        CallFormat(
            "minimax",
            ("<minimax:tool_call>", "<tool_calls>"),
            _read_minimax,
            in_template=("<minimax:tool_call>", "<tool_calls>"),
            inner=("</minimax:tool_call>", "</tool_calls>"),
        ),
        CallFormat("phi", ("functools[", "<|tool_call|>"), _read_phi, in_template=("functools[", "<|/tool_call|>"), inner=("<|/tool_call|>",)),
        CallFormat("granite", ("<|tool_call|>",), _read_list("<|tool_call|>"), in_template=("<|tool_call|>",)),
        CallFormat(
            "gpt-oss",
            ("<|start|>assistant<|channel|>commentary to=functions.", "<|channel|>commentary to=functions."),
            _read_harmony,
            in_template=("to=functions.",),
            inner=("<|constrain|>", "<|message|>"),
            dropped=("<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|start|>assistant", "<|return|>", "<|end|>", "<|call|>"),
        ),
    )
}
"""Name -> format, in the order of the documents."""

_ORDER = ("gpt-oss", "minimax", "kimi-k2", "deepseek-v3", "mistral", "glm4.5", "qwen3-coder", "phi", "granite", "llama-pythonic", "hermes", "llama3-json")


def detect_format(template: str | None) -> str | None:
    """The format that a chat template speaks of: the most special texts first; None: it knows no tools."""
    if template is None:
        return None
    for name in _ORDER:
        if any(text in template for text in FORMATS[name].in_template):
            return name
    return None
