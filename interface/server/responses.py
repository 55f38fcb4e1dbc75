"""/v1/responses on the wire: OpenAI's events of a stream, or one response. Nothing is stored."""

from __future__ import annotations

import json
import secrets
from typing import Any, Final

from ..core.errors import FastLLMError
from .answer import Answer, Due
from .answers import Identity, error_body
from .generation import Generation, Usage
from .logprobs import chat_entry
from .reading import Block, Blocks, read_with_logprobs
from .sse import Frames, event_frame

__all__ = ["ResponsesWriter"]

_PREFIX: Final = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class ResponsesWriter:
    """A `Writer` with an item for each part of the answer: reasoning, a message, calls. `sequence_number` counts the events."""

    def __init__(self, identity: Identity, generation: Generation):
        self._identity, self._generation = identity, generation
        self._custom = set(generation.ready.detail.pop("custom", ()))
        self._number = -1
        self.plain: dict[int, Frames] = {}
        self._blocks = Blocks()
        self._ids: dict[int, tuple[str, str]] = {}  # of an item: its id, and its call's
        self._open: Block | None = None
        self._cut = False
        self._early: list[dict[str, Any]] = []  # log-probabilities whose text is held back

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return event_frame(kind, {"sequence_number": self._number, **data})

    def _response(self, status: str, usage: Usage | None = None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        generation = self._generation
        params, detail = generation.params, generation.ready.detail
        return {
            "id": self._identity.id,
            "object": "response",
            "created_at": self._identity.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._identity.model,
            "output": [] if usage is None else [self._item(block, self._ended(block)) for block in self._blocks.all],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": params.logprobs or 0,
            "store": False,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **detail,
        }

    # items ------------------------------------------------------------------------------------------------------------

    def _place(self, block: Block, content: bool = True) -> dict[str, Any]:
        place = {"item_id": self._id(block)[0], "output_index": block.index}
        return {**place, "content_index": 0} if content else place

    def _id(self, block: Block) -> tuple[str, str]:
        if block.index not in self._ids:
            prefix = "ctc_" if block.name in self._custom else _PREFIX[block.kind]
            self._ids[block.index] = (f"{prefix}{secrets.token_hex(12)}", f"call_{secrets.token_hex(10)}")
        return self._ids[block.index]

    def _part(self, block: Block, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item_id, call_id = self._id(block)
        begun = status == "in_progress"
        if block.kind == "call":
            text = "" if begun else block.text
            if block.name in self._custom:
                return {"id": item_id, "type": "custom_tool_call", "call_id": call_id, "name": block.name, "input": _input(text), "status": status}
            return {"id": item_id, "type": "function_call", "call_id": call_id, "name": block.name, "arguments": text, "status": status}
        content = [] if begun else [self._part(block, block.text, block.logprobs)]
        if block.kind == "reasoning":
            return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _ended(self, block: Block) -> str:
        """An answer that is cut is cut in its last item."""
        return "incomplete" if self._cut and block is self._blocks.all[-1] and not block.complete else "completed"

    def _begin(self, block: Block) -> bytes:
        frames = self._close() + self._event("response.output_item.added", output_index=block.index, item=self._item(block, "in_progress"))
        self._open = block
        if block.kind != "call":
            frames += self._event("response.content_part.added", **self._place(block), part=self._part(block, "", []))
        return frames

    def _grow(self, block: Block, text: str, entries: list[dict[str, Any]]) -> bytes:
        if block.kind == "call":
            if block.name in self._custom:
                return b""
            return self._event("response.function_call_arguments.delta", **self._place(block, False), delta=text)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._place(block), delta=text)
        return self._event("response.output_text.delta", **self._place(block), delta=text, logprobs=_shown(entries))

    def _close(self) -> bytes:
        block, self._open = self._open, None
        if block is None:
            return b""
        if block.kind == "call" and block.name in self._custom:
            place, text = self._place(block, False), _input(block.text)
            frames = self._event("response.custom_tool_call_input.delta", **place, delta=text) if text else b""
            frames += self._event("response.custom_tool_call_input.done", **place, input=text)
        elif block.kind == "call":
            frames = self._event("response.function_call_arguments.done", **self._place(block, False), name=block.name, arguments=block.text)
        elif block.kind == "reasoning":
            frames = self._event("response.reasoning_text.done", **self._place(block), text=block.text)
        else:
            frames = self._event("response.output_text.done", **self._place(block), text=block.text, logprobs=_shown(block.logprobs))
        if block.kind != "call":
            frames += self._event("response.content_part.done", **self._place(block), part=self._part(block, block.text, block.logprobs))
        return frames + self._event("response.output_item.done", output_index=block.index, item=self._item(block, self._ended(block)))

    # a writer ---------------------------------------------------------------------------------------------------------

    def start(self) -> bytes:
        """The response, still empty."""
        first = self._event("response.created", response=self._response("in_progress"))
        return first + self._event("response.in_progress", response=self._response("in_progress"))

    def piece(self, answer: Answer, text: str, logprobs: list[Due]) -> bytes:
        """Deltas; the first of an item opens it, and closes the one before. Log-probabilities are those of the message's tokens."""
        deltas, due = read_with_logprobs(self._generation, answer, text, logprobs)
        entries = [[chat_entry(self._generation.tokenizer, one) for one in some] for some in due]
        last = self._blocks.all[-1] if self._blocks.all else None
        if last is not None and last.kind == "text":
            last.logprobs += entries[0]
        elif last is None:
            self._early += entries[0]
        frames = b""
        for (block, new_text, new), taken in zip(self._blocks.add(deltas), entries[1:], strict=True):
            if block.kind == "text":
                taken, self._early = self._early + taken, []
                block.logprobs += taken
            if not self._generation.ready.stream:
                continue
            if new:
                frames += self._begin(block)
            if new_text:
                frames += self._grow(block, new_text, taken)
            if block.complete:
                frames += self._close()
        return frames

    def progress(self, told: dict[str, Any]) -> bytes:
        """Nothing: this interface has no such thing."""
        return b""

    def finish(self, answer: Answer) -> bytes:
        """What was held back, and the end of the last item; an answer of nothing is an empty message."""
        frames = self.piece(answer, "", []) if answer.parser is not None else b""
        self._cut = answer.finish_reason == "length"
        if not self._blocks.all:
            block = Block(0, "text", logprobs=self._early)
            self._blocks.all.append(block)
            frames += self._begin(block) if self._generation.ready.stream else b""
        return frames + self._close()

    def _status(self) -> str:
        return "incomplete" if self._cut else "completed"

    def end(self, usage: Usage) -> bytes:
        """The whole response again."""
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status, usage))

    def error(self, error: FastLLMError) -> bytes:
        """A failed response."""
        told = error_body(error, self._identity.request_id)["error"]
        body = {"code": "server_error", "message": told["message"]}
        return self._event("response.failed", response=self._response("failed", error=body))

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole response."""
        return self._response(self._status(), usage)


def _shown(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: entry[key] for key in ("token", "logprob", "top_logprobs")} for entry in entries]


def _input(arguments: str) -> str:
    """The text that a custom tool gets; "" of a call that is cut."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return ""


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
