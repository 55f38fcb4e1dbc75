"""The cases, one module per group. `all_cases()` lists every case of the suite; the list depends on nothing but this version."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..case import Case

__all__ = ["all_cases"]


@lru_cache(maxsize=1)
def all_cases() -> dict[str, Case]:
    """id -> case, in running order. Raises ValueError for an id that is used twice."""
    from . import (
        attention,
        below,
        caches,
        contexts,
        continued,
        contract,
        counts,
        decomposed,
        determinism,
        elementwise,
        experts,
        gates,
        grids,
        hazards,
        honesty,
        linear,
        memory,
        models,
        norms,
        properties,
        recurrent,
        sampling,
        scales,
        serving,
        specials,
        splits,
        steps,
        tables,
        tails,
    )

    found: dict[str, Case] = {}
    parts: Iterable[Iterable[Case]] = (
        module.cases() for module in (linear, norms, elementwise, decomposed, attention, caches, contexts, experts, recurrent, properties, memory, sampling, honesty, contract, determinism, models, serving, counts, specials, steps, scales, splits, gates, tables, continued, grids, below, tails, hazards)
    )
    for case in (c for part in parts for c in part):
        if case.id in found:
            raise ValueError(f"two cases are called '{case.id}'")
        found[case.id] = case
    return found
