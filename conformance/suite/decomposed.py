"""Extended ops as the core ops that take their place: what a backend without the op computes is held to the bounds of the op itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastllm.api import CATALOGUE, GraphBuilder

from .. import bounds
from ..bench import In, Ran
from ..bounds import Expected
from ..case import Case, Failure, Outcome
from ..numbers import Numbers
from ..session import Session
from .common import bind, expect

__all__ = ["cases"]

Setup = Callable[[Numbers], tuple[dict[str, np.ndarray], Mapping[str, Any], Expected]]
"""numbers -> (operands by name, attributes, what the oracle expects)."""


def _softcap(numbers: Numbers) -> tuple[dict[str, np.ndarray], Mapping[str, Any], Expected]:
    x = numbers.normal(5, 65) * np.float32(60)
    x[0, 0], x[1, 0], x[2, 0] = np.nan, np.inf, -np.inf
    return {"x": x}, {"cap": 30.0}, bounds.softcap(x, 30.0)


_SETUPS: dict[str, Setup] = {"softcap": _softcap}
"""One for each op of the catalogue that has a decomposition (a test counts them)."""


def _equals(case_id: str, session: Session, numbers: Numbers, op: str) -> Outcome:
    operands, attrs, expected = _SETUPS[op](numbers)
    spec, builder = CATALOGUE[op], GraphBuilder("decomposed")
    inputs = [builder.weight(name, values.shape, "f32") for name, values in operands.items()]
    assert spec.decompose is not None
    results = spec.decompose(builder, inputs, spec.complete_attrs(attrs))
    found, ran = dict(operands), None
    for node in builder.graph.nodes:
        if not CATALOGUE[node.op].core:
            raise Failure("contract", f"'{op}' decomposes into '{node.op}', which is no core op")
        outs = [(tuple(int(d) for d in builder.graph.values[n].shape), builder.graph.values[n].dtype) for n in node.outputs]
        ran = session.bench.run(node.op, [_operand(builder, found, n) for n in node.inputs], outs, node.attrs)
        found |= dict(zip(node.outputs, ran.outs, strict=True))
    assert ran is not None
    outcome = expect(session, case_id, Ran([found[r.name] for r in results], ran.yes, ran.native), [expected])
    outcome.native = None
    return outcome


def _operand(builder: GraphBuilder, found: Mapping[str, np.ndarray], name: str | None) -> In | None:
    if name is None:
        return None
    value = builder.graph.values[name]
    array = np.asarray(value.data) if value.kind == "const" else found[name]
    return In(array, value.dtype, "" if value.kind == "const" else "T")


def cases() -> Iterator[Case]:
    """One for each op."""
    for op in _SETUPS:
        case_id = f"{op}/f32/row/any/decomposed#bound"
        yield Case(case_id, op, "rows", bind(_equals, case_id, op), required=True, quick=True, bin=f"{op}|f32|decomposed|any")
