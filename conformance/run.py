"""One conformance run from start to end: choose, run, apply expected failures, judge the level. Behind the command and
`check_backend`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fastllm.api import plugin_facts

from .case import DEFAULT_SEED, CaseResult, Requirements
from .expected import apply_expected, read_expected
from .levels import Standing, standing
from .perf import build_perf, compare, read_floors, read_old
from .perf_cases import perf_items
from .report import build_report
from .runner import Job, Selection, cases_for, choose, run_cases
from .session import Target
from .sources import kernel_hash
from .suite import all_cases
from .suite.soak import soak_case

__all__ = ["Run", "RunOptions", "run_suite"]


@dataclass(frozen=True)
class RunOptions:
    """What to run and how. expected: a conformance.toml; None: the one in the vendor's package, if there is one. perf: measure speed
    afterwards (a whole run for Gold always does); compare: an older report to hold it against. soak_minutes: serve for so long, too."""

    target: Target
    selection: Selection = field(default_factory=Selection)
    seed: int = DEFAULT_SEED
    jobs: int = 2
    stop: bool = False
    dump: str | None = None
    expected: str | Path | None = None
    command: str = ""
    perf: bool = False
    compare: str | Path | None = None
    soak_minutes: float = 0.0


@dataclass
class Run:
    """A run's results, standing and report."""

    results: list[CaseResult]
    earned: Standing
    report: dict[str, Any]

    @property
    def met(self) -> bool:
        """True if the asked level was reached; of a filtered run, if nothing failed."""
        if self.report["quick"] or any(self.report["filters"].values()):
            return not any(r.status in ("failed", "not run") for r in self.results)
        return self.earned.level == self.report["asked"]


def run_suite(options: RunOptions, progress: Callable[[CaseResult], None] = lambda result: None) -> Run:
    """Runs it. Raises UsageError for a selection that matches nothing, and the loader's errors for a backend that does not open."""
    start = time.perf_counter()
    old = read_old(options.compare) if options.compare is not None else {}  # before minutes are spent
    target = options.target
    facts = plugin_facts(target.name, plugins_file=target.plugins_file, plugin_paths=target.plugin_paths)
    target = replace(target, plugin_paths=tuple(facts.files))  # the suite's processes run no other file's code
    requirements = facts.requirements or Requirements()
    emulated = requirements.emulated or facts.execution == "emulated"
    requirements = replace(requirements, emulated=emulated)
    selection = options.selection
    chosen = choose(selection, cases_for(target, options.seed).values())
    path = options.expected
    if path is None and facts.package_folder is not None and (facts.package_folder / "conformance.toml").is_file():
        path = facts.package_folder / "conformance.toml"
    sources = kernel_hash(facts.package_folder)
    listed, floors = ([], []) if path is None else (read_expected(path), read_floors(path))
    if options.soak_minutes:
        chosen.append(soak_case(options.soak_minutes))
    job = Job(target, options.seed, options.jobs, options.stop, options.dump, requirements)
    found = run_cases(job, chosen, progress)
    if path is not None:
        found = apply_expected(found, listed, facts.version, whole=selection.whole, known=all_cases())
    perf = None
    stopped = options.stop and any(r.status == "failed" for r in found)
    if (options.perf or (selection.level == "gold" and selection.whole)) and not stopped:
        perf = build_perf(run_cases(replace(job, jobs=1), perf_items(selection.ops), progress), floors, emulated=emulated)
        if old:
            perf["compared"] = compare(perf, old, str(options.compare))
    earned = standing(found, selection.level, whole=selection.whole, tolerated=bool(requirements.tolerance), perf=perf)
    about: Mapping[str, Any] = {
        "distribution": facts.distribution, "version": facts.version, "device": facts.device, "environment": dict(facts.environment),
        "options": dict(target.options), "device_kind": facts.execution, "emulated": emulated, "execution": "emulated" if emulated else facts.execution,
        "sources": sources, "tolerance": {k: list(v) for k, v in requirements.tolerance.items()},
        "expected": [asdict(e) for e in listed], "floors": [asdict(f) for f in floors],
    }  # fmt: skip
    report = build_report(
        found, earned, selection, backend=target.name, command=options.command, seed=options.seed, engine=_engine(), about=about,
        time_s=time.perf_counter() - start, perf=perf,
    )  # fmt: skip
    return Run(found, earned, report)


def _engine() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fastllm-engine")
    except PackageNotFoundError:
        return "unknown"


def check(options: RunOptions) -> Sequence[CaseResult]:
    """`run_suite`, with an error of the backend as a failed result."""
    try:
        return run_suite(options).results
    except Exception as error:
        name = options.target.name
        why = getattr(error, "why", "")
        message = f"{type(error).__name__}: {error}" + (f" ({why})" if why else "")
        return [CaseResult(f"backend/-/-/{name}/opens#contract", "backend", "contract", options.selection.level, True, "failed", "contract", message)]


