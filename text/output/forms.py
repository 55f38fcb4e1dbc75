"""The readers of tool calls, one for each form in which model families write them (see `formats` for which family writes which).

Each reads a region from its marker on; see `region.Region` for how it gets text and tells of calls.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping
from typing import Any, Final

from .json_values import PythonEnd, typed_value
from .region import MAX_NAME, Reader, Region, Tools, Wait

__all__ = [
    "DEEPSEEK",
    "KIMI",
    "read_deepseek",
    "read_glm",
    "read_harmony",
    "read_hermes",
    "read_kimi",
    "read_list",
    "read_llama3",
    "read_minimax",
    "read_mistral",
    "read_phi",
    "read_pythonic",
    "read_qwen3_coder",
]

DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
KIMI: Final = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


def read_hermes(r: Region) -> Wait:
    """<tool_call>{"name": …, "arguments": …}</tool_call>; a tool that takes a text: <tool_call><custom name="N">text</custom></tool_call>"""
    yield from r.literal("<tool_call>")
    yield from r.blank()
    if (yield from r.maybe('<custom name="')):
        name = _name((yield from r.until('">', MAX_NAME)))
        text = yield from r.until("</custom>")
        r.whole(name, json.dumps({"input": text}, ensure_ascii=False))
    else:
        yield from r.named()
    yield from r.blank()
    yield from r.literal("</tool_call>")


def read_qwen3_coder(r: Region) -> Wait:
    """<tool_call><function=N><parameter=K>V</parameter>…</function></tool_call>"""
    yield from r.literal("<tool_call>")
    yield from r.blank()
    yield from r.literal("<function=")
    name = _name((yield from r.until(">", MAX_NAME)))
    properties = _properties(r.tools, name)
    r.begin(name)
    while True:
        yield from r.blank()
        if not (yield from r.maybe("<parameter=")):
            break
        key = yield from r.until(">", MAX_NAME)
        value = yield from _raw(r, properties.get(key), "</parameter>")
        r.pair(key, typed_value(value.removeprefix("\n").removesuffix("\n"), properties.get(key)))
    yield from r.literal("</function>")
    r.end_pairs()
    yield from r.blank()
    yield from r.literal("</tool_call>")


def read_llama3(r: Region) -> Wait:
    """{"name": …, "parameters": …}, after <|python_tag|> or at the start; several with `;` between."""
    tagged = yield from r.maybe("<|python_tag|>")
    while True:
        yield from r.blank()
        yield from r.named(("parameters", "arguments"), bare=not tagged)
        yield from r.blank()
        if not (yield from r.maybe(";")):
            return


def read_pythonic(r: Region) -> Wait:
    """[f(a=1), g(b="x")], in <|python_start|> … <|python_end|> or at the start."""
    yield from r.maybe("<|python_start|>")
    yield from r.blank()
    yield from r.literal("[")
    while True:
        yield from r.blank()
        name = yield from r.name()
        yield from r.blank()
        if (yield from r.peek()) != "(":
            raise ValueError("no call")
        _python_call(r, name, (yield from r.value(PythonEnd())))
        yield from r.blank()
        if not (yield from r.maybe(",")):
            break
    yield from r.literal("]")
    yield from r.maybe("<|python_end|>")


def _python_call(r: Region, name: str, arguments: str) -> None:
    try:
        node = ast.parse(f"f{arguments}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"no call: {error}") from None
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("no call with named arguments")
    r.whole(name, json.dumps({k.arg: _literal(k.value) for k in node.keywords}, ensure_ascii=False))


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


def read_mistral(r: Region) -> Wait:
    """[TOOL_CALLS][{…}, …], and [TOOL_CALLS]N[ARGS]{…}"""
    yield from r.literal("[TOOL_CALLS]")
    yield from r.blank()
    if (yield from r.peek()) == "[":
        yield from r.list()
        return
    name = yield from r.name()
    if not r.stream and (yield from r.maybe("[CALL_ID]")):  # no grammar has it
        yield from r.name()
    yield from r.literal("[ARGS]")
    yield from r.blank()
    r.begin(name)
    yield from r.object()
    r.end()


def read_deepseek(r: Region) -> Wait:
    """Both forms between the list's markers: `function<sep>N` with a fenced JSON (V3), and `N<sep>{…}` (V3.1)."""
    begin, call, separator, call_end, end = DEEPSEEK
    yield from r.literal(begin)
    while True:
        yield from r.blank()
        if r.num_ended and ((yield from r.maybe(end)) or r.final):
            return
        yield from r.literal(call)
        name = (yield from r.until(separator, MAX_NAME)).strip()
        fenced = name == "function"
        if fenced:
            name = (yield from r.until("\n", MAX_NAME)).strip()
            yield from r.blank()
            yield from r.maybe("```json")
            yield from r.blank()
        r.begin(_name(name))
        yield from r.object()
        yield from r.blank()
        if fenced and (yield from r.maybe("```")):
            yield from r.blank()
        r.end()
        yield from r.literal(call_end)


def read_glm(r: Region) -> Wait:
    """<tool_call>N <arg_key>K</arg_key><arg_value>V</arg_value>… </tool_call>"""
    yield from r.literal("<tool_call>")
    yield from r.blank()
    name = yield from r.name()
    properties = _properties(r.tools, name)
    r.begin(name)
    while True:
        yield from r.blank()
        if not (yield from r.maybe("<arg_key>")):
            break
        key = (yield from r.until("</arg_key>", MAX_NAME)).strip()
        yield from r.blank()
        yield from r.literal("<arg_value>")
        r.pair(key, typed_value((yield from _raw(r, properties.get(key), "</arg_value>")), properties.get(key)))
    yield from r.literal("</tool_call>")
    r.end_pairs()


def read_kimi(r: Region) -> Wait:
    """<|tool_calls_section_begin|><|tool_call_begin|>functions.N:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…"""
    begin, call, arguments, call_end, end = KIMI
    yield from r.literal(begin)
    while True:
        yield from r.blank()
        if r.num_ended and ((yield from r.maybe(end)) or r.final):
            return
        yield from r.literal(call)
        name = (yield from r.until(arguments, MAX_NAME)).strip().removeprefix("functions.")
        r.begin(_name(re.sub(r":\d+$", "", name)))
        yield from r.blank()
        yield from r.object()
        yield from r.blank()
        r.end()
        yield from r.literal(call_end)


def read_minimax(r: Region) -> Wait:
    """M1: lines of JSON in <tool_calls>; M2: <minimax:tool_call><invoke name="N"><parameter name="K">V</parameter></invoke>…"""
    lines = yield from r.maybe("<tool_calls>")
    if not lines:
        yield from r.literal("<minimax:tool_call>")
    end = "</tool_calls>" if lines else "</minimax:tool_call>"
    while True:
        yield from r.blank()
        if r.num_ended and (yield from r.maybe(end)):
            return
        if lines:
            yield from r.named()
            continue
        yield from r.literal('<invoke name="')
        name = _name((yield from r.until('">', MAX_NAME)))
        properties = _properties(r.tools, name)
        r.begin(name)
        while True:
            yield from r.blank()
            if not (yield from r.maybe('<parameter name="')):
                break
            key = yield from r.until('">', MAX_NAME)
            value = yield from _raw(r, properties.get(key), "</parameter>")
            r.pair(key, typed_value(value.strip("\n"), properties.get(key)))
        yield from r.literal("</invoke>")
        r.end_pairs()


def read_list(marker: str, closing: str = "") -> Reader:
    """A list of JSON after a marker."""

    def read(r: Region) -> Wait:
        yield from r.literal(marker)
        yield from r.blank()
        if (yield from r.peek()) == "{":
            yield from r.named()
        else:
            yield from r.list()
        if closing:
            yield from r.blank()
            yield from r.literal(closing)

    return read


def read_phi(r: Region) -> Wait:
    """functools[{…}], and <|tool_call|>[{…}]<|/tool_call|>"""
    if (yield from r.maybe("functools")):
        yield from r.list()
    else:
        yield from read_list("<|tool_call|>", "<|/tool_call|>")(r)


_HARMONY_HEAD: Final = re.compile(r"([\w./-]+)\s*(?:<\|constrain\|>\s*json)?\s*(?:json)?")


def read_harmony(r: Region) -> Wait:
    """<|channel|>commentary to=functions.N <|constrain|>json<|message|>{…}<|call|>; the last marker ends the answer, and may not come."""
    yield from r.maybe("<|start|>assistant")
    yield from r.literal("<|channel|>commentary to=functions.")
    head = _HARMONY_HEAD.fullmatch((yield from r.until("<|message|>", MAX_NAME)).strip())
    if head is None:
        raise ValueError("a commentary that is no call")
    r.begin(head[1])
    yield from r.blank()
    if (yield from r.peek()) == "{":
        yield from r.object()
    else:
        r.arguments("{}")
    yield from r.blank()
    if not ((yield from r.maybe("<|call|>")) or (yield from r.maybe("<|end|>")) or r.final):
        raise ValueError("text behind the arguments")
    r.end()


def _raw(r: Region, schema: Any, closing: str) -> Generator[None, None, str]:
    """A value up to its closing marker; in an object or a list, the marker may also be a part of a string."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds in ("object", "array"):
        yield from r.blank()
        if (yield from r.peek()) in ("{", "["):
            value = yield from r.value()
            yield from r.blank()
            yield from r.literal(closing)
            return value
    return (yield from r.until(closing))


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w.:/-]+", text.strip()):
        raise ValueError("no name of a tool")
    return text.strip()


def _properties(tools: Tools, name: str) -> Mapping[str, Any]:
    schema = tools.get(name)
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}
