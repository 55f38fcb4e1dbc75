"""Lowering: nodes of a graph -> launches of kernels with their arguments.

Buffers are fixed by the plan, so a launch is fixed but for the numbers of a step (T, S, R). Decided here: which kernel with which
macros runs an op; that rounded activations are made once for all linear layers that read the same value; and the cosines of a step
once for all rope nodes with the same frequencies. One in-order queue makes barriers unnecessary.

`backend.py` calls `Lowering` for a compiled segment and for an op that runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastllm.api import FORMATS, KVSpec, Node, ShapeError, Tensor, UnsupportedError, check_cache, contiguous

from . import recurrent
from .layouts import BLOCK_LAYOUTS, PLAIN_KINDS, STRIP
from .operands import F32, I32, I64, Absent, Arg, Matrix, Operand, Pointer, column, matrix, packed, vector
from .runtime import KernelKey
from .tuning import Tuning

__all__ = ["CACHE_BYTES", "Extent", "Launch", "Lowering", "prepared_bytes", "rope_table_bytes"]

CACHE_BYTES: Final = {"f16": 2, "f32": 4}
ACTS: Final = ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu", "swiglu_oai")
ALONE: Final = 8
MASKS: Final = ("causal", "full", "prefix", "chunk")
GROUP_BYTES: Final = 16  # act_group of acts.h
DOTS: Final = 16  # outputs of a group of `dots`

Size = int | str


@dataclass(frozen=True)
class Extent:
    """Work-groups along a dimension: ceil(size / per) * times."""

    size: Size
    times: int = 1
    per: int = 1


@dataclass(frozen=True)
class Launch:
    """One kernel. only: (symbol or number, least, most): it runs if that many rows are there."""

    node: int
    key: KernelKey
    args: tuple[Arg, ...]
    groups: tuple[Extent, ...]
    lanes: int
    only: tuple[Size, int, int] | None = None


def prepared_bytes(rows: int, width: int, pairs: bool) -> int:
    """Bytes of the rounded activations of [rows, width]."""
    return rows * (width // 32) * ((64 if pairs else 32) + GROUP_BYTES)


def rope_table_bytes(rows: int, pairs: int) -> int:
    """Bytes of the cosines and sines of `pairs` angles for each of `rows` tokens."""
    return rows * 2 * pairs * 4


class Lowering:
    """Collects launches. source: value name -> operand; scratch(nbytes, keep): memory for the node, or until the end with keep;
    rows(symbol): the most rows it stands for; fault: handle of the fault record."""

    def __init__(
        self,
        source: Callable[[str], Operand],
        scratch: Callable[[int, bool], Tensor],
        rows: Callable[[Size], int],
        fault: Any,
        tuning: Tuning,
        *,
        fp64: bool,
        kv_dtype: str,
    ):
        self.source, self.scratch, self.rows, self.tuning = source, scratch, rows, tuning
        self.fault = Pointer(fault, 0)
        self.real = {"FP64": 1} if fp64 else {}
        self.kv_dtype = kv_dtype
        self.launches: list[Launch] = []
        self.node = 0
        self._prepared: tuple[Matrix, tuple[Any, int, int]] | None = None  # what the scratch holds, and where that was read
        self._tables: dict[tuple[Any, ...], Pointer] = {}

    def add(self, index: int, node: Node) -> None:
        """Appends the launches of one node."""
        handler = getattr(self, f"_op_{node.op}", None)
        if handler is None:
            raise UnsupportedError(f"there is no kernel for op '{node.op}'")
        self.node = index
        inputs = [None if n is None else self.source(n) for n in node.inputs]
        outputs = [self.source(n) for n in node.outputs]
        handler(inputs, outputs, node.attrs)
        for out in outputs:
            self._wrote(out.tensor)

    # launches ---------------------------------------------------------------------------------------------------------

    def _emit(
        self,
        source: str,
        entry: str,
        defines: Mapping[str, int],
        args: Sequence[Arg],
        *groups: Extent,
        only: tuple[Size, int, int] | None = None,
    ) -> None:
        key = KernelKey.of(source, entry, defines)
        self.launches.append(Launch(self.node, key, tuple(args), groups, defines["LANES"], only))

    def _tiles(
        self, source: str, entry: str, defines: Mapping[str, int], args: Sequence[Arg], strips: int, rows: Size
    ) -> None:
        """A linear kernel: one row alone, several in tiles. Both give the same bits."""
        tile = self.tuning.tile
        self._emit(source, entry, {**defines, "ROWS": 1}, args, Extent(strips), Extent(rows), only=(rows, 1, 1))
        self._emit(source, entry, {**defines, "ROWS": tile}, args, Extent(strips), Extent(rows, per=tile), only=(rows, 2, 1 << 62))

    def _pieces(self, width: int) -> Extent:
        return Extent(width, per=self.tuning.span)

    def _wrote(self, t: Tensor) -> None:
        """Forgets prepared activations whose source has changed."""
        if self._prepared is not None:
            handle, low, high = self._prepared[1]
            start, stop = _window(t)
            if t.buffer is handle and start < high and low < stop:
                self._prepared = None

    # linear -----------------------------------------------------------------------------------------------------------

    def _op_linear(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        x, w, bias = inputs
        a, y = matrix(x), matrix(outputs[0])
        b: tuple[Arg, ...] = (Absent(), I32(0)) if bias is None else (vector(bias, "f32"), I32(1))
        if w.tensor.packed is None:
            m = matrix(w, *PLAIN_KINDS)
            self._dots(a, (m.pointer, I64(m.row), I64(0)), b, y, PLAIN_KINDS[w.tensor.dtype])
            return
        layout, at = packed(w)
        count, width = layout.shape
        strips = -(-count // STRIP)
        sizes = (I32(a.rows), I32(count), I32(width))
        if layout.format in PLAIN_KINDS:
            defines = {**self.tuning.linear, "PLAIN": PLAIN_KINDS[layout.format]}
            args = (at, a.pointer, I64(a.row), *b, y.pointer, I64(y.row), *sizes)
            self._tiles("plain.fl", "strips", defines, args, strips, a.rows)
            return
        codes, groups = self._prepare(x, a)
        defines = {**self.tuning.linear, **BLOCK_LAYOUTS[layout.format].defines()}
        self._tiles("linear.fl", "linear", defines, (at, codes, groups, *b, y.pointer, I64(y.row), *sizes), strips, a.rows)

    def _prepare(self, x: Operand, a: Matrix) -> tuple[Pointer, Pointer]:
        """The rounded activations of x, made now unless the scratch still holds them: codes and groups."""
        most, pairs = max(1, self.rows(a.rows)), self.tuning.pairs
        where = self.scratch(prepared_bytes(most, a.width, pairs), False)
        groups_at = where.offset + most * (a.width // 32) * (64 if pairs else 32)
        codes, groups = Pointer(where.buffer.handle, where.offset // 4), Pointer(where.buffer.handle, groups_at // GROUP_BYTES)
        if self._prepared is None or self._prepared[0] != a:
            span = self.tuning.span // 32
            defines = {**self.tuning.acts, "LANES": min(self.tuning.lanes, span), "VEC": 1, "SPAN": span}
            args = (a.pointer, I64(a.row), codes, groups, I32(a.width))
            self._emit("prepare.fl", "prepare", defines, args, Extent(a.rows), Extent(a.width // 32, per=span))
            self._prepared = (a, (x.tensor.buffer, *_window(x.tensor)))
        return codes, groups

    def _dots(self, a: Matrix, b: tuple[Arg, ...], bias: tuple[Arg, ...], y: Matrix, plain: int) -> None:
        """Products with rows as they lie in memory. b: where they are, elements to the next row, elements to the next head."""
        args = (*a.args, *b, *bias, *y.args, I32(y.heads), I32(y.width), I32(a.width))
        defines = {**self.tuning.row, "PLAIN": plain, "SPAN": DOTS}
        self._emit("plain.fl", "dots", defines, args, Extent(a.rows, times=y.heads), Extent(y.width, per=DOTS))

    def _op_matmul(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        m = matrix(inputs[1], *PLAIN_KINDS)  # [H, N, K]: its N rows are "heads" of a Matrix
        b = (m.pointer, I64(m.head), I64(m.row))
        self._dots(matrix(inputs[0]), b, (Absent(), I32(0)), matrix(outputs[0]), PLAIN_KINDS[inputs[1].tensor.dtype])

    # rows -------------------------------------------------------------------------------------------------------------

    def _op_embed(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        ids, table = inputs
        y, where = matrix(outputs[0]), column(ids, "i32")
        tail = (y.pointer, I64(y.row), self.fault)
        if table.tensor.packed is not None:
            layout, at = packed(table)
            kinds: dict[str, int] = {"STRIPS": 1, "PLAIN": PLAIN_KINDS[layout.format]} if layout.format in PLAIN_KINDS else {}
            kinds = kinds or BLOCK_LAYOUTS[layout.format].defines()
            args: tuple[Arg, ...] = (*where, at, I64(0), *tail, I32(layout.shape[0]), I32(layout.shape[1]))
        else:
            t = matrix(table, *PLAIN_KINDS)
            size = FORMATS[table.tensor.dtype].block_bytes
            kinds = {"STRIPS": 0, "PLAIN": PLAIN_KINDS[table.tensor.dtype]}
            args = (*where, Pointer(t.pointer.handle, t.pointer.offset * size), I64(t.row), *tail, I32(t.rows), I32(t.width))
        self._emit("embed.fl", "embed", {**self.tuning.row, **kinds}, args, Extent(y.rows))

    def _op_rms_norm(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        self._norm("rms_norm", inputs, outputs[0], attrs["eps"])

    def _op_layer_norm(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        self._norm("layer_norm", inputs, outputs[0], attrs["eps"])

    def _norm(self, entry: str, inputs: list[Any], out: Operand, eps: float) -> None:
        x, y = matrix(inputs[0]), matrix(out)
        params: list[Arg] = []
        for p in inputs[1:]:
            params += [Absent(), I32(0)] if p is None else [vector(p, "f32"), I32(1)]
        args = (*x.args, *params, *y.args, I32(x.heads), I32(x.width), F32(eps))
        self._emit("rows.fl", entry, self.tuning.row, args, Extent(x.rows, times=x.heads))

    def _op_softmax(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        x, y = matrix(inputs[0]), matrix(outputs[0])
        args = (*x.args, *y.args, I32(x.heads), I32(x.width))
        self._emit("rows.fl", "softmax", self.tuning.row, args, Extent(x.rows, times=x.heads))

    # elementwise ------------------------------------------------------------------------------------------------------

    def _elementwise(self, entry: str, defines: Mapping[str, int], args: Sequence[Arg], x: Matrix) -> None:
        defines = {**self.tuning.row, "SPAN": self.tuning.span, **defines}
        self._emit("elementwise.fl", entry, defines, args, Extent(x.rows, times=x.heads), self._pieces(x.width))

    def _op_act_mul(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        self._act_mul(inputs[0], inputs[1], outputs[0], attrs["kind"])

    def _act_mul(self, x: Operand, other: Operand | None, out: Operand, name: str) -> None:
        gate, y = matrix(x), matrix(out)
        up = gate if other is None else matrix(other)
        kind = ACTS.index(name) + ALONE * (other is None)
        args = (*gate.args, *up.args, *y.args, I32(gate.heads), I32(gate.width))
        self._elementwise("act_mul", {"KIND": kind, **self.real}, args, gate)

    def _op_add(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        self._binary(0, inputs, outputs[0])

    def _op_mul(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        self._binary(1, inputs, outputs[0])

    def _binary(self, op: int, inputs: list[Any], out: Operand) -> None:
        a, z, other = matrix(inputs[0]), matrix(out), inputs[1]
        if other.shape == inputs[0].shape:  # elements
            b, step = matrix(other), 1
        elif other.shape == (1,):
            b, step = Matrix(vector(other, "f32"), 1, 1, 1, 0, 0), 0
        elif len(other.shape) == 1:  # the last axis
            b, step = Matrix(vector(other, "f32"), 1, 1, a.width, 0, 0), 1
        else:  # [T, 1]: one number a row
            m = matrix(other)
            b, step = Matrix(m.pointer, m.rows, 1, 1, m.row, 0), 0
        args = (*a.args, *b.args, I32(step), *z.args, I32(a.heads), I32(a.width))
        self._elementwise("binary", {"OP": op}, args, a)

    def _op_concat(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        x, y, z = matrix(inputs[0]), matrix(inputs[1]), matrix(outputs[0])
        self._elementwise("concat", {}, (*x.args, *y.args, *z.args, I32(x.heads), I32(x.width), I32(z.width)), z)

    def _op_softcap(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        x, y = matrix(inputs[0]), matrix(outputs[0])
        self._elementwise("softcap", {}, (*x.args, *y.args, I32(x.heads), I32(x.width), F32(attrs["cap"])), x)

    def _op_quantize(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        x, codes, scales = matrix(inputs[0]), matrix(outputs[0], "i8"), matrix(outputs[1])
        args = (x.pointer, I64(x.row), codes.pointer, I64(codes.row), scales.pointer, I64(scales.row), I32(x.width), I32(attrs["group"]))
        self._groups("quantize", args, x, attrs["group"])

    def _op_dequantize(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        codes, scales, y = matrix(inputs[0], "i8"), matrix(inputs[1]), matrix(outputs[0])
        args = (codes.pointer, I64(codes.row), scales.pointer, I64(scales.row), y.pointer, I64(y.row), I32(y.width), I32(attrs["group"]))
        self._groups("dequantize", args, y, attrs["group"])

    def _groups(self, entry: str, args: Sequence[Arg], x: Matrix, size: int) -> None:
        defines = {"LANES": self.tuning.lanes, "VEC": 1}
        self._emit("quantize.fl", entry, defines, args, Extent(x.rows), Extent(x.width // size, per=self.tuning.lanes))

    # recurrent state --------------------------------------------------------------------------------------------------

    def _op_short_conv(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        recurrent.short_conv(self, inputs, outputs[0])
        self._act_mul(outputs[0], None, outputs[0], attrs["kind"])

    def _op_delta_rule(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        recurrent.delta_rule(self, inputs, outputs[0], attrs)

    def emit_recurrent(self, entry: str, defines: Mapping[str, int], args: Sequence[Arg], sequences: Size, groups: int, span: int) -> None:
        """A launch of `groups` groups for each sequence."""
        macros = {"LANES": min(self.tuning.lanes, span), "VEC": 1, "SPAN": span, **defines}
        self._emit("recurrent.fl", entry, macros, args, Extent(groups), Extent(sequences))

    # attention --------------------------------------------------------------------------------------------------------

    def _op_rope(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        x, y = matrix(inputs[0]), matrix(outputs[0])
        positions, freq, r = vector(inputs[1], "i32"), vector(inputs[2], "f32"), inputs[2].tensor.shape[0]
        key = (positions, freq, attrs["factor"], x.rows)
        if key not in self._tables:
            where = self.scratch(rope_table_bytes(max(1, self.rows(x.rows)), r), True)
            table = Pointer(where.buffer.handle, where.offset // 4)
            angles = (positions, freq, table, I32(r), F32(attrs["factor"]))
            self._emit("rope.fl", "rope_table", {**self.tuning.row, **self.real, "STYLE_PAIRS": 0}, angles, Extent(x.rows))
            self._tables[key] = table
        defines = {**self.tuning.row, **self.real, "STYLE_PAIRS": int(attrs["style"] == "pairs")}
        args = (*x.args, self._tables[key], *y.args, I32(x.heads), I32(x.width), I32(r))
        self._emit("rope.fl", "rope", defines, args, Extent(x.rows, times=x.heads))

    def _cache(self, s: Operand) -> tuple[dict[str, int], tuple[Arg, ...]]:
        """Macros of cache.h, and cache, elements of a block, number of blocks."""
        t, spec = s.tensor, s.tensor.spec
        if not isinstance(spec, KVSpec) or (spec.dtype or self.kv_dtype) not in CACHE_BYTES:
            raise ShapeError(f"kv_write and attention need a key/value cache of {' or '.join(CACHE_BYTES)}, not {spec}")
        dtype = spec.dtype or self.kv_dtype
        size = CACHE_BYTES[dtype]
        needed = t.block_size * spec.num_kv_heads * (spec.key_dim + spec.value_dim) * size
        check_cache(t, needed, size)
        defines = {
            "CACHE_F16": int(dtype == "f16"), "BLOCK_TOKENS": t.block_size, "KV_HEADS": spec.num_kv_heads,
            "DK": spec.key_dim, "DV": spec.value_dim,
        }  # fmt: skip
        return defines, (Pointer(t.buffer.handle, t.offset // size), I64(t.block_bytes // size), I32(t.num_blocks))

    def _op_kv_write(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        cache, key, value, slots = inputs
        defines, where = self._cache(cache)
        k = matrix(key)
        v = k if value is None else matrix(value)
        args = (*where, *k.args, *v.args, vector(slots, "i32"), self.fault)
        self._emit("kv_write.fl", "kv_write", {**defines, "LANES": self.tuning.lanes, "VEC": 1}, args, Extent(k.rows))

    def _op_attention(self, inputs: list[Any], outputs: list[Operand], attrs: Mapping[str, Any]) -> None:
        query, cache, positions, query_start, context_len, table, sinks, slopes, prefix = inputs
        defines, where = self._cache(cache)
        q, y, pages = matrix(query), matrix(outputs[0]), matrix(table, "i32")
        if attrs["mask"] == "prefix" and prefix is None:
            raise ShapeError("op 'attention' needs the operand 'prefix_len' with mask 'prefix'")
        vec = self.tuning.vec
        while y.width % vec or defines["BLOCK_TOKENS"] % vec:
            vec //= 2
        defines |= {
            "LANES": self.tuning.lanes, "VEC": vec, "WIDTH": y.width, "MASK": MASKS.index(attrs["mask"]),
            "SOFTCAP": int(attrs["softcap"] > 0), "SINKS": int(sinks is not None), "SLOPES": int(slopes is not None),
        }  # fmt: skip
        args = (
            *q.args, *where, vector(positions, "i32"), vector(query_start, "i32"), vector(context_len, "i32"),
            pages.pointer, I64(pages.row), I32(pages.width),
            *(Absent() if s is None else vector(s, "f32") for s in (sinks, slopes)),
            Absent() if prefix is None else vector(prefix, "i32"),
            *y.args, self.fault, I32(context_len.shape[0]), I32(q.heads), F32(attrs["scale"]), F32(attrs["softcap"]),
            I32(attrs["chunk"]), I32(attrs["window"]),
        )  # fmt: skip
        self._emit("attention.fl", "attention", defines, args, Extent(q.rows, times=q.heads))


def _window(t: Tensor) -> tuple[int, int]:
    """First byte that a tensor may touch, and the one behind the last."""
    strides = t.strides or contiguous(t.shape)
    span = 0 if 0 in t.shape else 1 + sum((n - 1) * k for n, k in zip(t.shape, strides, strict=True))
    return (t.offset, t.offset + span * FORMATS[t.dtype].block_bytes)
