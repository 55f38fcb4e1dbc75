"""Which instruction-set variant of the kernels runs: the best one here, or the one that is asked for and can run."""

from __future__ import annotations

import os

from fastllm.api import UsageError

from . import _native

__all__ = ["best", "choose", "distrusted", "variants"]


def variants() -> dict[str, str]:
    """Variant name -> why it cannot run here ("" if it can), the oldest first."""
    return {name: _native.isa_missing(i) or "" for i, name in enumerate(_native.isa_names())}


def best() -> str:
    """The best variant that runs here, whatever the environment asks for."""
    return [name for name, why in variants().items() if not why][-1]


def distrusted(asked: str) -> str:
    """One line if the option `isa` left the choice to us and AMX was passed over because its self-test failed; "" otherwise."""
    why = variants().get("amx", "")
    free = asked == "auto" and os.environ.get("FASTLLM_ISA", "") in ("", "auto")
    return f"cpu_avx takes {best()} instead of amx: {why}" if free and "self-test" in why else ""


def choose(asked: str) -> str:
    """The variant for the option `isa`; "auto" follows `FASTLLM_ISA` if it is set. Raises UsageError for a name that is unknown or
    whose instructions this machine would refuse."""
    source = f"--backend-opt isa={asked}"
    if asked == "auto":
        asked = os.environ.get("FASTLLM_ISA", "") or "auto"
        source = f"FASTLLM_ISA={asked}"
    if asked == "auto":
        return best()
    known = variants()
    if asked not in known:
        raise UsageError(
            f"{source}: there is no such instruction set; known: {', '.join(known)}", who="cpu_avx", fix="use auto"
        )
    if known[asked]:
        raise UsageError(f"{source} cannot run here: {known[asked]}", who="cpu_avx", fix=f"use auto (here: {best()})")
    return asked
