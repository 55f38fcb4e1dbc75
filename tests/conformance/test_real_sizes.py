"""The cases give every op, in every format, the sizes that `conformance/real_sizes.py` promises; and a promise that falls short of a real model says why."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fastllm.api import CATALOGUE, KV_DTYPES, Yes
from fastllm.conformance import oracle
from fastllm.conformance.bench import Bench
from fastllm.conformance.mutants.base import CodedBase
from fastllm.conformance.numbers import Numbers
from fastllm.conformance.real_sizes import SIZES, format_of
from fastllm.conformance.session import Session, Target
from fastllm.conformance.suite import all_cases
from fastllm.conformance.suite.linear import FORMATS

WITH_WEIGHTS = {"linear": FORMATS, "embed": FORMATS, "moe": FORMATS, "matmul": ("f32", "f16", "bf16")}
WITH_CACHE = ("attention", "kv_write")


class Enough(Exception):
    """The op that a case is about has been given its operands."""


class Anything(CodedBase):
    """Takes every format, and samples."""

    def supports(self, q):
        return Yes("mutant.sample") if q.op == "sample" else super().supports(q)


@pytest.fixture(scope="module")
def given() -> dict[tuple[str, str, str], tuple[int, str]]:
    """(op, name of a dimension, format) -> (the largest size in a case that compares values at Bronze, its id). Nothing is computed. Cases of core ops in
    f32 count if no backend may decline them."""
    found: dict[tuple[str, str, str], tuple[int, str]] = {}
    sizes: dict[str, list] = {}
    for size in SIZES:
        sizes.setdefault(size.op, []).append(size)
    case = None

    def run(bench, op, inputs, outs, attrs=None, symbols=None):
        format = format_of(inputs)
        full = CATALOGUE[op].complete_attrs(attrs or {})
        if op in sizes and (case.required or format != "f32" or not CATALOGUE[op].core or ("/f32/" in case.id and case.group == "caches")):
            for size in sizes[op]:
                key, value = (op, size.name, format), size.of(inputs, full)
                if value > found.get(key, (-1, ""))[0]:
                    found[key] = (value, case.id)
        if op == case.op or op != "kv_write":
            raise Enough
        return None

    with pytest.MonkeyPatch.context() as patch, Session(Target("mutant", mutant="honest"), opener=lambda **options: (Anything(), None)) as session:
        patch.setattr(Bench, "run", run)
        patch.setattr(Bench, "check_zones", lambda *args: None)
        patch.setattr(oracle, "sample", lambda *args: 0)
        for case in all_cases().values():
            if case.level == "bronze" and case.rule in ("bound", "exact") and case.op in CATALOGUE and not case.id.endswith("decomposed#" + case.rule):
                with pytest.raises(Enough):
                    case.check(session, Numbers(1))
    return found


def formats(op: str) -> tuple[str, ...]:
    """In which an op has to meet its sizes."""
    return WITH_WEIGHTS.get(op, KV_DTYPES if op in WITH_CACHE else ("f32",))


def short_of(given: Mapping[tuple[str, str, str], tuple[int, str]]) -> list[str]:
    """The promises that cases do not keep, in words."""
    return [
        f"{s.op}, {s.name} in {f}: {given.get((s.op, s.name, f), (0, 'no case'))} of {s.asked}"
        for s in SIZES for f in formats(s.op) if given.get((s.op, s.name, f), (0, ""))[0] < s.asked
    ]  # fmt: skip


def test_every_op_meets_in_every_format_the_sizes_that_are_promised(given):
    short = short_of(given)
    assert short == [], "\n".join(short)


def test_a_promise_below_a_real_model_says_why_and_is_kept_in_f32(given):
    for s in SIZES:
        assert bool(s.why) == (s.asked < s.real), f"{s.op}, {s.name}: a reason goes with a smaller size, and with nothing else"
    below = {(s.op, s.name): given[s.op, s.name, "f32"][0] for s in SIZES if given[s.op, s.name, "f32"][0] < s.real}
    assert below == {
        ("attention", "tokens of a context"): 66_001, ("sample", "adjustments"): 98_298,
        ("moe", "rows of a stack of gates"): 66_690, ("moe", "rows of a stack of last matrices"): 66_690,
    }  # fmt: skip


def test_the_table_has_every_op_of_the_catalogue_and_every_dimension_that_tells_heads_apart():
    assert {s.op for s in SIZES} == set(CATALOGUE)
    assert {s.op for s in SIZES if "heads" in s.name} == {"matmul", "rms_norm", "rope", "kv_write", "attention", "add", "mul", "concat", "delta_rule"}
    assert len({(s.op, s.name) for s in SIZES}) == len(SIZES)


def test_every_block_format_of_the_engine_is_one_of_the_suite():
    from fastllm.api import FORMATS as ENGINE
    from fastllm.conformance import blocks

    assert {f.name: (f.block, f.block_bytes) for f in ENGINE.values() if not f.plain} == blocks.BLOCK_BYTES


def test_a_size_that_cases_lose_is_noticed(given):
    assert given["linear", "outputs", "q3_k"][0] == 262_211
    assert given["attention", "heads with a sink", "int8"][1].endswith("/gpt_oss#bound")
    lost = {**given, ("linear", "outputs", "q3_k"): (4096, "a/case")}
    del lost["attention", "heads with a sink", "int8"]
    assert short_of(lost) == ["linear, outputs in q3_k: (4096, 'a/case') of 262208", "attention, heads with a sink in int8: (0, 'no case') of 64"]
