"""One choice of one prompt: text and log-probabilities out of the engine's events, as they become certain."""

from __future__ import annotations

import codecs
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ..core.request import TokenEvent, TokenLogprobs
from ..text import IncrementalDetokenizer
from ..text.detokenizer import special_stops
from ..text.stops import AnswerStops

if TYPE_CHECKING:
    from .generation import Generation

__all__ = ["Answer", "Due"]


class _Entry(NamedTuple):
    """Log-probabilities of a token, its bytes, and the characters of the answer that it begins and ends in."""

    logprobs: TokenLogprobs
    raw: bytes
    start: int
    end: int


class Due(NamedTuple):
    """Log-probabilities of a token whose characters have been given out. raw: its bytes; part: those of them that are in the text; start, end:
    characters of the answer that it begins and ends in."""

    logprobs: TokenLogprobs
    raw: bytes
    part: slice
    start: int
    end: int


class Answer:
    """One choice of one prompt: its text as it becomes certain.

    finish_reason: stop, length, or None while it goes on; stopped: the stop text that ended it. text: all of it so far.
    """

    def __init__(self, generation: Generation, prompt: int, choice: int, index: int):
        self.prompt, self.choice, self.index = prompt, choice, index
        self._ready, self._tokenizer = generation.ready, generation.tokenizer
        stops = self._ready.params.stop or ()
        self._keep = keep = generation.kept_ids
        self.undecided: list[Due] = []  # log-probabilities of tokens that are content, or are not
        self.spans: list[tuple[int, int]] = []  # characters that are content
        self.parser, scout = generation.make_parser(), generation.make_parser() if stops else None
        self.plain = not stops and self.parser is None and generation.params.logprobs is None  # a token gives text, and nothing else
        self._stops = None if scout is None else AnswerStops(scout, stops)
        self._stop_ids = {} if scout is None else {i: t for i, t in special_stops(self._tokenizer, stops).items() if i not in keep}
        plain = stops if scout is None else ()
        self._detokenizer = IncrementalDetokenizer(self._tokenizer, stop=plain, skip_special=self._ready.skip_special, keep=keep)
        self.reasoning_tokens = 0
        self.parts: list[str] = []
        self.num_tokens = 0
        self.last_token_at = 0.0
        self.finish_reason: str | None = None
        self.stopped: str | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._entries: deque[_Entry] = deque()  # not sent yet
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = self._released = 0  # characters of the tokens so far, and of the text that was given out

    @property
    def text(self) -> str:
        """What has been given out."""
        return "".join(self.parts)

    def feed(self, event: TokenEvent) -> tuple[str, list[Due]]:
        """Takes an event; gives the text that is certain now, and the log-probabilities of its tokens."""
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        text, token = "", event.token_id
        if token is not None:
            self.num_tokens += 1
            if event.finish_reason != "stop" and token < self._tokenizer.vocab_size:
                text = self._text(token)
                if event.logprob is not None:
                    self._note(TokenLogprobs(token, event.logprob, event.top_logprobs or ()))
        reason = event.finish_reason
        if self.stopped is None and reason is not None:
            text += self._rest()
        if self.stopped is not None:
            reason = "stop"
            if self._ready.include_stop:
                text += self.stopped
        elif reason == "stop" and self._ready.include_stop and token is not None and token in (self._ready.params.stop_token_ids or ()):
            text += self._tokenizer.decode_bytes(token, skip_special=False).decode("utf-8", "replace")
        self.finish_reason = reason
        if text:
            self.parts.append(text)
        return text, self._due(text) if self._entries else []

    def feed_all(self, token_ids: list[int]) -> list[str]:
        """Takes tokens that are nothing but text, of an answer that is `plain`; gives the texts that are certain now, as `feed` would one by one."""
        self.num_tokens += len(token_ids)
        size = self._tokenizer.vocab_size
        texts = self._detokenizer.push_all([token for token in token_ids if token < size])
        self.parts += texts
        return texts

    def _text(self, token: int) -> str:
        """What is certain with one more token."""
        if self._stops is None:
            text, self.stopped = self._detokenizer.push(token), self._detokenizer.stopped
        elif token in self._stop_ids and self._stops.in_answer:
            text, self.stopped = self._rest(), self.stopped or self._stop_ids[token]
        else:
            text, self.stopped = self._stops.push(self._detokenizer.push(token)), self._stops.stopped
        return text

    def _rest(self) -> str:
        """What was held back; no token follows."""
        text = self._detokenizer.finish()
        if self._stops is None:
            self.stopped = self._detokenizer.stopped
            return text
        text = self._stops.push(text)
        if self._stops.stopped is None:
            text += self._stops.finish()
        self.stopped = self._stops.stopped
        return text

    def _note(self, logprobs: TokenLogprobs) -> None:
        """Remembers a token's log-probabilities until its characters have been given out."""
        skip = self._ready.skip_special and logprobs.token_id not in self._keep
        raw = self._tokenizer.decode_bytes(logprobs.token_id, skip_special=skip)
        broken = bool(self._utf8.getstate()[0]) and not (raw[:1] and 0x80 <= raw[0] < 0xC0)  # the U+FFFD belongs to the token before
        start = self._decoded + broken
        self._decoded += len(self._utf8.decode(raw))
        half = bool(self._utf8.getstate()[0])  # it ends inside of a character
        self._entries.append(_Entry(logprobs, raw, start, self._decoded + half))

    def _due(self, text: str) -> list[Due]:
        """Log-probabilities of the tokens whose characters have all been given out; at a stop text also of the one that it cuts."""
        self._released += len(text)
        due: list[Due] = []
        whole = self.finish_reason is not None and self.stopped is None
        while self._entries and (self._entries[0].end <= self._released or whole):
            entry = self._entries.popleft()
            due.append(Due(entry.logprobs, entry.raw, slice(None), entry.start, entry.end))
        if self.stopped is not None and self._entries:
            first = self._entries[0]
            if first.start < self._released:
                kept = first.raw.decode("utf-8", "replace")[: self._released - first.start]
                part = slice(min(len(kept.encode()), len(first.raw)))
                due.append(Due(first.logprobs, first.raw, part, first.start, self._released))
            self._entries.clear()
        return due
