"""Every op meets the sizes of real models and every number of rows, and index vectors with a stride are judged or honestly refused."""

from __future__ import annotations

import pytest

from fastllm.api import CATALOGUE, KV_DTYPES, No
from fastllm.conformance import blocks
from fastllm.conformance.case import matches
from fastllm.conformance.mutants import all_mutants
from fastllm.conformance.mutants.base import CodedBase, MutantBase
from fastllm.conformance.session import Session, Target
from fastllm.conformance.suite import all_cases
from fastllm.conformance.suite.linear import FORMATS

STRIDED = "embed/i32*f32/gap/v33-c32-n9/ids_step2#exact"


def test_every_op_has_a_case_of_more_rows_than_512_and_a_mutant_that_stops_there():
    stopped = {name.partition(".")[0] for name in all_mutants() if name.endswith(".rows_beyond_512")}
    assert stopped == set(CATALOGUE) - {"softcap"}  # which is act_mul and mul wherever ops are numpy
    assert any(c.op == "softcap" and "m1100-" in c.id for c in all_cases().values())


def test_what_no_model_has_may_be_refused_and_what_models_have_may_not():
    cases = all_cases()
    assert not [c.id for c in cases.values() if "66000" in c.id and c.required]
    for op, part in (("embed", "v262211-c32-n16"), ("linear", "m1-n262211-k32"), ("linear", "m2-n65569-k64"), ("linear", "m80-n33-k4096"), ("linear", "m2-n7-k53248"), ("kv_write", "blocks.real"), ("attention", "context.real")):
        assert [c for c in cases.values() if c.op == op and part in c.id and c.required and c.level == "bronze"], part


def strided(backend):
    """The result of a case of ids with a stride on a backend."""
    with Session(Target("mutant", mutant="honest"), opener=lambda **options: (backend, None)) as session:
        return all_cases()[STRIDED].run(session)


class Refuses(MutantBase):
    """Takes dense operands only, and says so."""

    def supports(self, q):
        return No("only dense operands") if any(q.strides) else super().supports(q)


class Careless(MutantBase):
    """Says Yes to strides, and raises."""

    def ops(self):
        def embed(ids, table, *, out, **more):
            if ids.strides is not None:
                raise ValueError("dense ids are needed")
            honest(ids, table, out=out, **more)

        found = dict(super().ops())
        honest, found["mutant.embed"] = found["mutant.embed"], embed
        return found


class Without(MutantBase):
    """Lacks the op."""

    def supports(self, q):
        return No("no embed here") if q.op == "embed" else super().supports(q)


def test_a_stride_is_judged_or_refused_when_it_is_asked_for_and_not_later():
    taken = strided(MutantBase())
    assert (taken.status, taken.facts.get("refused")) == ("passed", None)
    refused = strided(Refuses())
    assert refused.status == "passed"
    assert "only dense operands" in refused.facts["refused"]
    assert (strided(Careless()).status, strided(Careless()).rule) == ("failed", "error")
    assert (strided(Without()).status, strided(Without()).rule) == ("failed", "honest")  # required: a No to the op itself is no way out


def test_every_op_meets_every_number_of_rows_in_every_format_that_it_has():
    met = {(c.op, c.id.split("/")[1].rpartition("*")[2]) for c in all_cases().values() if c.level == "bronze" and "counts" in c.id.split("/")[4] and c.rule in ("bound", "exact")}
    assert {op for op, _ in met} == set(CATALOGUE)
    for op in ("linear", "embed", "moe"):
        assert {format for name, format in met if name == op} == set(FORMATS), op
    assert {format for name, format in met if name == "matmul"} == set(blocks.PLAIN_BYTES)
    for op in ("attention", "kv_write"):
        assert {format for name, format in met if name == op} == set(KV_DTYPES), op


def test_every_number_of_rows_and_every_tile_is_calibrated_in_a_bin_of_its_own():
    cases = [c for c in all_cases().values() if c.group.startswith("counts.") and c.rule == "bound"]
    assert {c.id for c in cases if not c.bin} == {c.id for c in cases if "fp8g128" in c.id}
    others = {c.bin for c in all_cases().values() if not c.group.startswith("counts.")}
    assert {c.bin for c in cases if c.bin} & others == set()


@pytest.mark.parametrize(
    ("name", "of"),
    [("moe.of_32_rows_q4_0", "moe/f32*q4_0/*"), ("embed.of_32_rows_q6_k", "embed/i32*q6_k/*"), ("matmul.of_32_rows_f16", "matmul/f32*f16/*"), ("sample.of_32_rows", "sample/f32/row/r*")],
)
def test_a_fault_of_one_number_of_rows_is_seen_by_the_cases_of_counts_alone(name, of):
    cases = [c for c in all_cases().values() if matches(c.id, of) and not ("151936" in c.id or "262211" in c.id or "32000" in c.id)]
    with Session(Target("mutant", mutant=name)) as session:
        failed = {r.id for r in (c.run(session) for c in cases) if r.status == "failed"}
    assert failed
    assert failed == {i for i in failed if "counts" in i}
    assert len(cases) > len(failed)


class Counting(CodedBase):
    """Counts weights that are packed; `writes`: embed changes its table."""

    packed, writes = 0, False

    def pack_weight(self, weight, layout, dst, offset):
        self.packed += 1
        super().pack_weight(weight, layout, dst, offset)

    def ops(self):
        def embed(ids, table, *, out, **more):
            honest(ids, table, out=out, **more)
            if self.writes and ids.shape[0] == 32:
                self.array(table)[0, 0] += 1

        found = dict(super().ops())
        honest, found["mutant.embed"] = found["mutant.embed"], embed
        return found


def test_weights_of_a_case_of_counts_are_placed_once_and_watched_in_every_step():
    case = next(c for c in all_cases().values() if c.id.startswith("embed/i32*q4_0/row/m1_257-") and c.id.endswith("/counts#bound"))
    for writes in (False, True):
        backend = Counting()
        backend.writes = writes
        with Session(Target("mutant", mutant="honest"), opener=lambda *, it=backend, **options: (it, None)) as session:
            used = backend.memory().used
            result = case.run(session)
            assert backend.packed == 1
            assert (result.status, result.rule) == (("failed", "guard") if writes else ("passed", "")), result.message
            assert writes == ("with 32: op 'embed' changed its input 'table'" in result.message)
            assert backend.memory().used == used
