"""The markers around a model's reasoning, and whether a prompt ends inside of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["REASONING", "ReasoningFormat", "detect_reasoning", "starts_in_reasoning"]


@dataclass(frozen=True)
class ReasoningFormat:
    """opening, closing: the markers."""

    name: str
    opening: str
    closing: str


REASONING: Final[dict[str, ReasoningFormat]] = {
    f.name: f
    for f in (
        ReasoningFormat("gpt-oss", "<|channel|>analysis<|message|>", "<|end|>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("think", "<think>", "</think>"),
    )
}
"""Name -> markers; the first whose opening a chat template names is the model's."""


def detect_reasoning(template: str | None) -> str | None:
    """The format that a chat template speaks of, or None."""
    if template is None:
        return None
    if "<|channel|>analysis" in template:
        return "gpt-oss"
    return next((f.name for f in REASONING.values() if f.opening in template or f.closing in template), None)


def starts_in_reasoning(prompt: str, format: ReasoningFormat) -> bool:
    """True if the rendered prompt opened reasoning and did not close it: the answer then starts inside."""
    return prompt.rfind(format.opening) > prompt.rfind(format.closing)
