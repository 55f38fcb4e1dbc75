"""An answer's text as parts: what the parser of its family makes of it, and the blocks or items into which Messages and Responses put that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..text.output import Delta

if TYPE_CHECKING:
    from .answer import Answer, Due
    from .generation import Generation

__all__ = ["Block", "Blocks", "read", "read_with_logprobs"]


def read(generation: Generation, answer: Answer, text: str) -> list[Delta]:
    """Takes text apart; at the answer's end also what was held back, and then why it ended is known (`answer.finish_reason`)."""
    parser = answer.parser
    if parser is None:
        return [Delta(content=text)] if text else []
    had_call = parser.num_calls > 0
    deltas = parser.feed(text)
    if answer.finish_reason is not None:
        cut = parser.in_call and answer.finish_reason == "length"
        deltas += parser.finish()
        answer.parser = None
        if parser.num_calls and not cut:
            answer.finish_reason = "tool_calls"
    if generation.one_call and parser.num_calls:  # what follows the one call is not wanted
        first = next((i for i, delta in enumerate(deltas) if delta.call and delta.call.complete), -1)
        deltas = [] if had_call else deltas[: first + 1]
    return deltas


def read_with_logprobs(generation: Generation, answer: Answer, text: str, due: list[Due]) -> tuple[list[Delta], list[list[Due]]]:
    """Takes text apart as `read`, and gives the log-probabilities of its content: of tokens whose characters are all known to be content or not,
    those that have any in it. One list more than deltas: the first belongs to content that has left before."""
    parser = answer.parser
    deltas = read(generation, answer, text)
    entries: list[list[Due]] = [[] for _ in range(len(deltas) + 1)]
    if parser is None:
        entries[-1] = due
        return deltas, entries
    spoken = [number for number, delta in enumerate(deltas, 1) for _ in delta.spans]
    old = len(answer.spans)
    answer.spans += [span for delta in deltas for span in delta.spans]
    answer.undecided += due
    decided = parser.num_decided if answer.parser is not None else None
    while answer.undecided and (decided is None or answer.undecided[0].end <= decided):
        token = answer.undecided.pop(0)
        places = _places(token, answer.spans)
        if not places:
            if not token.raw and not parser.in_reasoning and not parser.in_call:  # a special token that is skipped
                entries[0].append(token)
            continue
        last = max(places.values())
        kept = token._replace(part=slice(min(places), max(places) + 1))
        entries[0 if last < old else spoken[last - old]].append(kept)
    start = answer.undecided[0].start if answer.undecided else decided or 0
    answer.spans = [span for span in answer.spans if span[1] > start]
    return deltas, entries


def _places(token: Due, spans: list[tuple[int, int]]) -> dict[int, int]:
    """Bytes of a token that are in one of the spans: byte -> which."""
    places, character = {}, token.start - 1
    for number, byte in enumerate(token.raw[token.part]):
        character += number == 0 or byte & 0xC0 != 0x80
        for which, (first, end) in enumerate(spans):
            if first <= character < end:
                places[number] = which
    return places


@dataclass
class Block:
    """One part of an answer. kind: reasoning, text or call; name: of the function; complete: its end has come."""

    index: int
    kind: str
    name: str = ""
    text: str = ""
    complete: bool = False
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Blocks:
    """The parts of an answer in order. `add` tells what changed: (block, text that is new in it, it is new)."""

    def __init__(self) -> None:
        self.all: list[Block] = []

    def add(self, deltas: list[Delta]) -> Iterator[tuple[Block, str, bool]]:
        """Takes deltas; gives the block of each."""
        for delta in deltas:
            kind = "call" if delta.call else "reasoning" if delta.reasoning else "text"
            text = delta.call.arguments if delta.call else delta.reasoning or delta.content
            last = self.all[-1] if self.all else None
            new = last is None or last.kind != kind or bool(delta.call and delta.call.name)
            if new:
                self.all.append(Block(len(self.all), kind, delta.call.name if delta.call else ""))
            block = self.all[-1]
            block.text += text
            block.complete = bool(delta.call and delta.call.complete)
            yield block, text, new
