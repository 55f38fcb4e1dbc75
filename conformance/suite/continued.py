"""short_conv and delta_rule: prompts that go on. A piece of a prompt that starts from a state, and is longer than the chunks in which kernels take rows.

A kernel that works through a sequence in chunks carries the state from one chunk to the next by another formula than from one call to the next: each is
right alone in cases where a long sequence starts from nothing, and a short one from a state.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..bounds import Expected
from ..case import Case, Outcome
from ..numbers import Numbers
from ..session import Session
from .common import bind, expect
from .recurrent import on_device

__all__ = ["cases"]

PIECES = ((5, 64, 2), (70, 66), (1, 129, 2))
"""Tokens of each call, per sequence."""


def _continued(case_id: str, session: Session, numbers: Numbers, op: str) -> Outcome:
    """All sequences in each call; those that have ended have no rows."""
    with on_device(session, numbers, op, [sum(p) for p in PIECES]) as (kit, device):
        wanted, worst = [kit.judge(s) for s in range(len(PIECES))], Outcome(0.0)
        for turn in range(max(map(len, PIECES))):
            spans = [(s, sum(p[:turn]), sum(p[: turn + 1])) for s, p in enumerate(PIECES)]
            device.run(spans)
            assert device.ran is not None
            y, bound = (np.concatenate([getattr(wanted[s], name)[a:b] for s, a, b in spans]) for name in ("y", "bound"))
            outcome = expect(session, case_id, device.ran, [Expected(y, bound)])
            worst = max(worst, outcome, key=lambda o: (o.margin or 0.0, bool(o.impl)))
        return worst


def cases() -> Iterator[Case]:
    """One for each op with a state."""
    for op, size in (("short_conv", "c24-k4"), ("delta_rule", "j1-h2-d8_8")):
        case_id = f"{op}/f32/row/l{'_'.join(str(sum(p)) for p in PIECES)}-{size}/continued#bound"
        yield Case(case_id, op, "recurrent", bind(_continued, case_id, op), quick=op == "short_conv")
