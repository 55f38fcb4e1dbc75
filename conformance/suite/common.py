"""What the case modules share: running an op and judging its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..bench import Ran
from ..bounds import Expected
from ..case import Failure, NotApplicable, Outcome
from ..judge import judge
from ..numbers import Numbers
from ..session import Session

__all__ = ["bind", "expect", "or_refused", "same_bits", "size_bin", "tolerance"]


def bind(check: Callable[..., Outcome], case_id: str, *args: Any, **kwargs: Any) -> Callable[[Session, Numbers], Outcome]:
    """check(case_id, session, numbers, *args) as what a Case calls."""

    def run(session: Session, numbers: Numbers) -> Outcome:
        return check(case_id, session, numbers, *args, **kwargs)

    return run


def or_refused(strided: Callable[[Session, Numbers], Outcome], dense: Callable[[Session, Numbers], Outcome]) -> Callable[[Session, Numbers], Outcome]:
    """A case of operands with a stride, which a backend may refuse when it is asked: then it must be right without the stride, and only then
    the case does not apply."""

    def run(session: Session, numbers: Numbers) -> Outcome:
        try:
            return strided(session, numbers)
        except NotApplicable as reason:
            outcome = dense(session, numbers)
            return Outcome(outcome.margin, outcome.nmse, outcome.index, outcome.impl, outcome.native, {**outcome.facts, "refused": str(reason)})

    return run


def size_bin(k: int) -> str:
    """Bin of a reduction length, for calibration."""
    return next(name for limit, name in ((64, "k<=64"), (512, "k<=512"), (4096, "k<=4096"), (1 << 62, "k>4096")) if k <= limit)


def tolerance(session: Session, case_id: str) -> float:
    """The vendor's factor for this case, 1 without one."""
    from fnmatch import fnmatchcase

    return max((min(factor, 4.0) for pattern, (factor, _) in session.requirements.tolerance.items() if fnmatchcase(case_id, pattern)), default=1.0)


def expect(session: Session, case_id: str, ran: Ran, expected: Sequence[Expected], rule: str = "") -> Outcome:
    """Judges every result of an op. rule: what a wrong value breaks, if not the judge's own rule."""
    factor = tolerance(session, case_id)
    worst = Outcome(0.0, 0.0, (), ran.yes.impl, ran.native)
    for found, wanted in zip(ran.outs, expected, strict=True):
        verdict = judge(found, Expected(wanted.y, wanted.bound * factor, wanted.exact, wanted.slack) if factor != 1 else wanted)
        if verdict.message:
            facts = {"margin": verdict.margin, "nmse": verdict.nmse, "index": verdict.index, "impl": ran.yes.impl, "native": ran.native}
            broken = verdict.rule if verdict.rule == "contract" else rule or verdict.rule
            raise Failure(broken, f"{ran.yes.impl}: {verdict.message}", **facts)
        if verdict.margin >= (worst.margin or 0):
            worst = Outcome(float(verdict.margin), verdict.nmse, verdict.index, ran.yes.impl, ran.native)
    if ran.kept:
        worst.facts["kept"] = [k for k in ran.kept if k]
    return worst


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two arrays have the same bits."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()
