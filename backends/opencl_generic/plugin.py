"""The plug-in of `opencl_generic`. Importing this loads no driver, and not pyopencl."""

from __future__ import annotations

from collections.abc import Mapping
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
    "kernels": Option(
        str, "auto", ("auto", "vector", "lanes"), help="vector: for CPUs; lanes: for GPUs; auto: what the device is"
    ),
    "kv_dtype": Option(str, "f16", ("f16", "f32"), help="how keys and values are cached"),
}


@hookimpl
def fastllm_backends() -> list[BackendSpec]:
    """One backend. Below cpu_avx: most OpenCL devices that are found on plain machines are the CPU itself."""
    summary = "any device with an OpenCL 1.2 driver"
    return [BackendSpec("opencl_generic", API_VERSION, OPSET, vendor="fastllm", summary=summary, priority=40, options=OPTIONS)]


@hookimpl
def fastllm_probe(name: str) -> Ready | Unavailable:
    """The devices of all drivers."""
    from .runtime import Missing, device_kind, devices

    try:
        found = devices()
    except Missing as missing:
        return Unavailable(missing.reason, missing.hint)
    return Ready(tuple(
        DeviceInfo(key, d.name.strip(), int(d.global_mem_size), f"{d.platform.name.strip()}, {d.max_compute_units} units", device_kind(d))
        for key, d in found.items()
    ))  # fmt: skip


@hookimpl
def fastllm_open_backend(name: str, device: str, options: Mapping[str, Any]) -> Backend:
    """Opens a device. Raises BackendUnavailable if it is not there any more."""
    from ..gpu.backend import GpuBackend
    from .runtime import ClRuntime, Missing, devices

    try:
        found = devices()
    except Missing as missing:
        raise BackendUnavailable(missing.reason, who=name, fix=missing.hint) from None
    if device not in found:
        raise BackendUnavailable(f"{name} has no device '{device}' any more", who=name, fix=f"devices: {', '.join(found)}")
    values = {key: options.get(key, option.default) for key, option in OPTIONS.items()}
    return GpuBackend(name, ClRuntime(found[device], name), **values)


@hookimpl
def fastllm_environment(name: str) -> dict[str, str]:
    """Platforms and drivers."""
    from .runtime import Missing, devices

    try:
        found = devices()
    except Missing as missing:
        return {"opencl": missing.reason}
    import pyopencl

    known = {"pyopencl": pyopencl.VERSION_TEXT}
    return known | {f"device {k}": f"{d.name.strip()}: {d.platform.version.strip()}, driver {d.driver_version}" for k, d in found.items()}
