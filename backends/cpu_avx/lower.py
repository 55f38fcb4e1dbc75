"""Lowering: nodes of a graph → the flat instruction array that `native/program.c` runs.

Addresses are fixed by the plan, so an instruction holds pointers and integers only. Three things are decided here:

- **Sharing.** The rows that a linear layer wants (rounded to int8, `PREPARE`) are made once for all layers that read the same value, and
  the cosines of a step once for all rope nodes with the same frequencies.
- **Barriers.** A thread owns rows (norms, additions, rope, cache writes) or columns (a linear layer and the activation behind it). An
  instruction waits for the others only if it touches memory that another thread may have written, or may still read, since
  the last barrier: `Access` says what an instruction touches and by whom.
- **Checks.** Every array of indices that the step brings becomes a check that runs before the first instruction.

`backend.py` calls `lower` for a compiled segment and for every op that is run alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastllm.api import FORMATS, KVSpec, Node, ShapeError, StepDims, Tensor, UnsupportedError

from . import _native

__all__ = ["CACHE_TYPES", "Lowered", "Source", "lower"]

OPCODES: Final = {
    name: number
    for number, name in enumerate(
        ("embed", "embed_packed", "rms_norm", "layer_norm", "rope_table", "rope", "kv_write", "attention", "prepare", "linear",
         "act_mul", "add", "mul", "softmax", "softcap", "matmul", "quantize", "dequantize", "route_topk", "moe", "concat")
    )
}  # fmt: skip
"""As in program.h."""
SYMBOLS: Final = {"T": 1, "S": 2, "R": 3, "S+1": 4, "R+1": 5}
DTYPES: Final = {"f32": 0, "f16": 1, "bf16": 2, "i32": 3, "i8": 4}
CACHE_TYPES: Final = {"f32": 0, "f16": 1}
ACTS: Final = ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu", "swiglu_oai")
MASKS: Final = ("causal", "full", "prefix", "chunk")
SCORES: Final = ("softmax", "sigmoid", "softmax_of_chosen")
FULL, COLUMNS, ONE, ROWS = range(4)
INDEX, SLOT, PAGES = range(3)

ALIGNMENT: Final = 64
"""Of the matrices of a stack (Limits.alignment)."""
KEY_RANGE: Final = 512
"""Keys of one range of the attention kernel (FL_RANGE)."""
PARTIAL_ROWS: Final = 8
"""Most rows of a step whose attention is cut into key ranges."""
PARTIAL_BYTES: Final = 16 << 20

Shape = tuple[int | str, ...]
View = tuple[int, int, int, int, int, int, int, int]
"""(address, symbol, rows, stride 0, stride 1, d1, d2, dtype)."""


@dataclass(frozen=True)
class Source:
    """An operand: where it lives (at its largest shape), its shape with symbols, and the address of the value it is a window on."""

    tensor: Tensor
    shape: Shape
    anchor: int


@dataclass(frozen=True)
class Access:
    """Memory that an instruction touches. part: how threads share it, None if a thread may touch all of it; anchor, stride: which
    base value, and bytes from one row of it to the next."""

    low: int
    high: int
    write: bool
    part: tuple[str, int | str] | None = None
    anchor: int = 0
    stride: int = 0

    def conflicts(self, other: Access) -> bool:
        """True if different threads may touch the same bytes, one of them writing."""
        if self.low >= other.high or other.low >= self.high or not (self.write or other.write):
            return False
        same = self.part is not None and (self.part, self.anchor, self.stride) == (other.part, other.anchor, other.stride)
        return not same or (self.part is not None and self.part[0] == "columns" and self.low != other.low)


@dataclass
class Lowered:
    """What `_native.Program` takes. code and checks: tuples; scratch_bytes: per thread; owned: memory that the program needs."""

    code: list[tuple[Any, ...]] = field(default_factory=list)
    checks: list[tuple[Any, ...]] = field(default_factory=list)
    scratch_bytes: int = 64
    owned: list[_native.Memory] = field(default_factory=list)


def lower(
    nodes: Sequence[Node], source: Callable[[str], Source], largest: StepDims, *, exact: bool, kv_dtype: str, threads: int
) -> Lowered:
    """Instructions for `nodes`. source: value name -> operand; exact: f32 activations for quantised weights. Raises ShapeError for
    operands that no kernel takes (strides, sizes), UnsupportedError for an op there is none for."""
    lowering = _Lowering(source, largest, exact, kv_dtype, threads)
    for index, node in enumerate(nodes):
        lowering.add(index, node)
    return lowering.result


class _Lowering:
    def __init__(self, source: Callable[[str], Source], largest: StepDims, exact: bool, kv_dtype: str, threads: int):
        self.source, self.largest, self.exact, self.kv_dtype, self.threads = source, largest, exact, kv_dtype, threads
        self.result = Lowered()
        self.pending: list[Access] = []
        self.prepared: dict[tuple[int, int, int | str], tuple[int, Access | None]] = {}  # buffer -> address, what it holds
        self.tables: dict[tuple[Any, ...], tuple[View, Access]] = {}
        self.partials: dict[int, int] = {}
        self.spaces_of: dict[tuple[Any, int], int] = {}
        self.seen: set[tuple[Any, ...]] = set()
        self.node = 0

    def add(self, index: int, node: Node) -> None:
        """Appends the instructions of one node."""
        handler = getattr(self, f"_op_{node.op}", None)
        if handler is None:
            raise UnsupportedError(f"cpu_avx has no kernel for op '{node.op}'")
        self.node = index
        inputs = [None if n is None else self.source(n) for n in node.inputs]
        outputs = [self.source(n) for n in node.outputs]
        handler(inputs, outputs, node.attrs)

    # instructions -----------------------------------------------------------------------------------------------------

    def emit(
        self,
        name: str,
        operands: Sequence[View | None],
        accesses: Sequence[Access],
        *,
        weight: tuple[int, ...] | None = None,
        acts: tuple[int, ...] | None = None,
        cache: tuple[int, ...] | None = None,
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
    ) -> None:
        """One instruction, with a barrier before it where its accesses ask for one."""
        barrier = any(a.conflicts(p) for a in accesses for p in self.pending)
        if barrier:
            self.pending.clear()
        self.pending.extend(accesses)
        for key, (address, held) in self.prepared.items():
            if held is not None and any(a.write and a.low < held.high and held.low < a.high for a in accesses):
                self.prepared[key] = (address, None)
        entry = (OPCODES[name], int(barrier), self.node, tuple(operands), weight, acts, cache, tuple(ints), tuple(floats))
        self.result.code.append(entry)

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

    def rows(self, s: Source, write: bool) -> Access:
        """s, shared by rows."""
        v = matrix(s, (s.tensor.dtype,))
        return _access(s, write, ("rows", s.shape[0]), v[3] * FORMATS[s.tensor.dtype].block_bytes)

    def spaces(self, symbol: int | str) -> int:
        """The most rows that a leading dimension stands for."""
        return self.largest.resolve(symbol)

    # ops --------------------------------------------------------------------------------------------------------------

    def _op_embed(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        ids, table, out = inputs[0], inputs[1], outputs[0]
        accesses = [_access(ids, False), _access(table, False), self.rows(out, True)]
        if table.tensor.packed is not None:
            weight = packed_weight(table)
            self.check_index(INDEX, ids, weight[1])
            self.emit("embed_packed", [vector(ids, "i32"), None, matrix(out)], accesses, weight=weight)
            return
        t = matrix(table, ("f32", "f16", "bf16"))
        self.check_index(INDEX, ids, t[2], t[1])
        self.emit("embed", [vector(ids, "i32"), t, matrix(out)], accesses)

    def _op_linear(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        x, w, bias, out = *inputs, outputs[0]
        b = None if bias is None else vector(bias, "f32")
        if w.tensor.packed is None:
            self._plain_linear(x, w, bias, out)
            return
        weight = packed_weight(w)
        layout, count, width, _ = weight
        kind = _native.prepare_kind(layout, self.exact)
        acts, held = self._prepare(x, kind, width)
        self.result.scratch_bytes = max(self.result.scratch_bytes, _native.linear_scratch())
        y = matrix(out)
        accesses = [held, _access(out, True, ("columns", count), y[3] * 4)]
        self.emit("linear", [b, y], accesses, weight=weight, acts=acts, ints=(0,))

    def _prepare(self, x: Source, kind: int, width: int) -> tuple[tuple[int, int, int], Access]:
        """The prepared form of x: made now, unless the buffer of its kind still holds it."""
        symbol = x.shape[0]
        v = matrix(x)
        size = max(1, _native.prepared_bytes(kind, max(1, self.spaces(symbol)), width))
        key = (kind, width, symbol)
        address, held = self.prepared.get(key) or (self.allocate(size), None)
        whole = Access(address, address + size, False)
        want = self.rows(x, False)
        if held != want:
            mine = Access(address, address + size, True, ("rows", symbol), address, 0)
            self.emit("prepare", [v], [want, mine], acts=(kind, width, address))
            self.prepared[key] = (address, want)
        return (kind, width, address), whole

    def _plain_linear(self, x: Source, w: Source, bias: Source | None, out: Source) -> None:
        """A weight that is not packed (routers, small heads): a product per row, then the bias."""
        t = matrix(w, ("f32", "f16", "bf16"))
        b = (t[0], 0, 1, 0, t[3], t[2], t[6], t[7])  # one head of N rows
        y = matrix(out)
        self.emit("matmul", [matrix(x), b, y], [self.rows(x, False), _access(w, False), self.rows(out, True)])
        if bias is not None:
            self.emit("add", [y, vector(bias, "f32"), y], [self.rows(out, True), _access(bias, False)], ints=(COLUMNS,))

    def _op_matmul(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        a, b, out = *inputs, outputs[0]
        views = [matrix(a), matrix(b, ("f32", "f16", "bf16")), matrix(out)]
        self.emit("matmul", views, [self.rows(a, False), _access(b, False), self.rows(out, True)])

    def _op_rms_norm(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        self._norm("rms_norm", inputs, outputs[0], attrs["eps"])

    def _op_layer_norm(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        self._norm("layer_norm", inputs, outputs[0], attrs["eps"])

    def _norm(self, name: str, inputs: list[Any], out: Source, eps: float) -> None:
        x, *params = inputs
        views = [None if p is None else vector(p, "f32") for p in params]
        accesses = [self.rows(x, False), self.rows(out, True), *(_access(p, False) for p in params if p is not None)]
        self.emit(name, [matrix(x), *views, matrix(out)], accesses, floats=(eps,))

    def _op_rope(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        x, positions, inv_freq, out = *inputs, outputs[0]
        where, freq = vector(positions, "i32"), vector(inv_freq, "f32")
        r, symbol = freq[6], x.shape[0]
        key = (where, freq, attrs["factor"], symbol)
        if key not in self.tables:
            address = self.allocate(max(1, self.spaces(symbol)) * 8 * max(r, 1))
            view = (address, where[1], where[2], 2 * r, 0, 1, 2 * r, 0)
            access = Access(address, address + max(1, self.spaces(symbol)) * 8 * max(r, 1), True, ("rows", symbol), address, 8 * r)
            reads = [_access(positions, False), _access(inv_freq, False)]
            self.emit("rope_table", [where, freq, view], [*reads, access], floats=(attrs["factor"],))
            self.tables[key] = (view, Access(access.low, access.high, False, access.part, access.anchor, access.stride))
        view, access = self.tables[key]
        ints = (r, int(attrs["style"] == "pairs"))
        self.emit("rope", [matrix(x), view, matrix(out)], [self.rows(x, False), access, self.rows(out, True)], ints=ints)

    def _op_kv_write(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        cache, key, value, slots = inputs
        c = self._cache(cache)
        if c[6] == 0:
            value = None
        self.check_index(SLOT, slots, c[2] * c[3])
        accesses = [self.rows(key, False), _access(slots, False), _cache_access(c, True)]
        if value is not None:
            accesses.append(self.rows(value, False))
        self.emit("kv_write", [matrix(key), None if value is None else matrix(value), vector(slots, "i32")], accesses, cache=c)

    def _op_attention(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        q, cache, positions, query_start, context_len, table, sinks, slopes, prefix, out = *inputs, outputs[0]
        c = self._cache(cache)
        value_dim = c[6] or attrs["value_dim"]
        t = matrix(table, ("i32",))
        starts, lengths = vector(query_start, "i32"), vector(context_len, "i32")
        self.check(PAGES, starts[0], 0, 0, 0, c[2], lengths[0], t[0], t[3], t[6], c[3])
        query = matrix(q)
        heads, ranges = query[5], -(-t[6] * c[3] // KEY_RANGE)
        self.result.scratch_bytes = max(self.result.scratch_bytes, _native.attention_scratch(c[5], value_dim))
        row_bytes = heads * ranges * (-(-value_dim // 16) * 16 + 8) * 4
        held = min(self.spaces(q.shape[0]), PARTIAL_ROWS, PARTIAL_BYTES // max(row_bytes, 1)) if self.threads > 1 and ranges > 1 else 0
        partials = 0
        if held:
            if row_bytes * held not in self.partials:
                self.partials[row_bytes * held] = self.allocate(row_bytes * held)
            partials = self.partials[row_bytes * held]
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
        accesses = [_access(s, False) for s in inputs[2:] if s is not None]
        accesses += [_access(q, False), _cache_access(c, False), _access(out, True)]
        if partials:
            accesses.append(Access(partials, partials + row_bytes * held, True))
        ints = (MASKS.index(attrs["mask"]), attrs["chunk"], attrs["window"], value_dim, ranges, held, partials)
        self.emit("attention", views, accesses, cache=c, ints=ints, floats=(attrs["scale"], attrs["softcap"]))

    def _cache(self, cache: Source) -> tuple[int, int, int, int, int, int, int, int]:
        t = cache.tensor
        if not isinstance(t.spec, KVSpec):
            raise ShapeError("kv_write and attention need a key/value cache")
        dtype = CACHE_TYPES[self.kv_dtype]
        needed = _native.cache_block_bytes(t.block_size, t.spec.num_kv_heads, t.spec.key_dim, t.spec.value_dim, dtype)
        if t.block_size < 1 or t.block_bytes < needed or t.offset + t.num_blocks * t.block_bytes > t.buffer.nbytes:
            raise ShapeError(
                f"a cache of {t.num_blocks} blocks of {t.block_bytes} bytes does not hold {t.block_size} tokens of {t.spec} each"
            )
        shape = (t.spec.num_kv_heads, t.spec.key_dim, t.spec.value_dim)
        return (t.buffer.handle + t.offset, t.block_bytes, t.num_blocks, t.block_size, *shape, dtype)

    def _op_act_mul(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        gate, up, out = *inputs, outputs[0]
        g, y = matrix(gate), matrix(out)
        operands = [s for s in (gate, up) if s is not None]
        # the columns that the linear layers of gate and up give this thread: no barrier between them and this
        columns = len(gate.shape) == 2 and all(s.anchor == _address(s.tensor) for s in (*operands, out))
        if columns:
            part = ("columns", g[6])
            accesses = [_access(s, False, part, matrix(s)[3] * 4) for s in operands]
            accesses.append(_access(out, True, part, y[3] * 4))
        else:
            accesses = [*(self.rows(s, False) for s in operands), self.rows(out, True)]
        self.emit("act_mul", [g, None if up is None else matrix(up), y], accesses, ints=(ACTS.index(attrs["kind"]), int(columns)))

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
        access = self.rows(y, False) if kind in (FULL, ROWS) else _access(y, False)
        self.emit(name, [matrix(x), other, matrix(out)], [self.rows(x, False), access, self.rows(out, True)], ints=(kind,))

    def _op_softmax(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        self.emit("softmax", [matrix(inputs[0]), matrix(outputs[0])], [self.rows(inputs[0], False), self.rows(outputs[0], True)])

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
        accesses += [] if bias is None else [_access(bias, False)]
        group = (attrs["groups"], attrs["keep_groups"], int(attrs["group_score"] == "top2sum"))
        ints = (attrs["k"], SCORES.index(attrs["score"]), *group, attrs["renorm"])
        self.emit("route_topk", views, accesses, ints=ints, floats=(attrs["scale"],))

    def _op_moe(self, inputs: list[Any], outputs: list[Source], attrs: Mapping[str, Any]) -> None:
        x, ids, weights, gate, up, down, *biases, out = *inputs, outputs[0]
        views = [matrix(x), matrix(ids, ("i32",)), matrix(weights), matrix(out)]
        rows, (experts, width, _), top_k = self.spaces(x.shape[0]), gate.tensor.shape, ids.tensor.shape[1]
        if not isinstance(ids.shape[0], str):  # alone; in a model a router made them, and the kernel leaves out what is no expert
            if ids.tensor.strides not in (None, contiguous(ids.tensor.shape)):
                raise ShapeError("op 'moe' takes contiguous ids")
            self.check(INDEX, views[1][0], 0, rows * top_k, 0, experts, 0, 0, 0, 0, 0)
        pairs = max(rows, 1) * top_k
        middle = self.shared("hidden", pairs * width * 4)
        fields = [rows, experts, top_k, width, ACTS.index(attrs["kind"]), middle]
        for stack, bias in zip((gate, up, down), biases, strict=True):
            if stack is None:
                fields += [0] * 6
                continue
            number, _, k, address, stride = packed_stack(stack)
            kind = _native.prepare_kind(number, self.exact)
            acts = self.shared(("rows", kind, stack is down), _native.moe_prepared(kind, pairs, experts, k))
            fields += [number, address, stride, 0 if bias is None else matrix(bias)[0], kind, acts]
        table = self.allocate(8 * len(fields))
        _native.copy_in(table, struct.pack(f"={len(fields)}q", *fields))
        self.result.scratch_bytes = max(self.result.scratch_bytes, _native.moe_scratch(rows, top_k, experts))
        accesses = [_access(s, False) for s in (x, ids, weights)]
        accesses += [_access(out, True), Access(middle, middle + pairs * width * 4, True)]  # of all experts that share it
        self.emit("moe", views, accesses, ints=(table,))


# operands ---------------------------------------------------------------------------------------------------------------


def matrix(s: Source, dtypes: tuple[str, ...] = ("f32",)) -> View:
    """An operand of two or three dimensions, or of one where each element is a row (symbolic) or all are one row. Raises ShapeError
    for strides that no kernel takes, a dtype that is not among `dtypes`, or a window that leaves its buffer."""
    t, strides = s.tensor, _checked_strides(s, dtypes)
    symbol = SYMBOLS.get(str(s.shape[0]), 0) if isinstance(s.shape[0], str) else 0
    dtype = DTYPES[t.dtype]
    if len(t.shape) == 1:
        if symbol:
            return (_address(t), symbol, t.shape[0], strides[0], 0, 1, 1, dtype)
        return (_address(t), 0, 1, t.shape[0], 0, 1, t.shape[0], dtype)
    if len(t.shape) == 2:
        return (_address(t), symbol, t.shape[0], strides[0], 0, 1, t.shape[1], dtype)
    if len(t.shape) == 3:
        return (_address(t), symbol, t.shape[0], strides[0], strides[1], t.shape[1], t.shape[2], dtype)
    raise ShapeError(f"cpu_avx takes values of up to three dimensions, not {list(t.shape)}")


def vector(s: Source, dtype: str) -> View:
    """An operand of one dimension, contiguous."""
    t, strides = s.tensor, _checked_strides(s, (dtype,))
    if len(t.shape) != 1 or (t.shape[0] > 1 and strides[0] != 1):
        raise ShapeError(f"a contiguous vector is needed, not shape {list(t.shape)} with strides {list(strides)}")
    symbol = SYMBOLS.get(str(s.shape[0]), 0) if isinstance(s.shape[0], str) else 0
    return (_address(t), symbol, t.shape[0], 1, 0, 1, t.shape[0], DTYPES[dtype])


def packed_weight(s: Source) -> tuple[int, int, int, int]:
    """(layout number, N, K, address) of a packed weight."""
    layout = s.tensor.packed
    number = -1 if layout is None else _native.layout_number(layout.id)
    fits = layout is not None and tuple(s.tensor.shape) == tuple(layout.shape) and len(layout.shape) == 2
    if layout is None or number < 0 or not fits or s.tensor.offset + layout.nbytes > s.tensor.buffer.nbytes:
        raise ShapeError(f"this is not a weight that cpu_avx packed: {layout}")
    return (number, layout.shape[0], layout.shape[1], _address(s.tensor))


def packed_stack(s: Source) -> tuple[int, int, int, int, int]:
    """(layout number, N, K, address, bytes from one matrix to the next) of a packed stack [E, N, K]."""
    layout = s.tensor.packed
    number = -1 if layout is None else _native.layout_number(layout.id)
    fits = layout is not None and len(s.tensor.shape) == 3 and tuple(s.tensor.shape[1:]) == tuple(layout.shape)
    stride = -(-layout.nbytes // ALIGNMENT) * ALIGNMENT if layout is not None else 0
    if layout is None or number < 0 or not fits or s.tensor.offset + s.tensor.shape[0] * stride > s.tensor.buffer.nbytes:
        raise ShapeError(f"this is not a stack of weights that cpu_avx packed: {layout}")
    return (number, layout.shape[0], layout.shape[1], _address(s.tensor), stride)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def _checked_strides(s: Source, dtypes: tuple[str, ...]) -> tuple[int, ...]:
    t = s.tensor
    if t.dtype not in dtypes or t.packed is not None:
        raise ShapeError(f"an operand of {' or '.join(dtypes)} is needed, not {'packed ' if t.packed else ''}{t.dtype}")
    strides = t.strides if t.strides is not None else contiguous(t.shape)
    if 0 in t.shape:
        return contiguous(t.shape)  # nothing is read or written, whatever the strides say
    if len(strides) != len(t.shape) or min(strides, default=0) < 0:
        raise ShapeError(f"strides {list(strides)} of shape {list(t.shape)} are negative or of another rank")
    if t.shape and t.shape[-1] > 1 and len(t.shape) > 1 and strides[-1] != 1:
        raise ShapeError(f"the last axis must be contiguous; strides are {list(strides)}")
    size = FORMATS[t.dtype].block_bytes
    span = 0 if 0 in t.shape else 1 + sum((n - 1) * k for n, k in zip(t.shape, strides, strict=True))
    if t.offset < 0 or t.offset + span * size > t.buffer.nbytes or _address(t) % size:
        raise ShapeError(f"a window of {span * size} bytes at {t.offset} leaves its buffer of {t.buffer.nbytes}, or is not aligned")
    return strides


def _address(t: Tensor) -> int:
    return int(t.buffer.handle) + t.offset


def _access(s: Source, write: bool, part: tuple[str, int | str] | None = None, stride: int = 0) -> Access:
    t = s.tensor
    low = _address(t)
    if t.packed is not None:
        return Access(low, low + t.packed.nbytes, write)
    strides = t.strides if t.strides is not None else contiguous(t.shape)
    span = 0 if 0 in t.shape else 1 + sum((n - 1) * k for n, k in zip(t.shape, strides, strict=True))
    return Access(low, low + span * FORMATS[t.dtype].block_bytes, write, part, s.anchor, stride)


def _cache_access(c: tuple[int, ...], write: bool) -> Access:
    return Access(c[0], c[0] + c[1] * c[2], write, ("slots", 0) if write else None, c[0], 0)
