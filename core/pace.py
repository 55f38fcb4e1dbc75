"""Pace: how many prompt tokens a step may take while others decode, so that no stream stalls for a long prompt.

A step of decodes takes `decode_s`; each prompt token in it adds `prompt_s`. Both are learnt from measured steps. A mixed step may take
STRETCH times as long as one of decodes alone, so that the longest gap between two tokens of a stream stays below three times its median.

What a mixed step took cannot be divided between its decodes and its prompt tokens by looking at it: a cost put down to the wrong side
makes the budget smaller, and a smaller budget makes the mistake larger. So what decodes cost is only ever read off steps without prompt
tokens. While prompts wait there would be none; then a step of decodes alone is asked for by a budget of 0: when their number has
changed much, and otherwise now and then. Between two such steps the cost is taken for at most what it can be. Of two of them the quicker one
counts: a single step from which another program took the processor would make all steps with prompts too long until the next is measured.

What a token adds depends on how many there are, and grows with the context: so a step that took longer than the mean says is believed at
once, one that took less by degrees. A step with few prompt tokens says nothing about one: its noise would be divided by their number.
The budget changes when a prompt is computed, never what: a row's result does not depend on how its prompt was cut.

Called by the engine's thread after each step; the scheduler asks for the budget where it needs one.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Pace"]

STRETCH: Final = 1.8  # a mixed step, in steps of decodes alone; the rest to 3 is for the slowest of a hundred steps (1.2 to 1.5 times the mean in calm rounds: docs/performance.md)
LEAST_TOKENS: Final = 4  # prompts go on, however slow the machine is
FIRST_TOKENS: Final = 16  # before the cost of a prompt token is known
MANY_TOKENS: Final = 64  # so many tell what one costs, even where they cost little beside the decodes
WEIGHT: Final = 0.25  # of the newest step in a mean
OUTLIER: Final = 4.0  # a step counts as at most that many times the mean: somebody else had the machine
SOON, LATE = 8, 32  # steps with prompts until decodes are measured again: after the first measurement, and at the most


class Pace:
    """What steps cost. decode_s: seconds of a step of `num_decodes` decodes alone; prompt_s: of one prompt token; 0.0: not known."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.decode_s = self.prompt_s = 0.0
        self.num_decodes = 0
        self._newest = 0.0  # what the step took that decode_s was measured by last
        self._measured = 0  # steps that decode_s is the mean of
        self._beside = 0  # steps that told what a prompt token costs beside decodes: alone, it pays for the step too
        self._mixed = 0  # steps with prompts since the last of them
        self._steps = 0
        self._asked = 0  # the step that was asked for to measure decodes

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step that has run: sequences that decoded, tokens of prompts, and how long it took."""
        self._steps += 1
        if num_prompt_tokens == 0:
            self._observe_decodes(num_decodes, seconds)
            return
        self._mixed += 1
        alone, mean = self._decodes_s(max(num_decodes, 1)), self.prompt_s
        newest = max(seconds - alone, 0.0) / num_prompt_tokens
        if mean == 0.0:
            self.prompt_s = newest if 2 * num_prompt_tokens >= FIRST_TOKENS else 0.0
        elif num_prompt_tokens >= MANY_TOKENS or 2 * mean * num_prompt_tokens >= alone:
            newest = min(newest, OUTLIER * mean)
            self._beside += num_decodes > 0
            weight = max(WEIGHT, 1 / self._beside) if num_decodes else WEIGHT
            self.prompt_s = newest if num_decodes and newest > mean else mean + weight * (newest - mean)

    def _observe_decodes(self, num_decodes: int, seconds: float) -> None:
        self._mixed = 0
        if num_decodes == self.num_decodes:
            self._measured += 1
            weight = max(WEIGHT, 1 / self._measured)
            self.decode_s += weight * (min(seconds, self._newest) - self.decode_s)
        else:  # one step may have been disturbed: n times as many decodes take n times as long at the most
            most = self.decode_s * max(num_decodes / self.num_decodes, 1.0) if self.num_decodes else seconds
            self.num_decodes, self._measured, self.decode_s = num_decodes, 1, min(seconds, most)
        self._newest = seconds

    def _decodes_s(self, num_decodes: int) -> float:
        """A step of so many decodes, or less: more of them take no less time, and fewer save no more than their share."""
        return self.decode_s * min(num_decodes / self.num_decodes, 1.0) if self.num_decodes else 0.0

    def prompt_budget(self, num_decodes: int) -> int:
        """Prompt tokens that the next step may take beside so many decodes, ≥ 1; 0: none, so that it tells what decodes cost. Two such
        steps are never asked for in a row."""
        changed, known = abs(num_decodes - self.num_decodes), self.num_decodes
        wait = SOON if changed else min(SOON * self._measured, LATE)
        if self._asked != self._steps and (4 * changed >= known or self._mixed >= wait):
            self._asked = self._steps + 1
            return 0
        if self.prompt_s == 0.0:
            return FIRST_TOKENS
        return max(LEAST_TOKENS, int(min((STRETCH - 1) * self._decodes_s(num_decodes) / self.prompt_s, 1 << 20)))
