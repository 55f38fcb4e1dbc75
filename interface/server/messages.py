"""/v1/messages on the wire: Anthropic's events of a stream, or one message."""

from __future__ import annotations

import secrets
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from ..core.errors import FastLLMError
from .answer import Answer, Due
from .answers import Identity, error_body
from .generation import Generation, Usage
from .reading import Block, Blocks, read
from .sse import Frames, event_frame

__all__ = ["PING", "MessagesWriter", "arguments_of"]

PING: Final = event_frame("ping", {})
_INPUT: Final = TypeAdapter(dict[str, Any])  # of a call that is cut: what is whole of it
_REASONS: Final = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}


class MessagesWriter:
    """A `Writer` with blocks of thinking, text and tool use, one open at a time."""

    def __init__(self, identity: Identity, generation: Generation):
        self._identity, self._generation = identity, generation
        self.plain: dict[int, Frames] = {}
        self._blocks = Blocks()
        self._ids: dict[int, str] = {}
        self._open: Block | None = None

    def _message(self, usage: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "id": self._identity.id,
            "type": "message",
            "role": "assistant",
            "model": self._identity.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            **more,
        }

    def start(self) -> bytes:
        """The message, still empty; what was found in the cache is not known yet."""
        usage = {"input_tokens": len(self._generation.ready.prompts[0]), "output_tokens": 0}
        return event_frame("message_start", {"message": self._message(usage)})

    def _content(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        if block.kind == "call":
            call_id = self._ids.setdefault(block.index, f"toolu_{secrets.token_hex(12)}")
            return {"type": "tool_use", "id": call_id, "name": block.name, "input": arguments_of(text)}
        return {"type": "thinking", "thinking": text, "signature": ""} if block.kind == "reasoning" else {"type": "text", "text": text}

    def piece(self, answer: Answer, text: str, logprobs: list[Due]) -> bytes:
        """Deltas; the first of a block opens it, and closes the one before."""
        frames = b""
        for block, new_text, new in self._blocks.add(read(self._generation, answer, text)):
            if not self._generation.ready.stream:
                continue
            if new:
                frames += self._close()
                self._open = block
                frames += event_frame("content_block_start", {"index": block.index, "content_block": self._content(block, empty=True)})
            if new_text:
                frames += event_frame("content_block_delta", {"index": block.index, "delta": _delta(block, new_text)})
            if block.complete:
                frames += self._close()
        return frames

    def _close(self) -> bytes:
        block, self._open = self._open, None
        return b"" if block is None else event_frame("content_block_stop", {"index": block.index})

    def progress(self, told: dict[str, Any]) -> bytes:
        """Nothing: this interface has no such thing."""
        return b""

    def finish(self, answer: Answer) -> bytes:
        """What was held back, and the end of the last block."""
        frames = self.piece(answer, "", []) if answer.parser is not None else b""
        return frames + self._close()

    def _end(self) -> dict[str, Any]:
        answer = self._generation.answers[0]
        if answer.stopped is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped}
        return {"stop_reason": _REASONS[answer.finish_reason or "stop"], "stop_sequence": None}

    def end(self, usage: Usage) -> bytes:
        """Why it ended, what it took, and the end."""
        return event_frame("message_delta", {"delta": self._end(), "usage": _usage(usage)}) + event_frame("message_stop", {})

    def error(self, error: FastLLMError) -> bytes:
        """An error event."""
        body = error_body(error, self._identity.request_id, anthropic=True)
        return event_frame("error", {key: value for key, value in body.items() if key != "type"})

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole message."""
        return self._message(_usage(usage), content=[self._content(block) for block in self._blocks.all], **self._end())


def arguments_of(arguments: str) -> dict[str, Any]:
    """What a call gives; of one that is cut, what is whole; nothing of a text that is no JSON."""
    try:
        return _INPUT.validate_json(arguments or "{}", experimental_allow_partial=True)
    except ValidationError:
        return {}


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": "thinking_delta", "thinking": text} if block.kind == "reasoning" else {"type": "text_delta", "text": text}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens, 1),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
