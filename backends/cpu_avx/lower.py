"""Lowering: nodes of a graph → the flat instruction array that `native/program.c` runs.

Addresses are fixed by the plan, so an instruction holds pointers and integers only. Four things are decided here:

- **Sharing.** The rows that a linear layer wants (rounded to int8, `PREPARE`) are made once for all layers that read the same value, and
  the cosines of a step once for all rope nodes with the same frequencies.
- **Fusion.** Neighbours become one instruction where nobody else reads what is between them: a norm and the rounding behind it, a linear
  layer and the addition of its residual, the linear layers of gate and up with their activation, and the rounding for the next layer.
  The bits are those of the single ops.
- **Barriers.** A thread owns rows (norms, additions, rope, cache writes) or columns (a linear layer and the activation behind it). An
  instruction waits for the others only if it touches memory that another thread may have written, or may still read, since
  the last barrier: `Access` says what an instruction touches and by whom. Steps of one row need fewer: each thread prepares such a row
  for itself, so barriers are worked out twice, for steps of several rows and for steps of one.
- **Checks.** Every array of indices that the step brings becomes a check that runs before the first instruction.

`backend.py` calls `lower` for a compiled segment and for every op that is run alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastllm.api import FORMATS, KVSpec, Node, ShapeError, StepDims, UnsupportedError, check_cache, contiguous

from . import _native, recurrent
from .kept import MAX_HEAD, Kept
from .operands import (
    Access,
    Source,
    View,
    access,
    address_of,
    cache_access,
    matrix,
    packed_stack,
    packed_weight,
    vector,
)

__all__ = ["Lowered", "lower"]

OPCODES: Final = {
    name: number
    for number, name in enumerate(
        ("embed", "embed_packed", "rms_norm", "layer_norm", "rope_table", "rope", "kv_write", "attention", "prepare", "linear",
         "act_mul", "add", "mul", "softmax", "softcap", "matmul", "quantize", "dequantize", "route_topk", "moe", "concat",
         "short_conv", "delta_rule")
    )
}  # fmt: skip
"""As in program.h."""
ACTS: Final = ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu", "swiglu_oai")
MASKS: Final = ("causal", "full", "prefix", "chunk")
SCORES: Final = ("softmax", "sigmoid", "softmax_of_chosen")
FULL, COLUMNS, ONE, ROWS = range(4)
INDEX, SLOT, PAGES = range(3)

KEY_RANGE: Final = 256
"""Keys of one range of the attention kernel (FL_RANGE)."""
PARTIAL_ROWS: Final = 8
"""Most rows of a step whose attention is cut into key ranges (FL_PARTIAL_ROWS)."""
PARTIAL_BYTES: Final = 16 << 20
"""For what such ranges give. If a step has more of them they are done some at a time."""


@dataclass(frozen=True)
class Norm:
    """An rms_norm that is fused with the layers that read it."""

    x: Source
    weight: Source | None
    eps: float
    readers: int


@dataclass
class Prepared:
    """A buffer of prepared rows. key: kind, width, symbol of the rows; address, size: shared by all threads; private, stride: one row
    for each thread, 0 if there is none; held: the rows that it holds now, None if nothing; alone: steps of one row have them in the
    private part; readers: layers that are still to read rows that exist nowhere else."""

    key: tuple[int, int, int | str]
    address: int
    size: int
    private: int
    stride: int
    held: Access | None = None
    alone: bool = False
    readers: int = 0

    def whole(self, write: bool) -> Access:
        """All of the shared part, by any thread."""
        return Access(self.address, self.address + self.size, write)


@dataclass
class Lowered:
    """What `_native.Program` takes. code and checks: tuples; scratch_bytes: per thread; owned: memory that the program needs."""

    code: list[tuple[Any, ...]] = field(default_factory=list)
    checks: list[tuple[Any, ...]] = field(default_factory=list)
    scratch_bytes: int = 64
    owned: list[_native.Memory] = field(default_factory=list)


def lower(
    nodes: Sequence[Node],
    source: Callable[[str], Source],
    largest: StepDims,
    *,
    exact: bool,
    bf16: bool,
    kept: Kept,
    threads: int,
    uses: Mapping[str, int] | None = None,
) -> Lowered:
    """Instructions for `nodes`. source: value name -> operand; exact: f32 activations for quantised weights; bf16: else
    bf16 activations for bf16 weights; uses: how often each value is
    read in the whole graph, its views and the graph's outputs counted (a value that is not named is not fused away). Raises
    ShapeError for operands that no kernel takes (strides, sizes), UnsupportedError for an op there is none for."""
    lowering = _Lowering(nodes, source, largest, exact, bf16, kept, threads, uses or {})
    index = 0
    while index < len(nodes):
        index += lowering.add(index)
    return lowering.result


class _Lowering:
    def __init__(
        self,
        nodes: Sequence[Node],
        source: Callable[[str], Source],
        largest: StepDims,
        exact: bool,
        bf16: bool,
        kept: Kept,
        threads: int,
        uses: Mapping[str, int],
    ):
        self.nodes, self.source, self.largest, self.uses = nodes, source, largest, uses
        self.exact, self.bf16, self.kept, self.threads = exact, bf16, kept, threads
        self.result = Lowered()
        self.pending: tuple[list[Access], list[Access]] = (
            [],
            [],
        )  # since the last barrier, in steps of several rows and of one
        self.prepared: list[Prepared] = []
        self.tables: dict[tuple[Any, ...], tuple[View, Access]] = {}
        self.spaces_of: dict[tuple[Any, int], int] = {}
        self.seen: set[tuple[Any, ...]] = set()
        self.node = 0

    def add(self, index: int) -> int:
        """Appends the instructions of one node, or of several that are fused; returns how many."""
        node = self.nodes[index]
        handler = getattr(self, f"_op_{node.op}", None)
        if handler is None:
            raise UnsupportedError(f"cpu_avx has no kernel for op '{node.op}'")
        self.node = index
        fused = self._fuse(index)
        if fused:
            return fused
        inputs = [None if n is None else self.source(n) for n in node.inputs]
        outputs = [self.source(n) for n in node.outputs]
        handler(inputs, outputs, node.attrs)
        return 1

    # instructions -----------------------------------------------------------------------------------------------------

    def emit(
        self,
        name: str,
        operands: Sequence[View | None],
        accesses: Sequence[Access],
        *,
        alone: Sequence[Access] | None = None,
        weights: Sequence[tuple[int, ...]] = (),
        acts: Sequence[tuple[int, ...]] = (),
        cache: tuple[int, ...] | None = None,
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
    ) -> None:
        """One instruction, with a barrier before it where its accesses ask for one. alone: its accesses in steps of one row, if others."""
        barrier = 0
        single = [a.of_one_row() for a in (accesses if alone is None else alone)]
        for bit, pending, touched in zip((1, 2), self.pending, (accesses, single), strict=True):
            if any(a.conflicts(p) for a in touched for p in pending):
                barrier |= bit
                pending.clear()
            pending.extend(touched)
        self.forget(accesses)
        entry = (
            OPCODES[name],
            barrier,
            self.node,
            tuple(operands),
            tuple(weights),
            tuple(acts),
            cache,
            tuple(ints),
            tuple(floats),
        )
        self.result.code.append(entry)

    def forget(self, accesses: Sequence[Access]) -> None:
        """Prepared rows whose source is written are no longer its rows."""
        for buffer in self.prepared:
            held = buffer.held
            if held is not None and any(a.write and a.low < held.high and held.low < a.high for a in accesses):
                assert not buffer.readers, "rows that were fused away are lost before they are read"
                buffer.held = None

    def allocate(self, nbytes: int) -> int:
        """Memory of the program's own."""
        memory = _native.Memory(nbytes)
        self.result.owned.append(memory)
        return memory.address

    def shared(self, key: Any, nbytes: int) -> int:
        """Memory that all nodes of this kind and size use in turn."""
        if (key, nbytes) not in self.spaces_of:
            self.spaces_of[(key, nbytes)] = self.allocate(nbytes)
        return self.spaces_of[(key, nbytes)]

    def check(self, kind: int, *key: int) -> None:
        """An index check, once for all nodes that ask for the same one."""
        if (kind, *key) not in self.seen:
            self.seen.add((kind, *key))
            self.result.checks.append((kind, self.node, *key))

    def check_index(self, kind: int, s: Source, limit: int, limit_symbol: int = 0) -> None:
        """Elements of a vector in 0…limit − 1 (slots: may be negative)."""
        v = vector(s, "i32")
        self.check(kind, v[0], v[1], v[2], limit_symbol, limit, 0, 0, 0, 0, 0)

    def check_starts(self, address: int) -> None:
        """query_start [S + 1] at this address divides the tokens of the step."""
        self.check(PAGES, address, *[0] * 9)

    def rows(self, s: Source, write: bool) -> Access:
        """s, shared by rows."""
        v = matrix(s, (s.tensor.dtype,))
        return access(s, write, ("rows", s.shape[0]), v[3] * FORMATS[s.tensor.dtype].block_bytes)

    def spaces(self, symbol: int | str) -> int:
        """The most rows that a leading dimension stands for."""
        return self.largest.resolve(symbol)

    # ops --------------------------------------------------------------------------------------------------------------

    def _op_embed(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        ids, table, out = inputs[0], inputs[1], outputs[0]
        accesses = [access(ids, False), access(table, False), self.rows(out, True)]
        if table.tensor.packed is not None:
            weight = packed_weight(table)
            self.check_index(INDEX, ids, weight[1])
            self.emit("embed_packed", [vector(ids, "i32"), None, matrix(out)], accesses, weights=[weight])
            return
        t = matrix(table, ("f32", "f16", "bf16"))
        self.check_index(INDEX, ids, t[2], t[1])
        self.emit("embed", [vector(ids, "i32"), t, matrix(out)], accesses)

    def _op_linear(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        x, w, bias, out = *inputs, outputs[0]
        if w.tensor.packed is None:
            self._plain_linear(x, w, bias, out)
        else:
            self._linear(x, [packed_weight(w)], [bias], out)

    def _linear(
        self,
        x: Source,
        weights: Sequence[tuple[int, int, int, int]],
        biases: Sequence[Source | None],
        out: Source,
        *,
        add: Source | None = None,
        act: int = -1,
        codes: bool = False,
        reads: int = 1,
    ) -> None:
        """x times the weight (and the one of up), with its epilogue: see fl_target in linear.h. codes: prepared at once, not written;
        reads: how many layers of the graph this is."""
        layout, count, width, _ = weights[0]
        kind = _native.prepare_kind(layout, self.exact, self.bf16)
        acts = self._prepare(x, kind, width)
        acts.readers = max(0, acts.readers - reads)
        self.result.scratch_bytes = max(self.result.scratch_bytes, _native.linear_scratch())
        y, target = matrix(out), None
        accesses = [access(b, False) for b in biases if b is not None]
        if add is not None:
            accesses.append(access(add, False, ("columns", count), matrix(add)[3] * 4))
        if codes:
            target = self._buffer((kind, count, out.shape[0]), acts)
            accesses.append(target.whole(True))
        else:
            accesses.append(access(out, True, ("columns", count), y[3] * 4))
        b = [None if bias is None else vector(bias, "f32") for bias in (*biases, None)][:2]
        self.emit(
            "linear",
            [b[0], y, b[1], None if add is None else matrix(add)],
            [acts.whole(False), *accesses],
            alone=accesses if acts.alone else None,
            weights=weights,
            acts=[(kind, width, acts.address)] + ([] if target is None else [(kind, count, target.address)]),
            ints=(act, acts.private if acts.alone else 0, acts.stride),
        )
        if target is not None:
            self._holds(target, self.rows(out, False), alone=False, readers=1)

    def _buffer(self, key: tuple[int, int, int | str], busy: Prepared | None = None) -> Prepared:
        """Memory for prepared rows, whose contents nobody needs any more; not `busy`."""
        for buffer in self.prepared:
            if buffer.key == key and not buffer.readers and buffer is not busy:
                return buffer
        kind, width, symbol = key
        size = max(1, _native.prepared_bytes(kind, max(1, self.spaces(symbol)), width))
        stride = (_native.prepared_bytes(kind, 1, width) + 127) // 64 * 64 if symbol in ("T", "R") else 0
        private = self.allocate(stride * self.threads) if stride else 0
        self.prepared.append(Prepared(key, self.allocate(size), size, private, stride))
        return self.prepared[-1]

    def _holds(self, buffer: Prepared, rows: Access, *, alone: bool, readers: int) -> None:
        """buffer now holds these rows, and no other does."""
        for other in self.prepared:
            if other.held is not None and other.held.low < rows.high and rows.low < other.held.high:
                other.held = None
        buffer.held, buffer.alone, buffer.readers = rows, alone, readers

    def _prepare(self, x: Source, kind: int, width: int, norm: Norm | None = None) -> Prepared:
        """The prepared form of x: made now, unless a buffer holds it. norm: x is what this norm makes of its operand."""
        want, key = self.rows(x, False), (kind, width, x.shape[0])
        for buffer in self.prepared:
            if buffer.key == key and buffer.held == want and norm is None:
                return buffer
        buffer = self._buffer(key)
        operand = x if norm is None else norm.x
        reads = [] if norm is None or norm.weight is None else [access(norm.weight, False)]
        mine = Access(buffer.address, buffer.address + buffer.size, True, ("rows", x.shape[0]), buffer.address, 0)
        self.emit(
            "prepare",
            [matrix(operand), None if norm is None or norm.weight is None else vector(norm.weight, "f32")],
            [*reads, self.rows(operand, False), mine],
            alone=[*reads, access(operand, False)] if buffer.private else None,
            acts=[(kind, width, buffer.address)],
            ints=(int(norm is not None), buffer.private, buffer.stride),
            floats=(0.0 if norm is None else norm.eps,),
        )
        self._holds(buffer, want, alone=buffer.private != 0, readers=0 if norm is None else norm.readers)
        return buffer

    # fusion -----------------------------------------------------------------------------------------------------------

    def _fuse(self, index: int) -> int:
        """Emits the nodes from `index` on that make one instruction; returns how many, 0 if there is nothing to fuse."""
        node = self.nodes[index]
        if node.op == "rms_norm":
            return self._fuse_norm(node)
        if node.op == "linear" and self._is_packed(node):
            return self._fuse_gated(index) or self._fuse_residual(index)
        return 0

    def _is_packed(self, node: Node) -> bool:
        return node.op == "linear" and self.source(str(node.inputs[1])).tensor.packed is not None

    def _passed_on(self, node: Node, reads: int = 1) -> bool:
        """True if what the node makes is read so often in all, and may be fused away."""
        return self.uses.get(node.outputs[0]) == reads

    def _kind(self, node: Node) -> tuple[int, int]:
        """(kind, width) of the rows that a packed linear layer reads."""
        weight = packed_weight(self.source(str(node.inputs[1])))
        return _native.prepare_kind(weight[0], self.exact, self.bf16), weight[2]

    def _fuse_norm(self, node: Node) -> int:
        """A norm whose rows only packed linear layers of one kind read: straight to their prepared rows."""
        readers = [n for n in self.nodes if node.outputs[0] in n.inputs]
        if (
            not readers
            or not self._passed_on(node, len(readers))
            or not all(self._is_packed(n) and n.inputs[0] == node.outputs[0] for n in readers)
        ):
            return 0
        kinds = {self._kind(n) for n in readers}
        x, out = self.source(str(node.inputs[0])), self.source(node.outputs[0])
        if len(kinds) > 1 or len(x.shape) != 2:
            return 0
        kind, width = kinds.pop()
        weight = node.inputs[1]
        self.result.scratch_bytes = max(self.result.scratch_bytes, 4 * width + 64)
        norm = Norm(x, None if weight is None else self.source(weight), node.attrs["eps"], len(readers))
        self._prepare(out, kind, width, norm)
        return 1

    def _fuse_residual(self, index: int) -> int:
        """A linear layer and the addition of a value of the same shape behind it."""
        node, after = self.nodes[index], self._after(index, 1, "add")
        if after is None or node.outputs[0] not in after.inputs or not self._passed_on(node):
            return 0
        other = self.source(str(after.inputs[1 - after.inputs.index(node.outputs[0])]))
        x, w, bias = (None if n is None else self.source(n) for n in node.inputs)
        out = self.source(after.outputs[0])
        if x is None or w is None or other.shape != out.shape or len(out.shape) != 2:
            return 0
        self._linear(x, [packed_weight(w)], [bias], out, add=other)
        return 2

    def _fuse_gated(self, index: int) -> int:
        """The linear layers of gate and up and their activation; or one linear layer, whole or in two halves, and its activation."""
        first, after = self.nodes[index], self._after(index, 1, "act_mul")
        x = self.source(str(first.inputs[0]))
        w, bias = (None if n is None else self.source(n) for n in first.inputs[1:])
        weights, biases = [packed_weight(w)] if w is not None else [], [bias]
        if after is not None and after.inputs == (first.outputs[0], None) and self._passed_on(first):
            count = 2
        elif after is not None and self._halves(first, after):
            layout, rows, width, address = weights[0]
            half = rows // 2
            weights = [
                (layout, half, width, address),
                (layout, half, width, address + _native.packed_bytes(_native.layout_name(layout), half, width)),
            ]
            biases, count = [None, None], 2
        else:
            second, after = self._after(index, 1, "linear"), self._after(index, 2, "act_mul")
            if second is None or after is None or not self._is_packed(second) or second.inputs[0] != first.inputs[0]:
                return 0
            if after.inputs not in ((first.outputs[0], second.outputs[0]), (second.outputs[0], first.outputs[0])):
                return 0
            if not (self._passed_on(first) and self._passed_on(second)) or self._kind(first) != self._kind(second):
                return 0
            weights.append(packed_weight(self.source(str(second.inputs[1]))))
            biases.append(None if second.inputs[2] is None else self.source(second.inputs[2]))
            if after.inputs[0] == second.outputs[0]:
                weights, biases = weights[::-1], biases[::-1]
            count = 3
        codes, kind = self._rounds(after, self._kind(first)[0]), ACTS.index(after.attrs["kind"])
        self._linear(x, weights, biases, self.source(after.outputs[0]), act=kind, codes=codes, reads=count - 1)
        return count

    def _halves(self, node: Node, act: Node) -> bool:
        """True if `act` reads the first half of the columns of a linear layer as gate, the second as up, and nobody else reads it."""
        out, parts = self.source(node.outputs[0]), [self.source(n) for n in act.inputs if n is not None]
        width = out.shape[-1]
        if (
            len(parts) != 2
            or node.inputs[2] is not None
            or not isinstance(width, int)
            or width % (2 * _native.STRIP)
            or not self._passed_on(node, 2)
        ):
            return False
        wanted = [address_of(out.tensor), address_of(out.tensor) + 2 * width]
        return [address_of(p.tensor) for p in parts] == wanted and all(
            p.anchor == out.anchor and p.shape[-1] == width // 2 for p in parts
        )

    def _rounds(self, act: Node, kind: int) -> bool:
        """True if the next layer alone reads what `act` makes, and its groups are whole strips."""
        readers = [n for n in self.nodes if act.outputs[0] in n.inputs]
        if (
            len(readers) != 1
            or not self._passed_on(act)
            or not self._is_packed(readers[0])
            or readers[0].inputs[0] != act.outputs[0]
        ):
            return False
        return kind == _native.STRIP and self._kind(readers[0]) == (kind, self.source(act.outputs[0]).shape[-1])

    def _after(self, index: int, distance: int, op: str) -> Node | None:
        """The node `distance` places behind, if it is such an op."""
        return (
            self.nodes[index + distance]
            if index + distance < len(self.nodes) and self.nodes[index + distance].op == op
            else None
        )

    def _plain_linear(self, x: Source, w: Source, bias: Source | None, out: Source) -> None:
        """A weight that is not packed (routers, small heads): a product per row, then the bias."""
        t = matrix(w, ("f32", "f16", "bf16"))
        b = (t[0], 0, 1, 0, t[3], t[2], t[6], t[7])  # one head of N rows
        y = matrix(out)
        self.emit("matmul", [matrix(x), b, y], [self.rows(x, False), access(w, False), self.rows(out, True)])
        if bias is not None:
            self.emit("add", [y, vector(bias, "f32"), y], [self.rows(out, True), access(bias, False)], ints=(COLUMNS,))

    def _op_matmul(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        a, b, out = *inputs, outputs[0]
        views = [matrix(a), matrix(b, ("f32", "f16", "bf16")), matrix(out)]
        self.emit("matmul", views, [self.rows(a, False), access(b, False), self.rows(out, True)])

    def _op_rms_norm(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        self._norm("rms_norm", inputs, outputs[0], attrs["eps"])

    def _op_layer_norm(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        self._norm("layer_norm", inputs, outputs[0], attrs["eps"])

    def _norm(self, name: str, inputs: list[Any], out: Source, eps: float) -> None:
        x, *params = inputs
        views = [None if p is None else vector(p, "f32") for p in params]
        accesses = [self.rows(x, False), self.rows(out, True), *(access(p, False) for p in params if p is not None)]
        self.emit(name, [matrix(x), *views, matrix(out)], accesses, floats=(eps,))

    def _op_rope(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        x, positions, inv_freq, out = *inputs, outputs[0]
        where, freq = vector(positions, "i32"), vector(inv_freq, "f32")
        r, symbol = freq[6], x.shape[0]
        key = (where, freq, attrs["factor"], symbol)
        if key not in self.tables:
            address = self.allocate(max(1, self.spaces(symbol)) * 8 * max(r, 1))
            view = (address, where[1], where[2], 2 * r, 0, 1, 2 * r, 0)
            turned = Access(
                address, address + max(1, self.spaces(symbol)) * 8 * max(r, 1), True, ("rows", symbol), address, 8 * r
            )
            reads = [access(positions, False), access(inv_freq, False)]
            self.emit("rope_table", [where, freq, view], [*reads, turned], floats=(attrs["factor"],))
            self.tables[key] = (view, Access(turned.low, turned.high, False, turned.part, turned.anchor, turned.stride))
        view, turned = self.tables[key]
        ints = (r, int(attrs["style"] == "pairs"))
        self.emit("rope", [matrix(x), view, matrix(out)], [self.rows(x, False), turned, self.rows(out, True)], ints=ints)

    def _op_kv_write(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        cache, key, value, slots = inputs
        c = self._cache(cache)
        if c[6] == 0:
            value = None
        self.check_index(SLOT, slots, c[2] * c[3])
        accesses = [self.rows(key, False), access(slots, False), cache_access(c, True)]
        if value is not None:
            accesses.append(self.rows(value, False))
        self.emit("kv_write", [matrix(key), None if value is None else matrix(value), vector(slots, "i32")], accesses, cache=c)

    def _op_attention(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        q, cache, positions, query_start, context_len, table, sinks, slopes, prefix, out = *inputs, outputs[0]
        c = self._cache(cache)
        value_dim = c[6] or attrs["value_dim"]
        if max(c[5], value_dim) > MAX_HEAD:
            raise ShapeError(f"heads of {max(c[5], value_dim)} elements; kernels take {MAX_HEAD} at most")
        t = matrix(table, ("i32",))
        starts, lengths = vector(query_start, "i32"), vector(context_len, "i32")
        self.check(PAGES, starts[0], 0, 0, 0, c[2], lengths[0], t[0], t[3], t[6], c[3])
        query = matrix(q)
        self.result.scratch_bytes = max(self.result.scratch_bytes, _native.attention_scratch(c[5], value_dim))
        heads, ranges = query[5], -(-t[6] * c[3] // KEY_RANGE)
        pair_bytes = heads * (-(-value_dim // 16) * 16 + 8) * 4
        rows = min(self.spaces(q.shape[0]), PARTIAL_ROWS)
        pairs = min(rows * (ranges + 1), max(PARTIAL_BYTES // max(pair_bytes, 1), 4 * PARTIAL_ROWS))
        partials = self.shared("partials", pair_bytes * pairs) if self.threads > 1 and ranges > 1 and rows else 0
        if attrs["mask"] == "prefix" and prefix is None:
            raise ShapeError("op 'attention' needs the operand 'prefix_len' with mask 'prefix'")
        views = [
            query,
            vector(positions, "i32"),
            starts,
            lengths,
            t,
            None if sinks is None else vector(sinks, "f32"),
            None if slopes is None else vector(slopes, "f32"),
            None if prefix is None else vector(prefix, "i32"),
            matrix(out),
        ]
        accesses = [access(s, False) for s in inputs[2:] if s is not None]
        accesses += [access(q, False), cache_access(c, False), access(out, True)]
        if partials:
            accesses.append(Access(partials, partials + pair_bytes * pairs, True))
        ints = (MASKS.index(attrs["mask"]), attrs["chunk"], attrs["window"], value_dim, pairs if partials else 0, partials)
        self.emit("attention", views, accesses, cache=c, ints=ints, floats=(attrs["scale"], attrs["softcap"]))

    def _cache(self, cache: Source) -> tuple[int, int, int, int, int, int, int, int]:
        t = cache.tensor
        if not isinstance(t.spec, KVSpec):
            raise ShapeError("kv_write and attention need a key/value cache")
        dtype = self.kept.number(t.spec)
        needed = _native.cache_block_bytes(t.block_size, t.spec.num_kv_heads, t.spec.key_dim, t.spec.value_dim, dtype)
        check_cache(t, needed, 1)
        shape = (t.spec.num_kv_heads, t.spec.key_dim, t.spec.value_dim)
        return (t.buffer.handle + t.offset, t.block_bytes, t.num_blocks, t.block_size, *shape, dtype)

    def _op_act_mul(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        gate, up, out = *inputs, outputs[0]
        g, y = matrix(gate), matrix(out)
        operands = [s for s in (gate, up) if s is not None]
        # the columns that the linear layers of gate and up give this thread: no barrier between them and this
        columns = len(gate.shape) == 2 and all(s.anchor == address_of(s.tensor) for s in (*operands, out))
        if columns:
            part = ("columns", g[6])
            accesses = [access(s, False, part, matrix(s)[3] * 4) for s in operands]
            accesses.append(access(out, True, part, y[3] * 4))
        else:
            accesses = [*(self.rows(s, False) for s in operands), self.rows(out, True)]
        self.emit(
            "act_mul", [g, None if up is None else matrix(up), y], accesses, ints=(ACTS.index(attrs["kind"]), int(columns))
        )

    def _op_add(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        self._binary("add", inputs, outputs[0])

    def _op_mul(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        self._binary("mul", inputs, outputs[0])

    def _binary(self, name: str, inputs: list[Any], out: Source) -> None:
        x, y = inputs
        if y.shape == x.shape:
            kind = FULL
        elif y.shape == (1,):
            kind = ONE
        elif len(y.shape) == 1:
            kind = COLUMNS
        else:
            kind = ROWS
        other = matrix(y) if kind in (FULL, ROWS) else vector(y, "f32")
        touched = self.rows(y, False) if kind in (FULL, ROWS) else access(y, False)
        self.emit(name, [matrix(x), other, matrix(out)], [self.rows(x, False), touched, self.rows(out, True)], ints=(kind,))

    def _op_softmax(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        self.emit(
            "softmax", [matrix(inputs[0]), matrix(outputs[0])], [self.rows(inputs[0], False), self.rows(outputs[0], True)]
        )

    def _op_softcap(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        accesses = [self.rows(inputs[0], False), self.rows(outputs[0], True)]
        self.emit("softcap", [matrix(inputs[0]), matrix(outputs[0])], accesses, floats=(attrs["cap"],))

    def _op_quantize(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        views = [matrix(inputs[0]), matrix(outputs[0], ("i8",)), matrix(outputs[1])]
        accesses = [self.rows(inputs[0], False), self.rows(outputs[0], True), self.rows(outputs[1], True)]
        self.emit("quantize", views, accesses, ints=(attrs["group"],))

    def _op_dequantize(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        views = [matrix(inputs[0], ("i8",)), matrix(inputs[1]), matrix(outputs[0])]
        accesses = [self.rows(inputs[0], False), self.rows(inputs[1], False), self.rows(outputs[0], True)]
        self.emit("dequantize", views, accesses, ints=(attrs["group"],))

    def _op_concat(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        x, y, out = *inputs, outputs[0]
        self.emit("concat", [matrix(s) for s in (x, y, out)], [self.rows(x, False), self.rows(y, False), self.rows(out, True)])

    def _op_route_topk(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        (logits, bias), (ids, weights) = inputs, outputs
        views = [matrix(logits), None if bias is None else vector(bias, "f32"), matrix(ids, ("i32",)), matrix(weights)]
        self.result.scratch_bytes = max(self.result.scratch_bytes, 16 * logits.tensor.shape[1])
        accesses = [self.rows(logits, False), self.rows(ids, True), self.rows(weights, True)]
        accesses += [] if bias is None else [access(bias, False)]
        group = (attrs["groups"], attrs["keep_groups"], int(attrs["group_score"] == "top2sum"))
        ints = (attrs["k"], SCORES.index(attrs["score"]), *group, attrs["renorm"])
        self.emit("route_topk", views, accesses, ints=ints, floats=(attrs["scale"],))

    def _op_short_conv(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        recurrent.short_conv(self, inputs, outputs[0], ACTS.index(attrs["kind"]))

    def _op_delta_rule(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        recurrent.delta_rule(self, inputs, outputs[0], attrs)

    def _op_moe(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        x, ids, weights, gate, up, down, *biases, out = *inputs, outputs[0]
        views = [matrix(x), matrix(ids, ("i32",)), matrix(weights), matrix(out)]
        rows, (experts, width, _), top_k = self.spaces(x.shape[0]), gate.tensor.shape, ids.tensor.shape[1]
        if not isinstance(
            ids.shape[0], str
        ):  # alone; in a model a router made them, and the kernel leaves out what is no expert
            if ids.tensor.strides not in (None, contiguous(ids.tensor.shape)):
                raise ShapeError("op 'moe' takes contiguous ids")
            self.check(INDEX, views[1][0], 0, rows * top_k, 0, experts, 0, 0, 0, 0, 0)
        pairs = max(rows, 1) * top_k
        middle = self.shared("hidden", pairs * width * 4)
        fields = [rows, experts, top_k, width, ACTS.index(attrs["kind"]), middle]
        for stack, bias in zip((gate, up, down), biases, strict=True):
            if stack is None:
                fields += [0] * 7
                continue
            number, _, k, address, stride = packed_stack(stack)
            kind = _native.prepare_kind(number, self.exact, self.bf16)
            acts = self.shared(("rows", kind, stack is down), _native.moe_prepared(kind, pairs, experts, k))
            rows_of = (0, 0) if bias is None else (matrix(bias)[0], matrix(bias)[3])  # one row for each expert
            fields += [number, address, stride, *rows_of, kind, acts]
        table = self.allocate(8 * len(fields))
        _native.copy_in(table, struct.pack(f"={len(fields)}q", *fields))
        self.result.scratch_bytes = max(self.result.scratch_bytes, _native.moe_scratch(rows, top_k, experts))
        accesses = [access(s, False) for s in (x, ids, weights)]
        accesses += [access(out, True), Access(middle, middle + pairs * width * 4, True)]  # of all experts that share it
        self.emit("moe", views, accesses, ints=(table,))
