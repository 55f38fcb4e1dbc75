"""sample: the id that the rule gives, exactly. A backend that answers No leaves it to the host, and the host's sampler is judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fastllm.api import No, host_sample

from .. import oracle
from ..case import Case, Failure, Outcome
from ..numbers import Numbers
from ..operands import In
from ..session import Session
from .common import bind
from .linear import VOCABULARY

__all__ = ["Draws", "cases", "draws"]

PARAMETERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 5.0},
    "cold": {"temperature": 0.05},
    "top_k": {"top_k": 3},
    "top_k1": {"top_k": 1},
    "top_k_all": {"top_k": 10**6},
    "top_p": {"top_p": 0.6},
    "top_p0": {"top_p": 0.0},
    "min_p": {"min_p": 0.3},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "greedy_top_k": {"temperature": 0.0, "top_k": 2, "top_p": 0.5},
}


@dataclass
class Draws:
    """What is sampled from, row by row, and the ids that are right. adjust: (id, bias, penalty of repeats, what is subtracted) of each row."""

    name: str
    logits: np.ndarray
    u: np.ndarray
    parameters: Mapping[str, float]
    adjust: list[list[tuple[int, float, float, float]]]
    wanted: list[int]

    def judge(self, session: Session, rows: int) -> Outcome:
        """Samples the first rows, on the device or else on the host. Raises Failure for another id."""
        flat = [entry for row in self.adjust[:rows] for entry in row]
        arrays: dict[str, tuple[np.ndarray, str, str]] = {
            "u": (self.u[:rows], "f64", "R"),
            **{n: (np.full(rows, self.parameters[n], np.int32 if n == "top_k" else np.float32), "i32" if n == "top_k" else "f32", "R") for n in ("temperature", "top_k", "top_p", "min_p")},
            "adjust_start": (np.cumsum([0, *map(len, self.adjust[:rows])]).astype(np.int32), "i32", "R+1"),
            "adjust_ids": (np.array([e[0] for e in flat], np.int32), "i32", "A"),
            **{n: (np.array([e[i + 1] for e in flat], np.float32), "f32", "A") for i, n in enumerate(("adjust_bias", "adjust_repeat", "adjust_sub"))},
        }  # fmt: skip
        operands = [In(self.logits[:rows], "f32", "R"), *(In(a, d, lead) for a, d, lead in arrays.values())]
        bench = session.bench
        answer, _ = bench.ask("sample", operands, {}, {"A": len(flat)})
        if isinstance(answer, No):
            found, impl, native = host_sample(self.logits[:rows], **{n: a for n, (a, _, _) in arrays.items()}), "host", None
        else:
            ran = bench.run("sample", operands, [((rows,), "i32")], {}, {"A": len(flat)})
            found, impl, native = ran.outs[0], ran.yes.impl, ran.native
        if found.tolist() != self.wanted[:rows]:
            r = next(i for i in range(rows) if int(found[i]) != self.wanted[i])
            raise Failure("exact", f"{impl}: row {r} (u = {self.u[r]:.6g}, {self.name}) gives id {int(found[r])} instead of {self.wanted[r]}", impl=impl, native=native)
        return Outcome(impl=impl, native=native)


def draws(numbers: Numbers, vocabulary: int, rows: int, name: str, data: str) -> Draws:
    """Random logits f32 [rows, vocabulary]. name: of PARAMETERS; data: what is special about the logits, u or the adjustments."""
    logits = numbers.normal(rows, vocabulary) * np.float32(3)
    if data == "ties":
        logits = np.round(logits)
    if data == "equal":
        logits[...] = 1.5
    if data == "last":  # the best ones are the last of the vocabulary
        logits[np.arange(rows), vocabulary - 1 - np.arange(rows)] = 100
    if data == "bad":
        logits[0, vocabulary // 2], logits[1, 0] = np.nan, np.inf
        logits[2, :] = -np.inf
    p = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **PARAMETERS[name]}
    u = np.array([(0.0, 1 - 2.0**-53, *numbers.uniform(rows))[r] if data == "ends" else numbers.uniform(1)[0] for r in range(rows)])
    adjust: list[list[tuple[int, float, float, float]]] = [[] for _ in range(rows)]
    if data == "adjusted":
        for r in range(rows):
            best = int(logits[r].argmax())
            adjust[r] = [(best, -math.inf if r % 2 else -5.0, 1.3, 0.5), ((best + 1) % vocabulary, 2.0, 1.0, 0.0)]
    if data == "far":  # bans of the best ids, which are the last of the vocabulary
        logits[np.arange(rows), vocabulary - 1 - np.arange(rows)] = 100
        adjust = [[(r, -1.0, 1.0, 0.0), (vocabulary - 1 - r, -math.inf, 1.0, 0.0)] for r in range(rows)]
    if data == "many":  # rows end at numbers of 17 bits, with the ban of the best id: a long text with penalties
        last = vocabulary - 1 - np.arange(rows)
        logits[np.arange(rows), last] = 100
        adjust = [[*((i, 0.5 * (i % 3), 1.1, 0.25) for i in range(vocabulary - rows)), (int(last[r]), -math.inf, 1.0, 0.0)] for r in range(rows)]
    wanted = [oracle.sample(logits[r], float(u[r]), p["temperature"], int(p["top_k"]), p["top_p"], p["min_p"], adjust[r]) for r in range(rows)]
    return Draws(name, logits, u, p, adjust, wanted)


def _sample(case_id: str, session: Session, numbers: Numbers, vocabulary: int, rows: int, name: str, data: str) -> Outcome:
    return draws(numbers, vocabulary, rows, name, data).judge(session, rows)


def _case(rows: int, vocabulary: int, name: str, data: str, quick: bool = False) -> Case:
    case_id = f"sample/f32/row/r{rows}-v{vocabulary}/{name}.{data}#exact"
    return Case(case_id, "sample", "sample", bind(_sample, case_id, vocabulary, rows, name, data), required=True, quick=quick)


def cases() -> Iterator[Case]:
    """Every parameter alone and combined; ties, equal logits, both ends of u, adjustments, rows without a finite logit."""
    for vocabulary in (1, 2, 257, 32000):
        for name in PARAMETERS if vocabulary == 257 else ("greedy", "plain", "all"):
            for data in ("normal", "ties", "ends") if vocabulary <= 257 else ("normal",):
                yield _case(9 if vocabulary < 1000 else 2, vocabulary, name, data, quick=vocabulary == 257 and data == "ties")
    for rows, vocabulary, names in ((1, 32000, ("top_p",)), (9, 151936, ("greedy", "all")), (1, 151936, ("plain", "top_p")), (9, VOCABULARY, ("greedy", "top_k")), (1, VOCABULARY, ("plain", "min_p", "all"))):
        for name in names:  # the sizes of real vocabularies: ids beyond 2^16, sums of 2^18 weights
            yield _case(rows, vocabulary, name, "last" if name == "greedy" else "normal", quick=rows == 9 and name == "greedy")
    yield _case(1, 257, "all", "normal")
    yield _case(1100, 33, "greedy", "normal", quick=True)
    yield _case(1100, 33, "all", "normal")
    yield _case(9, VOCABULARY, "greedy", "far", quick=True)
    yield _case(3, 32768, "greedy", "many")
    for name, data in (("plain", "equal"), ("greedy", "equal"), ("top_k", "equal"), ("all", "adjusted"), ("greedy", "adjusted"), ("plain", "bad"), ("greedy", "bad")):
        yield _case(5, 33, name, data, quick=data != "equal")
    case_id = "sample/f32/row/r0-v8/plain.none#exact"
    yield Case(case_id, "sample", "sample", bind(_sample, case_id, 8, 0, "plain", "normal"), required=True)
