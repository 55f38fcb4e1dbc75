"""Rows in which every number is far below zero: a maximum that is sought from 0 on, and not from −∞, is right in all other cases. And scores of attention that
are far above: a kernel for single rows that takes no maximum is right until then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .. import bounds
from ..case import Case, Outcome
from ..numbers import Numbers
from ..operands import In
from ..session import Session
from .attention import Setup, paged
from .common import bind, expect
from .experts import routed

__all__ = ["cases"]

OFFSETS = (-120.0, -1000.0, -1e6)
"""Less than the exponent of any number of f32, taken from 0."""


def _softmax(case_id: str, session: Session, numbers: Numbers, width: int) -> Outcome:
    x = numbers.normal(len(OFFSETS), width) + np.array(OFFSETS, np.float32)[:, None]
    ran = session.bench.run("softmax", [In(x, "f32", "T")], [(x.shape, "f32")])
    return expect(session, case_id, ran, [bounds.softmax(x)])


def _attention(case_id: str, session: Session, numbers: Numbers, length: int, score: float) -> Outcome:
    """Keys that all point away from the queries, or to them; rows of one sequence, then each in a sequence of its own."""
    setup = Setup((length,), (9,), 4, 2, 32, 32, 16, attrs={"scale": 1.0})
    with paged(session, setup, numbers) as kit:
        kit.keys[0] = (np.float32(score / 96) + np.float32(0.02) * kit.keys[0]).astype(np.float32)
        kit.fill()
        query, where = (3 + np.float32(0.1) * numbers.normal(9, 4, 32)).astype(np.float32), setup.positions(0)
        together = kit.attend([query], [where])
        first = expect(session, case_id, together, [kit.expected([query], [where], together)])
        kit.table = kit.table.repeat(9, axis=0)
        kit.setup, kit.keys, kit.values = replace(setup, lengths=setup.lengths * 9, rows=(1,) * 9), kit.keys * 9, kit.values * 9
        queries, places = np.split(query, 9), np.split(where, 9)
        alone = kit.attend(queries, places)
        return max(first, expect(session, case_id, alone, [kit.expected(queries, places, alone)]), key=lambda outcome: outcome.margin or 0.0)


def _route(case_id: str, session: Session, numbers: Numbers, offset: float, bias: bool, attrs: dict[str, Any]) -> Outcome:
    logits = numbers.normal(5, 32) * np.float32(2) + np.float32(0 if bias else offset)
    return routed(case_id, session, logits, numbers.normal(32) + np.float32(offset) if bias else None, attrs)


_ROUTES: tuple[tuple[str, float, bool, dict[str, Any]], ...] = (
    ("softmax", -200.0, False, {"k": 4, "renorm": 1}),
    ("of_chosen", -50.0, False, {"k": 4, "score": "softmax_of_chosen"}),
    ("sigmoid_bias", -9.0, True, {"k": 4, "score": "sigmoid", "renorm": 1}),
    ("groups", -9.0, True, {"k": 4, "score": "sigmoid", "groups": 4, "keep_groups": 2, "group_score": "top2sum", "renorm": 1}),
    ("groups_max", -50.0, False, {"k": 3, "score": "softmax_of_chosen", "groups": 8, "keep_groups": 2}),
)


def cases() -> Iterator[Case]:
    """Ops that look for a maximum."""
    for width in (35, 4097):
        case_id = f"softmax/f32/row/m{len(OFFSETS)}-n{width}/below#bound"
        yield Case(case_id, "softmax", "rows", bind(_softmax, case_id, width), required=True, quick=width == 35)
    for length in (40, 703):
        for name, score in (("below", -192.0), ("above", 192.0)):
            case_id = f"attention/f32/row/l{length}-h4_2-d32_32-b16/{name}#bound"
            yield Case(case_id, "attention", "attention", bind(_attention, case_id, length, score), required=True, quick=length == 40)
    for name, offset, bias, attrs in _ROUTES:
        case_id = f"route_topk/f32/row/t5-e32-k{attrs['k']}/{name}.below#bound"
        yield Case(case_id, "route_topk", "experts", bind(_route, case_id, offset, bias, attrs), quick=name == "of_chosen")
