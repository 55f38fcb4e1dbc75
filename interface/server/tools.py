"""Tools and reasoning of a chat, at preparation: what the template is told, and how the answer's text is to be read.

The template writes tools and calls if it knows them. Otherwise they are described in the system message in the hermes form, and calls and
results of the conversation become texts in it. Calls that must happen (`required`, a named function) are enforced by a grammar; families
whose markers are special tokens write those calls in the hermes form, which can be enforced as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..core.errors import InvalidRequest
from ..text.output import FORMATS, REASONING, detect_format, detect_reasoning, starts_in_reasoning

if TYPE_CHECKING:
    from ..text import ChatTemplate
    from .schemas import ChatBody

__all__ = ["OutputSpec", "ToolUse", "markers", "messages_for", "output_spec", "tool_use"]

ENFORCED: Final = {  # format -> text before the name, between name and arguments, after them
    "hermes": ('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>"),
    "llama3-json": ('{"name": ', ', "parameters": ', "}"),
}
DESCRIPTION: Final = (
    "You may call functions. They are given as JSON within <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write\n<tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>'
)


@dataclass
class OutputSpec:
    """How an answer's text is read. calls, reasoning: names of formats; tools: name -> schema; in_reasoning: it starts there; one: the first
    call ends the answer."""

    calls: str | None = None
    reasoning: str | None = None
    tools: dict[str, Any] = field(default_factory=dict)
    in_reasoning: bool = False
    one: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass
class ToolUse:
    """tools: for the template, None where there are none to write. native: the template writes them. format: in which calls are
    read; schemas: name -> schema of the parameters; constraint: of calls that must happen."""

    tools: list[dict[str, Any]] | None
    native: bool
    format: str | None
    schemas: dict[str, Any]
    constraint: dict[str, Any] | None = None


def tool_use(body: ChatBody, template: ChatTemplate) -> ToolUse:
    """What a body's tools ask for. Raises InvalidRequest for a name that occurs twice, or a choice that names no tool."""
    tools = [t.model_dump(exclude_none=True) for t in body.tools or []]
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {"type": "object"} for t in tools}
    if len(schemas) < len(tools):
        raise InvalidRequest("two tools have one name", who="tools", fix="give each a name of its own", param="tools")
    choice = body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a call, but there are no tools", who="tool_choice", fix="send tools", param="tool_choice")
        return ToolUse(None, True, None, {})
    if choice == "none":
        return ToolUse(None, True, None, {})
    format = detect_format("\0".join(template.literals)) if template.supports_tools else None
    native = format is not None
    wanted = list(schemas)
    if not isinstance(choice, str | None):
        if choice.function.name not in schemas:
            name = choice.function.name
            raise InvalidRequest(f"tool_choice names {name!r:.60}, which is no tool", who="tool_choice", fix=f"one of {', '.join(wanted)}", param="tool_choice")
        wanted = [choice.function.name]
    use = ToolUse(tools, native, format or "hermes", schemas)
    if choice not in (None, "auto"):
        use.format = use.format if use.format in ENFORCED else "hermes"
        single = not isinstance(choice, str | None) or body.parallel_tool_calls is False or use.format == "llama3-json"
        use.constraint = {"kind": "grammar", "source": _calls_grammar(use.format, {n: schemas[n] for n in wanted}, single), "param": "tools"}
    return use


def _calls_grammar(format: str, schemas: Mapping[str, Any], single: bool) -> str:
    """Lark: one call of these functions, or several."""
    before, between, after = ENFORCED[format]
    lines = [f"start: call{'' if single else (' (' + json.dumps(chr(10)) + ' call)*')}", "call: " + " | ".join(f"call_{i}" for i in range(len(schemas)))]
    for i, (name, schema) in enumerate(schemas.items()):
        lines.append(f"call_{i}: {json.dumps(before + json.dumps(name) + between, ensure_ascii=False)} args_{i} {json.dumps(after)}")
        lines.append(f"args_{i}: %json {json.dumps({'type': 'object', **schema}, ensure_ascii=False)}")
    return "\n".join(lines)


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
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{where}.function.arguments is not JSON", who=where, fix="send the text of an object", param=where) from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.function.arguments is no object", who=where, fix="send the text of an object", param=where)
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**made, "id": call["id"]} if isinstance(call.get("id"), str) else made


def output_spec(body: ChatBody, use: ToolUse, template: ChatTemplate, prompt: str) -> OutputSpec | None:
    """How the answer is read; None: it is content, all of it. prompt: as it was rendered."""
    reasoning = None if body.reasoning_format == "none" else detect_reasoning("\0".join(template.literals))
    calls = use.format if use.tools else None
    if reasoning is None and calls is None:
        return None
    starts = reasoning is not None and starts_in_reasoning(prompt, REASONING[reasoning])
    named = body.tool_choice is not None and not isinstance(body.tool_choice, str)
    return OutputSpec(calls, reasoning, use.schemas, starts, one=bool(calls) and (body.parallel_tool_calls is False or named))


def markers(spec: OutputSpec) -> list[str]:
    """Texts whose special tokens must be read and not skipped."""
    found = [*FORMATS[spec.calls].markers, *FORMATS[spec.calls].inner, *FORMATS[spec.calls].dropped] if spec.calls else []
    return [*found, REASONING[spec.reasoning].opening, REASONING[spec.reasoning].closing] if spec.reasoning else found
