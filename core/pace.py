"""Pace: how many prompt tokens a step may take while others decode, so that no stream stalls for a long prompt.

A step of decodes takes `decode_s`; each prompt token in it adds `prompt_s`. Both are running means of measured steps. A mixed step may
take STRETCH times as long as one of decodes alone, so that the gap between two tokens of a stream stays below three times its median.
The budget changes when a prompt is computed, never what: a row's result does not depend on how its prompt was cut.

Called by the engine's thread after each step; the scheduler asks for the budget where it needs one.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Pace"]

STRETCH: Final = 2.4  # a mixed step, in steps of decodes alone
SHORT_S: Final = 0.01  # what a step may take in any case: nobody sees a gap of 10 ms
LEAST_TOKENS: Final = 16  # prompts go on, however slow the machine is
FIRST_TOKENS: Final = 64  # before the cost of a prompt token is known
WEIGHT: Final = 0.25  # of the newest step in a mean
OUTLIER: Final = 4.0  # a step counts as at most that many times the mean: somebody else had the machine


class Pace:
    """Running means of what steps cost. decode_s: seconds of a step of decodes alone; prompt_s: of one prompt token; 0.0: not known."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.decode_s = self.prompt_s = 0.0

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step that has run: sequences that decoded, tokens of prompts, and how long it took."""
        if num_prompt_tokens == 0:
            self.decode_s = _mean(self.decode_s, seconds)
        else:
            alone = self.decode_s if num_decodes else 0.0
            self.prompt_s = _mean(self.prompt_s, max(seconds - alone, 0.0) / num_prompt_tokens)

    def prompt_budget(self) -> int | None:
        """Prompt tokens that the next step may take if others decode in it; None: as many as there is room for."""
        if self.decode_s == 0.0:
            return None
        if self.prompt_s == 0.0:
            return FIRST_TOKENS
        spare = max(STRETCH * self.decode_s, SHORT_S) - self.decode_s
        return max(LEAST_TOKENS, int(min(spare / self.prompt_s, 1 << 20)))


def _mean(mean: float, newest: float) -> float:
    return newest if mean == 0.0 else mean + WEIGHT * (min(newest, OUTLIER * mean) - mean)
