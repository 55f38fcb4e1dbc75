"""The items of a perf report: probes of the machine, every op at the sizes of a decode step and of a prompt, and two models.

They are cases like the others, so they run in a worker of their own and a hang is a line, but they belong to no level and decide nothing:
`perf` reads the seconds, bytes and operations that they leave in their facts. Sizes are those of a
model of 7 to 8 billion parameters; ops that compute little get so many rows that no cache holds them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fastllm.api import KVSpec, StepBatch, StepLimits

from . import blocks, tiny
from .case import Case, NotApplicable, Outcome, matches
from .loaded import Loaded, batch_of
from .midmodel import save_mid
from .numbers import Numbers
from .operands import Cache, In, Operand, Weight
from .session import Session
from .speed import Prepared, Timing, timed

__all__ = ["perf_cases", "perf_items"]

PROMPT, ROWS, WIDTH, WIDE = 256, 2048, 4096, 11008
FOOTPRINT = 128 << 20
"""Bytes of weights that are read in turn: more than the caches of a CPU hold."""
COPY_BYTES = 128 << 20
FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k")
SHAPES = {"act_mul": f"t{ROWS // 3}-c{WIDE}", "softmax": "t256-c32000", "matmul": "t8-h16-n128-k512", "rope": f"t{ROWS}-h32-d128"}
MULTIPLIED = ("f32", "f16", "q8_0", "q4_0")


@dataclass(frozen=True)
class Work:
    """One call of an op. bytes: read and written, the weights as the backend keeps them are added; flops: a multiply-add is two."""

    op: str
    inputs: Sequence[Operand]
    outs: Sequence[tuple[tuple[int, ...], str]]
    attrs: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    bytes: float = 0.0
    flops: float = 0.0
    copies: int = 1


def _tiled(numbers: Numbers, *shape: int) -> np.ndarray:
    """f32 normal numbers, a million of them repeated."""
    return np.resize(numbers.normal(1 << 16), shape).astype(np.float32)


def _weight(numbers: Numbers, format: str, rows: int, columns: int) -> Weight:
    if format in blocks.PLAIN_BYTES:
        data = blocks.encode_plain(format, _tiled(numbers, rows, columns))
    else:
        values, nbytes = blocks.BLOCK_BYTES[format]
        some = blocks.random_blocks(numbers, format, 4096 * values).reshape(-1, nbytes)
        data = np.resize(some, (rows * columns // values, nbytes)).reshape(-1)
    return Weight((rows, columns), format, data)


def _rows(numbers: Numbers, *shape: int) -> In:
    return In(_tiled(numbers, *shape), "f32", "T")


def _linear(numbers: Numbers, format: str, m: int, n: int, k: int) -> Work:
    weight = _weight(numbers, format, n, k)
    copies = -(-FOOTPRINT // weight.data.nbytes) if m < 64 else 1
    return Work("linear", [_rows(numbers, m, k), weight], [((m, n), "f32")], bytes=4.0 * m * (k + n), flops=2.0 * m * n * k, copies=copies)


def _each(numbers: Numbers, op: str) -> Work:
    """An op that is bound by what it reads and writes."""
    t, c = ROWS, WIDTH
    norm, heads = In(np.ones(c, np.float32)), [_rows(numbers, t, 32, 128)]
    where = In(np.arange(t, dtype=np.int32), "i32", "T")
    x, wide = _rows(numbers, t, c), _rows(numbers, t // 3, WIDE)
    made: dict[str, Work] = {
        "rms_norm": Work(op, [x, norm], [((t, c), "f32")], {"eps": 1e-5}, bytes=8.0 * t * c),
        "layer_norm": Work(op, [x, norm, norm], [((t, c), "f32")], {"eps": 1e-5}, bytes=8.0 * t * c),
        "rope": Work(op, [*heads, where, In(1e4 ** -np.linspace(0, 1, 64, dtype=np.float32))], [((t, 32, 128), "f32")], {"style": "half"}, bytes=8.0 * t * c),
        "act_mul": Work(op, [wide, wide], [((t // 3, WIDE), "f32")], {"kind": "silu"}, bytes=12.0 * (t // 3) * WIDE),
        "add": Work(op, [x, _rows(numbers, t, c)], [((t, c), "f32")], bytes=12.0 * t * c),
        "mul": Work(op, [x, _rows(numbers, t, c)], [((t, c), "f32")], bytes=12.0 * t * c),
        "softmax": Work(op, [_rows(numbers, 256, 32000)], [((256, 32000), "f32")], bytes=8.0 * 256 * 32000),
        "quantize": Work(op, [x], [((t, c), "i8"), ((t, c // 32), "f32")], bytes=(5.0 + 4 / 32) * t * c),
        "dequantize": Work(op, [In(numbers.bytes(t * c).view(np.int8).reshape(t, c), "i8", "T"), _rows(numbers, t, c // 32)], [((t, c), "f32")], bytes=(5.0 + 4 / 32) * t * c),
        "embed": Work(op, [In(numbers.integers(t, 0, 8192).astype(np.int32), "i32", "T"), _weight(numbers, "f16", 8192, c)], [((t, c), "f32")], bytes=6.0 * t * c),
        "matmul": Work(op, [_rows(numbers, 8, 16, 512), In(_tiled(numbers, 16, 128, 512))], [((8, 16, 128), "f32")], bytes=4.0 * 16 * 128 * 512, flops=2.0 * 8 * 16 * 128 * 512),
    }  # fmt: skip
    return made[op]


def _op(case_id: str, make: Callable[[Numbers], Work], session: Session, numbers: Numbers) -> Outcome:
    """Seconds of an op. The bytes of the weights, as they are kept, come on top; of `embed` only the rows that are read."""
    _real(session)
    work = make(numbers)
    with Prepared(session.bench, work.op, work.inputs, work.outs, work.attrs, work.sizes, work.copies) as prepared:
        extra = 0.0 if work.op == "embed" else prepared.weight_bytes
        return _outcome(prepared, prepared.time(), work.bytes + extra, work.flops)


def _outcome(prepared: Prepared, timing: Timing, nbytes: float, flops: float) -> Outcome:
    facts = {**timing.as_dict(), "bytes": nbytes, "flops": flops}
    return Outcome(impl=prepared.yes.impl, native=not prepared.inherited, facts=facts)


def _attention(case_id: str, session: Session, numbers: Numbers, rows: int, context: int) -> Outcome:
    """Eight kv heads of 128, four queries each. Rows are the last of the context; every row reads all keys before it."""
    _real(session)
    with _Cache(session, context) as (cache, tables):
        where = np.arange(context - rows, context, dtype=np.int32)
        step = [In(where, "i32", "T"), In(np.array([0, rows], np.int32), "i32", "S+1"), In(np.array([context], np.int32), "i32", "S"), In(tables, "i32", "S")]
        inputs: list[Operand] = [_rows(numbers, rows, 32, 128), cache, *step]
        sizes = {"S": 1, "B": tables.shape[1], "ctx": context}
        with Prepared(session.bench, "attention", inputs, [((rows, 32, 128), "f32")], {"scale": 128**-0.5}, sizes) as prepared:
            assert cache.tensor is not None
            nbytes = cache.tensor.block_bytes * context / cache.block_size + 8.0 * rows * 32 * 128
            pairs = rows * (context - (rows - 1) / 2)
            return _outcome(prepared, prepared.time(), nbytes, 4.0 * pairs * 32 * 128)


def _kv_write(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """A prompt's keys and values into an empty cache."""
    _real(session)
    with _Cache(session, PROMPT) as (cache, _):
        inputs: list[Operand] = [cache, _rows(numbers, PROMPT, 8, 128), _rows(numbers, PROMPT, 8, 128), In(np.arange(PROMPT, dtype=np.int32), "i32", "T")]
        with Prepared(session.bench, "kv_write", inputs, [], {}, {"ctx": PROMPT}) as prepared:
            assert cache.tensor is not None
            return _outcome(prepared, prepared.time(), 8.0 * PROMPT * 8 * 128 + cache.tensor.block_bytes * PROMPT / cache.block_size, 0.0)


class _Cache:
    """A cache of zeros with room for `context` tokens, and its block table."""

    def __init__(self, session: Session, context: int):
        self.session, self.blocks = session, -(-context // 64)

    def __enter__(self) -> tuple[Cache, np.ndarray]:
        bench = self.session.bench
        self.cache = bench.cache(KVSpec(8, 128, 128), 64, self.blocks)
        assert self.cache.region is not None
        assert self.cache.tensor is not None
        zeros = np.zeros(self.cache.tensor.block_bytes * self.blocks, np.uint8)
        bench.backend.upload(self.cache.region.buffer, self.cache.tensor.offset, memoryview(zeros), bench.stream)
        bench.stream.synchronize()
        return self.cache, np.arange(self.blocks, dtype=np.int32)[None]

    def __exit__(self, *_: object) -> None:
        assert self.cache.region is not None
        self.cache.region.buffer.close()


def _real(session: Session) -> None:
    if session.requirements.emulated:
        raise NotApplicable("emulated devices report no speed")


# probes -----------------------------------------------------------------------------------------------------------------


def _copy(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """`Backend.copy` within the device: bytes read and written."""
    _real(session)
    backend, stream = session.backend, session.bench.stream
    size = min(COPY_BYTES, backend.limits.max_alloc or COPY_BYTES)
    free = backend.memory().free
    size = min(size, free // 4) if free else size
    with ExitStack() as stack:
        source, target = backend.alloc(size, "scratch"), backend.alloc(size, "scratch")
        stack.callback(source.close)
        stack.callback(target.close)
        timing = timed(lambda: backend.copy(target, 0, source, 0, size, stream), stream.synchronize)
    return Outcome(facts={**timing.as_dict(), "bytes": 2.0 * size, "flops": 0.0})


def _empty(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """One element plus one element, waited for: what calling any op costs."""
    _real(session)
    one = In(np.ones((1, 1), np.float32), "f32", "T")
    with Prepared(session.bench, "add", [one, one], [((1, 1), "f32")]) as prepared:
        return _outcome(prepared, prepared.time_alone(), 0.0, 0.0)


# models -----------------------------------------------------------------------------------------------------------------


def _model(case_id: str, session: Session, numbers: Numbers, name: str, streams: int, tokens: int) -> Outcome:
    """Steps of `streams` sequences of `tokens` tokens each, after 128 that are there already; logits of each last row. What leaves the
    device is counted here: nodes, switches between devices, copies, bytes."""
    with tempfile.TemporaryDirectory(prefix="fastllm-conformance-") as folder:
        path = save_mid(Path(folder)) if name == "mid" else tiny.save("llama-q4_0", Path(folder) / "model")
        largest = max(48, streams * tokens)
        context = 512 if name == "mid" else 128
        start = min(128, context // 2)
        limits = StepLimits(largest, streams, streams, context, 16, streams * context // 16)
        kit = Loaded(session.backend, path, limits=limits)
        try:
            facts = _counts(kit)
            if not session.requirements.emulated:
                facts |= {**_stepping(kit, streams, tokens, start, context), "tokens": streams * tokens}
        finally:
            kit.close()
    native = [d for d in kit.plan.decisions if d.device == "device" and not d.inherited]
    return Outcome(native=bool(native), facts=facts)


def _counts(kit: Loaded) -> dict[str, Any]:
    plan = kit.plan
    devices = [s.device for s in plan.segments]
    return {
        "nodes": len(plan.decisions), "fallbacks": len(plan.fallbacks), "inherited": len(plan.inherited),
        "switches": sum(a != b for a, b in pairwise(devices)), "copies": sum(len(s.copies) for s in plan.segments),
        "copy_bytes": plan.copy_bytes_per_token(), "bytes": float(plan.bytes_per_token()),
    }  # fmt: skip


def _stepping(kit: Loaded, streams: int, tokens: int, start: int, context: int) -> dict[str, Any]:
    vocabulary, rows = kit.executor.vocab_size, context // 16
    ids = np.resize(np.arange(3, 250), context + tokens).astype(np.int32)
    tables = [list(range(s * rows, (s + 1) * rows)) for s in range(streams)]

    def batch(at: int, count: int, only: int | None = None) -> StepBatch:
        which = range(streams) if only is None else [only]
        made = batch_of([(ids % vocabulary, at, count) for _ in which], [tables[s] for s in which])
        return replace(made, sample_rows=np.cumsum([count for _ in which]).astype(np.int32) - 1)

    for s in range(streams):
        for at in range(0, start, 32):
            kit.executor.run(batch(at, min(32, start - at), only=s))
    places = list(range(start, context - tokens + 1))
    steps = [batch(at, tokens) for at in (places if tokens == 1 else places[:1])]
    turn = iter(range(1 << 62))
    return timed(lambda: _discard(kit.executor.run(steps[next(turn) % len(steps)])), lambda: None).as_dict()


def _discard(result: object) -> None:
    """A step's logits are not looked at."""


@lru_cache(maxsize=1)
def perf_cases() -> dict[str, Case]:
    """id -> item, in running order: probes, ops, models."""
    found: dict[str, Case] = {}

    def add(case_id: str, op: str, check: Callable[..., Outcome], *args: Any) -> None:
        run = lambda session, numbers: check(case_id, *args, session, numbers) if check is _op else check(case_id, session, numbers, *args)  # noqa: E731
        found[case_id] = Case(case_id, op, "perf", run, "gold", limit_s=60.0)

    add("probe/-/-/128MiB/copy#perf", "probe", _copy)
    for form in MULTIPLIED:
        add(f"probe/f32*{form}/row/m512-n2048-k4096/multiply#perf", "probe", _op, lambda n, f=form: _linear(n, f, 512, 2048, 4096))
    add("probe/f32/row/t1-c1/empty#perf", "probe", _empty)
    for form in FORMATS:
        add(f"linear/f32*{form}/row/m1-n4096-k4096/decode#perf", "linear", _op, lambda n, f=form: _linear(n, f, 1, WIDTH, WIDTH))
    for form in ("f32", "q8_0", "q4_0"):
        for m in (8, PROMPT):
            name = "batch" if m == 8 else "prompt"
            add(f"linear/f32*{form}/row/m{m}-n4096-k4096/{name}#perf", "linear", _op, lambda n, f=form, m=m: _linear(n, f, m, WIDTH, WIDTH))
    for op in ("embed", "matmul", "rms_norm", "layer_norm", "rope", "act_mul", "add", "mul", "softmax", "quantize", "dequantize"):
        add(f"{op}/f32/row/{SHAPES.get(op, f't{ROWS}-c{WIDTH}')}/typical#perf", op, _op, lambda n, o=op: _each(n, o))
    add(f"kv_write/f32/row/t{PROMPT}/typical#perf", "kv_write", _kv_write)
    add("attention/f32/paged/r1-ctx16384/decode#perf", "attention", _attention, 1, 16384)
    add("attention/f32/paged/r256-ctx512/prompt#perf", "attention", _attention, 256, 512)
    add("model/tiny-q4_0/-/s1-t1/decode#perf", "model", _model, "tiny", 1, 1)
    for streams, tokens, name in ((1, 1, "decode"), (8, 1, "streams"), (1, PROMPT, "prompt")):
        add(f"model/mid-q4_0/-/s{streams}-t{tokens}/{name}#perf", "model", _model, "mid", streams, tokens)
    return found


def perf_items(ops: Sequence[str] = ()) -> list[Case]:
    """All items; of a run of some ops (patterns), the probes and what is about those ops."""
    items = list(perf_cases().values())
    return [i for i in items if not ops or i.op == "probe" or any(matches(i.op, p) for p in ops)]
