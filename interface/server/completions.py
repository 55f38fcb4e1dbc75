"""/v1/completions on the wire: chunks of a stream, or one object; with the prompt before the answer where `echo` asks for it."""

from __future__ import annotations

from typing import Any

from ..core.errors import FastLLMError
from .answer import Answer, Due
from .answers import Identity, error_body
from .generation import Generation, Usage
from .logprobs import LegacyLogprobs
from .sse import DONE, SLOT, Chunks, Frames, frame

__all__ = ["CompletionWriter"]


class CompletionWriter:
    """A `Writer`. Choice i of prompt p has the index p · n + i."""

    def __init__(self, identity: Identity, generation: Generation):
        self._identity, self._generation = identity, generation
        self._chunks = Chunks(identity.head("text_completion"), {"usage": None} if generation.ready.include_usage else {})
        self._wanted = generation.ready.params.logprobs is not None
        self._echo = generation.ready.echo
        self._begun: set[int] = set()
        self.plain: dict[int, Frames] = {}
        self._logprobs: dict[int, LegacyLogprobs] = {}

    def _legacy(self, answer: Answer) -> LegacyLogprobs:
        """The choice's log-probabilities; with echo they begin with the prompt's."""
        found = self._logprobs.get(answer.index)
        if found is None:
            tokenizer, number = self._generation.tokenizer, answer.prompt
            found = self._logprobs[answer.index] = LegacyLogprobs(tokenizer)
            if self._echo:
                first = self._generation.answers[number * self._generation.n]  # the prompt's are computed once, with the first choice
                prompt = self._generation.ready.prompts[number].tolist()
                for token, entry in zip(prompt, first.prompt_logprobs or [None] * len(prompt), strict=True):
                    found.add(token, entry)
        return found

    def _chunk(self, index: int, text: str, reason: str | None, logprobs: Any) -> bytes:
        return self._chunks.frame({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}, self._times())

    def _times(self) -> dict[str, Any] | None:
        return self._generation.usage().llama() if self._generation.ready.per_token else None

    def start(self) -> bytes:
        """Nothing before the first token."""
        return b""

    def piece(self, answer: Answer, text: str, logprobs: list[Due]) -> bytes:
        """Text; the first of a choice begins with the prompt, if that is echoed."""
        if (plain := self.plain.get(answer.index)) is not None and text:
            return plain((text,))
        taken = None
        if self._wanted:
            legacy = self._legacy(answer)
            for entry, *_ in logprobs:
                legacy.add(entry.token_id, entry)
            taken = legacy.take() if self._generation.ready.stream else None
        if not self._generation.ready.stream:
            return b""
        if answer.index not in self._begun:
            self._begun.add(answer.index)
            if not self._wanted and not self._generation.ready.per_token:
                choice = {"index": answer.index, "text": SLOT, "logprobs": None, "finish_reason": None}
                self.plain[answer.index] = self._chunks.around(choice)
            text = self._echo[answer.prompt] + text if self._echo else text
        return self._chunk(answer.index, text, None, taken) if text or taken else b""

    def progress(self, told: dict[str, Any]) -> bytes:
        """A chunk without choices."""
        extra = {"usage": None} if self._generation.ready.include_usage else {}
        return frame({**self._identity.head("text_completion"), "choices": [], **extra, "prompt_progress": told})

    def finish(self, answer: Answer) -> bytes:
        """The one chunk of a choice that says why it ended."""
        return self._chunk(answer.index, "", answer.finish_reason, None) if self._generation.ready.stream else b""

    def end(self, usage: Usage) -> bytes:
        """The usage, if asked, and the mark of the end."""
        if not self._generation.ready.include_usage:
            return DONE
        last = {**self._identity.head("text_completion"), "choices": [], "usage": usage.openai(), "timings": usage.llama()}
        return frame(last) + DONE

    def error(self, error: FastLLMError) -> bytes:
        """An error frame; no mark of the end follows."""
        return frame(error_body(error, self._identity.request_id))

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {
                "index": answer.index,
                "text": (self._echo[answer.prompt] if self._echo else "") + answer.text,
                "logprobs": self._legacy(answer).take() if self._wanted else None,
                "finish_reason": answer.finish_reason,
            }
            for answer in self._generation.answers
        ]
        return {**self._identity.head("text_completion"), "choices": choices, "usage": usage.openai(), "timings": usage.llama()}
