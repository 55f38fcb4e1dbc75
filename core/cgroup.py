"""What this process may use: CPU quota and memory limit of its control groups, and the memory that is free.

Containers with a quota are where engines collapse when they count the machine's cores instead (ollama#17916), so threads and the
size of the cache are planned from these numbers. Every function takes the root of the file system, so that tests can show it a
made-up tree. Called by backends (through `fastllm.api`) and by the interface.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["address_space", "available_memory", "cpu_quota", "memory_limit", "throttled_periods"]


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores that the control groups allow (1.5 for a quota of 150 ms in 100 ms), the smallest from our group up to the root, v2
    and v1; None without a limit."""
    quotas = []
    for folder in _groups(root, "cpu"):
        text = _read(folder / "cpu.max").split()
        if len(text) == 2 and text[0] != "max":
            quotas.append(_ratio(text[0], text[1]))
        quotas.append(_ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
    return min((q for q in quotas if q is not None), default=None)


def throttled_periods(root: Path = Path("/")) -> int:
    """Periods in which a quota stopped the threads of our control group or of one above it (the one that was stopped most), since these groups
    were made; 0 without a quota."""
    counts = [0]
    for folder in _groups(root, "cpu"):
        for line in _read(folder / "cpu.stat").splitlines():
            name, _, count = line.partition(" ")
            if name == "nr_throttled" and count.isdigit():
                counts.append(int(count))
    return max(counts)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the control groups allow, the smallest from our group up to the root; None without a limit."""
    limits = []
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit() and int(text) < 1 << 60:  # v1 writes a huge number for "no limit"
                limits.append(int(text))
    return min(limits, default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be used: the smaller of MemAvailable and what the control groups leave; None if neither is known.

    A group's usage counts the files that were read in it, a model's for example. The system gives those pages back before it refuses memory, so they
    are no use of memory here, but for those that are mapped somewhere (`memory.stat`, Documentation/admin-guide/cgroup-v2.rst)."""
    found = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for folder in _groups(root, "memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, used = _read(folder / limit), _read(folder / usage)
            if most.isdigit() and used.isdigit() and int(most) < 1 << 60:
                found.append(max(0, int(most) - max(0, int(used) - _file_pages(folder))))
    return min(found, default=None)


def _file_pages(folder: Path) -> int:
    """Bytes of files that a control group holds in memory, that nobody has mapped, and that are on the disk as they are. Of v1 the sums with groups below are what the usage counts."""
    counts = {name: int(count) for name, _, count in (line.partition(" ") for line in _read(folder / "memory.stat").splitlines()) if count.isdigit()}
    v1 = "total_inactive_file" in counts
    names = "total_inactive_file total_active_file total_mapped_file total_dirty total_writeback" if v1 else "inactive_file active_file file_mapped file_dirty file_writeback"
    inactive, active, *kept = (counts.get(name, 0) for name in names.split())
    return max(0, inactive + active - sum(kept))


def address_space(root: Path = Path("/")) -> int | None:
    """Bytes that the limits of this process (`ulimit -v`, `ulimit -d`) leave, whether they are touched or not; None without a limit."""
    sizes = _read(root / "proc/self/statm").split()
    if len(sizes) < 6:
        return None
    page, found = os.sysconf("SC_PAGE_SIZE"), []
    for limit, pages in ((resource.RLIMIT_AS, sizes[0]), (resource.RLIMIT_DATA, sizes[5])):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            found.append(max(0, most - int(pages) * page))
    return min(found, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of our control group and its parents: unified (v2) and the controller's own hierarchy (v1)."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            tops = [base, base / "unified"]
        elif controller in controllers.split(","):
            tops = [base / controller, base / controllers]
        else:
            continue
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _ratio(quota: str, period: str) -> float | None:
    try:
        q, p = int(quota), int(period)
    except ValueError:
        return None
    return q / p if q > 0 and p > 0 else None
