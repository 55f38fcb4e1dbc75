"""/v1/chat/completions on the wire: chunks of a stream, or one object."""

from __future__ import annotations

from typing import Any

from ..core.errors import FastLLMError
from ..text.output import Delta
from .answer import Answer, Due
from .answers import Identity, error_body
from .generation import Generation, Usage
from .logprobs import chat_entry
from .reading import read_with_logprobs
from .sse import DONE, SLOT, Chunks, Frames, frame

__all__ = ["ChatWriter"]


class ChatWriter:
    """A `Writer`. Each chunk carries one choice; the role comes once, with the first token; `finish_reason` once, with an empty delta."""

    def __init__(self, identity: Identity, generation: Generation):
        self._identity, self._generation = identity, generation
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of a choice that is not streamed
        self._chunks = Chunks(identity.head("chat.completion.chunk"), {"usage": None} if generation.ready.include_usage else {})
        self._begun: set[int] = set()
        self.plain: dict[int, Frames] = {}
        self._messages: dict[int, dict[str, Any]] = {}  # parts of a message that is not streamed

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        return self._chunks.frame({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}, self._times())

    def _times(self) -> dict[str, Any] | None:
        return self._generation.usage().llama() if self._generation.ready.per_token else None

    def start(self) -> bytes:
        """Nothing: a chunk before the first token would be measured as one."""
        return b""

    def piece(self, answer: Answer, text: str, logprobs: list[Due]) -> bytes:
        """The role with the first token, then text."""
        if (plain := self.plain.get(answer.index)) is not None and text:
            return plain((text,))
        deltas, due = read_with_logprobs(self._generation, answer, text, logprobs)
        entries = [[chat_entry(self._generation.tokenizer, one) for one in some] for some in due]
        if not self._generation.ready.stream:
            self._logprobs.setdefault(answer.index, []).extend(one for some in entries for one in some)
            self._message(answer.index, deltas)
            return b""
        frames = b""
        if answer.index not in self._begun:
            self._begun.add(answer.index)
            if answer.parser is None and self._generation.params.logprobs is None and not self._generation.ready.per_token:
                choice = {"index": answer.index, "delta": {"content": SLOT}, "logprobs": None, "finish_reason": None}
                self.plain[answer.index] = self._chunks.around(choice)
            first = {"index": answer.index, "delta": {"role": "assistant", "content": None}, "logprobs": None, "finish_reason": None}
            frames = self._chunks.frame(first)  # without times: it has no token
        if entries[0]:
            frames += self._chunk(answer.index, {}, None, {"content": entries[0]})
        for delta, some in zip(deltas, entries[1:], strict=True):
            for number, worded in enumerate(self._worded(answer.index, delta)):
                frames += self._chunk(answer.index, worded, None, {"content": some} if some and number == 0 else None)
        return frames

    def _worded(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Chunks of a delta: a call is its name, then pieces of its arguments."""
        if delta.call is None:
            kind = "reasoning_content" if delta.reasoning else "content"
            text = delta.reasoning or delta.content
            return [{kind: text}] if text else []
        call, chunks = delta.call, []
        if call.name:
            function = {"name": call.name, "arguments": ""}
            chunks.append({"index": call.index, "id": self._call_id(index, call.index), "type": "function", "function": function})
        if call.arguments:
            chunks.append({"index": call.index, "function": {"arguments": call.arguments}})
        return [{"tool_calls": [chunk]} for chunk in chunks]

    def _message(self, index: int, deltas: list[Delta]) -> None:
        """Adds deltas to the message of a choice that is not streamed."""
        message = self._messages.setdefault(index, {"content": "", "reasoning_content": "", "tool_calls": []})
        for delta in deltas:
            message["content"] += delta.content
            message["reasoning_content"] += delta.reasoning
            if delta.call is not None and delta.call.name:
                function = {"name": delta.call.name, "arguments": ""}
                message["tool_calls"].append({"id": self._call_id(index, delta.call.index), "type": "function", "function": function})
            if delta.call is not None:
                message["tool_calls"][delta.call.index]["function"]["arguments"] += delta.call.arguments

    def _call_id(self, index: int, call: int) -> str:
        return f"call_{self._identity.id.rpartition('-')[2][:20]}{index:x}{call:02x}"

    def progress(self, told: dict[str, Any]) -> bytes:
        """A chunk without choices."""
        extra = {"usage": None} if self._generation.ready.include_usage else {}
        return frame({**self._identity.head("chat.completion.chunk"), "choices": [], **extra, "prompt_progress": told})

    def finish(self, answer: Answer) -> bytes:
        """The one chunk of a choice that says why it ended."""
        frames = self.piece(answer, "", []) if answer.parser is not None else b""
        return frames + self._chunk(answer.index, {}, answer.finish_reason) if self._generation.ready.stream else b""

    def end(self, usage: Usage) -> bytes:
        """The usage, if asked, and the mark of the end."""
        if not self._generation.ready.include_usage:
            return DONE
        last = {**self._identity.head("chat.completion.chunk"), "choices": [], "usage": usage.openai(), "timings": usage.llama()}
        return frame(last) + DONE

    def error(self, error: FastLLMError) -> bytes:
        """An error frame; no mark of the end follows."""
        return frame(error_body(error, self._identity.request_id))

    def _whole(self, index: int) -> dict[str, Any]:
        """A message that is not streamed; empty parts are left out, and content is null where there are only calls."""
        parts = self._messages.get(index, {"content": "", "reasoning_content": "", "tool_calls": []})
        message: dict[str, Any] = {"role": "assistant", "content": parts["content"]}
        if parts["reasoning_content"]:
            message["reasoning_content"] = parts["reasoning_content"]
        if parts["tool_calls"]:
            message["tool_calls"] = parts["tool_calls"]
            message["content"] = parts["content"] or None
        return message

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        wanted = self._generation.ready.params.logprobs is not None
        choices = [
            {
                "index": answer.index,
                "message": self._whole(answer.index),
                "logprobs": {"content": self._logprobs.get(answer.index, [])} if wanted else None,
                "finish_reason": answer.finish_reason,
            }
            for answer in self._generation.answers
        ]
        return {**self._identity.head("chat.completion"), "choices": choices, "usage": usage.openai(), "timings": usage.llama()}
