"""How many threads, and on which cores: physical cores ∩ affinity mask ∩ CPU quota, with the reason in words.

Every peer collapses in containers with a quota, because it counts the machine's cores (ollama#17916: 0.27 instead of 12 tokens/s);
and two hardware threads of one core share the vector units, so they add nothing to a kernel that is bound by them. All
functions take the root of the file system and the affinity mask, so that tests can show them made-up machines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fastllm.api import cpu_quota

__all__ = ["ThreadChoice", "allowed_cpus", "choose_threads", "physical_cores"]


@dataclass(frozen=True)
class ThreadChoice:
    """count: threads to use. reason: why so many, in words. cores: for each thread the CPUs it may run on, or None to leave it to
    the system. warning: set if the count was asked for but is more than there is to use."""

    count: int
    reason: str
    cores: tuple[tuple[int, ...], ...] | None = None
    warning: str = ""


def allowed_cpus() -> tuple[int, ...]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(allowed: Iterable[int], root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """The allowed CPUs, grouped by physical core, in order. A CPU whose siblings are not known counts as a core of its own."""
    left = sorted(set(allowed))
    cores: list[tuple[int, ...]] = []
    while left:
        siblings = _cpu_list(root / f"sys/devices/system/cpu/cpu{left[0]}/topology/thread_siblings_list") | {left[0]}
        cores.append(tuple(c for c in left if c in siblings))
        left = [c for c in left if c not in siblings]
    return tuple(cores)


def choose_threads(
    requested: int, pin: bool = True, root: Path = Path("/"), allowed: Iterable[int] | None = None
) -> ThreadChoice:
    """The threads to use. requested: 0 for the default, else obeyed. Threads are pinned only if every allowed core gets exactly
    one: with fewer, the system knows better which cores are idle (other engines may run here), with more, they must share."""
    cores = physical_cores(allowed_cpus() if allowed is None else allowed, root)
    cpus = sum(len(core) for core in cores)
    quota = cpu_quota(root)
    known = f"{len(cores)} physical core{'s' * (len(cores) != 1)} allowed ({cpus} CPU{'s' * (cpus != 1)} in the affinity mask)"
    limit = f"CPU quota of {quota:g} cores" if quota is not None else "no CPU quota"
    most = len(cores) if quota is None else min(len(cores), math.floor(quota))
    count, warning = max(1, most), ""
    if requested > 0:
        count = requested
        if quota is not None and count > quota:
            warning = (
                f"{count} threads were asked for, but the CPU quota is {quota:g} cores: the kernel will stop them in turns"
            )
        elif count > cpus:
            warning = f"{count} threads were asked for, but only {cpus} CPUs are allowed: they will wait for each other"
    why = f"{count} asked for; " if requested > 0 else ""
    pinned = tuple(cores) if pin and count == len(cores) and (quota is None or count <= quota) else None
    return ThreadChoice(count, f"{why}{known}, {limit}", pinned, warning)


def _cpu_list(path: Path) -> set[int]:
    """CPUs of a kernel list such as `0-3,8`; empty if the file is missing or unreadable."""
    try:
        text = path.read_text().strip()
        found: set[int] = set()
        for part in text.split(",") if text else ():
            first, _, last = part.partition("-")
            if int(last or first) - int(first) < 4096:
                found |= set(range(int(first), int(last or first) + 1))
        return found
    except (OSError, ValueError):
        return set()
