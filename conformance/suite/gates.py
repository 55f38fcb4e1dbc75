"""act_mul of two operands: numbers that are not finite in the one and in the other, for every activation.

A kernel that clips or takes a maximum by instructions which prefer the number to the NaN (fmin, fmax) hides what broke before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fastllm.api import ACTIVATIONS

from .. import bounds
from ..case import Case, Outcome
from ..numbers import Numbers
from ..operands import In
from ..session import Session
from .common import bind, expect

__all__ = ["cases"]

WIDTH = 37


def _gated(case_id: str, session: Session, numbers: Numbers, kind: str) -> Outcome:
    """At the first elements, in the middle and at the last ones, which kernels compute by other code."""
    gate, up = numbers.normal(4, WIDTH) * np.float32(2), numbers.normal(4, WIDTH)
    for at in (0, 16, WIDTH - 3):
        gate[0, at], up[0, at] = np.nan, 1.5
        gate[1, at + 1], up[1, at + 1] = 1.5, np.nan
        gate[2, at + 2], up[2, at + 2] = 1.5, np.inf
        gate[3, at], up[3, at] = np.inf, 1.5
        gate[3, at + 2], up[3, at + 2] = 1.5, -np.inf
    ran = session.bench.run("act_mul", [In(gate, "f32", "T"), In(up, "f32", "T")], [(gate.shape, "f32")], {"kind": kind})
    with np.errstate(all="ignore"):
        return expect(session, case_id, ran, [bounds.act_mul(gate, up, kind)])


def cases() -> Iterator[Case]:
    """One for each activation."""
    for kind in ACTIVATIONS:
        case_id = f"act_mul/f32/row/m4-n{WIDTH}/{kind}.gated.special#bound"
        yield Case(case_id, "act_mul", "elementwise", bind(_gated, case_id, kind), required=True, quick=kind in ("relu", "swiglu_oai"))
