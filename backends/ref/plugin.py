"""The plug-in of `ref`: always ready, never the first choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastllm.api import API_VERSION, OPSET, Backend, BackendSpec, DeviceInfo, Ready, hookimpl


@hookimpl
def fastllm_backends() -> list[BackendSpec]:
    """One backend."""
    summary = "numpy: the definition of every op, slow"
    return [BackendSpec("ref", API_VERSION, OPSET, vendor="fastllm", summary=summary, priority=0)]


@hookimpl
def fastllm_probe(name: str) -> Ready:
    """numpy is always there."""
    return Ready((DeviceInfo("0", "host memory, numpy", kind="cpu"),))


@hookimpl
def fastllm_open_backend(name: str, device: str, options: Mapping[str, Any]) -> Backend:
    """Opens the one device."""
    from .backend import RefBackend

    return RefBackend()


@hookimpl
def fastllm_environment(name: str) -> dict[str, str]:
    """numpy's version."""
    import numpy

    return {"numpy": numpy.__version__}
