"""Tools and reasoning of a chat, at preparation: what the template is told, and how the answer's text is to be read.

The template writes tools and calls if it knows them. Otherwise they are described in the system message in the hermes form, and calls and
results of the conversation become texts in it. Calls are held by a grammar: those that must happen (`required`, a named function) from the
first token on, others (`auto`) from the marker on that opens them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..core.errors import InvalidRequest
from ..text.json_schema import check_schema, refused
from ..text.output import FORMATS, REASONING, OutputParser, detect_format, detect_reasoning, starts_in_reasoning
from ..text.output.call_grammars import Lexicon, Unheld, lazy, required
from ..text.output.region import loads
from .schemas import AllowedChoice, ChatBody, NamedChoice

if TYPE_CHECKING:
    from ..text import ChatTemplate, Tokenizer

__all__ = ["OutputSpec", "RawTools", "ToolUse", "calls_constraint", "kept_ids", "make_parser", "markers", "messages_for", "output_spec", "tool_parser", "tool_use"]

RawTools = Mapping[str, tuple[str, str]]
"""Tools whose input is a text: name -> (lark or regex, definition)."""

DESCRIPTION: Final = (
    "You may call functions. They are given as JSON within <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write\n<tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>'
)


@dataclass
class OutputSpec:
    """How an answer's text is read. calls, reasoning: names of formats; tools: name -> schema; in_reasoning: it starts there; one: the first
    call ends the answer; held: a grammar holds the calls, so their arguments leave while they are written; form: one holds all but reasoning;
    plain: reasoning stays in the content."""

    calls: str | None = None
    reasoning: str | None = None
    tools: dict[str, Any] = field(default_factory=dict)
    in_reasoning: bool = False
    one: bool = False
    held: bool = False
    form: bool = False
    plain: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass
class ToolUse:
    """tools: for the template, None where there are none to write. native: the template writes them. format: in which calls are
    read; schemas: name -> schema of the parameters; choice: auto or required; one: at most one call; strict: what cannot be held is
    refused; banned: markers that the answer may not write."""

    tools: list[dict[str, Any]] | None = None
    native: bool = True
    format: str | None = None
    schemas: dict[str, Any] = field(default_factory=dict)
    choice: str = "auto"
    one: bool = False
    strict: bool = False
    banned: tuple[str, ...] = ()
    raw: RawTools = field(default_factory=dict)


def tool_use(body: ChatBody, template: ChatTemplate, parser: str = "auto", raw: RawTools | None = None) -> ToolUse:
    """What a body's tools ask for. parser: a name of `FORMATS`, or auto: the template tells. Calls of `raw` are written in the hermes form.
    Raises InvalidRequest for a name that occurs twice, a schema that is none, or a choice that names no tool."""
    tools = [t.model_dump(exclude_none=True, include={"type": True, "function": {"name", "description", "parameters", "strict"}}) for t in body.tools or []]
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {"type": "object", "properties": {}} for t in tools}
    if len(schemas) < len(tools):
        raise InvalidRequest("two tools have one name", who="tools", fix="give each a name of its own", param="tools")
    for index, schema in enumerate(schemas.values()):
        param = f"tools[{index}].function.parameters"
        check_schema(schema, param)
        if schema.get("type", "object") not in ("object", ["object"]):
            raise refused(f"the type is {schema['type']!r:.60}", "arguments are an object", param)
    choice = body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a call, but there are no tools", who="tool_choice", fix="send tools", param="tool_choice")
        return ToolUse()
    format = tool_parser(template, parser)
    if choice == "none":
        return ToolUse(banned=tuple(m for m in FORMATS[format].markers if len(m) > 1))
    one = body.parallel_tool_calls is False
    asked = "auto" if choice in (None, "auto") else "required"
    if isinstance(choice, NamedChoice):
        schemas, one = _chosen(schemas, [choice.function.name]), True
    elif isinstance(choice, AllowedChoice):
        schemas, asked = _chosen(schemas, [t.function.name for t in choice.allowed_tools.tools]), choice.allowed_tools.mode
    texts = {name: raw[name] for name in schemas if name in raw} if raw else {}
    if texts:
        format = "hermes"
    strict = asked == "required" or any(t["function"].get("strict") for t in tools)
    return ToolUse(tools, _native(template), format, schemas, asked, one, strict or bool(texts), raw=texts)


def tool_parser(template: ChatTemplate, asked: str = "auto") -> str:
    """The form in which calls are read: what was asked for, or what the template speaks of, else hermes."""
    return (detect_format("\0".join(template.literals)) or "hermes" if _native(template) else "hermes") if asked == "auto" else asked


def _native(template: ChatTemplate) -> bool:
    """The template writes tools, in a form that is known."""
    return template.supports_tools and detect_format("\0".join(template.literals)) is not None


def _chosen(schemas: dict[str, Any], names: list[str]) -> dict[str, Any]:
    for name in names:
        if name not in schemas:
            raise InvalidRequest(f"tool_choice names {name!r:.60}, which is no tool", who="tool_choice", fix=f"one of {', '.join(schemas)}", param="tool_choice")
    return {name: schemas[name] for name in names}


def calls_constraint(use: ToolUse, template: ChatTemplate, tokenizer: Tokenizer, format: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """What holds the calls (`Prepared.constraint`), or None, and why not. format: the JSON that the answer may be instead. For calls that must
    happen, a family whose form cannot hold the schemas writes them in the hermes form. Raises InvalidSchema."""
    assert use.format is not None
    words = Lexicon({tokenizer.id_to_piece(i): i for i in tokenizer.special_ids}, tokenizer.end_ids)
    texts = "\0".join(template.literals)
    schema = None if format is None else [format["source"] if format["kind"] == "json_schema" else {"type": "object"}]
    base = {"param": "tools" if format is None else format["param"], "optional": not use.strict and format is None}
    try:
        if use.choice == "required" or schema is not None:
            try:
                otherwise = () if use.choice == "required" else schema or ()
                source = required(use.format, use.schemas, words, use.one, texts, otherwise, use.raw)
            except Unheld:
                if use.choice != "required":
                    raise
                use.format = "hermes"
                source = required("hermes", use.schemas, words, use.one, texts)
            return {**base, "kind": "bundle", "source": source}, ""
        triggers = [t.as_dict() for t in lazy(use.format, use.schemas, words, use.one, use.raw)]
        return {**base, "kind": "calls", "source": triggers}, ""
    except Unheld as error:
        if use.strict or schema is not None:
            raise refused("it cannot be enforced", str(error), str(base["param"])) from None
        return None, str(error)


def messages_for(messages: list[dict[str, Any]], use: ToolUse, template: ChatTemplate) -> list[dict[str, Any]]:
    """The conversation with its calls and results as the template takes them. Raises InvalidRequest for calls that are none."""
    writes = template.supports_tools
    out = []
    for index, message in enumerate(messages):
        made = {k: v for k, v in message.items() if v is not None}
        calls = made.get("tool_calls")
        if calls is not None:
            made["tool_calls"] = [_conversation_call(call, f"messages[{index}].tool_calls[{n}]") for n, call in enumerate(_listed(calls, index))]
            if not made["tool_calls"]:
                del made["tool_calls"]
        if not writes and "tool_calls" in made:
            texts = [made.get("content") or ""]
            for call in made.pop("tool_calls"):
                said = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
                texts.append(f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>")
            made["content"] = "\n".join(filter(None, texts))
        if not writes and made["role"] == "tool":
            made = {"role": "user", "content": f"<tool_response>\n{made.get('content') or ''}\n</tool_response>"}
        out.append(made)
    if use.tools and not use.native:
        text = DESCRIPTION.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in use.tools))
        if out and out[0]["role"] == "system":
            out[0] = {**out[0], "content": f"{out[0].get('content') or ''}\n\n{text}".strip()}
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


def _listed(calls: Any, index: int) -> list[Any]:
    if not isinstance(calls, list):
        param = f"messages[{index}].tool_calls"
        raise InvalidRequest(f"{param} is no list", who=param, fix="send a list of calls", param=param)
    return calls


def _conversation_call(call: Any, where: str) -> dict[str, Any]:
    """A call of an earlier answer; its arguments as an object, which is what templates write."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} is no call of a function", who=where, fix='{"id", "type": "function", "function": {"name", "arguments"}}', param=where)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{where}.function.arguments is not JSON", who=where, fix="send the text of an object", param=where) from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.function.arguments is no object", who=where, fix="send the text of an object", param=where)
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**made, "id": call["id"]} if isinstance(call.get("id"), str) else made


def output_spec(use: ToolUse, template: ChatTemplate, prompt: str, reasoning_format: str) -> OutputSpec | None:
    """How the answer is read; None: it is content, all of it. prompt: as it was rendered; reasoning_format: none leaves reasoning in the content."""
    reasoning = detect_reasoning("\0".join(template.literals))
    calls = use.format if use.tools else None
    if reasoning is None and calls is None:
        return None
    starts = reasoning is not None and starts_in_reasoning(prompt, REASONING[reasoning])
    return OutputSpec(calls, reasoning, use.schemas, starts, one=bool(calls) and use.one, plain=reasoning_format == "none")


def make_parser(spec: OutputSpec) -> OutputParser:
    """What takes an answer's text apart."""
    calls = None if spec.calls is None else FORMATS[spec.calls]
    reasoning = None if spec.reasoning is None else REASONING[spec.reasoning]
    more = {name: getattr(spec, name) for name in ("tools", "in_reasoning", "form", "plain")}
    return OutputParser(reasoning, calls, stream=spec.held, **more)


def markers(spec: OutputSpec) -> list[str]:
    """Texts whose special tokens must be read and not skipped."""
    found = [*FORMATS[spec.calls].markers, *FORMATS[spec.calls].inner, *FORMATS[spec.calls].dropped] if spec.calls else []
    return [*found, REASONING[spec.reasoning].opening, REASONING[spec.reasoning].closing] if spec.reasoning else found


def kept_ids(tokenizer: Tokenizer, spec: OutputSpec) -> frozenset[int]:
    """Special tokens that are part of a marker which somebody reads."""
    texts = markers(spec)
    return frozenset(i for i in tokenizer.special_ids if any(tokenizer.id_to_piece(i) in text for text in texts))
