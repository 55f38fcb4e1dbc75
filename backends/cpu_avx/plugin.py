"""The plug-in of `cpu_avx`: the built-in backend that everybody has. Importing this loads no native code."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastllm.api import (
    API_VERSION,
    OPSET,
    Backend,
    BackendSpec,
    BackendUnavailable,
    DeviceInfo,
    Option,
    Ready,
    Unavailable,
    hookimpl,
)

OPTIONS = {
    "threads": Option(int, 0, help="threads to compute with; 0: physical cores, affinity mask and CPU quota decide"),
    "isa": Option(
        str, "auto", ("auto", "baseline", "avx2", "avx512", "amx"), help="instruction set; auto: the best that runs here"
    ),
    "act": Option(
        str,
        "int8",
        ("int8", "f32"),
        help="activations of linear layers: rounded (fast), to int8 for quantised weights and to bf16 for bf16 weights where there is an instruction for it; or exact f32",
    ),
    "kv_dtype": Option(
        str,
        "auto",
        ("auto", "f16", "bf16", "f32", "int8"),
        help="how keys and values are cached, where `--kv-dtype` does not say; auto: bf16 where attention multiplies it (act=int8 with avx512 or amx), else f16",
    ),
    "pin": Option(bool, True, help="bind threads to cores if they use all of them"),
}

REBUILD = "build it again: make install in a source tree, else pip install --force-reinstall fastllm-engine"


@hookimpl
def fastllm_backends() -> list[BackendSpec]:
    """One backend."""
    summary = "this computer's CPU: SSE4.2, AVX2, AVX-512 or AMX, whatever it has"
    return [BackendSpec("cpu_avx", API_VERSION, OPSET, vendor="fastllm", summary=summary, priority=60, options=OPTIONS)]


@hookimpl
def fastllm_probe(name: str) -> Ready | Unavailable:
    """Ready, unless the native code was not built or does not load."""
    try:
        from . import isa
        from .threads import choose_threads

        best = isa.best()
    except (ImportError, AttributeError) as error:  # a name that is not there: the code was built from older sources
        return Unavailable(f"the native code does not load: {error}", REBUILD)
    choice = choose_threads(0)
    detail = f"{best}, {choice.count} thread{'s' * (choice.count != 1)}"
    return Ready((DeviceInfo("0", cpu_model(), memory_bytes(), detail, kind="cpu"),))


@hookimpl
def fastllm_open_backend(name: str, device: str, options: Mapping[str, Any]) -> Backend:
    """Opens the CPU. Raises UsageError for an instruction set that cannot run here, BackendUnavailable where the native code is not of these sources."""
    try:
        from .backend import CpuBackend
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable("backend 'cpu_avx' cannot be used on this machine", why=f"the native code does not fit its Python files: {error}", fix=REBUILD) from error

    return CpuBackend(**{key: options.get(key, option.default) for key, option in OPTIONS.items()})


@hookimpl
def fastllm_environment(name: str) -> dict[str, str]:
    """CPU, usable instruction sets and why the others are not, threads and why so many."""
    from . import isa
    from .threads import choose_threads

    choice = choose_threads(0)
    found = {"cpu": cpu_model(), "isa": isa.best()}
    found |= {f"isa {variant}": why or "usable" for variant, why in isa.variants().items()}
    return found | {"threads": f"{choice.count}: {choice.reason}"}


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name."""
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    except (OSError, UnicodeDecodeError):
        pass
    return platform.processor() or platform.machine() or "CPU"


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory of the machine; 0 if unknown."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0
