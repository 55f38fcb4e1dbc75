"""Extended ops as the core ops that take their place: what a backend without the op computes is held to the bounds of the op itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastllm.api import CATALOGUE, GraphBuilder, Value, Yes

from .. import blocks, bounds
from ..bench import In, Operand, Ran, Weight
from ..bounds import Expected, Numerics
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..session import Session
from .common import bind, expect
from .experts import moe_data

__all__ = ["cases"]


@dataclass
class Setup:
    """Operands by name, in catalogue order (a Weight is one of the model, an array has a row for each token), attributes, and what the oracle
    expects of kernels that declare such numerics."""

    operands: dict[str, np.ndarray | Weight | None]
    attrs: Mapping[str, Any]
    expected: Callable[[Numerics], Expected]


def _softcap(numbers: Numbers, format: str) -> Setup:
    x = numbers.normal(5, 65) * np.float32(60)
    x[0, 0], x[1, 0], x[2, 0] = np.nan, np.inf, -np.inf
    return Setup({"x": x}, {"cap": 30.0}, lambda numerics: bounds.softcap(x, 30.0))


def _moe(numbers: Numbers, format: str) -> Setup:
    data = moe_data(numbers, format, 7, 5, 2, 64, 96, bias=True)
    gate, up, down = data.stacks
    tables = [None if b is None else Weight(b.shape, "f32", blocks.encode_plain("f32", b)) for b in data.biases]
    operands: dict[str, np.ndarray | Weight | None] = {"x": data.x, "ids": data.ids, "weights": data.weights, "gate": gate, "up": up, "down": down}
    operands |= dict(zip(("gate_bias", "up_bias", "down_bias"), tables, strict=True))
    return Setup(operands, {"kind": "silu"}, lambda numerics: data.expected("silu", numerics))


_SETUPS: tuple[tuple[str, str, Callable[[Numbers, str], Setup]], ...] = (
    ("softcap", "f32", _softcap), ("moe", "f32", _moe), ("moe", "q4_0", _moe), ("moe", "q8_0", _moe),
)  # fmt: skip
"""(op, format of weights, operands): at least one for each op of the catalogue that has a decomposition (a test counts them)."""


def _equals(case_id: str, session: Session, numbers: Numbers, op: str, format: str, make: Callable[[Numbers, str], Setup]) -> Outcome:
    setup = make(numbers, format)
    if op == "moe" and _has(session, setup):
        raise NotApplicable("it computes moe itself, so nothing takes its place")
    spec, builder, numerics = CATALOGUE[op], GraphBuilder("decomposed"), Numerics()
    inputs = [_value(builder, name, operand) for name, operand in setup.operands.items()]
    assert spec.decompose is not None
    results = spec.decompose(builder, inputs, spec.complete_attrs(setup.attrs))
    rows = next(len(o) for o in setup.operands.values() if isinstance(o, np.ndarray))
    found, ran = {n: o for n, o in setup.operands.items() if o is not None}, None
    for node in builder.graph.nodes:
        if not CATALOGUE[node.op].core:
            raise Failure("contract", f"'{op}' decomposes into '{node.op}', which is no core op")
        values = [builder.graph.values[n] for n in node.outputs]
        outs = [(tuple(rows if isinstance(d, str) else d for d in v.shape), v.dtype) for v in values]
        ran = session.bench.run(node.op, [_operand(builder, found, n) for n in node.inputs], outs, node.attrs)
        found |= dict(zip(node.outputs, ran.outs, strict=True))
        if node.op == "linear":
            numerics = ran.numerics
    assert ran is not None
    outcome = expect(session, case_id, Ran([np.asarray(found[r.name]) for r in results], ran.yes, ran.native), [setup.expected(numerics)])
    outcome.native = None
    return outcome


def _has(session: Session, setup: Setup) -> bool:
    """Whether the backend computes these experts as one op of its own: then the planner never decomposes it."""
    operands = [o if isinstance(o, Weight) or o is None else In(o, "i32" if o.dtype == np.int32 else "f32", "T") for o in setup.operands.values()]
    answer, _ = session.bench.ask("moe", operands, CATALOGUE["moe"].complete_attrs(setup.attrs), {})
    return isinstance(answer, Yes) and not answer.impl.startswith("ref.")


def _value(builder: GraphBuilder, name: str, operand: np.ndarray | Weight | None) -> Value | None:
    if operand is None:
        return None
    if isinstance(operand, Weight):
        return builder.weight(name, operand.shape, "f32" if operand.format == "f32" else "any")
    value = Value(name, ("T", *operand.shape[1:]), "i32" if operand.dtype == np.int32 else "f32")
    return builder.graph.values.setdefault(name, value)


def _operand(builder: GraphBuilder, found: Mapping[str, np.ndarray | Weight], name: str | None) -> Operand:
    """What a node reads: a value that is there, a strided window on one, a constant, or one matrix of a stack."""
    if name is None:
        return None
    value, stack = builder.graph.values[name], found.get(name.partition("[")[0])
    if value.kind == "const":
        return In(np.asarray(value.data), value.dtype)
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
    for op, format, make in _SETUPS:
        types = "f32" if op == "softcap" else f"f32*{format}"
        case_id = f"{op}/{types}/row/any/decomposed#bound"
        yield Case(case_id, op, "rows", bind(_equals, case_id, op, format, make), required=op == "softcap", quick=format != "q8_0", bin=f"{op}|{format}|decomposed|any" if op == "softcap" else "")
