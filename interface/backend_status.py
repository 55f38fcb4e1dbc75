"""`fastllm backend status`: what a backend computes itself in a model, what it inherits, what leaves it, and what each costs.

Nothing is believed: an op counts as native only if it is not one of `RefBackend` and downloads nothing while it runs. The model is
run op by op, so a backend that fuses ops in a compiled program is faster than the sum of what is shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .core.backend import Backend
from .core.executor import Executor
from .core.plan import HOST
from .core.step import StepBatch
from .loading import LoadOptions, ModelPlan, plan_model

__all__ = ["BackendStatus", "OpStatus", "backend_status"]

PROMPT = 32  # tokens before the measured ones


@dataclass
class OpStatus:
    """One op of a model. state: native, inherited or fallback. count: nodes of the graph; seconds: median of a decode step, all nodes
    together; share: of the step. impl: implementation's name; device: where it runs; reason: why it left its device."""

    op: str
    state: str
    impl: str
    device: str
    count: int = 0
    seconds: float = 0.0
    share: float = 0.0
    reason: str = ""


@dataclass
class BackendStatus:
    """ops: by falling share of decode time. native, total: ops (not nodes) of this model that are native, and all that it needs.
    ranges: what was asked for, for example {"T": (0, 512), "ctx": (0, 8192)}."""

    backend: str
    model: str
    ops: list[OpStatus]
    native: int
    total: int
    step_s: float
    copy_bytes_per_token: int
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)

    def by_device(self) -> dict[str, float]:
        """Seconds of a step: "native on NAME" first, also if nothing is, then each other state and device."""
        found = {f"native on {self.backend}": 0.0}
        for op in self.ops:
            where = f"{op.state} on {op.device}"
            found[where] = found.get(where, 0.0) + op.seconds
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class _Watch:
    """Seconds and downloads of every node."""

    def __init__(self, backends: dict[str, Backend]):
        self.downloads = 0
        self.seconds: dict[int, list[float]] = {}
        self.downloading: set[int] = set()
        for backend in backends.values():
            self._count_downloads(backend)

    def _count_downloads(self, backend: Backend) -> None:
        download = backend.download

        def counted(*args: Any) -> None:
            self.downloads += 1
            download(*args)

        backend.download = counted  # type: ignore[assignment, method-assign]

    @contextmanager
    def __call__(self, node: int) -> Iterator[None]:
        before, start = self.downloads, time.perf_counter()
        yield
        self.seconds.setdefault(node, []).append(time.perf_counter() - start)
        if self.downloads > before:
            self.downloading.add(node)


def backend_status(name: str, model: str, options: LoadOptions, steps: int = 8) -> BackendStatus:
    """Runs a prompt and `steps` decode steps of a model on a backend, op by op. Raises what `plan_model` raises."""
    planned = plan_model(model, options)
    try:
        watch = _Watch(dict(planned.backends))
        executor = Executor(planned.plan, planned.definition.weights, planned.files.stored, planned.backends, observe=watch)
        try:
            count = min(PROMPT, planned.context - 1)
            executor.run(_batch(planned, 0, count))
            watch.seconds.clear()
            for position in range(count, min(count + steps, planned.context)):
                executor.run(_batch(planned, position, 1))
        finally:
            executor.close()
        return _summary(name, planned, watch)
    finally:
        planned.close()


def _batch(planned: ModelPlan, start: int, count: int) -> StepBatch:
    """`count` tokens of one sequence from position `start`, one row of logits."""
    limits = planned.plan.limits
    positions = np.arange(start, start + count, dtype=np.int32)
    blocks = -(-(start + count) // limits.block_size)
    return StepBatch(
        ids=np.asarray((positions * 7 + 1) % min(planned.definition.vocab_size, 1000), np.int32),
        positions=positions,
        slots=positions,  # block i of the sequence is block i of the cache
        query_start=np.array([0, count], np.int32),
        context_len=np.array([start + count], np.int32),
        block_table=np.arange(blocks, dtype=np.int32)[None],
        sample_rows=np.array([count - 1], np.int32),
        state_slot=np.zeros(1, np.int32),
    )


def _summary(name: str, planned: ModelPlan, watch: _Watch) -> BackendStatus:
    plan = planned.plan
    rows: dict[tuple[str, str, str], OpStatus] = {}
    for decision in plan.decisions:
        if decision.impl == HOST:
            continue
        op = plan.graph.nodes[decision.node].op
        if decision.inherited:
            state = "inherited"
        elif decision.device != name:
            state = "fallback"
        else:
            state = "inherited" if decision.node in watch.downloading else "native"
        row = rows.setdefault((op, state, decision.device), OpStatus(op, state, decision.impl, decision.device, reason=decision.reason))
        row.count += 1
        row.seconds += statistics.median(watch.seconds[decision.node])
    step = sum(row.seconds for row in rows.values())
    for row in rows.values():
        row.share = row.seconds / step if step else 0.0
    ops = {row.op for row in rows.values()}
    native = ops - {row.op for row in rows.values() if row.state != "native"}
    limits = plan.limits
    return BackendStatus(
        name,
        planned.name,
        sorted(rows.values(), key=lambda r: -r.seconds),
        len(native),
        len(ops),
        step,
        plan.copy_bytes_per_token(),
        {"T": (0, limits.max_tokens), "ctx": (0, limits.context)},
    )
