"""The plug-in of `fake`: always ready, chosen only by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastllm.api import API_VERSION, OPSET, Backend, BackendSpec, DeviceInfo, Option, Ready, hookimpl

OPTIONS = {
    "without": Option(str, "", help="ops that this device lacks, with commas: they leave it"),
    "inherit": Option(
        str, "", help="ops that are inherited from ref (download, compute on the host, upload), with commas; all: every op"
    ),
    "max_alloc": Option(int, 0, help="largest buffer in bytes; 0: any"),
    "memory": Option(int, 0, help="bytes of device memory; 0: any"),
}


@hookimpl
def fastllm_backends() -> list[BackendSpec]:
    """One backend, below 0: never chosen by itself."""
    summary = "an accelerator made of host memory, for tests of engines and plans: separate, poisoned, late"
    return [BackendSpec("fake", API_VERSION, OPSET, vendor="fastllm", summary=summary, priority=-1, options=OPTIONS)]


@hookimpl
def fastllm_probe(name: str) -> Ready:
    """Host memory is always there."""
    return Ready((DeviceInfo("0", "an accelerator made of host memory", kind="emulated"),))


@hookimpl
def fastllm_open_backend(name: str, device: str, options: Mapping[str, Any]) -> Backend:
    """Opens the one device. Raises UsageError for an op that does not exist or a negative size."""
    from .backend import FakeBackend

    return FakeBackend(**{key: options.get(key, option.default) for key, option in OPTIONS.items()})
