"""All that a backend author may import: the operator interface, the catalogue, errors and the numpy backend to inherit.

`fastllm.api` is versioned (`API_VERSION`, `OPSET`). Nothing else of fastllm is promised to stay. `RefBackend` is loaded when it
is first used, so that importing the api loads no backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from .core.backend import (
    API_VERSION,
    Backend,
    BackendSpec,
    Buffer,
    CompileEnv,
    DeviceInfo,
    Event,
    Limits,
    MemoryInfo,
    No,
    OpFn,
    OpQuery,
    Option,
    PackedLayout,
    Program,
    Ready,
    StepDims,
    Stream,
    Tensor,
    Unavailable,
    Yes,
    check_alloc,
    plain_bytes,
)
from .core.cgroup import available_memory, cpu_quota, memory_limit
from .core.errors import (
    BackendUnavailable,
    DeviceLost,
    EngineError,
    FastLLMError,
    OutOfMemory,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from .core.graph import Graph, GraphBuilder, KVSpec, Node, SlotSpec, Value, View
from .core.ops import CATALOGUE, CORE_OPS, OPSET, PRIMITIVE_OPS, OpSpec
from .core.quant import FORMATS, QuantFormat
from .core.weights import HostTensor

if TYPE_CHECKING:
    from .backends.ref.backend import RefBackend as RefBackend

hookimpl = pluggy.HookimplMarker("fastllm")
"""Marks the hook functions of a plug-in module (`fastllm_backends`, `fastllm_probe`, `fastllm_open_backend`, …)."""

__all__ = [
    "API_VERSION",
    "CATALOGUE",
    "CORE_OPS",
    "FORMATS",
    "OPSET",
    "PRIMITIVE_OPS",
    "Backend",
    "BackendSpec",
    "BackendUnavailable",
    "Buffer",
    "CompileEnv",
    "DeviceInfo",
    "DeviceLost",
    "EngineError",
    "Event",
    "FastLLMError",
    "Graph",
    "GraphBuilder",
    "HostTensor",
    "KVSpec",
    "Limits",
    "MemoryInfo",
    "No",
    "Node",
    "OpFn",
    "OpQuery",
    "OpSpec",
    "Option",
    "OutOfMemory",
    "PackedLayout",
    "Program",
    "QuantFormat",
    "Ready",
    "RefBackend",
    "ShapeError",
    "SlotSpec",
    "StepDims",
    "Stream",
    "Tensor",
    "Unavailable",
    "UnsupportedError",
    "UsageError",
    "Value",
    "View",
    "Yes",
    "available_memory",
    "check_alloc",
    "cpu_quota",
    "hookimpl",
    "memory_limit",
    "plain_bytes",
]


def __getattr__(name: str) -> Any:
    if name == "RefBackend":
        from .backends.ref.backend import RefBackend

        return RefBackend
    raise AttributeError(f"module 'fastllm.api' has no attribute '{name}'")
