"""Model level: tiny models from real files. Logits against the f64 graph within an ensemble tolerance, greedy ids, bits under chunking."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from fastllm.api import StepLimits

from .. import evaluate
from ..bounds import Numerics
from ..case import Case, Failure, Outcome
from ..loaded import BLOCK, Loaded, batch_of, loaded
from ..numbers import Numbers
from ..session import Session
from ..tiny import MODELS, VOCABULARY, save
from .common import bind, same_bits

__all__ = ["cases"]

TOKENS, PROMPT = 40, 24
EXTENDED = ("gpt_oss-bf16", "deepseek_v3-f32", "qwen3_next-f32", "mixtral-f32")
"""Models with extended ops, which may leave the device."""
RECURRENT = ("qwen3_next-f32",)
"""Models with state of a fixed size for each sequence."""


@lru_cache(maxsize=1)
def _ids() -> np.ndarray:
    return Numbers(77).integers(TOKENS, 3, VOCABULARY).astype(np.int32)


def _logits(case_id: str, session: Session, numbers: Numbers, name: str) -> Outcome:
    """Prefill in two chunks, then 16 decode steps: every row within four times what rounding may do to this model; where the two best
    logits are further apart than that, the same best id."""
    with loaded(session.backend, name) as kit:
        ids = _ids()
        found = kit.logits(ids, [7, PROMPT - 7, *[1] * (TOKENS - PROMPT)]).astype(np.float64)
        y, tolerance = evaluate.ensemble(kit.plan.graph, kit.weights(), ids, kit.numerics)
    if not np.isfinite(found).all():
        raise Failure("model", f"{name}: {int((~np.isfinite(found)).sum())} logits are not finite", margin=float("inf"))
    margins = np.abs(found - y).max(1) / tolerance[:, 0]
    row = int(margins.argmax())
    if margins[row] > 1:
        raise Failure("model", f"{name}: the logits after token {row} are {margins[row]:.2f} times the tolerance away ({tolerance[row, 0]:.3g})", margin=float(margins[row]), index=(row,))
    order = np.sort(y, 1)
    clear = order[:, -1] - order[:, -2] > 2 * tolerance[:, 0]
    wrong = clear & (found.argmax(1) != y.argmax(1))
    if wrong.any():
        raise Failure("model", f"{name}: another best id after token {int(np.flatnonzero(wrong)[0])}, though the margin is clear", margin=float("inf"))
    return Outcome(float(margins[row]), index=(row,), facts={"clear": int(clear.sum())})


def _chunked(case_id: str, session: Session, numbers: Numbers, name: str) -> Outcome:
    """One step, chunks, single tokens, other blocks, other sequences in the batch: the same bits of every logit."""
    with loaded(session.backend, name, num_blocks=8) as kit:
        ids = _ids()
        whole = kit.logits(ids, [TOKENS], table=[0, 1, 2])
        for pieces, table in (([7, 17, *[1] * 16], [0, 1, 2]), ([1] * TOKENS, [5, 3, 4]), ([33, 7], [2, 0, 1])):
            if not same_bits(kit.logits(ids, pieces, table=table), whole):
                raise Failure("d2", f"{name}: the logits of {TOKENS} tokens have other bits in pieces {pieces[:3]}… on blocks {table}")
        other = ids[::-1].copy()
        both = kit.executor.run(batch_of([(other, 0, 8), (ids, 0, TOKENS)], [[6], [0, 1, 2]])).logits[8:].copy()
        if not same_bits(both, whole):
            raise Failure("d2", f"{name}: the logits have other bits with another sequence in the batch")
    return Outcome()


def _long(case_id: str, session: Session, numbers: Numbers, name: str) -> Outcome:
    """A prompt of 200 tokens in one step, as an engine reads it, and in two: within the tolerance, and the same bits. Programs are compiled for such steps, too."""
    ids = numbers.integers(200, 3, VOCABULARY).astype(np.int32)
    with tempfile.TemporaryDirectory(prefix="fastllm-conformance-") as folder:
        kit = Loaded(session.backend, save(name, Path(folder) / "model"), limits=StepLimits(256, 1, 256, 256, BLOCK, 16, 2))
        try:
            found, parts = (kit.logits(ids, pieces, table=list(range(16))) for pieces in ([200], [130, 70]))
            y, tolerance = evaluate.ensemble(kit.plan.graph, kit.weights(), ids, kit.numerics, runs=2)
        finally:
            kit.close()
    if not same_bits(found, parts):
        raise Failure("d2", f"{name}: the logits of 200 tokens have other bits in one step than in two")
    margins = np.abs(found.astype(np.float64) - y).max(1) / tolerance[:, 0]
    row = int(np.where(np.isnan(margins), np.inf, margins).argmax())
    if not margins[row] <= 1:
        raise Failure("model", f"{name}: the logits after token {row} of a prompt of 200 are {margins[row]:.2f} times the tolerance away ({tolerance[row, 0]:.3g})", margin=float(margins[row]), index=(row,))
    return Outcome(float(margins[row]), index=(row,))


def _snapshot(case_id: str, session: Session, numbers: Numbers, name: str) -> Outcome:
    """A sequence goes on from a snapshot of its state, in another slot, after that state was lost: the bits of one that was never interrupted."""
    with loaded(session.backend, name, num_blocks=8) as kit:
        ids, cut = _ids(), 16
        whole = kit.logits(ids, [TOKENS], table=[0, 1, 2])
        kit.logits(ids, [cut], table=[3, 4, 5])
        kit.executor.keep_state(0, 1)
        for slot in range(2):  # slots are given to others, and a snapshot beside this one is written
            kit.executor.run(batch_of([(ids[::-1].copy(), 0, 8)] * (slot + 1), [[6], [7]][: slot + 1]))
            kit.executor.keep_state(slot, 0)
        kit.executor.restore_state(1, 1)
        batch = batch_of([(ids[::-1].copy(), 8, 4), (ids, cut, TOKENS - cut)], [[6], [3, 4, 5]])
        found = kit.executor.run(batch).logits[4:].copy()
        if not same_bits(found, whole[cut:]):
            raise Failure("d2", f"{name}: the logits after a snapshot of {cut} tokens have other bits than those of a sequence that was not interrupted")
    return Outcome()


def _stays(case_id: str, session: Session, numbers: Numbers, name: str) -> Outcome:
    """Zero fallbacks in a decode step: every op of the graph runs on the device, by the backend's own code."""
    with loaded(session.backend, name) as kit:
        left = kit.leaving()
        if left:
            reasons = sorted({d.reason for d in kit.plan.fallbacks})
            raise Failure("model", f"{name}: {', '.join(left)} leave the device in every step ({kit.plan.copy_bytes_per_token():,} bytes copied per token): {'; '.join(reasons) or 'inherited from ref'}")
    return Outcome()


def _sharp(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """The tolerance itself can fail: a fault of 2⁻⁹ in one norm of the f64 graph is outside of it."""
    with loaded(session.backend, "llama-f32") as kit:
        ids, weights = _ids()[:16], kit.weights()
        y, tolerance = evaluate.ensemble(kit.plan.graph, weights, ids, lambda node: Numerics())
        norm = next(n for n in weights if weights[n].ndim == 1)
        weights[norm] = weights[norm] * (1 + 2.0**-9)
        moved = evaluate.evaluate(kit.plan.graph, weights, ids, lambda node: Numerics())
    margin = float((np.abs(moved - y).max(1) / tolerance[:, 0]).max())
    if margin < 2:
        raise Failure("model", f"a fault of 2⁻⁹ in '{norm}' uses {margin:.2f} of the tolerance only: the tolerance is too wide to see anything")
    return Outcome(facts={"margin_of_the_fault": round(margin, 1)})


def cases() -> Iterator[Case]:
    """Per model: logits and bits; no op leaves the device in the dense ones."""
    for name in MODELS:
        quick = name in ("llama-f32", "llama-q4_0", "gemma3-f32")
        case_id = f"model/{name}/-/t{TOKENS}/logits#model"
        yield Case(case_id, "model", "models", bind(_logits, case_id, name), "silver", True, quick, limit_s=60.0)
        case_id = f"model/{name}/-/t{TOKENS}/chunks#d2"
        yield Case(case_id, "model", "models", bind(_chunked, case_id, name), "silver", True, quick, limit_s=60.0)
        if name not in EXTENDED:
            case_id = f"model/{name}/-/decode/fallbacks#model"
            yield Case(case_id, "model", "models", bind(_stays, case_id, name), "silver", True, quick)
    for name in ("llama-f32", "llama-q4_0", "gemma3-f32"):
        case_id = f"model/{name}/-/t200/prompt#model"
        yield Case(case_id, "model", "models", bind(_long, case_id, name), "silver", True, name == "llama-f32", limit_s=90.0)
    for name in RECURRENT:
        case_id = f"model/{name}/-/t{TOKENS}/snapshot#d2"
        yield Case(case_id, "model", "models", bind(_snapshot, case_id, name), "silver", True, quick=True, limit_s=60.0)
    case_id = "model/llama-f32/-/t16/tolerance#model"
    yield Case(case_id, "model", "models", bind(_sharp, case_id), "silver", True)
