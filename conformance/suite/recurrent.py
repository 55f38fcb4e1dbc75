"""short_conv and delta_rule: state of a fixed size per sequence. Extended ops: a No is not held against a backend.

What a slot holds is the vendor's; the suite sees it by what comes out of it: a sequence in pieces must give what it gives at once,
to the bit, whatever shares the batch, and the slots of others must stay as they are. New slots are full of NaN, which a row of
position 0 must not see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastllm.api import Backend, SlotSpec

from .. import bounds_extended
from ..bench import Bench, Ran
from ..bounds import Expected
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import In, Operand
from ..session import Session
from .common import bind, expect, or_refused, same_bits

__all__ = ["Device", "Kit", "again", "cases", "digests", "on_device"]

SLOTS = 5
REAL_SLOTS = 65541
"""More than 16 bits tell apart."""


@dataclass
class Kit:
    """One op with fixed data. rows: operands with a row for each token, per sequence; shared: the others; result: shape of a row;
    judge: sequence -> what the oracle expects of all of its rows."""

    op: str
    spec: SlotSpec
    rows: list[list[np.ndarray]]
    shared: list[np.ndarray]
    result: tuple[int, ...]
    judge: Callable[[int], Expected]
    attrs: dict[str, object] = field(default_factory=dict)
    gap: int = 0

    def length(self, s: int) -> int:
        """Tokens of a sequence."""
        return len(self.rows[s][0])


def _conv(numbers: Numbers, lengths: Sequence[int], channels: int, taps: int, kind: str = "silu", gap: int = 0, data: str = "normal") -> Kit:
    x, weight = [numbers.array(data, n, channels) for n in lengths], numbers.normal(channels, taps)

    def judge(s: int) -> Expected:
        history = np.concatenate([np.zeros((taps - 1, channels)), x[s]])
        return bounds_extended.short_conv(history.astype(np.float64), weight.astype(np.float64), kind, len(x[s]))

    return Kit("short_conv", SlotSpec((taps - 1, channels)), [[part] for part in x], [weight], (channels,), judge, {"kind": kind}, gap)


def _delta(numbers: Numbers, lengths: Sequence[int], groups: int, heads: int, dk: int, dv: int, gap: int = 0, small: bool = False, fast: float = 0.0) -> Kit:
    """small: vectors near zero, where eps counts. fast: added to a_log: how quickly the state forgets."""
    size = np.float32(1e-3 if small else 1)
    rows = [
        [
            numbers.normal(n, groups, dk) * size, numbers.normal(n, groups, dk) * size, numbers.normal(n, heads, dv),
            numbers.normal(n, heads) * np.float32(2), numbers.normal(n, heads) * np.float32(2),
        ] for n in lengths
    ]  # fmt: skip
    a_log, dt_bias = (numbers.normal(heads) * np.float32(0.5) + np.float32(fast - 2)).astype(np.float32), numbers.normal(heads)

    def judge(s: int) -> Expected:
        query, key, value, a, b = rows[s]
        return bounds_extended.delta_rule(query, key, value, a, b, a_log, dt_bias, 1e-6)

    return Kit("delta_rule", SlotSpec((heads, dk, dv)), rows, [a_log, dt_bias], (heads, dv), judge, {"eps": 1e-6}, gap)


class Device:
    """The state on the device, and calls of the op on parts of the sequences."""

    def __init__(self, bench: Bench, kit: Kit, slots: Sequence[int], count: int = SLOTS):
        self.bench, self.kit, self.slots, self.count = bench, kit, np.array(slots, np.int32), count
        self.state = bench.state(kit.spec, count)
        self.ran: Ran | None = None

    def close(self) -> None:
        """Frees the slots."""
        assert self.state.region is not None
        self.state.region.buffer.close()

    def run(self, pieces: Sequence[tuple[int, int, int]], stepped: int | None = None) -> list[np.ndarray]:
        """Rows [start, stop) of sequences, (sequence, start, stop) each; their results. Raises Failure if a slot of nobody changes.
        stepped: which of positions, starts and slots has a gap behind each entry."""
        kit, f32 = self.kit, np.float32
        parts = [np.concatenate([kit.rows[s][i][a:b] for s, a, b in pieces]).astype(f32) for i in range(len(kit.rows[0]))]
        where = np.concatenate([np.arange(a, b) for _, a, b in pieces]).astype(np.int32)
        starts = np.cumsum([0, *(b - a for _, a, b in pieces)]).astype(np.int32)
        slots = np.array([self.slots[s] for s, _, _ in pieces], np.int32)
        inputs: list[Operand] = [self.state, *(In(p, "f32", "T", kit.gap) for p in parts), *(In(p) for p in kit.shared)]
        inputs += [In(v, "i32", lead, 2 * (stepped == i)) for i, (v, lead) in enumerate(((where, "T"), (starts, "S+1"), (slots, "S")))]
        assert self.state.region is not None
        before = self._slots()
        self.ran = self.bench.run(kit.op, inputs, [((len(where), *kit.result), "f32")], kit.attrs, {"S": len(pieces)})
        self.bench.check_zones(self.state.region, "the state", kit.op)
        changed = (before != self._slots()).any(1)
        changed[[int(self.slots[s]) for s, a, b in pieces if a < b]] = False
        if changed.any():
            raise Failure("guard", f"op '{kit.op}' changed slot {int(np.flatnonzero(changed)[0])}, which is no sequence's of this step that has rows")
        return [self.ran.outs[0][starts[i] : starts[i + 1]] for i in range(len(pieces))]

    def _slots(self) -> np.ndarray:
        region = self.state.region
        assert region is not None
        return self.bench.fetch(region)[region.base : region.base + region.nbytes].reshape(self.count, -1)


def _oracle(
    case_id: str, session: Session, numbers: Numbers, make: Callable[[Numbers], Kit], slots: Sequence[int] = (3, 0, 4), count: int = SLOTS, *,
    apart: bool = False, stepped: int | None = None,
) -> Outcome:  # fmt: skip
    """Every sequence at once, in slots of `count`. apart: their last rows in a step of their own, which reads what is kept; stepped: which of
    its index vectors has a gap behind each entry, as a column of a matrix has one."""
    kit = make(numbers)
    device, lengths = Device(session.bench, kit, slots[: len(kit.rows)], count), [kit.length(s) for s in range(len(kit.rows))]
    try:
        found = device.run([(s, 0, n - apart) for s, n in enumerate(lengths)])
        if apart:
            ends = device.run([(s, n - 1, n) for s, n in enumerate(lengths)], stepped)
            found = [np.concatenate(pair) for pair in zip(found, ends, strict=True)]
    finally:
        device.close()
    assert device.ran is not None
    wanted = [kit.judge(s) for s in range(len(kit.rows))]
    device.ran.outs = [np.concatenate(found)]
    return expect(session, case_id, device.ran, [Expected(np.concatenate([w.y for w in wanted]), np.concatenate([w.bound for w in wanted]))])


def _pieces(case_id: str, session: Session, numbers: Numbers, make: Callable[[Numbers], Kit]) -> Outcome:
    """A sequence in pieces, alone and beside others that begin, go on and pause: the bits of one call."""
    kit = make(numbers)
    n = kit.length(0)
    whole = Device(session.bench, kit, [0, 1, 2])
    parts = Device(session.bench, kit, [2, 4, 0])
    try:
        wanted = [whole.run([(s, 0, kit.length(s))])[0] for s in range(3)]
        a = parts.run([(0, 0, 1)])
        b = parts.run([(1, 0, kit.length(1)), (0, 1, n // 2)])
        c = parts.run([(0, n // 2, n // 2), (2, 0, kit.length(2))])
        d = [parts.run([(0, t, t + 1)])[0] for t in range(n // 2, n)]
        again = parts.run([(0, 0, n)])[0]  # position 0 once more: what the slot holds does not count
        impl = parts.ran
    finally:
        whole.close()
        parts.close()
    for name, found, right in (("in pieces", np.concatenate([a[0], b[1], *d]), wanted[0]), ("beside another", b[0], wanted[1]), ("behind another", c[1], wanted[2]), ("once more from position 0", again, wanted[0])):
        if not same_bits(found, right):
            row = int(np.flatnonzero((found != right).reshape(len(right), -1).any(1) | np.isnan(found).reshape(len(right), -1).any(1))[0])
            raise Failure("d2", f"row {row} of '{kit.op}' has other bits {name} than in one call alone", impl=impl.yes.impl if impl else "")
    return Outcome(impl=impl.yes.impl if impl else "", native=impl.native if impl else None)


def again(case_id: str, session: Session, numbers: Numbers, op: str, held_by: Callable[[Backend], Any]) -> Outcome:
    """A second step in the buffers of the first one: other rows, positions and slots. held_by: a bench that keeps the buffers of its operands."""
    kit = _conv(numbers, (6, 6, 6), 24, 4) if op == "short_conv" else _delta(numbers, (6, 6, 6), 1, 2, 8, 8)
    held, found = held_by(session.backend), []
    try:
        for bench in (session.bench, held):
            device = Device(session.bench, kit, [1, 3, 0])
            device.bench = bench
            try:
                device.run([(0, 0, 3), (1, 0, 3)])
                found.append(np.concatenate(device.run([(2, 0, 3), (0, 3, 6)])))
            finally:
                device.close()
    finally:
        held.close()
    if not same_bits(*found):
        raise Failure("prop", f"'{op}' gives other bits where the buffers of its operands held those of the step before")
    return Outcome()


@contextmanager
def on_device(session: Session, numbers: Numbers, op: str, lengths: Sequence[int]) -> Iterator[tuple[Kit, Device]]:
    """Small operands of an op for sequences of these lengths, and a device on which each of them has a slot; closed at the end."""
    kit = _conv(numbers, lengths, 24, 4) if op == "short_conv" else _delta(numbers, lengths, 1, 2, 8, 8, fast=1.0)
    device = Device(session.bench, kit, numbers.permutation(len(lengths) + 2)[: len(lengths)].tolist(), len(lengths) + 2)
    try:
        yield kit, device
    finally:
        device.close()


def digests(bench: Bench) -> dict[str, str]:
    """op -> hash of its results on fixed data, of the ops that the backend has."""
    found = {}
    for kit in (_conv(Numbers(13), (70, 4, 3), 200, 4), _delta(Numbers(13), (70, 4, 3), 2, 4, 32, 80)):
        device = Device(bench, kit, [0, 1, 2])
        try:
            rows = device.run([(s, 0, kit.length(s)) for s in range(3)])
        except NotApplicable:
            continue
        finally:
            device.close()
        found[kit.op] = hashlib.sha256(np.concatenate(rows).tobytes()).hexdigest()[:16]
    return found


_CONVS: tuple[tuple[str, tuple[int, ...], int, int, str, int, str, bool], ...] = (
    # name, lengths, channels, taps, kind, gap, data, quick
    ("one", (1,), 1, 2, "silu", 0, "normal", False),
    ("ragged", (9, 0, 33), 40, 4, "silu", 0, "normal", True),
    ("gap", (5, 3), 33, 3, "silu", 7, "normal", False),
    ("long", (65,), 8, 4, "silu", 0, "cancelling", False),
    ("spread", (7, 8), 17, 8, "tanh", 0, "spread", False),
    ("wide", (3,), 8200, 4, "silu", 0, "outlier", True),
)  # fmt: skip
_DELTAS: tuple[tuple[str, tuple[int, ...], tuple[int, int, int, int], int, bool, float, bool], ...] = (
    # name, lengths, (groups, heads, dk, dv), gap, small, fast, quick
    ("one", (1,), (1, 1, 1, 1), 0, False, 0.0, False),
    ("ragged", (9, 0, 33), (2, 4, 16, 8), 0, False, 0.0, True),
    ("gap", (5, 3), (2, 2, 8, 12), 5, False, 0.0, False),
    ("long", (65,), (1, 3, 32, 32), 0, False, -2.0, False),
    ("forgets", (17,), (1, 2, 16, 16), 0, False, 4.0, True),
    ("tiny", (7,), (1, 2, 8, 8), 0, True, 0.0, True),
    ("wide", (3,), (1, 2, 128, 128), 0, False, 0.0, False),
    ("heads", (3, 1), (16, 64, 128, 128), 0, False, 0.0, True),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Sizes against the oracle; pieces."""
    for name, lengths, channels, taps, kind, gap, data, quick in _CONVS:
        case_id = f"short_conv/f32/{'gap' if gap else 'row'}/l{'_'.join(map(str, lengths))}-c{channels}-k{taps}/{name}#bound"
        make = _bound(_conv, lengths, channels, taps, kind, gap, data)
        yield Case(case_id, "short_conv", "recurrent", bind(_oracle, case_id, make), quick=quick, bin=f"short_conv|f32|{data}|any")
    for name, lengths, sizes, gap, small, fast, quick in _DELTAS:
        case_id = f"delta_rule/f32/{'gap' if gap else 'row'}/l{'_'.join(map(str, lengths))}-j{sizes[0]}-h{sizes[1]}-d{sizes[2]}_{sizes[3]}/{name}#bound"
        make = _bound(_delta, lengths, *sizes, gap, small, fast)
        yield Case(case_id, "delta_rule", "recurrent", bind(_oracle, case_id, make), quick=quick, bin=f"delta_rule|f32|{name}|any")
    many, far = tuple(1 + i % 3 for i in range(700)), (65540, 3, 32768, 65539, 4, 0)  # 65,540 and 4 are one number of 16 bits
    order = tuple((i * 7) % 701 for i in range(700))
    for name, lengths, slots, count in (("rows", (1100,), (0,), 1), ("many", many, order, 701), ("slots", (3, 2, 4, 1, 2, 3), far, REAL_SLOTS)):
        size = "1100" if name == "rows" else f"{len(lengths)}x"
        for op, make, shape in (("short_conv", _bound(_conv, lengths, 3, 3), "c3-k3"), ("delta_rule", _bound(_delta, lengths, 1, 1, 4, 2, 0, False, 1.0), "j1-h1-d4_2")):
            case_id = f"{op}/f32/row/l{size}-{shape}/{name}.real#bound"
            group = "normal" if op == "short_conv" else "forgets"
            yield Case(case_id, op, "recurrent", bind(_oracle, case_id, make, slots, count, apart=count > SLOTS), quick=name != "many" or op == "short_conv", bin=f"{op}|f32|{group}|any")
    for op, make in (("short_conv", _bound(_conv, (4, 2, 3), 24, 4)), ("delta_rule", _bound(_delta, (4, 2, 3), 1, 2, 8, 8))):
        for which, name in enumerate(("positions", "query_start", "state_slot")):
            case_id = f"{op}/f32/gap/l4_2_3/{name}_stepped#bound"
            yield Case(case_id, op, "recurrent", or_refused(bind(_oracle, case_id, make, apart=True, stepped=which), bind(_oracle, case_id, make, apart=True)), quick=True)
    for op, make in (("short_conv", _bound(_conv, (17, 4, 3), 24, 4)), ("delta_rule", _bound(_delta, (17, 4, 3), 2, 4, 16, 8))):
        case_id = f"{op}/f32/row/l17_4_3/pieces#d2"
        yield Case(case_id, op, "recurrent", bind(_pieces, case_id, make), "silver", quick=True)


def _bound(make: Callable[..., Kit], *args: object) -> Callable[[Numbers], Kit]:
    return lambda numbers: make(numbers, *args)
