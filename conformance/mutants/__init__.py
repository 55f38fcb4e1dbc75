"""Mutants: deliberately broken backends. The suite must see every one of them, by the rule that each names.

    alive     the mutant's results or observables differ from those of its honest base, in the very cases that shall kill it
    killed    one of those cases fails, by the named rule, with a margin of at least 2 where a bound decides; of mutants that are about
              `native` and levels, what the honest base earns is no longer earned

`fastllm conformance self-test` runs them all; a mutant that is dead or survives is a failure of the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from fastllm.api import API_VERSION, OPSET, Backend, BackendSpec, Option, UsageError

from ..case import CaseResult, matches
from ..kernels import KERNELS
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
    from . import attention, careless, counts, extended, heads, numeric, scales, sizes, splits, steps, system

    found: dict[str, Mutant] = {}
    for mutant in (m for module in (numeric, attention, extended, sizes, heads, counts, steps, scales, splits, careless, system) for m in module.mutants()):
        if mutant.name in found:
            raise ValueError(f"two mutants are called '{mutant.name}'")
        found[mutant.name] = mutant
    return found


def open_mutant(name: str, options: Mapping[str, str] | None = None) -> tuple[Backend, BackendSpec]:
    """A broken backend, as `open_backend` gives an honest one; or kernels of `kernels.py`, which only the suite opens."""
    if name == HONEST:
        return MutantBase(None, options), _spec()
    if name in KERNELS:
        return KERNELS[name](), _spec()
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
        self.results: list[CaseResult] = []

    def run(self, names: Sequence[str]) -> list[CaseResult]:
        """Runs cases by id."""
        results = []
        for name in names:
            result = all_cases()[name].run(self)
            self.trace.append((name, result.status, result.message, [a.tobytes() for k, a in self.last.items() if k.startswith("result")]))
            results.append(result)
        self.results += results
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
        return _in_process(mutant, ids[0])
    with _Traced(lambda **options: (mutant.make(options), _spec()), name) as broken:
        results = broken.run(ids)
    if mutant.how == "native":
        return _not_native(mutant, honest.results, results)
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


def _in_process(mutant: Mutant, case_id: str) -> Kill:
    """The honest base passes in a worker, too; the mutant fails there, by its rule."""
    about, case = (mutant.name, mutant.family, mutant.what), all_cases()[case_id]
    honest, broken = (run_cases(Job(Target("mutant", mutant=name), jobs=1, limit_s=limit), [case])[0] for name, limit in ((HONEST, None), (mutant.name, HANG_S)))
    if honest.status != "passed":
        return Kill(*about, "error", mutant.rule, case_id, message=f"the honest base is {honest.status} in a worker: {honest.message}")
    if broken.status == "passed":
        return Kill(*about, "dead", mutant.rule, case_id, message="its results and observables are those of the honest base")
    killed = broken.status == "failed" and broken.rule == mutant.rule
    return Kill(*about, "killed" if killed else "survived", mutant.rule, case_id, message=broken.message)


def _not_native(mutant: Mutant, before: Sequence[CaseResult], after: Sequence[CaseResult]) -> Kill:
    """The op of the honest base is native; that of the mutant is right in every case, and not native in one."""
    about, op = (mutant.name, mutant.family, mutant.what), before[0].op
    if op not in native_ops(before)[0]:
        return Kill(*about, "error", "native", before[0].id, message=f"{op} of the honest base is not native either")
    wrong = next((r for r in after if r.status != "passed"), None)
    if wrong is not None:
        return Kill(*about, "survived", "native", wrong.id, message=f"it is {wrong.status}, not native or not: {wrong.message}")
    if [r.native for r in before] == [r.native for r in after]:
        return Kill(*about, "dead", "native", before[0].id, message="its results and observables are those of the honest base")
    seen = op not in native_ops(after)[0]
    return Kill(*about, "killed" if seen else "survived", "native", before[0].id, message="not counted as native" if seen else "counted as native")


def _no_level(mutant: Mutant) -> Kill:
    """The honest base earns Bronze with these cases; the mutant earns nothing."""
    about = (mutant.name, mutant.family, mutant.what)
    ids = [c.id for c in all_cases().values() if c.level == "bronze" and c.group in ("honesty", "elementwise", "rows")]
    with _Traced(lambda **options: (mutant.base(options), _spec()), HONEST) as session:
        base = standing(session.run(ids), "bronze", whole=True)
    if base.level != "bronze" or not base.native:
        return Kill(*about, "error", "level", ids[0], message=f"the honest base: {base.badge()}; {'; '.join(base.reasons[:1])}")
    with _Traced(lambda **options: (mutant.make(options), _spec()), mutant.name) as session:
        earned = standing(session.run(ids), "bronze", whole=True)
    if (earned.level, earned.native) == (base.level, base.native):
        return Kill(*about, "dead", "level", ids[0], message="it earns what the honest base earns")
    good = not earned.level and earned.native == 0
    return Kill(*about, "killed" if good else "survived", "level", ids[0], message=earned.badge())


def self_test(names: Sequence[str] = (), jobs: int = 2, progress: Callable[[Kill], None] = lambda kill: None) -> list[Kill]:
    """Judges mutants (all, or those that fit a pattern) in parallel processes. Raises UsageError for a pattern that fits none."""
    chosen = list(all_mutants())
    if names:
        for pattern in names:
            if not any(matches(n, pattern) for n in chosen):
                near = get_close_matches(pattern.replace("*", ""), chosen, 3, 0.4)
                text = f"like it: {', '.join(near)}; " if near else ""
                raise UsageError(f"--mutant {pattern} fits no mutant", fix=f"{text}docs/conformance.md has the table of all {len(chosen)}")
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
