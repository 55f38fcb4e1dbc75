"""Calibration: how much of its bound an honest kernel needs, per op, format, data class and length of the sum.

Bounds are right if every honest kernel stays well below 1 (0.75 is asked) and the mildest mutant well above (2 is asked, in
`mutants`). The data of the kernels at hand are committed in `calibration/`, made by `fastllm conformance calibrate`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastllm.api import FastLLMError, UsageError, open_backend

from .files import write_whole
from .kernels import KERNELS
from .runner import Job, run_cases
from .session import Target
from .suite import all_cases

__all__ = ["FOLDER", "MOST", "calibrate", "default_targets", "label", "named_target"]

FOLDER = Path(__file__).parent / "calibration"
MOST = 0.75
"""What an honest kernel may need of a bound."""
VARIANTS = ("baseline", "avx2", "avx512")


def label(target: Target) -> str:
    """`cpu_avx-avx2`: the backend and its variant."""
    return "-".join([target.name.replace(":", "-"), *target.options.values()])


def named_target(name: str) -> Target:
    """NAME or NAME/VARIANT, such as `cpu_avx/avx2`; or a name of `kernels.py`."""
    if name in KERNELS:
        return Target(name, mutant=name)
    backend, _, variant = name.partition("/")
    return Target(backend, {"isa": variant} if variant else {})


def default_targets() -> list[Target]:
    """ref, each variant of cpu_avx that runs here, opencl_generic where there is a device, and the kernels of `kernels.py`."""
    wanted = [Target("ref"), *(Target("cpu_avx", {"isa": v}) for v in VARIANTS), Target("opencl_generic")]
    return [*(t for t in wanted if _opens(t)), *map(named_target, KERNELS)]


def _opens(target: Target) -> bool:
    try:
        open_backend(target.name, target.options)[0].close()
    except FastLLMError:
        return False
    return True


def calibrate(targets: Sequence[Target], out: Path | None, jobs: int = 2) -> dict[str, dict[str, dict[str, Any]]]:
    """label -> bin -> {"margin": the worst, "cases": how many}; written to `out`, one file per label. Raises UsageError for a kernel that
    fails a case, or needs more than `MOST` of a bound: nothing of it is written then."""
    chosen = [c for c in all_cases().values() if c.bin]
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    for target in targets:
        bins: dict[str, dict[str, Any]] = {}
        for result in run_cases(Job(target, jobs=jobs), chosen):
            if result.status == "failed" and not result.message.startswith("required for"):
                raise UsageError(f"{label(target)} fails {result.id}: {result.message}", who="fastllm conformance calibrate", fix="only honest kernels say how wide a bound must be")
            if result.margin is None:
                continue
            if result.margin > MOST:
                raise UsageError(f"{label(target)} needs {result.margin:.3g} of the bound of {result.id} (bin {result.bin}); at most {MOST:g} is allowed",
                                 who="fastllm conformance calibrate", fix="correct the kernel, or the bound if it is too narrow")  # fmt: skip
            entry = bins.setdefault(result.bin, {"margin": 0.0, "cases": 0})
            entry["margin"] = max(entry["margin"], float(f"{result.margin:.3g}"))
            entry["cases"] += 1
        name = label(target)
        measured[name] = dict(sorted(bins.items()))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            body = {"backend": name, "machine": platform.machine(), "seed": 1, "bins": measured[name]}
            write_whole({out / f"{name}.json": json.dumps(body, indent=1) + "\n"})
    return measured
