"""The runner: chooses cases, runs each group in a worker process, and survives whatever a backend does there.

A crash, an exit or a hang is a failed case; the rest of the group goes on in a new worker, three times at most. One runner is behind the
command, `check_backend` and the self-test; the pytest decorator runs cases in its own process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fastllm.api import UsageError

from .case import DEFAULT_SEED, LEVELS, Case, CaseResult, Requirements, matches
from .levels import select
from .session import Target
from .suite import all_cases

__all__ = ["Job", "Selection", "cases_for", "choose", "run_cases"]

DEATHS = 3
START_S = 60.0
"""Until a worker has begun its first case: interpreter, imports, and a backend that opens."""


@dataclass(frozen=True)
class Selection:
    """Which cases run. ops, cases: patterns; a pattern that matches nothing is an error."""

    level: str = "bronze"
    quick: bool = False
    ops: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """True if every case of the level runs."""
        return not (self.quick or self.ops or self.cases)


@dataclass(frozen=True)
class Job:
    """How cases are run. jobs: workers at the same time; stop: no new group after the first failure; dump: folder for operands and
    results of failed cases."""

    target: Target
    seed: int = DEFAULT_SEED
    jobs: int = 2
    stop: bool = False
    dump: str | None = None
    requirements: Requirements = field(default_factory=Requirements)
    limit_s: float | None = None


def cases_for(target: Target, seed: int = DEFAULT_SEED) -> dict[str, Case]:
    """The suite's cases, and those that the vendor adds (under `vendor/`)."""
    known = dict(all_cases())
    if target.mutant:
        return known
    from fastllm.api import plugin_cases

    for case in plugin_cases(target.name, plugins_file=target.plugins_file, plugin_paths=target.plugin_paths):
        own = replace(case, id=f"vendor/{case.id}", group="vendor", required=False)
        if own.id in known:
            raise UsageError(f"two cases of '{target.name}' are called '{case.id}'", who=f"backend '{target.name}'")
        known[own.id] = own
    return known


def choose(selection: Selection, known: Iterable[Case]) -> list[Case]:
    """The cases of a selection. Raises UsageError for an unknown level, and for a pattern that nothing matches."""
    if selection.level not in LEVELS:
        raise UsageError(f"there is no level '{selection.level}'", fix=f"one of {', '.join(LEVELS)}")
    pool = list(known)
    chosen = select(pool, selection.level, selection.quick)
    for name, patterns, of in (("--op", selection.ops, lambda c: c.op), ("--case", selection.cases, lambda c: c.id)):
        for pattern in patterns:
            if not any(matches(of(c), pattern) for c in (chosen if name == "--op" else pool)):
                close = sorted({of(c) for c in pool if pattern.strip("*").partition("/")[0] in of(c)})[:5]
                raise UsageError(f"{name} {pattern} matches no case", who="fastllm conformance", fix=f"close: {', '.join(close)}" if close else "fastllm conformance list")
    if selection.cases:
        chosen = [c for c in pool if any(matches(c.id, p) for p in selection.cases)]
    if selection.ops:
        chosen = [c for c in chosen if any(matches(c.op, p) for p in selection.ops)]
    if not chosen:
        raise UsageError("no case is left after --op and --case together", who="fastllm conformance", fix="fastllm conformance list")
    return chosen


def run_cases(job: Job, chosen: Sequence[Case], progress: Callable[[CaseResult], None] = lambda result: None) -> list[CaseResult]:
    """Runs cases group by group; a result for every one of them, in the order given."""
    groups: dict[str, list[Case]] = {}
    for case in chosen:
        groups.setdefault(case.group, []).append(case)
    found: dict[str, CaseResult] = {}
    failed = threading.Event()
    lock = threading.Lock()

    def tell(result: CaseResult) -> None:
        with lock:
            found[result.id] = result
            if result.status == "failed":
                failed.set()
            progress(result)

    def run_group(cases: list[Case]) -> None:
        if job.stop and failed.is_set():
            return
        _Group(job, cases, tell, failed).run()

    with ThreadPoolExecutor(max(1, job.jobs)) as pool:
        for future in [pool.submit(run_group, g) for g in sorted(groups.values(), key=len, reverse=True)]:
            future.result()
    return [found.get(c.id) or CaseResult(c.id, c.op, c.group, c.level, c.required, message="the run was stopped before it") for c in chosen]


class _Group:
    """One group in workers, one after the other."""

    def __init__(self, job: Job, cases: Sequence[Case], tell: Callable[[CaseResult], None], failed: threading.Event):
        self.job, self.tell, self.failed = job, tell, failed
        self.left = list(cases)

    def run(self) -> None:
        """Until every case has a result."""
        deaths = 0
        while self.left and not (self.job.stop and self.failed.is_set()):
            died = self._one_worker()
            deaths += died
            if deaths >= DEATHS:
                for case in self.left:
                    self.tell(CaseResult(case.id, case.op, case.group, case.level, case.required, message=f"not run: {DEATHS} workers of its group died"))
                self.left = []

    def _one_worker(self) -> bool:
        """Runs cases until the worker ends. True if it died of a case."""
        job = self.job
        body = {
            "target": job.target.as_dict(), "seed": job.seed, "ids": [c.id for c in self.left], "dump": job.dump,
            "requirements": asdict(job.requirements),
        }  # fmt: skip
        child = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "fastllm.conformance.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, "FASTLLM_CONTAIN_PLUGINS": "0"},  # a crash here is contained already
        )  # fmt: skip
        lines: queue.Queue[bytes | None] = queue.Queue()
        noise: list[bytes] = []
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        readers = [
            threading.Thread(target=_pump, args=(child.stdout, lines.put), daemon=True),
            threading.Thread(target=_pump, args=(child.stderr, lambda line: noise.append(line or b"")), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            child.stdin.write(json.dumps(body).encode())
            child.stdin.close()
        except BrokenPipeError:
            pass
        try:
            return self._listen(child, lines, noise)
        finally:
            _kill(child)
            child.wait()
            for reader in readers:
                reader.join(5)
            child.stdout.close()
            child.stderr.close()

    def _listen(self, child: subprocess.Popen[bytes], lines: queue.Queue[bytes | None], noise: list[bytes]) -> bool:
        current: Case | None = None
        while True:
            limit = START_S if current is None else self._limit(current)
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                case = current or self.left[0]
                self._dead(case, f"no end within {limit:g} s: the case hangs" if current else f"the worker did not start within {limit:g} s")
                return True
            if line is None:
                if not self.left:
                    return False
                child.wait()
                if current is None and child.returncode == 1:  # opening failed in a way that Python reports
                    last = (b"".join(noise).decode("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
                    self._dead(self.left[0], f"the worker failed: {last}")
                    return True
                self._dead(current or self.left[0], _ended(child.returncode))
                return True
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if "start" in message:
                current = self.left[0]
            elif "result" in message:
                result = CaseResult.from_dict(message["result"])
                self.left.pop(0)
                current = None
                self.tell(result)
                if self.job.stop and result.status == "failed":
                    return False

    def _limit(self, case: Case) -> float:
        return (self.job.limit_s or case.limit_s) * min(max(self.job.requirements.time_factor, 1.0), 10.0)

    def _dead(self, case: Case, message: str) -> None:
        self.left.remove(case)
        self.tell(CaseResult(case.id, case.op, case.group, case.level, case.required, "failed", "contract", message))


def _pump(stream: Any, put: Callable[[bytes | None], object]) -> None:
    for line in stream:
        put(line)
    put(None)


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError, AttributeError):
            child.kill()


def _ended(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        try:
            return f"the process died of {signal.Signals(-returncode).name}"
        except ValueError:
            return f"the process died of signal {-returncode}"
    return f"the process ended with status {returncode} in the middle of the case"
