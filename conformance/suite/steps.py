"""What lies between the calls of a running engine: buffers that are filled again for every step, blocks that several sequences share (a prefix that was
found in the cache), tokens that are appended one by one, and ops that nobody waits for.

A case of one op on operands that are new cannot see what a backend keeps from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from fastllm.api import CATALOGUE, CORE_OPS, KV_DTYPES, Backend, KVSpec, No, Tensor

from .. import blocks
from ..bench import Bench, Ran
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import In, Operand
from ..session import Session
from .attention import Paged, Setup
from .caches import declared, offered
from .common import bind, expect, same_bits
from .determinism import NAMES, checked_call
from .linear import weight_of
from .recurrent import again as recurrent_again

__all__ = ["cases"]


class _Held(Bench):
    """Puts the operands of one call after the other into the same buffers, as an engine does with those of its steps."""

    def __init__(self, backend: Backend):
        """Closed by `close`."""
        super().__init__(backend)
        self._pool: dict[tuple[int, str, int], Any] = {}
        self._next = 0

    def close(self) -> None:
        """Frees the buffers."""
        for region in self._pool.values():
            region.buffer.close()

    def run(self, *args: Any, **kwargs: Any) -> Ran:
        """The n-th buffer of a call is the n-th one of the call before, if that has the same kind and size."""
        self._next = 0
        return super().run(*args, **kwargs)

    def region(self, data: np.ndarray, kind: str) -> Any:
        """The buffer of the call before, with other contents."""
        key, self._next = (self._next, kind, data.nbytes), self._next + 1
        known = self._pool.get(key)
        if known is None:
            known = self._pool[key] = super().region(data, kind)
        else:
            known.before[known.base : known.base + known.nbytes] = data
            self.backend.upload(known.buffer, 0, memoryview(known.before), self.stream)
            self.stream.synchronize()
        return known

    def _keep(self, stack: ExitStack, data: np.ndarray, kind: str) -> Any:
        return self.region(data, kind)

    def _check_left(self, op: str, used: int) -> None:
        """What is held is not left."""


def _again(case_id: str, session: Session, numbers: Numbers, name: str) -> Outcome:
    """Other rows in the buffers of the rows before: as in new buffers, to the bit."""
    call, held = checked_call(session, name), _Held(session.backend)
    try:
        call(held, slice(0, 12))
        found = call(held, slice(12, 24))
    finally:
        held.close()
    if not same_bits(found, call(session.bench, slice(12, 24))):
        raise Failure("prop", f"'{name}' gives other bits where the buffers of its operands held others before: it keeps something of them")
    return Outcome()


def _attention_again(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """A second step over the same cache and in the same buffers: other queries, positions, lengths and block tables."""
    setup = Setup((40, 23), (2, 2), 4, 2, 32, 32, 16)
    kit = Paged(session.bench, setup, numbers)
    held = _Held(session.backend)
    try:
        steps = []
        for lengths, table in (((40, 23), kit.table), ((23, 40), kit.table[::-1].copy()), ((22, 39), kit.table[::-1].copy())):
            queries, where = [numbers.normal(2, 4, 32) for _ in lengths], [np.arange(n - 2, n, dtype=np.int32) for n in lengths]
            steps.append((replace(setup, lengths=lengths), table, queries, where))
        results: dict[Bench, list[np.ndarray]] = {}
        for bench in (session.bench, held):
            kit.bench = bench
            for step, table, queries, where in steps:
                kit.setup, kit.table = step, table
                results.setdefault(bench, []).append(kit.attend(queries, where).outs[0])
    finally:
        held.close()
        kit.close()
    for number, (right, found) in enumerate(zip(results[session.bench], results[held], strict=True), 1):
        if not same_bits(right, found):
            raise Failure("prop", f"attention of step {number} over one cache has other bits where the buffers of its operands held those of the step before")
    return Outcome()


class _Shared(Paged):
    """The first two blocks of sequence 0 are those of all."""

    def fill(self) -> None:
        """Those once, the rest of each for itself."""
        common = 2 * self.setup.block
        for s in range(1, len(self.setup.lengths)):
            self.keys[s][:common], self.values[s][:common] = self.keys[0][:common], self.values[0][:common]
            self.table[s, :2] = self.table[0, :2]
        for s, n in enumerate(self.setup.lengths):
            self.write(s, np.arange(common if s else 0, n))


def _shared_blocks(case_id: str, session: Session, numbers: Numbers, cache: str | None) -> Outcome:
    """Sequences that begin with the same blocks, in one step."""
    if cache is not None:
        offered(session, cache)
    setup = Setup((40, 53, 33, 32, 70), (3, 1, 1, 1, 20), 4, 2, 32, 32, 16, cache=cache)
    kit = _Shared(session.bench, setup, numbers)
    try:
        where = [setup.positions(s) for s in range(len(setup.lengths))]
        queries = [numbers.normal(len(p), setup.heads, setup.dk) for p in where]
        ran = kit.attend(queries, where)
        if cache is not None:
            declared(cache, ran.yes.weight)
        return expect(session, case_id, ran, [kit.expected(queries, where, ran)])
    finally:
        kit.close()


class _Appended(Paged):
    """A token of each sequence in every call, as decode steps write them, from buffers that are filled again."""

    def fill(self) -> None:
        """Call by call."""
        block, held = self.setup.block, _Held(self.bench.backend)
        usual, self.bench = self.bench, held
        try:
            for t in range(max(self.setup.lengths)):
                of = [s for s, n in enumerate(self.setup.lengths) if t < n]
                slots = np.array([self.table[s, t // block] * block + t % block for s in of], np.int32)
                self.kv_write(np.stack([self.keys[s][t] for s in of]), In(np.stack([self.values[s][t] for s in of]), "f32", "T"), slots)
        finally:
            self.bench = usual
            held.close()


def _appended(case_id: str, session: Session, numbers: Numbers, cache: str | None) -> Outcome:
    """What was written token by token is what one call writes: all results over it have the same bits."""
    if cache is not None:
        offered(session, cache)
    setup = Setup((37, 18), (37, 18), 4, 2, 32, 32, 16, cache=cache)
    seed, results = int(numbers.integers(1, 0, 1 << 30)[0]), []
    queries, where = [numbers.normal(n, 4, 32) for n in setup.lengths], [setup.positions(s) for s in range(2)]
    for kind in (Paged, _Appended):
        kit = kind(session.bench, setup, Numbers(seed))
        try:
            results.append([kit.attend(queries, where, window=window).outs[0] for window in (1, 0)])
        finally:
            kit.close()
    for what, right, found in zip(("values", "keys"), *results, strict=True):
        if not same_bits(right, found):
            row = int(np.flatnonzero((right.view(np.uint32) != found.view(np.uint32)).reshape(len(right), -1).any(1))[0])
            raise Failure("exact", f"{what} that were written token by token are not those of one call: row {row} of attention differs")
    return Outcome()


class _Chain:
    """Ops one after the other on one stream. Everything has its place, and its operands theirs, before the first one is enqueued; uploads belong to it."""

    def __init__(self, bench: Bench, stack: ExitStack):
        self.bench, self.stack = bench, stack
        self.calls: list[Callable[[], object]] = []

    def empty(self, shape: tuple[int, ...], dtype: str = "f32") -> Tensor:
        """Memory full of NaN."""
        region = self.bench.region(np.full(4 * int(np.prod(shape)), 0xFF, np.uint8), "scratch")
        self.stack.callback(region.buffer.close)
        return Tensor(region.buffer, region.base, shape, dtype)

    def sent(self, array: np.ndarray) -> Tensor:
        """An array, which is uploaded when its turn comes."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        tensor = self.empty(array.shape, "i32" if array.dtype == np.int32 else "f32")
        self.calls.append(lambda: self.bench.backend.upload(tensor.buffer, tensor.offset, memoryview(data), self.bench.stream))
        return tensor

    def op(self, name: str, operands: Sequence[Operand], tensors: Sequence[Tensor | None], shape: tuple[int, ...], **attrs: Any) -> Tensor:
        """Adds one, as `add`, with a result of a shape; where it will be."""
        out = self.empty(shape)
        self.add(name, operands, tensors, out, **attrs)
        return out

    def add(self, name: str, operands: Sequence[Operand], tensors: Sequence[Tensor | None], out: Tensor | tuple[()] = (), **attrs: Any) -> None:
        """Adds one. operands: what is asked about; tensors: where those are that ops before it, or `sent`, have made. Raises NotApplicable for a No."""
        spec = CATALOGUE[name]
        full = spec.complete_attrs(attrs)
        padded = [*operands, *[None] * (len(spec.inputs) - len(operands))]
        answer, kept = self.bench.ask(name, padded, full, {"ctx": ROWS, "S": 1, "B": 1} if "cache" in spec.inputs else {})
        if isinstance(answer, No):
            raise NotApplicable(f"{self.bench.backend.name} answers No: {answer.reason}")
        function = self.bench.functions[answer.impl]
        placed = [*tensors, *[None] * (len(padded) - len(tensors))]
        given = [self.bench.hold(self.stack, "operand", o, k, name) if t is None else t for t, o, k in zip(placed, padded, kept, strict=True)]
        workspace = replace(self.empty((-(-answer.workspace // 4),)), shape=(answer.workspace,), dtype="i8") if answer.workspace else None
        self.calls.append(lambda: function(*given, out=out, stream=self.bench.stream, ws=workspace, **full))

    def result(self, tensor: Tensor, wait: bool) -> np.ndarray:
        """Runs all. wait: behind each."""
        found = np.empty(tensor.shape, np.float32)
        for call in self.calls:
            call()
            if wait:
                self.bench.stream.synchronize()
        self.bench.backend.download(memoryview(found.reshape(-1).view(np.uint8)), tensor.buffer, tensor.offset, self.bench.stream)
        self.bench.stream.synchronize()
        return found


ROWS, HEADS, DIM = 5, 4, 16


def _chained(bench: Bench, numbers: Numbers, wait: bool) -> np.ndarray:
    """Most of a decoder layer."""
    flat, deep = (ROWS, HEADS * DIM), (ROWS, HEADS, DIM)
    x, where = numbers.normal(*flat), np.arange(ROWS, dtype=np.int32)
    freq, norm = (10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))).astype(np.float32), numbers.normal(flat[1])
    matrices = [weight_of(numbers, "f32", (flat[1], flat[1])) for _ in range(4)]
    wide, heads, at = In(x, "f32", "T"), In(x.reshape(deep), "f32", "T"), In(where, "i32", "T")
    cache = bench.cache(KVSpec(HEADS, DIM, DIM), 16, 2)
    assert cache.region is not None
    with ExitStack() as stack:
        stack.callback(cache.region.buffer.close)
        chain = _Chain(bench, stack)
        start, positions, slots = chain.sent(x), chain.sent(where), chain.sent(where + np.int32(16))
        normed = chain.op("rms_norm", [wide, In(norm)], [start], flat, eps=1e-5)
        query, key, value = (replace(chain.op("linear", [wide, m, None], [normed], flat), shape=deep) for m in matrices[:3])
        query, key = (chain.op("rope", [heads, at, In(freq)], [t, positions], deep) for t in (query, key))
        chain.add("kv_write", [cache, heads, heads, at], [cache.tensor, key, value, slots])
        step = [In(np.array(v, np.int32), "i32", lead) for v, lead in (([0, ROWS], "S+1"), ([ROWS], "S"), ([[1]], "S"))]
        seen = chain.op("attention", [heads, cache, at, *step], [query, cache.tensor, positions], deep, scale=0.25)
        mixed = chain.op("linear", [wide, matrices[3], None], [replace(seen, shape=flat)], flat)
        after = chain.op("add", [wide, wide], [start, mixed], flat)
        gated = chain.op("act_mul", [wide, wide], [after, normed], flat)
        scaled = chain.op("mul", [wide, wide], [gated, start], flat)
        return chain.result(chain.op("softmax", [wide], [scaled], flat), wait)


def _chain(session: Session, numbers: Numbers) -> Outcome:
    """The ops of a decoder layer in f32 (see `_chained`), and their uploads, with nothing between them but the order of the stream."""
    waited, alone = (_chained(session.bench, Numbers(31), wait) for wait in (True, False))
    if not np.isfinite(waited).all():
        raise Failure("contract", "ops that are waited for, one by one, give numbers that are not finite: what an op wrote is not what the next one reads")
    if not same_bits(waited, alone):
        raise Failure("contract", "ops of one stream give other bits where nobody waits between them: one of them, or an upload, is not in the order of the stream")
    return Outcome()


def cases() -> Iterator[Case]:
    """Buffers used again, shared blocks, tokens appended, a chain."""
    for name in (*NAMES, *(f"linear*{f}" for f in ("f16", "bf16", *blocks.BLOCK_BYTES))):
        op = name.partition("*")[0].removesuffix("_long")
        case_id = f"{op}/-/-/{name}/again#prop"
        yield Case(case_id, op, "determinism", bind(_again, case_id, name), required=name in CORE_OPS, quick=name in ("linear", "rope"))
    case_id = "attention/-/-/attention/again#prop"
    yield Case(case_id, "attention", "attention", bind(_attention_again, case_id), required=True, quick=True)
    for op in ("short_conv", "delta_rule"):
        case_id = f"{op}/-/-/{op}/again#prop"
        yield Case(case_id, op, "recurrent", bind(recurrent_again, case_id, op, _Held), quick=True)
    for cache in (None, *KV_DTYPES):
        case_id = f"attention/{cache or 'f32'}/row/l40_53_33_32_70/shared{'.cache' if cache else ''}#bound"
        yield Case(case_id, "attention", "caches" if cache else "attention", bind(_shared_blocks, case_id, cache), required=cache is None, quick=cache is None)
        case_id = f"kv_write/{cache or 'f32'}/row/l37_18/appended{'.cache' if cache else ''}#exact"
        yield Case(case_id, "kv_write", "caches" if cache else "attention", bind(_appended, case_id, cache), required=cache is None, quick=cache is None)
    yield Case("backend/-/-/any/chain#contract", "backend", "contract", _chain, required=True, quick=True)
