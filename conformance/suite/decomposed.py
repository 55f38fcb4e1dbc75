"""Extended ops as the core ops that take their place: what a backend without the op computes is held to the bounds of the op itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastllm.api import CATALOGUE, GraphBuilder, KVSpec, SlotSpec, Value, Yes

from .. import blocks, bounds, bounds_extended, oracle_extended
from ..bench import Ran
from ..bounds import Expected, Numerics
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import Cache, In, Operand, Weight
from ..session import Session
from .common import bind, expect
from .experts import moe_data

__all__ = ["cases"]


STEP_ARRAYS = ("positions", "query_start", "state_slot")
"""Operands that are arrays of the step."""


@dataclass
class Setup:
    """Operands by name, in catalogue order (a Weight is one of the model, a SlotSpec a state, an array has a row for each token but where
    it is one of STEP_ARRAYS), attributes, and what the oracle expects of kernels that declare such numerics. step: arrays of the
    step that the parts ask for beyond the operands; sizes: largest values of symbols."""

    operands: dict[str, np.ndarray | Weight | SlotSpec | None]
    attrs: Mapping[str, Any]
    expected: Callable[[Numerics], Expected]
    step: Mapping[str, np.ndarray] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


def _softcap(numbers: Numbers, format: str) -> Setup:
    x = numbers.normal(5, 65) * np.float32(60)
    x[0, 0], x[1, 0], x[2, 0] = np.nan, np.inf, -np.inf
    return Setup({"x": x}, {"cap": 30.0}, lambda numerics: bounds.softcap(x, 30.0))


def _moe(numbers: Numbers, format: str) -> Setup:
    data = moe_data(numbers, format, 7, 5, 2, 64, 96, bias=True)
    gate, up, down = data.stacks
    tables = [None if b is None else Weight(b.shape, "f32", blocks.encode_plain("f32", b)) for b in data.biases]
    operands: dict[str, np.ndarray | Weight | SlotSpec | None] = {"x": data.x, "ids": data.ids, "weights": data.weights, "gate": gate, "up": up, "down": down}
    operands |= dict(zip(("gate_bias", "up_bias", "down_bias"), tables, strict=True))
    return Setup(operands, {"kind": "silu"}, lambda numerics: data.expected("silu", numerics))


def _concat(numbers: Numbers, heads: tuple[int, ...]) -> Setup:
    x, y = numbers.normal(5, *heads, 33), numbers.normal(5, *heads, 8)
    return Setup({"x": x, "y": y}, {}, lambda numerics: bounds.copies(oracle_extended.concat(x, y)))


BLOCK = 16
"""Tokens of a block of the cache of `_short_conv`."""


def _short_conv(numbers: Numbers, format: str) -> Setup:
    """Three sequences from their beginning, one shorter than the kernel, one over a block's end; every block in another place."""
    lengths, channels, taps = (2, 19, 5), 96, 4
    x, weight = [numbers.normal(n, channels) for n in lengths], numbers.normal(channels, taps)

    def expected(numerics: Numerics) -> Expected:
        zeros = np.zeros((taps - 1, channels))
        parts = [bounds_extended.short_conv(np.concatenate([zeros, part]).astype(np.float64), weight.astype(np.float64), "silu", len(part)) for part in x]
        return Expected(np.concatenate([p.y for p in parts]), np.concatenate([np.asarray(p.bound) for p in parts]))

    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    table = np.array([[3, 3], [1, 0], [2, 2]], np.int32)
    of = np.repeat(np.arange(3), lengths)
    step = {
        "slots": (table[of, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
        "context_len": np.array(lengths, np.int32),
        "block_table": table,
    }
    operands: dict[str, np.ndarray | Weight | SlotSpec | None] = {
        "state": SlotSpec((taps - 1, channels)),
        "x": np.concatenate(x),
        "weight": Weight((channels, taps), "f32", blocks.encode_plain("f32", weight)),
        "positions": positions,
        "query_start": np.cumsum([0, *lengths]).astype(np.int32),
        "state_slot": np.array([0, 1, 2], np.int32),
    }
    return Setup(operands, {"kind": "silu"}, expected, step, {"S": 3, "B": 2, "ctx": max(lengths)})


_SETUPS: tuple[tuple[str, str, str, Callable[[Numbers, str], Setup]], ...] = (
    ("softcap", "f32", "row", _softcap),
    ("moe", "f32", "row", _moe), ("moe", "q4_0", "row", _moe), ("moe", "q8_0", "row", _moe),
    ("concat", "f32", "row", lambda numbers, _: _concat(numbers, ())), ("concat", "f32", "heads", lambda numbers, _: _concat(numbers, (3,))),
    ("short_conv", "f32", "row", _short_conv),
)  # fmt: skip
"""(op, format of weights, layout, operands): at least one for each op of the catalogue that has a decomposition (a test counts them)."""


def _equals(case_id: str, session: Session, numbers: Numbers, op: str, format: str, make: Callable[[Numbers, str], Setup]) -> Outcome:
    setup = make(numbers, format)
    if op == "moe" and _has(session, setup):
        raise NotApplicable("it computes moe itself, so nothing takes its place")
    spec, builder, numerics = CATALOGUE[op], GraphBuilder("decomposed"), Numerics()
    inputs = [_value(builder, name, operand) for name, operand in setup.operands.items()]
    assert spec.decompose is not None
    results = spec.decompose(builder, inputs, spec.complete_attrs(setup.attrs))
    rows = next(len(o) for n, o in setup.operands.items() if isinstance(o, np.ndarray) and n not in STEP_ARRAYS)
    found: dict[str, Any] = {n: o for n, o in {**setup.operands, **setup.step}.items() if o is not None}
    ran = None
    try:
        for node in builder.graph.nodes:
            if not CATALOGUE[node.op].core:
                raise Failure("contract", f"'{op}' decomposes into '{node.op}', which is no core op")
            values = [builder.graph.values[n] for n in node.outputs]
            outs = [(tuple(rows if isinstance(d, str) else d for d in v.shape), v.dtype) for v in values]
            ran = session.bench.run(node.op, [_operand(session, builder, found, n) for n in node.inputs], outs, node.attrs, setup.sizes)
            found |= dict(zip(node.outputs, ran.outs, strict=True))
            if node.op == "linear":
                numerics = ran.numerics
    finally:
        for made in found.values():
            if isinstance(made, Cache) and made.region is not None:
                made.region.buffer.close()
    assert ran is not None
    outcome = expect(session, case_id, Ran([np.asarray(found[r.name]) for r in results], ran.yes, ran.native), [setup.expected(numerics)])
    outcome.native = None
    return outcome


def _has(session: Session, setup: Setup) -> bool:
    """Whether the backend computes these experts as one op of its own: then the planner never decomposes it."""
    operands = [None if not isinstance(o, Weight | np.ndarray) else o if isinstance(o, Weight) else In(o, "i32" if o.dtype == np.int32 else "f32", "T") for o in setup.operands.values()]
    answer, _ = session.bench.ask("moe", operands, CATALOGUE["moe"].complete_attrs(setup.attrs), {})
    return isinstance(answer, Yes) and not answer.impl.startswith("ref.")


def _value(builder: GraphBuilder, name: str, operand: np.ndarray | Weight | SlotSpec | None) -> Value | None:
    if operand is None:
        return None
    if isinstance(operand, SlotSpec):
        return builder.slot_state(name, operand.shape)
    if isinstance(operand, Weight):
        return builder.weight(name, operand.shape, "f32" if operand.format == "f32" else "any")
    if name in STEP_ARRAYS:
        return builder.input(name)
    value = Value(name, ("T", *operand.shape[1:]), "i32" if operand.dtype == np.int32 else "f32")
    return builder.graph.values.setdefault(name, value)


def _operand(session: Session, builder: GraphBuilder, found: dict[str, Any], name: str | None) -> Operand:
    """What a node reads: a value that is there, a strided window on one, a constant, the same constant several times, an array of the step,
    a cache, one matrix of a stack or one column of a matrix."""
    if name is None:
        return None
    value, stack = builder.graph.values[name], found.get(name.partition("[")[0])
    if value.kind == "const":
        whole = np.asarray(builder.graph.base(name).data)
        return In(whole if value.view is None else np.broadcast_to(whole, [int(d) for d in value.shape]), value.dtype)
    if value.kind == "input":
        return In(found[name], value.dtype, str(value.shape[0]))
    if isinstance(value.spec, KVSpec):
        if name not in found:
            found[name] = session.bench.cache(value.spec, BLOCK, 1 + int(found["block_table"].max()))
        return found[name]
    if isinstance(stack, Weight) and ":" in name:
        return In(stack.decode()[:, int(name.partition(":, ")[2].split()[0])].astype(np.float32))
    if isinstance(stack, Weight) and name.endswith("]"):
        data = stack.data.reshape(stack.shape[0], -1)[int(name.partition("[")[2][:-1])]
        return Weight(value.shape, stack.format, data) if len(value.shape) > 1 else In(data.view(np.float32))  # type: ignore[arg-type]
    base = found[name if value.view is None else value.view.base]
    assert isinstance(base, np.ndarray)
    if value.view is None:
        return In(base, value.dtype, "T")
    shape = (len(base), *(int(d) for d in value.shape[1:]))
    window = np.lib.stride_tricks.as_strided(base.reshape(-1)[value.view.offset :], shape, [s * base.itemsize for s in value.view.strides])
    return In(window, value.dtype, "T", value.view.strides[0] - int(np.prod(shape[1:])), value.view.offset)


def cases() -> Iterator[Case]:
    """One for each op; of experts, one for each way in which formats are computed."""
    for op, format, layout, make in _SETUPS:
        types, rule = f"f32*{format}" if op == "moe" else "f32", "exact" if op == "concat" else "bound"
        case_id = f"{op}/{types}/{layout}/any/decomposed#{rule}"
        bin = f"{op}|{format}|decomposed|any" if op == "softcap" else ""
        yield Case(case_id, op, "rows", bind(_equals, case_id, op, format, make), required=op == "softcap", quick=format != "q8_0", bin=bin)
