"""The bench: runs one op on a backend as the executor would, with guards around everything.

Every buffer has zones of 0xFF before and behind its data (NaN in f32 and f16, −1 in integers), and results are filled with 0xFF
first: a read past an operand turns into NaN, a write past a result or an element that was left out is seen. Inputs must be
unchanged, an op may allocate nothing, and memory must be back as it was. Weights come as the planner would bring them:
packed where the backend gives a layout, else in the narrowest plain form without loss that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastllm.api import (
    CATALOGUE,
    FORMATS,
    Backend,
    HostTensor,
    KVSpec,
    No,
    PackedLayout,
    SlotSpec,
    Stream,
    Tensor,
    Yes,
    plain_bytes,
)

from . import blocks
from .bounds import Numerics
from .case import Failure, NotApplicable
from .operands import NUMPY, Cache, In, Operand, Region, State, Weight, dtype_of, query_for

__all__ = ["Bench", "Ran"]

NARROW = {"f16": ("f16", "f32"), "bf16": ("bf16", "f32"), "mxfp4": ("bf16", "f32")}
POISON = 0xFF


@dataclass
class Ran:
    """What became of an op. outs: downloaded results; native: the backend's own, without downloads."""

    outs: list[np.ndarray]
    yes: Yes
    native: bool
    kept: list[str] = field(default_factory=list)

    @property
    def numerics(self) -> Numerics:
        """As the Yes declares them."""
        y = self.yes
        return Numerics(y.acc, y.act, y.weight, y.prob, y.angle)


@dataclass
class _Held:
    """Weights that stay on the device for several runs. known: (id of a weight, its form) -> the weight, and where it is."""

    stack: ExitStack
    known: dict[tuple[int, str], tuple[Weight, Tensor, Region]] = field(default_factory=dict)


class Bench:
    """Operands and results of one open backend."""

    def __init__(self, backend: Backend):
        """backend: stays the caller's."""
        self.backend = backend
        self.stream: Stream = backend.new_stream()
        self.functions = dict(backend.ops())
        self.zone = max(256, backend.limits.alignment)
        self.last: dict[str, np.ndarray] = {}
        self._held: _Held | None = None

    # memory ---------------------------------------------------------------------------------------------------------

    def region(self, data: np.ndarray, kind: str) -> Region:
        """A guarded buffer that holds these bytes (u8)."""
        align = self.backend.limits.alignment
        whole = np.full(2 * self.zone + -(-max(data.nbytes, 1) // align) * align, POISON, np.uint8)
        whole[self.zone : self.zone + data.nbytes] = data
        buffer = self.backend.alloc(whole.nbytes, kind)
        self.backend.upload(buffer, 0, memoryview(whole), self.stream)
        self.stream.synchronize()
        return Region(buffer, self.zone, data.nbytes, whole)

    def fetch(self, region: Region) -> np.ndarray:
        """The whole buffer, downloaded: u8."""
        whole = np.empty(region.buffer.nbytes, np.uint8)
        self.backend.download(memoryview(whole), region.buffer, 0, self.stream)
        self.stream.synchronize()
        return whole

    def check_zones(self, region: Region, what: str, op: str) -> np.ndarray:
        """The data of a region. Raises Failure("guard") if a zone was written."""
        now = self.fetch(region)
        for name, part, first in (("before", slice(0, region.base), 0), ("behind", slice(region.base + region.nbytes, None), region.base + region.nbytes)):
            changed = np.flatnonzero(now[part] != region.before[part])
            if len(changed):
                at = int(changed[0]) + first - region.base
                raise Failure("guard", f"op '{op}' wrote {name} {what}: {len(changed)} bytes, first at byte {at} of {region.nbytes}")
        return now[region.base : region.base + region.nbytes]

    def cache(self, spec: KVSpec, block_size: int, num_blocks: int) -> Cache:
        """A cache full of 0xFF: what nobody wrote is NaN. The caller closes `region.buffer`."""
        per_block = self.backend.kv_block_bytes(spec, block_size)
        region = self.region(np.full(per_block * num_blocks, POISON, np.uint8), "kv")
        tensor = Tensor(
            region.buffer, region.base, (), "kv", spec=spec, block_size=block_size, num_blocks=num_blocks, block_bytes=per_block
        )
        return Cache(spec, block_size, num_blocks, tensor, region)

    def state(self, spec: SlotSpec, slots: int) -> State:
        """Slots full of 0xFF: whoever does not begin with zeros meets NaN. The caller closes `region.buffer`."""
        nbytes = plain_bytes(spec.shape, spec.dtype)
        region = self.region(np.full(nbytes * slots, POISON, np.uint8), "state")
        tensor = Tensor(region.buffer, region.base, (), "slot", spec=spec, num_blocks=slots, block_bytes=nbytes)
        return State(spec, slots, tensor, region)

    # asking ---------------------------------------------------------------------------------------------------------

    def layout(self, weight: Weight, op: str) -> PackedLayout | None:
        """The packed form that the backend wants for a weight of one op; of a stack: that of each of its matrices, in its own format or
        else the plain one that holds it."""
        forms = [weight.format]
        if len(weight.shape) > 2:
            forms.append(FORMATS[weight.format].lossless)
        layouts = (self.backend.pack_layout(weight.shape[-2:], form, frozenset({op})) for form in forms)
        return next((layout for layout in layouts if layout is not None), None)

    def ask(self, op: str, inputs: Sequence[Operand], attrs: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Yes | No, list[str]]:
        """The backend's answer as the planner would ask, and the form in which each operand is kept."""
        kept = [dtype_of(i) for i in inputs]
        answer: Yes | No = self.backend.supports(query_for(op, inputs, kept, attrs, sizes))
        for index, weight in enumerate(inputs):
            if not isinstance(weight, Weight):
                continue
            layout = None if weight.kept else self.layout(weight, op)
            forms = [layout.format] if layout is not None else [weight.kept] if weight.kept else [*NARROW.get(weight.format, ()), "f32"]
            for form in forms:
                kept[index] = form
                answer = self.backend.supports(query_for(op, inputs, kept, attrs, sizes))
                if isinstance(answer, Yes):
                    break
        if not isinstance(answer, Yes | No):
            raise Failure("honest", f"supports() answered {answer!r:.80} about '{op}', which is neither Yes nor No")
        if isinstance(answer, No) and not answer.reason:
            raise Failure("honest", f"supports() answered No about '{op}' without a reason")
        return answer, kept

    # running --------------------------------------------------------------------------------------------------------

    def run(
        self, op: str, inputs: Sequence[Operand], outs: Sequence[tuple[tuple[int, ...], str]], attrs: Mapping[str, Any] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Ran:  # fmt: skip
        """Runs an op. outs: (shape, dtype) of each result. sizes: largest values of symbols (ctx, S, B …).

        Raises NotApplicable if the backend says No, Failure for a broken guard, and what the op raises.
        """
        spec = CATALOGUE[op]
        full = spec.complete_attrs(attrs or {})
        operands = [*inputs, *[None] * (len(spec.inputs) - len(inputs))]
        self.last = {n.rstrip("?"): o.array if isinstance(o, In) else o.data for n, o in zip(spec.inputs, operands, strict=True) if isinstance(o, In | Weight)}
        answer, kept = self.ask(op, operands, full, sizes or {})
        if isinstance(answer, No):
            raise NotApplicable(f"{self.backend.name} answers No: {answer.reason}")
        function = self.functions.get(answer.impl)
        if function is None:
            raise Failure("honest", f"supports() names '{answer.impl}' for '{op}', which is not in ops()")
        for name, operand, form in zip(spec.inputs, operands, kept, strict=True):
            if self._held is not None and isinstance(operand, Weight) and (id(operand), form) not in self._held.known:
                self._held.known[id(operand), form] = (operand, *self._weight(self._held.stack, name.rstrip("?"), operand, form, op))
        used = self.backend.memory().used
        with ExitStack() as stack:
            regions: list[tuple[Region, str, bool]] = []  # (region, what, may change)
            tensors: list[Tensor | None] = []
            for name, operand, form in zip(spec.inputs, operands, kept, strict=True):
                tensors.append(self._place(stack, regions, name.rstrip("?"), operand, form, op))
            results, places = [], []
            for index, (shape, dtype) in enumerate(outs):
                nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(NUMPY[dtype]).itemsize
                region = self._keep(stack, np.full(nbytes, POISON, np.uint8), "scratch")
                regions.append((region, f"result {index}", True))
                places.append(region)
                results.append(Tensor(region.buffer, region.base, shape, dtype))
            workspace = None
            if answer.workspace:
                region = self._keep(stack, np.full(answer.workspace, POISON, np.uint8), "scratch")
                regions.append((region, "the workspace", True))
                workspace = Tensor(region.buffer, region.base, (answer.workspace,), "i8")
            with self.watch() as seen:
                out: Any = results[0] if len(results) == 1 else tuple(results)
                function(*tensors, out=out, stream=self.stream, ws=workspace, **full)
                self.stream.synchronize()
            if seen["alloc"]:
                raise Failure("guard", f"op '{op}' allocated {seen['alloc']} buffers; an op allocates nothing")
            for region, what, may_change in regions:
                data = self.check_zones(region, what, op)
                if not may_change and not np.array_equal(data, region.before[region.base : region.base + region.nbytes]):
                    raise Failure("guard", f"op '{op}' changed its input {what}")
            arrays = [
                self.fetch(region)[region.base : region.base + region.nbytes].view(NUMPY[dtype]).reshape(shape).copy()
                for region, (shape, dtype) in zip(places, outs, strict=True)
            ]
        self.last |= {f"result{i}": a for i, a in enumerate(arrays)}
        self._check_left(op, used)
        inherited = answer.impl.startswith("ref.") and self.backend.name != "ref"
        return Ran(arrays, answer, not inherited and not seen["download"], kept)

    def _check_left(self, op: str, used: int) -> None:
        if self.backend.memory().used != used:
            raise Failure("leak", f"op '{op}' left {self.backend.memory().used - used:,} bytes allocated")

    def _keep(self, stack: ExitStack, data: np.ndarray, kind: str) -> Region:
        region = self.region(data, kind)
        stack.callback(region.buffer.close)
        return region

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Weights are placed once, and stay on the device until this ends: for a case that runs an op on them many times, as an engine does."""
        with ExitStack() as stack:
            self._held = _Held(stack)
            try:
                yield
            finally:
                self._held = None

    def hold(self, stack: ExitStack, name: str, operand: Operand, form: str, op: str) -> Tensor | None:
        """An operand on the device until `stack` is closed, kept as `ask` said: for measurements, which look at no guard."""
        return self._place(stack, [], name, operand, form, op)

    def _place(self, stack: ExitStack, regions: list[Any], name: str, operand: Operand, form: str, op: str) -> Tensor | None:
        if operand is None:
            return None
        if isinstance(operand, Cache | State):
            assert operand.tensor is not None
            return operand.tensor
        if isinstance(operand, Weight):
            tensor, region = self._held.known[id(operand), form][1:] if self._held is not None else self._weight(stack, name, operand, form, op)
            regions.append((region, f"'{name}'", False))
            return tensor
        array = np.ascontiguousarray(operand.array, NUMPY[operand.dtype])
        shape, size = array.shape, array.itemsize
        data = array.reshape(shape[0], -1).view(np.uint8) if array.size else np.zeros((shape[0], 0), np.uint8)
        if operand.inner and array.size:  # [T, H, D] -> [T, H * (D + inner)]
            heads = np.full((*shape[:-1], (shape[-1] + operand.inner) * size), POISON, np.uint8)
            heads[..., : shape[-1] * size] = data.reshape(*shape[:-1], -1)
            data = heads.reshape(shape[0], -1)
        width = int(np.prod(shape[1:-1], dtype=np.int64)) * (shape[-1] + operand.inner) if len(shape) > 1 else 1
        row = width + operand.gap
        wide = np.full((shape[0] * row + operand.start) * size, POISON, np.uint8)
        if array.size:
            window = wide[operand.start * size :].reshape(shape[0], row * size)
            window[:, : width * size] = data
        region = self._keep(stack, wide, "scratch")
        regions.append((region, f"'{name}'", False))
        return Tensor(region.buffer, region.base + operand.start * size, shape, operand.dtype, operand.strides)

    def _weight(self, stack: ExitStack, name: str, weight: Weight, form: str, op: str) -> tuple[Tensor, Region]:
        """A weight on the device until `stack` is closed: packed if the backend has a layout for it, else plain in `form`."""
        layout = self.layout(weight, op) if not weight.kept else None
        if layout is not None and len(weight.shape) > 2:
            return self._stack(stack, name, weight, layout, op)
        if layout is None:
            values = weight.data if form == weight.format else blocks.encode_plain(form, weight.decode().astype(np.float32))
            region = self._keep(stack, values, "weights")
            return Tensor(region.buffer, region.base, weight.shape, form), region
        region = self._keep(stack, np.zeros(layout.nbytes, np.uint8), "weights")
        host = HostTensor(name, weight.shape, weight.format, np.ascontiguousarray(weight.data))
        self.backend.pack_weight(host, layout, region.buffer, region.base)
        region.before[region.base : region.base + region.nbytes] = self.check_zones(region, f"'{name}' (packing)", op)
        return Tensor(region.buffer, region.base, weight.shape, weight.format, packed=layout), region

    def _stack(self, stack: ExitStack, name: str, weight: Weight, layout: PackedLayout, op: str) -> tuple[Tensor, Region]:
        """A stack, packed matrix by matrix, each at the backend's alignment (as the loader does it)."""
        align, count = self.backend.limits.alignment, weight.shape[0]
        step = -(-layout.nbytes // align) * align
        region = self._keep(stack, np.zeros(count * step, np.uint8), "weights")
        whole = weight.data if layout.format == weight.format else blocks.encode_plain(layout.format, weight.decode().astype(np.float32))
        for index, data in enumerate(np.ascontiguousarray(whole).reshape(count, -1)):
            host = HostTensor(f"{name}.{index}", weight.shape[1:], layout.format, np.ascontiguousarray(data))
            self.backend.pack_weight(host, layout, region.buffer, region.base + index * step)
        region.before[region.base : region.base + region.nbytes] = self.check_zones(region, f"'{name}' (packing)", op)
        return Tensor(region.buffer, region.base, weight.shape, layout.format, packed=layout), region

    @contextmanager
    def watch(self) -> Iterator[dict[str, int]]:
        """Counts allocations and downloads while an op runs."""
        seen = {"alloc": 0, "download": 0}
        backend: Any = self.backend
        originals = {name: getattr(backend, name) for name in seen}

        def counted(name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                seen[name] += 1
                return originals[name](*args, **kwargs)

            return call

        for name in seen:
            setattr(backend, name, counted(name))
        try:
            yield seen
        finally:
            for name in seen:
                delattr(backend, name)
