"""Our engine in a container: how many threads it takes by itself, and its speed beside that of every number of threads set by hand.

A container is a wrapper that joins a control group with a CPU quota, or gets an affinity mask, before it becomes the worker. Making a control
group takes root and a `cpu` controller, of v1 or of v2; what cannot be made is a row with the reason. The kernel enforces both quotas alike, and where the
controller belongs to v1, `cpu.max` is shown to the engine in a mount namespace of its own, as a container with v2 would see it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastllm.bench import Row, Spread

from .engine import needs
from .environments import WORKERS
from .models import model_path
from .peers import OURS, Process, asked, speed

__all__ = ["CONTAINERS", "Container", "container", "container_rows", "cpu_group"]

PERIOD_US = 100_000
JOIN = "echo $$ > '{group}/cgroup.procs'"
SHOW = "mount -t tmpfs none /sys/fs/cgroup && echo '{quota_us} {period_us}' > /sys/fs/cgroup/cpu.max"


@dataclass(frozen=True)
class Container:
    """What an engine may use. quota: cores, 0 for no quota; v2: whether it finds a `cpu.max`; cpus: of the affinity mask, 0 for all."""

    quota: float = 0.0
    v2: bool = False
    cpus: int = 0

    @property
    def name(self) -> str:
        """For the table."""
        return (
            f"{self.quota:g} cores by {'cpu.max' if self.v2 else 'a v1 quota'}"
            if self.quota
            else f"affinity mask of {self.cpus}"
        )


CONTAINERS = (Container(quota=1.5), Container(quota=1.5, v2=True), Container(cpus=1))


@contextlib.contextmanager
def cpu_group(quota_us: int, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """(folder of a new control group below ours with that quota in each PERIOD_US, whether it is of v2). Raises OSError."""
    found = None
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = [controllers] if "cpu" in controllers.split(",") else ["", "unified"] if not controllers else []
        for parent in (root / "sys/fs/cgroup" / name / path.lstrip("/") for name in names):
            listed = parent / "cgroup.subtree_control"
            if controllers and parent.is_dir():
                found = parent, False
            elif not controllers and listed.exists() and "cpu" in listed.read_text().split():
                found = parent, True
    if found is None:
        raise OSError("no control group here has a cpu controller")
    parent, v2 = found
    group = parent / f"fastllm-bench-{os.getpid()}"
    group.mkdir()
    try:
        if v2:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        yield group, v2
    finally:
        group.rmdir()


@contextlib.contextmanager
def container(kind: Container) -> Iterator[list[str]]:
    """The command in front of a program that makes it run there. Raises OSError if there can be no such container."""
    if not kind.quota:
        allowed = sorted(os.sched_getaffinity(0))[: kind.cpus]
        yield ["taskset", "-c", ",".join(map(str, allowed))]
        return
    quota_us = round(kind.quota * PERIOD_US)
    with cpu_group(quota_us) as (group, v2):
        steps = [JOIN.format(group=group)]
        if kind.v2 and not v2:
            steps.append(SHOW.format(quota_us=quota_us, period_us=PERIOD_US))
        elif v2 and not kind.v2:
            raise OSError("the cpu controller belongs to v2 here")
        elif shutil.which("unshare") is None:
            raise OSError("there is no `unshare`")
        yield ["unshare", "-m", "sh", "-c", " && ".join((*steps, 'exec "$@"')), "sh"]


def container_rows(
    model: str, kinds: Sequence[Container], cells: Sequence[str], repeat: int, most: int
) -> Iterator[tuple[dict[str, Any], Row]]:
    """(options, row) for each container and cell: our speed with the threads chosen by itself beside the best of 1 … most set by hand, all in
    turns. Raises WorkerError if an engine does not load."""
    context, streams = needs(cells)
    path = os.fspath(model_path(model))
    for kind in kinds:
        try:
            with container(kind) as prefix, contextlib.ExitStack() as stack:
                engines: list[tuple[int, Process]] = []
                for threads in range(most + 1):
                    process = Process(sys.executable, WORKERS / OURS.worker, prefix=prefix)
                    stack.callback(process.close)
                    arguments = {
                        "path": path,
                        "threads": threads,
                        "context": -(-context // 64) * 64 + 64,
                        "streams": streams,
                        "options": {},
                    }
                    engines.append((int(process.call("load", **arguments)["threads"]), process))
                chosen = engines[0][0]
                for cell in cells:
                    yield {"threads": chosen}, compare(cell, kind, engines, repeat)
        except OSError as error:
            yield {}, Row("load", {"container": kind.name}, reason=f"{type(error).__name__}: {error}")


def compare(cell: str, kind: Container, engines: Sequence[tuple[int, Process]], repeat: int) -> Row:
    """One cell of all engines in turns; the first chose its threads by itself."""
    name, params = asked(cell)
    found: list[list[float]] = [[] for _ in engines]
    for turn in range(repeat + 1):  # the first is to warm up
        for (_, process), values in zip(engines, found, strict=True):
            value = speed(process, name, params)
            if turn:
                values.append(value)
    own, *others = map(Spread.of, found)
    best = max(range(len(others)), key=lambda i: others[i].median)
    ratio = Spread.of(a / b for a, b in zip(own.samples, others[best].samples, strict=True))
    threads = engines[best + 1][0]
    return Row(
        name,
        {"container": kind.name, **params},
        "tok/s",
        own,
        others[best].median,
        f"{threads} thread{'s' * (threads != 1)} by hand",
        ratio,
    )
