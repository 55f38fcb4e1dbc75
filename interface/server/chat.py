"""/v1/chat/completions on the wire: chunks of a stream, or one object."""

from __future__ import annotations

from typing import Any

from ..core.errors import FastLLMError
from ..core.request import TokenLogprobs
from .answers import Identity, error_body
from .generation import Answer, Generation, Usage
from .logprobs import chat_entry
from .sse import DONE, frame

__all__ = ["ChatWriter"]


class ChatWriter:
    """A `Writer`. Each chunk carries one choice; the role comes once, with the first token; `finish_reason` once, with an empty delta."""

    def __init__(self, identity: Identity, generation: Generation):
        self._identity, self._generation = identity, generation
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of a choice that is not streamed
        self._extra: dict[str, Any] = {"usage": None} if generation.ready.include_usage else {}
        self._begun: set[int] = set()

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return frame({**self._identity.head("chat.completion.chunk"), "choices": [choice], **self._extra})

    def start(self) -> bytes:
        """Nothing: a chunk before the first token would be measured as one."""
        return b""

    def piece(self, answer: Answer, text: str, logprobs: list[tuple[TokenLogprobs, int | None]]) -> bytes:
        """The role with the first token, then text."""
        entries = [chat_entry(self._generation.tokenizer, entry, cut) for entry, cut in logprobs]
        if not self._generation.ready.stream:
            self._logprobs.setdefault(answer.index, []).extend(entries)
            return b""
        frames = b""
        if answer.index not in self._begun:
            self._begun.add(answer.index)
            frames = self._chunk(answer.index, {"role": "assistant", "content": None})
        if text or entries:
            frames += self._chunk(answer.index, {"content": text} if text else {}, None, {"content": entries} if entries else None)
        return frames

    def finish(self, answer: Answer) -> bytes:
        """The one chunk of a choice that says why it ended."""
        return self._chunk(answer.index, {}, answer.finish_reason) if self._generation.ready.stream else b""

    def end(self, usage: Usage) -> bytes:
        """The usage, if asked, and the mark of the end."""
        if not self._generation.ready.include_usage:
            return DONE
        last = {**self._identity.head("chat.completion.chunk"), "choices": [], "usage": usage.openai(), "timings": usage.llama()}
        return frame(last) + DONE

    def error(self, error: FastLLMError) -> bytes:
        """An error frame; no mark of the end follows."""
        return frame(error_body(error, self._identity.request_id))

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        wanted = self._generation.ready.params.logprobs is not None
        choices = [
            {
                "index": answer.index,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": {"content": self._logprobs.get(answer.index, [])} if wanted else None,
                "finish_reason": answer.finish_reason,
            }
            for answer in self._generation.answers
        ]
        return {**self._identity.head("chat.completion"), "choices": choices, "usage": usage.openai(), "timings": usage.llama()}
