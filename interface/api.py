"""All that a backend author may import: the operator interface, the catalogue, errors and the numpy backend to inherit.

`fastllm.api` is versioned (`API_VERSION`, `OPSET`). Nothing else of fastllm is promised to stay. `RefBackend` is loaded when it
is first used, so that importing the api loads no backend.
"""

from __future__ import annotations

from importlib import import_module
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
from .core.graph import KV_DTYPES, Graph, GraphBuilder, KVSpec, Node, SlotSpec, Value, View
from .core.operands import OPERAND_TYPES, check_cache, checked_strides, contiguous, refuse_operands, refuse_query
from .core.ops import ACTIVATIONS, CATALOGUE, CORE_OPS, MASKS, OPSET, PRIMITIVE_OPS, OpSpec
from .core.quant import FORMATS, QuantFormat
from .core.weights import HostTensor

if TYPE_CHECKING:
    from .backends.ref.backend import RefBackend as RefBackend
    from .conformance.case import Requirements as Requirements
    from .core.engine import Engine as Engine
    from .core.executor import Executor as Executor
    from .core.placement import Placement as Placement
    from .core.plan import Plan as Plan
    from .core.plan import StepLimits as StepLimits
    from .core.planner import make_plan as make_plan
    from .core.request import Request as Request
    from .core.sampling import SamplingParams as SamplingParams
    from .core.step import StepBatch as StepBatch
    from .host import ModelInput as ModelInput
    from .host import PluginFacts as PluginFacts
    from .host import host_sample as host_sample
    from .host import open_backend as open_backend
    from .host import plugin_cases as plugin_cases
    from .host import plugin_facts as plugin_facts
    from .host import read_model as read_model

hookimpl = pluggy.HookimplMarker("fastllm")
"""Marks the hook functions of a plug-in module (`fastllm_backends`, `fastllm_probe`, `fastllm_open_backend`, …)."""

__all__ = [
    "ACTIVATIONS",
    "API_VERSION",
    "CATALOGUE",
    "CORE_OPS",
    "FORMATS",
    "KV_DTYPES",
    "MASKS",
    "OPERAND_TYPES",
    "OPSET",
    "PRIMITIVE_OPS",
    "Backend",
    "BackendSpec",
    "BackendUnavailable",
    "Buffer",
    "CompileEnv",
    "DeviceInfo",
    "DeviceLost",
    "Engine",
    "EngineError",
    "Event",
    "Executor",
    "FastLLMError",
    "Graph",
    "GraphBuilder",
    "HostTensor",
    "KVSpec",
    "Limits",
    "MemoryInfo",
    "ModelInput",
    "No",
    "Node",
    "OpFn",
    "OpQuery",
    "OpSpec",
    "Option",
    "OutOfMemory",
    "PackedLayout",
    "Placement",
    "Plan",
    "PluginFacts",
    "Program",
    "QuantFormat",
    "Ready",
    "RefBackend",
    "Request",
    "Requirements",
    "SamplingParams",
    "ShapeError",
    "SlotSpec",
    "StepBatch",
    "StepDims",
    "StepLimits",
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
    "check_cache",
    "checked_strides",
    "contiguous",
    "cpu_quota",
    "hookimpl",
    "host_sample",
    "make_plan",
    "memory_limit",
    "open_backend",
    "plain_bytes",
    "plugin_cases",
    "plugin_facts",
    "read_model",
    "refuse_operands",
    "refuse_query",
]


_LAZY = {
    "RefBackend": "backends.ref.backend",
    "Engine": "core.engine",
    "Executor": "core.executor",
    "Placement": "core.placement",
    "Plan": "core.plan",
    "StepLimits": "core.plan",
    "make_plan": "core.planner",
    "Request": "core.request",
    "SamplingParams": "core.sampling",
    "StepBatch": "core.step",
    "Requirements": "conformance.case",
    "ModelInput": "host",
    "PluginFacts": "host",
    "host_sample": "host",
    "open_backend": "host",
    "plugin_cases": "host",
    "plugin_facts": "host",
    "read_model": "host",
}
"""Name -> module below fastllm that has it: loaded when first used, so that importing the api loads no backend and no engine."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"fastllm.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'fastllm.api' has no attribute '{name}'")
