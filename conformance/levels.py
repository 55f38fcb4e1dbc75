"""Levels: what Bronze, Silver and Gold ask for, in one reviewed place.

Bronze: the ops are right: contract, honesty, guards; every core op in f32, every format that is claimed; D0.
Silver: models are right: a 16-bit, an 8-bit and a 4-bit weight format and paged attention, all native; every tiny model; D1–D3; no
        op leaves the device in a decode step.
Gold:   serving is right: many streams, cancels, exhaustion, 2,000 steps without a leak; and a perf report, with every floor met that the
        vendor declares.

A level counts only in a run of all of its cases. A required case may not be N/A; an op that is answered No is not a pass. Expected
failures keep Bronze if they are listed, and bar Silver for core ops; wrong numbers, broken guards and undeclared D2 are
never expected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastllm.api import API_VERSION, CORE_OPS, OPSET

from .case import LEVELS, STATUSES, Case, CaseResult
from .perf import perf_reasons

__all__ = ["DEVICE_OPS", "NEVER_EXPECTED", "SUITE_VERSION", "Standing", "native_ops", "select", "standing"]

SUITE_VERSION = 9
"""Raised when a change of cases or bounds may change who passes."""
NEVER_EXPECTED = ("bound", "exact", "guard", "d2")
DEVICE_OPS = tuple(op for op in CORE_OPS if op != "sample")
"""Core ops that a device runs: `sample` belongs to the host, which needs the logits for log-probabilities and grammars anyway."""
FORMATS_OF = {
    "16-bit": ("f16", "bf16"),
    "8-bit": ("q8_0",),
    "4-bit": ("q4_0", "q4_1", "q4_k", "iq4_nl", "iq4_xs", "mxfp4"),
}
"""What Silver wants one of, native."""


@dataclass(frozen=True)
class Standing:
    """What a run earned. level: "" for none; asked: of a filtered run "". reasons: why not more."""

    level: str
    reasons: tuple[str, ...]
    counts: dict[str, int]
    native: int
    native_of: int
    inherited: tuple[str, ...]

    def badge(self) -> str:
        """`silver · opset 1 · native 14/14`."""
        return f"{self.level or 'no level'} · opset {OPSET} · native {self.native}/{self.native_of}"

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {
            "level": self.level, "reasons": list(self.reasons), "counts": self.counts, "native": self.native, "native_of": self.native_of,
            "inherited": list(self.inherited), "badge": self.badge(), "api": ".".join(map(str, API_VERSION)),
        }  # fmt: skip


def select(cases: Iterable[Case], level: str, quick: bool) -> list[Case]:
    """The cases of a level and all below it; with `quick`, one of each kind."""
    upto = LEVELS.index(level)
    return [c for c in cases if LEVELS.index(c.level) <= upto and (c.quick or not quick)]


def native_ops(results: Sequence[CaseResult]) -> tuple[list[str], list[str]]:
    """(core ops whose own implementation was seen and passed, those that are inherited or not seen): as observed, not as claimed.

    The suite's own cases only: what a vendor adds proves nothing to others."""
    seen: dict[str, set[bool]] = {}
    for result in results:
        if result.id.startswith("vendor/"):
            continue
        if result.op in DEVICE_OPS and result.native is not None and result.status == "passed" and _in_f32(result.id):
            seen.setdefault(result.op, set()).add(result.native)
    native = [op for op in DEVICE_OPS if True in seen.get(op, ())]
    return native, [op for op in DEVICE_OPS if op not in native]


def _in_f32(case_id: str) -> bool:
    dtypes = case_id.split("/")[1]
    return "*" not in dtypes or dtypes.endswith("*f32")


def standing(
    results: Sequence[CaseResult], asked: str, *, whole: bool, tolerated: bool = False, perf: Mapping[str, Any] | None = None
) -> Standing:
    """What these results earn. asked: the level whose cases ran; whole: all of them ran. tolerated: looser bounds were used. perf: the
    perf report, which Gold needs."""
    counts = Counter(r.status for r in results)
    native, inherited = native_ops(results)
    reasons: list[str] = []
    level = ""
    for name in LEVELS[: LEVELS.index(asked) + 1]:
        missing = [] if whole else ["a filtered or quick run earns no level"]
        own = [r for r in results if r.level == name]
        missing += [f"{r.id}: {r.message or r.status}" for r in own if r.status not in ("passed", "expected", "n/a")]
        if not own:
            missing.append(f"no case of {name} ran")
        if name == "silver":
            missing += _silver(results, inherited, tolerated)
        if name == "gold":
            missing += ["expected failures are left"] if any(r.status == "expected" for r in results) else []
            missing += perf_reasons(perf)
        if missing:
            reasons = [f"not {name}: {line}" for line in missing[:20]]
            break
        level = name
    return Standing(level, tuple(reasons), {k: counts.get(k, 0) for k in STATUSES}, len(native), len(DEVICE_OPS), tuple(inherited))


def _silver(results: Sequence[CaseResult], inherited: Sequence[str], tolerated: bool) -> list[str]:
    missing = []
    for bits, formats in FORMATS_OF.items():
        if not any(r.status == "passed" and r.native and r.id.startswith(f"linear/f32*{f}/") for f in formats for r in results):
            missing.append(f"no {bits} weight format ({', '.join(formats)}) is native in linear")
    if "attention" in inherited:
        missing.append("attention is not native")
    missing += [f"{r.id} is expected to fail" for r in results if r.status == "expected" and r.op in CORE_OPS]
    if tolerated:
        missing.append("looser bounds (Requirements.tolerance) are for Bronze only")
    return missing
