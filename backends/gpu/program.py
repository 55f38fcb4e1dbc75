"""DeviceProgram: launches with their arguments set once; a step enqueues them one after the other and waits for nothing.

The arguments that depend on a step (its numbers of tokens, sequences and rows) are set again only when they change, so a decode step
costs one call of the driver for each kernel. The list of what to enqueue is kept for each size of step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastllm.api import Buffer, EngineError, Node, StepDims

from .lower import Extent, Launch
from .operands import F32, I32, I64, Absent, Pointer
from .runtime import Runtime

__all__ = ["DeviceProgram", "scalars"]

KEPT = 64
"""Lists of launches that are kept, one for each size of step."""


class DeviceProgram:
    """A compiled segment. owned: buffers that it needs and closes; used: is called when work was enqueued."""

    def __init__(
        self, runtime: Runtime, launches: Sequence[Launch], largest: StepDims, nothing: Any, owned: Sequence[Buffer],
        nodes: Sequence[Node], used: Callable[[], None],
    ):  # fmt: skip
        self._runtime, self._launches, self._largest, self._owned, self._used = runtime, launches, largest, list(owned), used
        self._ops = [n.op for n in nodes]
        self._bound: list[Any] = []
        self._symbols: list[list[tuple[int, str]]] = []  # of each launch: (argument, symbol)
        for launch in launches:
            values, symbols = scalars(launch, nothing)
            self._bound.append(runtime.bind(launch.key, values))
            self._symbols.append(symbols)
        self._dims: StepDims | None = None
        self._lists: dict[StepDims, list[tuple[Any, tuple[int, ...], int]]] = {}
        self._closed = False

    @property
    def kernels(self) -> int:
        """Launches of a step, at most."""
        return len(self._launches)

    def run(self, dims: StepDims) -> None:
        """Enqueues one step. Raises EngineError for one that is larger than the program was compiled for."""
        if self._closed:
            raise ValueError("the program is used after it was closed")
        if dims != self._dims:
            self._resize(dims)
        launch = self._runtime.launch
        for bound, groups, lanes in self._lists[dims]:
            launch(bound, groups, lanes)
        self._used()

    def _resize(self, dims: StepDims) -> None:
        most = self._largest
        if not (0 <= dims.T <= most.T and 0 <= dims.S <= most.S and 0 <= dims.R <= most.R):
            raise EngineError(f"a step of {dims} is larger than the program was compiled for: {most}")
        for bound, symbols in zip(self._bound, self._symbols, strict=True):
            for index, symbol in symbols:
                self._runtime.set_arg(bound, index, np.int32(dims.resolve(symbol)))
        if dims not in self._lists:
            if len(self._lists) >= KEPT:
                self._lists.clear()
            self._lists[dims] = self._list(dims)
        self._dims = dims

    def _list(self, dims: StepDims) -> list[tuple[Any, tuple[int, ...], int]]:
        todo = []
        for launch, bound in zip(self._launches, self._bound, strict=True):
            if launch.only is not None:
                rows = dims.resolve(launch.only[0])
                if not launch.only[1] <= rows <= launch.only[2]:
                    continue
            groups = tuple(_count(e, dims) for e in launch.groups)
            if 0 not in groups:
                todo.append((bound, groups, launch.lanes))
        return todo

    def close(self) -> None:
        """Frees what the program owns; may be called twice."""
        if not self._closed:
            self._closed = True
            self._bound.clear()
            self._lists.clear()
            for buffer in self._owned:
                buffer.close()


def scalars(launch: Launch, nothing: Any) -> tuple[list[Any], list[tuple[int, str]]]:
    """Arguments as handles and numpy scalars (0 for a symbol), and which of them are symbols. nothing: handle for absent operands."""
    values: list[Any] = []
    symbols: list[tuple[int, str]] = []
    for arg in launch.args:
        match arg:
            case Pointer(handle, offset):
                values += [handle, np.uint64(offset)]
            case Absent():
                values += [nothing, np.uint64(0)]
            case I32(value):
                if isinstance(value, str):
                    symbols.append((len(values), value))
                    value = 0
                values.append(np.int32(value))
            case I64(value):
                values.append(np.int64(value))
            case F32(value):
                values.append(np.float32(value))
    return values, symbols


def _count(extent: Extent, dims: StepDims) -> int:
    return -(-dims.resolve(extent.size) // extent.per) * extent.times
