"""Pace: how many prompt tokens a step may take while others decode, so that no stream stalls for a long prompt.

A step of decodes takes `decode_s`; each prompt token in it adds `prompt_s`. Both are learnt from measured steps. A mixed step may take
STRETCH times as long as one of decodes alone, so that the gap between two tokens of a stream stays below three times its median. What a
token adds depends on how many there are, and grows with the context: so a step that took longer than the mean says is believed at once,
one that took less by degrees. The budget changes when a prompt is computed, never what: a row's result does not depend on how its prompt
was cut.

Called by the engine's thread after each step; the scheduler asks for the budget where it needs one.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Pace"]

STRETCH: Final = 2.2  # a mixed step, in steps of decodes alone; the rest to 3 is for steps that differ
LEAST_TOKENS: Final = 4  # prompts go on, however slow the machine is
FIRST_TOKENS: Final = 16  # before the cost of a prompt token is known
WEIGHT: Final = 0.25  # of the newest step in a mean
OUTLIER: Final = 4.0  # a step counts as at most that many times the mean: somebody else had the machine


class Pace:
    """What steps cost. decode_s: seconds of a step of decodes alone; prompt_s: of one prompt token; 0.0: not known."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.decode_s = self.prompt_s = 0.0

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step that has run: sequences that decoded, tokens of prompts, and how long it took."""
        if num_prompt_tokens == 0:
            mean = self.decode_s
            self.decode_s = seconds if mean == 0.0 else mean + WEIGHT * (min(seconds, OUTLIER * mean) - mean)
            return
        mean = self.prompt_s
        newest = max(seconds - (self.decode_s if num_decodes else 0.0), 0.0) / num_prompt_tokens
        if mean == 0.0:
            self.prompt_s = newest
        else:
            newest = min(newest, OUTLIER * mean)
            self.prompt_s = newest if num_decodes and newest > mean else mean + WEIGHT * (newest - mean)

    def prompt_budget(self) -> int | None:
        """Prompt tokens that the next step may take if others decode in it; None: as many as there is room for."""
        if self.decode_s == 0.0:
            return None
        if self.prompt_s == 0.0:
            return FIRST_TOKENS
        return max(LEAST_TOKENS, int(min((STRETCH - 1) * self.decode_s / self.prompt_s, 1 << 20)))
