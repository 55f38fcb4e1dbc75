"""honesty: what supports() says is true. Both directions: a Yes that errs fails, and so does an implementation that no Yes leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from fastllm.api import CATALOGUE, CORE_OPS, FORMATS, KVSpec, No, OpQuery, SlotSpec, Yes

from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import Cache, In, Operand, State, query_for
from ..session import Session
from .common import bind

__all__ = ["cases", "questions"]

HOST_OPS = ("sample",)
"""Core ops that the engine itself may run: a No is not held against a backend."""


def questions(op: str, rows: int = 4, width: int = 64, ctx: int = 64) -> OpQuery:
    """A plain question about an op in f32 (stacks of experts too), as the planner would ask for steps of up to `rows` tokens."""
    f, i = np.float32, np.int32
    x, pos, cache = In(np.zeros((rows, width), f), "f32", "T"), In(np.zeros(rows, i), "i32", "T"), Cache(KVSpec(2, 32, 32), 64, 2)
    heads = In(np.zeros((rows, 2, 32), f), "f32", "T")
    step = [pos, In(np.zeros(2, i), "i32", "S+1"), In(np.zeros(1, i), "i32", "S"), In(np.zeros((1, 2), i), "i32", "S")]
    ragged = [In(np.zeros(2, i), "i32", "S+1"), In(np.zeros(1, i), "i32", "S")]
    gates = [In(np.zeros((rows, 2), f), "f32", "T") for _ in range(2)]
    inputs: dict[str, list[Operand]] = {
        "embed": [pos, In(np.zeros((8, width), f))],
        "linear": [x, In(np.zeros((8, width), f)), None],
        "matmul": [heads, In(np.zeros((2, 5, 32), f))],
        "rms_norm": [x, In(np.zeros(width, f))],
        "layer_norm": [x, In(np.zeros(width, f)), None],
        "rope": [heads, pos, In(np.zeros(16, f))],
        "kv_write": [cache, heads, heads, pos],
        "attention": [In(np.zeros((rows, 4, 32), f), "f32", "T"), cache, *step, None, None, None],
        "add": [x, x],
        "mul": [x, x],
        "act_mul": [x, x],
        "softmax": [x],
        "quantize": [x],
        "dequantize": [In(np.zeros((rows, width), np.int8), "i8", "T"), In(np.zeros((rows, width // 32), f), "f32", "T")],
        "softcap": [x],
        "concat": [heads, heads],
        "route_topk": [x, In(np.zeros(width, f))],
        "moe": [x, In(np.zeros((rows, 2), i), "i32", "T"), In(np.zeros((rows, 2), f), "f32", "T"), *(In(np.zeros((4, width, width), f)) for _ in range(3))],
        "short_conv": [State(SlotSpec((3, width)), 2), x, In(np.zeros((width, 4), f)), pos, *ragged],
        "delta_rule": [State(SlotSpec((2, 32, 32)), 2), heads, heads, heads, *gates, *(In(np.zeros(2, f)) for _ in range(2)), pos, *ragged],
    }
    spec = CATALOGUE[op]
    operands = [*inputs[op], *[None] * (len(spec.inputs) - len(inputs[op]))]
    attrs: dict[str, Any] = {"eps": 1e-5, "scale": 0.2, "cap": 30.0, "k": 2}
    full = spec.complete_attrs({k: v for k, v in attrs.items() if k in spec.attrs})
    kept = ["" if o is None else "kv" if isinstance(o, Cache) else "slot" if isinstance(o, State) else o.dtype for o in operands if not hasattr(o, "format")]
    return query_for(op, operands, kept, full, {"ctx": ctx})


ASKED = tuple(op for op in CATALOGUE if op not in HOST_OPS)


def _answer(session: Session, query: OpQuery) -> Yes | No:
    answer = session.backend.supports(query)
    if not isinstance(answer, Yes | No):
        raise Failure("honest", f"supports() answered {answer!r:.80}, which is neither Yes nor No")
    return answer


def _core(case_id: str, session: Session, numbers: Numbers, op: str) -> Outcome:
    """A core op in f32 gets a Yes that names an implementation, the same one every time, for every part of the range."""
    whole = questions(op)
    answer = _answer(session, whole)
    if isinstance(answer, No) and op not in CORE_OPS:
        raise NotApplicable(f"an extended op, which is decomposed or runs elsewhere: {answer.reason}")
    if isinstance(answer, No):
        raise Failure("honest", f"'{op}' is a core op, but the backend answers No: {answer.reason}")
    if answer.impl not in session.backend.ops():
        raise Failure("honest", f"supports() names '{answer.impl}', which is not in ops()")
    if _answer(session, whole) != answer:
        raise Failure("honest", f"the same question about '{op}' got two answers")
    for small in (questions(op, rows=1), questions(op, rows=3, ctx=7)):
        part = _answer(session, small)
        if isinstance(part, No):
            raise Failure("honest", f"'{op}' is promised for {dict(whole.dims)}, but not for its part {dict(small.dims)}: {part.reason}")
    return Outcome(impl=answer.impl)


def _refuses(case_id: str, session: Session, numbers: Numbers, what: str) -> Outcome:
    """An invented op, dtype, attribute or value must get a No with a reason."""
    base = questions("linear")
    queries = {
        "op": replace(base, op="frobnicate"),
        "dtype": replace(base, dtypes=("f32", "q9_9", None)),
        "activation": replace(questions("rms_norm"), dtypes=("c128", "f32")),
        "attribute": replace(questions("rms_norm"), attrs={"eps": 1e-5, "sharpness": 3}),
        "mask": replace(questions("attention"), attrs={"scale": 0.2, "mask": "spiral"}),
        "kind": replace(questions("act_mul"), attrs={"kind": "frelu"}),
        "style": replace(questions("rope"), attrs={"style": "triples"}),
    }
    answer = _answer(session, queries[what])
    if isinstance(answer, Yes):
        raise Failure("honest", f"the backend answers Yes ({answer.impl}) to an invented {what}: {queries[what].op} {queries[what].dtypes} {dict(queries[what].attrs)}")
    if not answer.reason:
        raise Failure("honest", f"a No without a reason, to an invented {what}")
    return Outcome()


def _pure(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """Asking allocates nothing and moves no bytes."""
    with session.bench.watch() as seen:
        for op in ASKED:
            _answer(session, questions(op))
    if seen["alloc"] or seen["download"]:
        raise Failure("honest", f"supports() made {seen['alloc']} allocations and {seen['download']} downloads; it is to be pure")
    return Outcome()


def _reachable(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """Every implementation of ops() is led to by some Yes."""
    named = set()
    for op in ASKED:
        query = questions(op)
        for dtypes in _variants(query):
            answer = _answer(session, replace(query, dtypes=dtypes))
            if isinstance(answer, Yes):
                named.add(answer.impl)
    known = {name.rpartition(".")[2] for name in CATALOGUE}
    dead = sorted(n for n in set(session.backend.ops()) - named if n.rpartition(".")[2] not in known or (not n.startswith("ref.") and n.rpartition(".")[2] in ASKED))
    if dead:
        raise Failure("honest", f"no Yes leads to {', '.join(dead)} of ops(): an implementation that nobody can reach is not tested")
    return Outcome()


def _variants(query: OpQuery) -> list[tuple[str | None, ...]]:
    if query.op == "moe":
        return [(*query.dtypes[:3], form, form, form, *query.dtypes[6:]) for form in FORMATS]
    if query.op not in ("linear", "embed", "matmul"):
        return [query.dtypes]
    first, _, *rest = query.dtypes
    return [(first, form, *rest) for form in FORMATS]


def _holds(case_id: str, session: Session, numbers: Numbers, op: str) -> Outcome:
    """A No with `holds` keeps its word: inside of those ranges the answer is Yes."""
    query = questions(op, rows=4096, ctx=1 << 20)
    answer = _answer(session, query)
    if isinstance(answer, Yes) or answer.holds is None:
        return Outcome(impl=answer.impl if isinstance(answer, Yes) else "")
    inside = replace(query, dims={**query.dims, **answer.holds})
    again = _answer(session, inside)
    if isinstance(again, No):
        raise Failure("honest", f"'{op}' holds for {dict(answer.holds)}, says the backend, but asked about that it says No: {again.reason}")
    return Outcome(impl=again.impl)


def cases() -> Iterator[Case]:
    """Core ops, invented things, purity, reachability, holds."""
    for op in ASKED:
        for name, check, quick in (("any/core", _core, True), ("huge/holds", _holds, False)):
            case_id = f"{op}/f32/-/{name}#honest"
            yield Case(case_id, op, "honesty", bind(check, case_id, op), required=op in CORE_OPS, quick=quick)
    for what in ("op", "dtype", "activation", "attribute", "mask", "kind", "style"):
        case_id = f"any/-/-/any/invented_{what}#honest"
        yield Case(case_id, "any", "honesty", bind(_refuses, case_id, what), required=True, quick=True)
    for name, whole in (("pure", _pure), ("reachable", _reachable)):
        case_id = f"any/-/-/any/{name}#honest"
        yield Case(case_id, "any", "honesty", bind(whole, case_id), required=True, quick=True)
