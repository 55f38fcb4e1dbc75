"""`--soak`: the serving level for minutes instead of seconds, with other requests in every round, and memory that must not grow.

A round is eight streams from four threads, cancels in the middle of a batch, a cache that runs out, and 960 steps on one executor. The
case is no part of a level: a run that was asked for it fails with it, and a report without it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..case import Case, Failure, Outcome
from ..numbers import Numbers, seed_of
from ..session import Session
from . import serving
from .common import bind

__all__ = ["LONGEST_MINUTES", "named_soak", "soak_case"]

LONGEST_MINUTES = 60.0
STEPS = 960
GROWTH_BYTES = 24 << 20
"""What a process may grow by from the third round on: heaps of threads and of an interpreter settle late."""


def soak_case(minutes: float) -> Case:
    """The case that serves for so many minutes."""
    case_id = f"soak/{serving.MODEL}/-/m{minutes:g}/serving#serve"
    return Case(case_id, "engine", "soak-long", bind(_soak, case_id, minutes), "gold", True, limit_s=120.0 + 90.0 * minutes)


def named_soak(ids: Iterable[str]) -> dict[str, Case]:
    """The soak cases among these ids."""
    return {i: soak_case(float(i.split("/")[3].removeprefix("m"))) for i in ids if i.startswith("soak/")}


def _soak(case_id: str, session: Session, numbers: Numbers, minutes: float) -> Outcome:
    """Rounds until the time is over, at least one. Host memory is looked at after each."""
    end, rounds, sizes = time.monotonic() + 60 * minutes, 0, []
    used = session.backend.memory().used
    while not rounds or time.monotonic() < end:
        mine = Numbers(seed_of(rounds, case_id))
        serving.streams(case_id, session, mine)
        serving.cancels(case_id, session, mine)
        serving.exhaustion(case_id, session, mine)
        serving.soak(case_id, session, mine, STEPS)
        rounds += 1
        if session.backend.memory().used != used:
            raise Failure("leak", f"{session.backend.memory().used - used:,} bytes more are in use after round {rounds}")
        sizes.append(serving.resident_bytes())
    grown = sizes[-1] - sizes[min(2, len(sizes) - 1)]
    if sizes[0] and grown > GROWTH_BYTES:
        raise Failure("leak", f"the process grew by {grown / (1 << 20):.1f} MiB from the third round to the last of {rounds}")
    return Outcome(facts={"rounds": rounds, "steps": rounds * STEPS, "grown_bytes": grown})
