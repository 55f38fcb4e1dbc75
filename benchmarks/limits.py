"""What the machine can do: read bandwidth by size and threads, and the peak of every multiply instruction it has.

The backend's own probes are the limits that everything is measured against, so they are checked against a second probe that shares nothing with
them: `bandwidth.c`, compiled here on demand.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.bench import Row, Spread

from .environments import Unavailable, cache_folder

__all__ = ["SIZES_MB", "independent_probe", "limit_rows"]

SIZES_MB = (16, 100, 700)
"""In the last-level cache of most machines, in that of large ones, in none."""
SOURCE = Path(__file__).parent / "bandwidth.c"


def independent_probe() -> Callable[[int, int], float]:
    """read(nbytes, threads) -> bytes per second. Raises Unavailable without a compiler."""
    compiler = next(filter(None, (shutil.which(c) for c in (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        raise Unavailable("there is no C compiler")
    library = cache_folder() / "bandwidth.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_name(f"bandwidth.{os.getpid()}.so")
        command = [compiler, "-O2", "-march=native", "-shared", "-fPIC", "-pthread", os.fspath(SOURCE), "-o", os.fspath(part)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"{compiler} failed: {done.stderr.strip()[:200]}")
        part.rename(library)
    read = ctypes.CDLL(os.fspath(library)).read_bandwidth
    read.argtypes, read.restype = [ctypes.c_size_t, ctypes.c_int], ctypes.c_double
    return lambda nbytes, threads: float(read(nbytes, threads))


def limit_rows(threads: int, repeat: int) -> Iterator[tuple[int, Row]]:
    """(threads, row) of every limit, with one thread and with all."""
    try:
        probe: Callable[[int, int], float] | None = independent_probe()
        why = ""
    except Unavailable as error:
        probe, why = None, str(error)
    for count in sorted({1, threads}):
        with CpuBackend(threads=count) as cpu:
            for size in SIZES_MB:
                nbytes, params = size << 20, {"mib": size}
                ours, theirs = [], []
                for _ in range(repeat):
                    ours.append((cpu.read_bandwidth(nbytes) or 0.0) / 1e9)
                    if probe is not None:
                        theirs.append(probe(nbytes, count) / 1e9)
                yield count, Row("read", params, "GB/s", Spread.of(ours))
                if theirs:
                    ratio = Spread.of(a / b for a, b in zip(ours, theirs, strict=True))
                    yield count, Row("read, second probe", params, "GB/s", Spread.of(theirs), ratio=ratio, limit_of="the backend's probe / this one")
                else:
                    yield count, Row("read, second probe", params, reason=why)
            rounds = [cpu.peaks() for _ in range(repeat)]
            for name, (dtype, _) in rounds[0].items():
                rates = [r[name][1] for r in rounds]
                found = [float(r) / 1e12 for r in rates if not isinstance(r, str)]
                params = {"instruction": name, "type": dtype}
                if found:
                    yield count, Row("peak", params, "TOP/s", Spread.of(found))
                else:
                    yield count, Row("peak", params, reason=str(rates[0]))
