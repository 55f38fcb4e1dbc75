"""/v1/messages on the wire: Anthropic's events of a stream, or one message."""

from __future__ import annotations

from typing import Any, Final

from ..core.errors import FastLLMError
from ..core.request import TokenLogprobs
from .answers import Identity, error_body
from .generation import Answer, Generation, Usage
from .sse import event_frame

__all__ = ["PING", "MessagesWriter"]

PING: Final = event_frame("ping", {})
_REASONS: Final = {"length": "max_tokens", "stop": "end_turn"}


class MessagesWriter:
    """A `Writer` with one block of text."""

    def __init__(self, identity: Identity, generation: Generation):
        self._identity, self._generation = identity, generation
        self._open = False

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

    def piece(self, answer: Answer, text: str, logprobs: list[tuple[TokenLogprobs, int | None]]) -> bytes:
        """A delta; the first opens the block."""
        if not text or not self._generation.ready.stream:
            return b""
        frames = b""
        if not self._open:
            self._open = True
            frames = event_frame("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
        return frames + event_frame("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})

    def finish(self, answer: Answer) -> bytes:
        """Closes the block."""
        return event_frame("content_block_stop", {"index": 0}) if self._open else b""

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
        text = self._generation.answers[0].text
        return self._message(_usage(usage), content=[{"type": "text", "text": text}] if text else [], **self._end())


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens, 1),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
