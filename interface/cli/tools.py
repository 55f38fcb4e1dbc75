"""`fastllm run --tools FILE`: one answer that may be calls of functions. Their prompt, their grammar and their reading are the server's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import InvalidRequest, UsageError
from .files import read_json

if TYPE_CHECKING:
    from ..core.request import TokenConstraint
    from ..llm import LLM
    from ..text.output import Delta, OutputParser

__all__ = ["ToolAnswer", "prepare_tools"]


@dataclass
class ToolAnswer:
    """How the answer is asked for, and what is read of it. ids: of the prompt; grammar: holds the calls; keep: special tokens that are markers;
    notes: what is done otherwise than asked. text, calls: so far; cut: name of the call that the answer's end cut."""

    ids: list[int]
    grammar: Callable[[], TokenConstraint] | None
    keep: frozenset[int]
    parser: OutputParser
    notes: list[str]

    def __post_init__(self) -> None:
        self.text, self.calls = "", list[dict[str, Any]]()
        self.cut: str | None = None
        self._arguments = ""

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Text of the model; returns what is text of the answer, and calls that are complete: {"name", "arguments"}."""
        return self._read(self.parser.feed(text))

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The answer has ended: what was held back."""
        return self._read(self.parser.finish())

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended. reason: the engine's."""
        return "tool_calls" if self.calls and self.cut is None and reason != "cancelled" else reason

    def _read(self, deltas: list[Delta]) -> tuple[str, list[dict[str, Any]]]:
        text, done = "", []
        for delta in deltas:
            text += delta.content
            if delta.call is None:
                continue
            if delta.call.name:
                self.cut, self._arguments = delta.call.name, ""
            self._arguments += delta.call.arguments
            if delta.call.complete:
                done.append({"name": self.cut, "arguments": json.loads(self._arguments)})
                self.cut = None
        self.text += text
        self.calls += done
        return text, done


def prepare_tools(llm: LLM, path: Path, choice: str, messages: list[dict[str, Any]], switches: dict[str, Any]) -> ToolAnswer:
    """The prompt of a conversation with the tools of a file, and how its answer is read. choice: auto, required, or the name of a function. switches: variables of
    the template.
    Raises UsageError for a file that holds no tools, and for a model without a chat template."""
    if llm.loaded.template is None:
        raise UsageError("this model has no chat template: --tools has no place in its prompt", fix="use a chat model, or give --chat-template FILE")
    tools = _tools_of(path)
    from ..server.bodies import explain
    from ..server.constraints import compile_constraint
    from ..server.prepare import Kitchen, Prepared, chat
    from ..server.schemas import ChatBody
    from ..server.tools import OutputSpec, kept_ids, make_parser, tool_parser

    loaded, tokenizer = llm.loaded, llm.tokenizer
    kitchen = Kitchen(tokenizer, llm.loaded.template, loaded.context, loaded.planned.definition.vocab_size, reasoning_format="none", thinking=switches.get("enable_thinking"))
    named = {"type": "function", "function": {"name": choice}}
    from pydantic import ValidationError

    try:
        body = ChatBody.model_validate({"messages": messages, "tools": tools, "tool_choice": choice if choice in ("auto", "required") else named})
    except ValidationError as error:
        raise _bad(path, explain(error)) from None
    ready = Prepared()
    try:
        chat(kitchen, body, ready)
        grammar = compile_constraint(llm.grammars, ready)
    except InvalidRequest as error:
        raise _bad(path, error) from None
    assert ready.output is not None
    spec, notes = OutputSpec(**ready.output), list(ready.warnings)
    if not llm.loaded.template.supports_tools:
        form = tool_parser(llm.loaded.template)
        notes.append(f"this model's chat template knows no tools: they are described in the system message, calls in the {form} form")
    assert spec.calls is not None
    return ToolAnswer(ready.prompts[0].tolist(), grammar, kept_ids(tokenizer, spec), make_parser(spec), notes)


def _tools_of(path: Path) -> list[Any]:
    tools = read_json("--tools", path)
    if not isinstance(tools, list) or not tools:
        fix = 'write [{"type": "function", "function": {"name": …, "parameters": …}}]'
        raise UsageError(f"--tools {path} holds no list of tools", who="--tools", fix=fix)
    return tools


def _bad(path: Path, error: InvalidRequest) -> UsageError:
    return UsageError(f"--tools '{path}': {error.message}", who="--tools", why=error.why, fix=error.fix or "correct the file")
