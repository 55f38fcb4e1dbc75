"""Mutants: deliberately broken backends. The suite must see every one of them, by the rule that each names.

    alive     the mutant's results or observables differ from those of its honest base, in the very cases that shall kill it
    killed    one of those cases fails, by the named rule, with a margin of at least 2 where a bound decides

`fastllm conformance self-test` runs them all; a mutant that is dead or survives is a failure of the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastllm.api import API_VERSION, OPSET, Backend, BackendSpec, Option, UsageError

from ..case import CaseResult, matches
from ..levels import native_ops, standing
from ..runner import Job, run_cases
from ..session import Session, Target
from ..suite import all_cases
from .base import Mutant, MutantBase

__all__ = ["Kill", "all_mutants", "judge_mutant", "open_mutant", "self_test"]

LEAST_MARGIN = 2.0
HANG_S = 3.0
HONEST = "honest"
"""Name under which `open_mutant` gives the base that nothing was done to."""


@lru_cache(maxsize=1)
def all_mutants() -> dict[str, Mutant]:
    """name -> mutant."""
    from . import attention, extended, numeric, system

    found: dict[str, Mutant] = {}
    for mutant in (m for module in (numeric, attention, extended, system) for m in module.mutants()):
        if mutant.name in found:
            raise ValueError(f"two mutants are called '{mutant.name}'")
        found[mutant.name] = mutant
    return found


def open_mutant(name: str, options: Mapping[str, str] | None = None) -> tuple[Backend, BackendSpec]:
    """A broken backend, as `open_backend` gives an honest one."""
    if name == HONEST:
        return MutantBase(None, options), _spec()
    return all_mutants()[name].make(options or {}), _spec()


def _spec() -> BackendSpec:
    return BackendSpec("mutant", API_VERSION, OPSET, options={"threads": Option(int, 1)})


@dataclass(frozen=True)
class Kill:
    """What became of a mutant. verdict: killed | survived | dead | error; case: that killed it (the worst); margin: of that case."""

    name: str
    family: str
    what: str
    verdict: str
    rule: str
    case: str = ""
    margin: float | None = None
    message: str = ""

    @property
    def good(self) -> bool:
        """True if the suite did its work."""
        return self.verdict == "killed"


class _Traced(Session):
    """A session that remembers the bits of every result and what each case said."""

    def __init__(self, opener: Callable[..., tuple[Backend, BackendSpec]], mutant: str):
        super().__init__(Target("mutant", mutant=mutant), opener=opener)
        self.trace: list[Any] = []

    def run(self, names: Sequence[str]) -> list[CaseResult]:
        """Runs cases by id."""
        results = []
        for name in names:
            result = all_cases()[name].run(self)
            self.trace.append((name, result.status, result.message, [a.tobytes() for k, a in self.last.items() if k.startswith("result")]))
            results.append(result)
        return results


def judge_mutant(name: str) -> Kill:
    """Runs one mutant: honest base, alive, killed."""
    mutant = all_mutants()[name]
    ids = [c.id for c in all_cases().values() if matches(c.id, mutant.cases)]
    about = (mutant.name, mutant.family, mutant.what)
    if not ids:
        return Kill(*about, "error", mutant.rule, message=f"no case fits '{mutant.cases}'")
    if mutant.how == "level":
        return _no_level(mutant)
    ids = ids[:12]
    with _Traced(lambda **options: (mutant.base(options), _spec()), HONEST) as honest:
        fails = [r for r in honest.run(ids) if r.status == "failed"]
    if fails:
        return Kill(*about, "error", mutant.rule, fails[0].id, message=f"the honest base fails: {fails[0].message}")
    if mutant.how == "process":
        results = run_cases(Job(Target("mutant", mutant=name), jobs=1, limit_s=HANG_S), [all_cases()[i] for i in ids[:1]])
        killed = [r for r in results if r.status == "failed" and r.rule == mutant.rule]
        return Kill(*about, "killed" if killed else "survived", mutant.rule, results[0].id, message=results[0].message)
    with _Traced(lambda **options: (mutant.make(options), _spec()), name) as broken:
        results = broken.run(ids)
    if mutant.how == "native":
        seen = "softmax" not in native_ops(results)[0]
        return Kill(*about, "killed" if seen else "survived", "native", ids[0], message="not counted as native" if seen else "counted as native")
    if broken.trace == honest.trace:
        return Kill(*about, "dead", mutant.rule, ids[0], message="its results and observables are those of the honest base")
    killed = [r for r in results if r.status == "failed" and r.rule == mutant.rule]
    if not killed:
        other = next((r for r in results if r.status == "failed"), None)
        text = f"failed by another rule, {other.rule}: {other.message}" if other else "every case passes"
        return Kill(*about, "survived", mutant.rule, other.id if other else ids[0], message=text)
    worst = max(killed, key=lambda r: r.margin if r.margin is not None else 0.0)
    if mutant.rule == "bound" and worst.margin is not None and worst.margin < LEAST_MARGIN:
        return Kill(*about, "survived", mutant.rule, worst.id, worst.margin, f"killed with a margin of {worst.margin:.2f} only; at least {LEAST_MARGIN:g} is asked")
    return Kill(*about, "killed", mutant.rule, worst.id, worst.margin, worst.message)


def _no_level(mutant: Mutant) -> Kill:
    chosen = [c for c in all_cases().values() if c.level == "bronze" and (c.group in ("honesty", "elementwise", "rows"))]
    with _Traced(lambda **options: (mutant.make(options), _spec()), mutant.name) as session:
        results = session.run([c.id for c in chosen])
    earned = standing(results, "bronze", whole=True)
    good = not earned.level and earned.native == 0
    return Kill(mutant.name, mutant.family, mutant.what, "killed" if good else "survived", "level", chosen[0].id, message=earned.badge())


def self_test(names: Sequence[str] = (), jobs: int = 2, progress: Callable[[Kill], None] = lambda kill: None) -> list[Kill]:
    """Judges mutants (all, or those that fit a pattern) in parallel processes. Raises UsageError for a pattern that fits none."""
    chosen = list(all_mutants())
    if names:
        for pattern in names:
            if not any(matches(n, pattern) for n in chosen):
                raise UsageError(f"--mutant {pattern} fits no mutant", fix=f"known: {', '.join(chosen)}")
        chosen = [n for n in chosen if any(matches(n, p) for p in names)]
    found = []
    with ProcessPoolExecutor(jobs, mp_context=_spawn()) as pool:
        for kill in pool.map(judge_mutant, chosen):
            progress(kill)
            found.append(kill)
    return found


def _spawn() -> Any:
    import multiprocessing

    return multiprocessing.get_context("spawn")
