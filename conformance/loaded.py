"""A tiny model on a backend, as a run would load it: files, graph, plan, executor. Used by the model and the serving level."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fastllm.api import (
    Backend,
    Executor,
    Node,
    OpQuery,
    Placement,
    Plan,
    RefBackend,
    StepBatch,
    StepLimits,
    Yes,
    make_plan,
    read_model,
)

from . import tiny
from .bounds import Numerics

__all__ = ["Loaded", "batch_of", "loaded"]

BLOCK = 16
CONTEXT = 128
SNAPSHOTS = 2
"""Of recurrent state, where a model has some."""


class Loaded:
    """plan, executor, and what the oracle needs of the model: graph, weights in f64, declared numerics of each node."""

    def __init__(self, backend: Backend, path: Path, num_blocks: int = 8, max_sequences: int = 4, limits: StepLimits | None = None):
        """limits: of a step, instead of those of a tiny model. Raises what loading raises; closed by `close`."""
        self.backend = backend
        self._stack = ExitStack()
        self._answers: dict[tuple[str, Any], Yes] = {}
        try:
            limits = limits or StepLimits(48, max_sequences, 48, CONTEXT, BLOCK, num_blocks, SNAPSHOTS)
            model = read_model(path, limits.context)
            self._stack.callback(model.close)
            self.definition, self.tensors = model.definition, model.tensors
            ref = RefBackend()
            self._stack.callback(ref.close)
            backends: dict[str, Backend] = {"device": backend, "ref": ref}
            with self._listening():
                self.plan: Plan = make_plan(
                    self.definition.graph, self.definition.weights, self.tensors, backends, Placement.on("device"), limits, fallback="allow"
                )
            self.executor = Executor(self.plan, self.definition.weights, self.tensors, backends)
            self._stack.callback(self.executor.close)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Frees everything but the backend."""
        self._stack.close()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Remembers the last Yes about each (op, shape of the second operand)."""
        backend: Any = self.backend
        honest = backend.supports

        def supports(q: OpQuery) -> Any:
            answer = honest(q)
            if isinstance(answer, Yes):
                self._answers[q.op, q.shapes[1] if len(q.shapes) > 1 else None] = answer
            return answer

        backend.supports = supports
        try:
            yield
        finally:
            del backend.supports

    def numerics(self, node: Node) -> Numerics:
        """What was declared for a node."""
        value = self.plan.graph.values[node.inputs[1]] if len(node.inputs) > 1 and node.inputs[1] is not None else None
        answer = self._answers.get((node.op, None if value is None else value.shape))
        return Numerics(answer.acc, answer.act, answer.weight, answer.prob, answer.angle) if answer is not None else Numerics()

    def weights(self) -> dict[str, np.ndarray]:
        """Every weight of the graph, f64."""
        found = {}
        for value in self.plan.graph.of_kind("weight"):
            host = self._reference(value.name).resolve(self.tensors, value.name, tuple(int(d) for d in value.shape))
            found[value.name] = host.decode().astype(np.float64)
        return found

    def _reference(self, name: str) -> Any:
        """Where a weight of the plan comes from: "stack[3]" is a matrix of a stack, "matrix[:, 1 of 4]" a column, in a plan with ops that became core ops."""
        whole, _, which = name.rpartition("[")
        known = self.definition.weights
        return known[name] if name in known else known[whole].part(which[:-1])

    def leaving(self) -> list[str]:
        """Ops of a decode step that the device does not run itself: on another backend, or inherited from ref."""
        return sorted({self.plan.graph.nodes[d.node].op for d in (*self.plan.fallbacks, *self.plan.inherited)})

    def logits(self, ids: np.ndarray, pieces: list[int], start: int = 0, table: list[int] | None = None) -> np.ndarray:
        """Logits f32 after each of `ids`, the prompt cut in pieces of these lengths."""
        out, at = [], start
        for length in pieces:
            out.append(self.executor.run(batch_of([(ids, at, length)], [table or list(range(len(self._table)))])).logits[:length].copy())
            at += length
        return np.concatenate(out)

    @property
    def _table(self) -> range:
        return range(self.executor.num_blocks)


def batch_of(parts: list[tuple[np.ndarray, int, int]], tables: list[list[int]]) -> StepBatch:
    """A step of several sequences. parts: (ids, first position, count) of each; tables: their blocks. Every row's logits are asked for."""
    i32 = np.int32
    ids = np.concatenate([p[0][p[1] : p[1] + p[2]] for p in parts]).astype(i32)
    positions = np.concatenate([np.arange(p[1], p[1] + p[2]) for p in parts]).astype(i32)
    slots = np.concatenate(
        [np.array([t[p // BLOCK] * BLOCK + p % BLOCK for p in range(at, at + count)], i32) for (_, at, count), t in zip(parts, tables, strict=True)]
    )
    width = max(len(t) for t in tables)
    block_table = np.array([[*t, *[0] * (width - len(t))] for t in tables], i32)
    starts = np.cumsum([0, *(p[2] for p in parts)]).astype(i32)
    lengths = np.array([p[1] + p[2] for p in parts], i32)
    return StepBatch(ids, positions, slots.astype(i32), starts, lengths, block_table, np.arange(len(ids), dtype=i32), None, np.arange(len(parts), dtype=i32))


@contextmanager
def loaded(backend: Backend, name: str, num_blocks: int = 8, max_sequences: int = 4) -> Iterator[Loaded]:
    """A tiny model, saved to a temporary folder and loaded on a backend."""
    with tempfile.TemporaryDirectory(prefix="fastllm-conformance-") as folder:
        kit = Loaded(backend, tiny.save(name, Path(folder) / "model"), num_blocks, max_sequences)
        try:
            yield kit
        finally:
            kit.close()
