"""Every op meets the sizes of real models, and index vectors with a stride are judged or honestly refused."""

from __future__ import annotations

from fastllm.api import CATALOGUE, No
from fastllm.conformance.mutants import all_mutants
from fastllm.conformance.mutants.base import MutantBase
from fastllm.conformance.session import Session, Target
from fastllm.conformance.suite import all_cases

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
