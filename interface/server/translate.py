"""Responses and Messages said in a chat's words: their bodies become those of `/v1/chat/completions`, and errors are given back their names.

What has no place in a chat (images, stored responses, tools that a vendor hosts) is refused by the name that the client used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..core.errors import FastLLMError, InvalidRequest, UnsupportedContent
from ..text.output.region import loads
from .schemas import AnthropicTool, CountBody, MessagesBody, ResponsesBody, ResponsesCountBody

__all__ = ["messages_words", "raw_tools", "renamed", "renamed_text", "responses_words"]

RAW_INPUT: Mapping[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}


def renamed(error: FastLLMError, names: Mapping[str, str]) -> FastLLMError:
    """The error, naming the fields as the route does, in all that a client reads. names: a chat's name -> the route's, the longest first;
    `[*]` is any index, the same in both."""
    param = str(error.fields.get("param") or "")
    found = _own(param, names) or _own(error.who, names)
    if found is not None:
        ours, theirs = found
        error.fields["param"] = theirs + param.removeprefix(ours)
        for name in ("message", "who", "fix"):
            setattr(error, name, _said(getattr(error, name), ours, theirs))
    return error


def renamed_text(text: str, names: Mapping[str, str]) -> str:
    """A sentence that begins with a field's name, as the route names it."""
    found = _own(text, names)
    return text if found is None else _said(text, *found)


def _own(text: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    """The chat's name that the text begins with, and the route's name of it."""
    for ours, theirs in names.items():
        found = re.match(re.escape(ours).replace(r"\[\*\]", r"\[(\d+)\]") + r"(?![\w-])", text)
        if found is not None:
            return found.group(), theirs.replace("[*]", f"[{found.group(1)}]") if found.groups() else theirs
    return None


def _said(text: str, ours: str, theirs: str) -> str:
    return re.sub(rf"(?<![\w.]){re.escape(ours)}(?![\w-])", lambda _: theirs, text)


def texts(content: Any, where: str, kinds: tuple[str, ...]) -> str:
    """Content as one text. Raises UnsupportedContent for what is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a text or a list of parts", who=where, param=where)
    return "\n".join(_text(part, f"{where}[{index}]", kinds) for index, part in enumerate(content))


def _text(part: Any, where: str, kinds: tuple[str, ...]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        raise UnsupportedContent(f"{where} is of type {kind!r:.60}; this server takes text only", who=where, param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where} has no text", who=where, param=where)
    return str(part["text"])


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        param = f"{where}.{key}"
        raise InvalidRequest(f"{param} is missing", who=param, fix="send a text", param=param)
    return value


def _call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# Messages -----------------------------------------------------------------------------------------------------------------


def messages_words(body: CountBody) -> dict[str, Any]:
    """An Anthropic body as fields of a chat; a last message of the assistant is a beginning to go on from."""
    messages: list[dict[str, Any]] = []
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        messages.append({"role": "system", "content": text})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        parts = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        messages += _of_user(parts, where) if message.role == "user" else [_of_assistant(parts, where)]
    words: dict[str, Any] = {"messages": messages, "model": body.model, "chat_template_kwargs": None}
    last = messages[-1]
    words["continue_final_message"] = body.messages[-1].role == "assistant" and not last.get("tool_calls")
    words |= _tool_words(body)
    if body.output_config is not None:
        format = body.output_config.format
        if format is not None:
            words["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": format.schema_}}
        words["reasoning_effort"] = body.output_config.effort
    if isinstance(body, MessagesBody):
        words |= {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        words["stop"] = body.stop_sequences
    return words


def _of_user(parts: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Results first, as the calls' answers, then what the user says."""
    results, said = [], []
    for index, part in enumerate(parts):
        at = f"{where}[{index}]"
        if isinstance(part, dict) and part.get("type") == "tool_result":
            text = texts(part.get("content"), f"{at}.content", ("text",))
            results.append({"role": "tool", "tool_call_id": _string(part, "tool_use_id", at), "content": f"Error: {text}" if part.get("is_error") else text})
        else:
            said.append(_text(part, at, ("text",)))
    return [*results, {"role": "user", "content": "\n".join(said)}] if said or not results else results


def _of_assistant(parts: list[dict[str, Any]], where: str) -> dict[str, Any]:
    said: list[str] = []
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, part in enumerate(parts):
        at, kind = f"{where}[{index}]", part.get("type")
        if kind == "tool_use":
            given = part.get("input") or {}
            if not isinstance(given, dict):
                raise InvalidRequest(f"{at}.input is no object", who=at, param=f"{at}.input")
            calls.append(_call(_string(part, "name", at), json.dumps(given, ensure_ascii=False), _string(part, "id", at)))
        elif kind == "thinking":
            thought.append(str(part.get("thinking") or ""))
        elif kind != "redacted_thinking":
            said.append(_text(part, at, ("text",)))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(said) if said or not calls else None}
    if thought:
        message["reasoning_content"] = "\n".join(thought)
    return {**message, "tool_calls": calls} if calls else message


def _tool_words(body: CountBody) -> dict[str, Any]:
    words: dict[str, Any] = {"tools": [_anthropic_tool(tool, i) for i, tool in enumerate(body.tools or [])] or None}
    choice = body.tool_choice
    if choice is None:
        return words
    if choice.type == "tool" and not choice.name:
        raise InvalidRequest("tool_choice.name is missing", who="tool_choice", fix="name a tool", param="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    words["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type, named)
    words["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return words


def _anthropic_tool(tool: AnthropicTool, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        param = f"tools[{index}].type"
        raise InvalidRequest(f"{param} is {tool.type!r:.60}: this server hosts no tools", who=param, fix="send functions with input_schema", param=param)
    if tool.input_schema is None:
        param = f"tools[{index}].input_schema"
        raise InvalidRequest(f"{param} is missing", who=param, fix="send a JSON schema", param=param)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": function}


# Responses ----------------------------------------------------------------------------------------------------------------


def responses_words(body: ResponsesCountBody) -> dict[str, Any]:
    """A body of Responses as fields of a chat."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    words: dict[str, Any] = {"messages": messages, "model": body.model, "parallel_tool_calls": body.parallel_tool_calls}
    if isinstance(body, ResponsesBody):
        words |= {name: getattr(body, name) for name in ("stream", "temperature", "top_p", "top_logprobs")}
        words |= {"max_tokens": body.max_output_tokens, "logprobs": True if body.top_logprobs is not None else None}
    words["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    words["tools"] = [_response_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])] or None
    words["tool_choice"] = _response_choice(body.tool_choice)
    format = body.text.format if body.text else None
    if format is not None and format.type == "json_schema":
        if format.schema_ is None:
            raise InvalidRequest("text.format.schema is missing", who="text.format", fix="send a JSON schema", param="text.format.schema")
        words["response_format"] = {"type": "json_schema", "json_schema": {"name": format.name or "answer", "schema": format.schema_}}
    elif format is not None and format.type == "json_object":
        words["response_format"] = {"type": "json_object"}
    return words


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """One item; reasoning, words and calls of one answer of the model are one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise InvalidRequest(f"{where}.role is {role!r:.60}", who=where, fix="user, assistant, system or developer", param=f"{where}.role")
        text = texts(item.get("content"), f"{where}.content", ("input_text", "output_text", "text", "refusal") if role == "assistant" else ("input_text", "output_text", "text"))
        if role == "assistant" and messages and messages[-1]["role"] == "assistant" and messages[-1]["content"] is None:
            messages[-1]["content"] = text
        else:
            messages.append({"role": role, "content": text})
    elif kind in ("function_call", "custom_tool_call"):
        given = _arguments(item, where) if kind == "function_call" else json.dumps({"input": _string(item, "input", where)}, ensure_ascii=False)
        call = _call(_string(item, "name", where), given, _string(item, "call_id", where))
        _of_model(messages).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = texts(item.get("output"), f"{where}.output", ("input_text", "output_text", "text"))
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = texts(parts, f"{where}.content", ("reasoning_text", "summary_text"))
        if text:
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})
    else:
        raise UnsupportedContent(f"{where} is of type {kind!r:.60}, which this server does not take", who=where, param=where)


def _arguments(item: Mapping[str, Any], where: str) -> str:
    """What a call was given: the text of a JSON object, which may be empty."""
    given, param = item.get("arguments"), f"{where}.arguments"
    try:
        if isinstance(given, str) and (not given.strip() or isinstance(loads(given), dict)):
            return given
    except (ValueError, RecursionError):
        pass
    said = "missing" if given is None else "no text of a JSON object"
    raise InvalidRequest(f"{param} is {said}", who=param, fix="send the text of an object, such as \"{}\"", param=param)


def _of_model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _response_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        param = f"{where}.type"
        raise InvalidRequest(f"{param} is {kind!r:.60}: this server hosts no tools", who=param, fix="send functions and custom tools", param=param)
    function = {"name": _string(tool, "name", where), "description": tool.get("description")}
    if kind == "function":
        return {"type": "function", "function": {**function, "parameters": tool.get("parameters"), "strict": tool.get("strict")}}
    format = _custom_format(tool, where)
    if format is not None:
        function["description"] = f"{function['description'] or ''}\nIts input follows this {format[0]}:\n{format[1]}".strip()
    return {"type": "function", "function": {**function, "parameters": dict(RAW_INPUT)}}


def _custom_format(tool: Mapping[str, Any], where: str) -> tuple[str, str] | None:
    """(lark or regex, definition) of a custom tool's input, None: any text."""
    format = tool.get("format") or {"type": "text"}
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "text":
        return None
    param = f"{where}.format"
    if kind != "grammar" or format.get("syntax") not in ("lark", "regex") or not isinstance(format.get("definition"), str):
        raise InvalidRequest(f"{param} is not known", who=param, fix='{"type": "grammar", "syntax": "lark" | "regex", "definition": …}', param=param)
    return format["syntax"], format["definition"]


def raw_tools(body: ResponsesCountBody) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Names of the custom tools, and the grammars of those whose input has one: name -> (lark or regex, definition)."""
    custom = [(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or []) if tool.get("type") == "custom"]
    formats = {str(tool["name"]): format for tool, where in custom if (format := _custom_format(tool, where)) is not None}
    return [str(tool["name"]) for tool, _ in custom], formats


def _response_choice(choice: Any) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    kind, param = choice.get("type"), "tool_choice"
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _string(choice, "name", param)}}
    if kind == "allowed_tools":
        named = choice.get("tools")
        if not isinstance(named, list) or not all(isinstance(t, dict) for t in named):
            raise InvalidRequest("tool_choice.tools is no list of tools", who=param, param="tool_choice.tools")
        tools = [{"type": "function", "function": {"name": _string(tool, "name", f"{param}.tools[{i}]")}} for i, tool in enumerate(named)]
        mode = choice.get("mode") or "auto"
        if mode not in ("auto", "required"):
            raise InvalidRequest(f"tool_choice.mode is {mode!r:.60}", who=param, fix="auto or required", param="tool_choice.mode")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    raise InvalidRequest(f"tool_choice is of type {kind!r:.60}", who=param, fix="function, custom or allowed_tools", param=param)
