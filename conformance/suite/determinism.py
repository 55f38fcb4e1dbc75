"""D0–D3: the same bits again, in a new process, whatever shares the batch, on any number of threads."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fastllm.api import FORMATS, Yes

from .. import blocks
from ..bench import Bench
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import In, Weight
from ..session import Session
from . import recurrent
from .attention import Paged, Setup
from .common import bind, same_bits
from .honesty import questions
from .linear import weight_of

__all__ = ["NAMES", "cases", "checked_call", "digests"]

ROWS = 37
Rows = slice
Call = Callable[[Bench, Rows], np.ndarray]


def _row_calls(numbers: Numbers) -> dict[str, Call]:
    """op -> a function that runs it on some rows of fixed data; every call gives the rows' results."""
    x, heads = numbers.normal(ROWS, 96), numbers.normal(ROWS, 3, 64)
    w, norm = weight_of(numbers, "f32", (70, 96)), numbers.normal(96)
    long, wide = numbers.normal(ROWS, 4128), weight_of(numbers, "f32", (9, 4128))
    matrices, where = weight_of(numbers, "f32", (3, 33, 64)), np.arange(ROWS, dtype=np.int32) * 11
    inv_freq = (10000.0 ** (-np.arange(32) / 32)).astype(np.float32)
    ids, table = (np.arange(ROWS, dtype=np.int32) * 7) % 50, weight_of(numbers, "f32", (50, 96))
    codes = numbers.integers(ROWS * 96, -127, 128).astype(np.int8).reshape(ROWS, 96)
    scales = np.abs(numbers.normal(ROWS, 3))
    experts = [weight_of(numbers, "f32", shape) for shape in ((6, 64, 96), (6, 64, 96), (6, 96, 64))]
    chosen = np.stack([numbers.permutation(6)[:2] for _ in range(ROWS)]).astype(np.int32)

    def run(op: str, out: tuple[int, ...], *inputs: Any, **attrs: Any) -> Call:
        def call(bench: Bench, rows: Rows) -> np.ndarray:
            cut = [In(i.array[rows], i.dtype, i.lead) if isinstance(i, In) and i.lead == "T" else i for i in inputs]
            count = len(range(*rows.indices(ROWS)))
            dtype = {"quantize": "i8", "route_topk": "i32"}.get(op, "f32")
            second = {"quantize": out[0] // 32, "route_topk": out[0]}.get(op)
            outs = [((count, *out), dtype)] + ([((count, second), "f32")] if second else [])
            results = bench.run(op, cut, outs, attrs).outs
            return np.concatenate([r.reshape(count, -1).view(np.uint8) for r in results], axis=1) if count else np.zeros((0, 1), np.uint8)

        return call

    def t(array: np.ndarray, dtype: str = "f32") -> In:
        return In(array, dtype, "T")

    calls = {
        "linear": run("linear", (70,), t(x), w, None),
        "linear_long": run("linear", (9,), t(long), wide, None),
        "matmul": run("matmul", (3, 33), t(heads), matrices),
        "rms_norm": run("rms_norm", (96,), t(x), In(norm), eps=1e-5),
        "layer_norm": run("layer_norm", (96,), t(x), In(norm), In(norm), eps=1e-5),
        "softmax": run("softmax", (96,), t(x)),
        "rope": run("rope", (3, 64), t(heads), t(where, "i32"), In(inv_freq)),
        "act_mul": run("act_mul", (96,), t(x), t(x[:, ::-1].copy())),
        "add": run("add", (96,), t(x), In(norm)),
        "mul": run("mul", (96,), t(x), In(norm)),
        "quantize": run("quantize", (96,), t(x), group=32),
        "dequantize": run("dequantize", (96,), t(codes, "i8"), t(scales), group=32),
        "embed": run("embed", (96,), t(ids, "i32"), table),
        "concat": run("concat", (3, 128), t(heads), t(heads[..., ::-1].copy())),
        "route_topk": run("route_topk", (5,), t(x), k=5, score="sigmoid", groups=8, keep_groups=3, group_score="top2sum", renorm=1),
        "moe": run("moe", (96,), t(x), t(chosen, "i32"), t(np.abs(x[:, :2]).copy()), *experts),
    }
    for format in ("f16", "bf16", *blocks.BLOCK_BYTES):
        block = blocks.BLOCK_BYTES.get(format, (32, 0))[0]
        calls[f"linear*{format}"] = run("linear", (40,), t(numbers.normal(ROWS, 2 * block)), weight_of(numbers, format, (40, 2 * block)), None)
    return calls


def _claimed(bench: Bench, name: str) -> bool:
    """Whether a format's own path exists here (another would be the f32 path again), and an extended op at all."""
    op, _, format = name.partition("*")
    if op in EXTENDED:
        try:
            _row_calls(Numbers(11))[name](bench, slice(0, 0))
        except NotApplicable:
            return False
    if not format:
        return True
    block = FORMATS[format].block
    weight = Weight((40, 2 * max(block, 16)), format, np.zeros(FORMATS[format].nbytes(80 * max(block, 16)), np.uint8))
    answer, kept = bench.ask("linear", [In(np.zeros((1, weight.shape[1]), np.float32), "f32", "T"), weight, None], {}, {})
    return isinstance(answer, Yes) and kept[1] == format


def _repeats(case_id: str, session: Session, numbers: Numbers, name: str) -> Outcome:
    call = checked_call(session, name)
    first = call(session.bench, slice(0, ROWS))
    for again in range(9):
        if not same_bits(call(session.bench, slice(0, ROWS)), first):
            raise Failure("d0", f"'{name}' gives other bits in repeat {again + 2} of 10")
    return Outcome()


def checked_call(session: Session, name: str) -> Call:
    """What runs `name` on some rows of fixed data. Raises NotApplicable for a format or an extended op that the backend has not."""
    if not _claimed(session.bench, name):
        format = name.partition("*")[2]
        raise NotApplicable(f"{format} weights are decoded before this backend sees them" if format else f"the backend has no '{name}'")
    return _row_calls(Numbers(11))[name]


def _alone(case_id: str, session: Session, numbers: Numbers, name: str) -> Outcome:
    """Rows alone, in pairs, in chunks: the bits of the whole batch."""
    if "rows" in _varies(session, name):
        raise Failure("d2", f"'{name}' declares varies=('rows',): batch mates change results, D2 is not claimed")
    call = checked_call(session, name)
    whole = call(session.bench, slice(0, ROWS))
    for rows in (slice(0, 1), slice(36, 37), slice(17, 19), slice(3, 8), slice(5, 36), slice(0, 16)):
        part = call(session.bench, rows)
        if not same_bits(part, whole[rows]):
            bad = int(np.argwhere((part != whole[rows]).any(axis=1))[0, 0]) + rows.start
            raise Failure("d2", f"row {bad} of '{name}' has other bits in rows {rows.start}…{rows.stop - 1} alone than among {ROWS} rows")
    return Outcome()


def _varies(session: Session, name: str) -> tuple[str, ...]:
    op = name.partition("*")[0].removesuffix("_long")
    answer = session.backend.supports(questions(op))
    return answer.varies if isinstance(answer, Yes) else ()


_ATTENTION = Setup((1100, 40, 9), (70, 2, 1), 4, 2, 64, 64, 16)


def _attention_rows(bench: Bench, pieces: tuple[tuple[int, int], ...], with_others: bool) -> np.ndarray:
    """Results of the first sequence's rows, computed in pieces, with or without the other sequences' rows in the batch."""
    numbers = Numbers(12)
    kit = Paged(bench, _ATTENTION, numbers)
    try:
        queries = [numbers.normal(n, 4, 64) for n in _ATTENTION.rows]
        where = [_ATTENTION.positions(s) for s in range(3)]
        parts = []
        for low, high in pieces:
            cut = [queries[0][low:high], *(q if with_others else q[:0] for q in queries[1:])]
            at = [where[0][low:high], *(p if with_others else p[:0] for p in where[1:])]
            parts.append(kit.attend(cut, at).outs[0][: high - low])
        return np.concatenate(parts)
    finally:
        kit.close()


def _attention_alone(session: Session, numbers: Numbers) -> Outcome:
    whole = _attention_rows(session.bench, ((0, 70),), True)
    for pieces, others in ((((0, 70),), False), (((0, 1), (1, 3), (3, 70)), False), (((0, 33), (33, 70)), True)):
        if not same_bits(_attention_rows(session.bench, pieces, others), whole):
            raise Failure("d2", f"attention of 70 rows has other bits in pieces {pieces}, {'with' if others else 'without'} other sequences in the batch")
    for row in (0, 31, 69):
        if not same_bits(_attention_rows(session.bench, ((row, row + 1),), False), whole[row : row + 1]):
            raise Failure("d2", f"row {row} of attention has other bits alone than in a prompt of 70")
    return Outcome()


def digests(bench: Bench) -> dict[str, str]:
    """op -> hash of its results on fixed data, for comparing processes and thread counts."""
    found = {}
    for name, call in _row_calls(Numbers(11)).items():
        if _claimed(bench, name):
            found[name] = hashlib.sha256(call(bench, slice(0, ROWS)).tobytes()).hexdigest()[:16]
    found |= recurrent.digests(bench)
    found["attention"] = hashlib.sha256(_attention_rows(bench, ((0, 70),), True).tobytes()).hexdigest()[:16]
    return found


def _differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return sorted(name for name in a if a[name] != b.get(name))


def _new_process(session: Session, numbers: Numbers) -> Outcome:
    """A child process gives the same bits."""
    here = digests(session.bench)
    command = [sys.executable, "-m", "fastllm.conformance.worker", "--digests"]
    child = subprocess.run(command, input=json.dumps(session.target.as_dict()), capture_output=True, text=True, timeout=80, check=False)
    if child.returncode:
        raise Failure("d1", f"a child process failed: {(child.stderr.strip().splitlines() or ['no message'])[-1]}")
    other = _differing(here, json.loads(child.stdout.splitlines()[-1]))
    if other:
        raise Failure("d1", f"a new process gives other bits for {', '.join(other)}")
    return Outcome()


def _threads(session: Session, numbers: Numbers) -> Outcome:
    """1, 2, 3 and 5 threads give the same bits."""
    if "threads" not in session.spec.options:
        raise NotApplicable("the backend has no option 'threads'")
    found: dict[int, dict[str, str]] = {}
    for count in (1, 2, 3, 5):
        with session.fresh(threads=str(count)) as backend:
            found[count] = digests(Bench(backend))
    for count, other in found.items():
        if wrong := _differing(found[1], other):
            raise Failure("d3", f"{count} threads give other bits than one for {', '.join(wrong)}")
    return Outcome()


EXTENDED = ("concat", "route_topk", "moe")
NAMES = ("linear", "linear_long", "matmul", "rms_norm", "layer_norm", "softmax", "rope", "act_mul", "add", "mul", "quantize", "dequantize", "embed", *EXTENDED)


def cases() -> Iterator[Case]:
    """D0 and D2 per op and format, D1 and D3 for all together."""
    for name in (*NAMES, *(f"linear*{f}" for f in ("f16", "bf16", *blocks.BLOCK_BYTES))):
        op = name.partition("*")[0].removesuffix("_long")
        plain = "*" not in name
        quick = name in ("linear", "linear_long", "rms_norm", "linear*q4_0", "linear*q8_0")
        for rule, check, level in (("repeats#d0", _repeats, "bronze"), ("rows#d2", _alone, "silver")):
            case_id = f"{op}/-/-/{name}/{rule}"
            yield Case(case_id, op, "determinism", bind(check, case_id, name), level, plain and name not in EXTENDED, quick)
    yield Case("attention/-/-/attention/rows#d2", "attention", "determinism", _attention_alone, "silver", True, True)
    yield Case("any/-/-/all/process#d1", "any", "determinism", _new_process, "silver", True, limit_s=90.0)
    yield Case("any/-/-/all/threads#d3", "any", "determinism", _threads, "silver", limit_s=90.0)
