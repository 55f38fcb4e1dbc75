"""Two sets of constants of one shape in one backend, one after the other: what is made from the first must not serve for the second.

Gemma 3 turns heads of one width by two lists of frequencies. A backend that keeps a table of sines by width and position is right for every other model.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import bounds
from ..case import Case, Outcome
from ..numbers import Numbers
from ..operands import In
from ..session import Session
from .common import bind, expect

__all__ = ["cases"]


def _rope(case_id: str, session: Session, numbers: Numbers, style: str) -> Outcome:
    """Frequencies of theta 10,000 and of 1,000,000 by turns, and each of them divided by eight, over the same positions."""
    x, where = numbers.normal(5, 2, 64), np.array([0, 1, 17, 900, 4095], np.int32)
    usual, far = ((theta ** (-np.arange(32) / 32)).astype(np.float32) for theta in (1e4, 1e6))
    worst = Outcome(0.0)
    for freq, factor in ((usual, 1.0), (far, 1.0), (usual / np.float32(8), 1.0), (far, 0.5), (usual, 1.0)):
        ran = session.bench.run("rope", [In(x, "f32", "T"), In(where, "i32", "T"), In(freq)], [(x.shape, "f32")], {"style": style, "factor": factor})
        outcome = expect(session, case_id, ran, [bounds.rope(x, where, freq, style, factor, ran.numerics)])
        worst = max(worst, outcome, key=lambda o: (o.margin or 0.0, bool(o.impl)))
    return worst


def cases() -> Iterator[Case]:
    """Both styles."""
    for style in ("half", "pairs"):
        case_id = f"rope/f32/row/t5-h2-d64-r32/{style}.tables#bound"
        yield Case(case_id, "rope", "rope", bind(_rope, case_id, style), required=True, quick=style == "half")
