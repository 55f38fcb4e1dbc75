"""The runner, levels, expected failures and reports: on real backends, and on ones that crash, hang and exit."""

from __future__ import annotations

import json

import pytest

from fastllm.api import UsageError
from fastllm.backends.cpu_avx import isa
from fastllm.cli.main import run_command
from fastllm.conformance import Failure, NotApplicable, check_backend, parametrize_with_cases
from fastllm.conformance.case import Case, CaseResult
from fastllm.conformance.expected import apply_expected, read_expected
from fastllm.conformance.levels import standing
from fastllm.conformance.report import sealed
from fastllm.conformance.runner import Job, Selection, choose, run_cases
from fastllm.conformance.session import Session, Target
from fastllm.conformance.suite import all_cases
from fastllm.conformance.verify import verify

PLUGIN = """
import os, signal, time
from fastllm.api import API_VERSION, OPSET, BackendSpec, DeviceInfo, Ready, RefBackend, Yes, hookimpl

class Bad(RefBackend):
    name = "bad"

    def supports(self, q):
        return Yes("bad.softmax") if q.op == "softmax" else Yes("bad.rope") if q.op == "rope" else super().supports(q)

    def ops(self):
        return {**super().ops(), "bad.softmax": self.softmax, "bad.rope": self.rope}

    def softmax(self, x, *, out, stream, ws):
        if x.shape[-1] == 33:
            os.kill(os.getpid(), signal.SIGSEGV)
        if x.shape[-1] == 64:
            os._exit(7)
        if x.shape[-1] == 40:
            time.sleep(60)
        self._op_softmax(x, out=out, stream=stream, ws=ws)

    def rope(self, *args, **kwargs):
        raise RuntimeError("no rope today")

@hookimpl
def fastllm_backends():
    return [BackendSpec("bad", API_VERSION, OPSET)]

@hookimpl
def fastllm_probe(name):
    return Ready((DeviceInfo("0", "nothing"),))

@hookimpl
def fastllm_open_backend(name, device, options):
    return Bad()
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "bad.py"
    path.write_text(PLUGIN)
    return str(path)


def test_a_crash_an_exit_and_a_hang_are_failed_cases_and_the_run_goes_on(bad):
    cases = [c for c in all_cases().values() if c.op == "softmax" and c.group == "rows"]
    chosen = [c for c in cases if any(f"n{n}/" in c.id for n in (7, 1000)) or "/row/m3-n33/" in c.id]
    results = {r.id: r for r in run_cases(Job(Target("bad", plugin_paths=(bad,)), jobs=1), chosen)}
    crashed = [r for r in results.values() if "n33/" in r.id]
    assert [(r.status, r.rule) for r in crashed] == [("failed", "contract")]
    assert "SIGSEGV" in crashed[0].message
    assert all(r.status == "passed" for r in results.values() if "n33/" not in r.id)
    exits = [c for c in cases if "/row/m3-n64/" in c.id]
    assert "status 7" in run_cases(Job(Target("bad", plugin_paths=(bad,))), exits)[0].message
    hangs = [c for c in cases if "special" in c.id]
    assert "hangs" in run_cases(Job(Target("bad", plugin_paths=(bad,)), limit_s=3.0), hangs)[0].message


def test_after_three_deaths_the_rest_of_a_group_is_not_run(bad):
    deadly = Case("softmax/-/-/a/die#bound", "softmax", "rows", lambda s, g: None)
    many = [c for c in all_cases().values() if c.op == "softmax" and "n33/" in c.id] + [c for c in all_cases().values() if c.op == "softmax" and "n64/" in c.id]
    plain = [c for c in all_cases().values() if c.op == "softmax" and "n7/" in c.id]
    results = run_cases(Job(Target("bad", plugin_paths=(bad,)), jobs=1), [*many, *plain])
    assert sum(r.status == "failed" for r in results) == 3
    assert all(r.status == "not run" for r in results[3:])
    assert deadly.rule == "bound"


def test_an_op_that_raises_fails_its_cases_with_the_message(bad):
    results = check_backend("bad", ops=["rope"], plugin_paths=[bad], quick=True)
    assert {r.status for r in results if r.rule != "honest"} >= {"failed"}
    assert any("no rope today" in r.message for r in results)


@pytest.mark.parametrize("deed", ["ctypes.string_at(0)", "raise RuntimeError('unfinished')"])
def test_another_file_that_fails_is_nobodys_fault_and_in_no_process_of_the_suite(tmp_path, deed):
    other, runs = tmp_path / "other.py", tmp_path / "runs"
    other.write_text(f"import ctypes\nwith open({str(runs)!r}, 'a') as file:\n    file.write('x')\n{deed}\n")
    (tmp_path / "good.py").write_text(PLUGIN.replace("bad", "good").replace("Bad", "Good"))
    results = check_backend("good", ops=["add"], plugin_paths=[tmp_path / "good.py", other], quick=True)
    assert {r.status for r in results} <= {"passed", "n/a"}, results[0].message
    assert any(r.status == "passed" for r in results)
    assert runs.read_text() == "x", "it is asked once for its names"


def test_a_backend_that_does_not_open_is_a_failed_result():
    (result,) = check_backend("no_such_backend")
    assert (result.status, result.rule) == ("failed", "contract")
    assert "no_such_backend" in result.message


@pytest.mark.parametrize("selection", [Selection(ops=("nothing",)), Selection(cases=("softmax/never#bound",)), Selection(level="platinum"), Selection(ops=("rope",), cases=("softmax/*",))])
def test_a_selection_that_matches_nothing_is_an_error(selection):
    with pytest.raises(UsageError):
        choose(selection, all_cases().values())


def test_one_id_alone_gives_the_result_of_the_full_run():
    first = check_backend("ref", ops=["softmax"])
    one = next(r for r in first if r.margin and r.status == "passed")
    (alone,) = check_backend("ref", cases=[one.id])
    assert (alone.margin, alone.nmse, alone.index) == (one.margin, one.nmse, one.index)


@parametrize_with_cases("cpu_avx", quick=True, ops=["rms_norm", "kv_write"])
def test_the_decorator_gives_one_test_per_case(case):
    case.run()


def _results(**changed):
    body = {"id": "softmax/f32/row/a/b#bound", "op": "softmax", "group": "rows", "level": "bronze", "status": "passed"}
    return [CaseResult(**{**body, **changed}), CaseResult("rope/f32/row/a/b#bound", "rope", "rope", "bronze", status="passed")]


def test_expected_failures_are_strict(tmp_path):
    path = tmp_path / "conformance.toml"

    def applied(results, text, version="0.3", **more):
        path.write_text(text)
        return apply_expected(results, read_expected(path), version, **more)

    entry = '[[expected]]\nid = "softmax/*"\nclass = "bug"\nreason = "later"\n'
    assert applied(_results(status="failed", rule="error"), entry)[0].status == "expected"
    assert applied(_results(status="failed", rule="bound"), entry)[0].status == "failed"
    assert applied(_results(), entry)[-1].status == "failed"
    assert applied(_results(), entry.replace("softmax", "sofmax"))[-1].status == "failed"
    assert len(applied(_results(), entry.replace("softmax", "sofmax"), whole=False)) == 2
    assert applied(_results(), entry.replace("softmax", "sofmax"), whole=False, known=all_cases())[-1].message.endswith("it matches no case")
    for whole in (True, False):  # cases of another op, or of a higher level, that were not asked for
        assert len(applied(_results(), entry.replace("softmax", "model"), whole=whole, known=all_cases())) == 2
    assert applied(_results(status="failed", rule="error"), entry + 'until = "0.3"\n')[-1].status == "failed"
    assert applied(_results(status="failed", rule="error"), entry + 'until = "0.4"\n')[0].status == "expected"
    for wrong, said in (
        ("expected = 3", "may hold"), ("[[expected]]\nid = 'x'", "reason and class missing"), (entry.replace("bug", "maybe"), "class is 'maybe'"), ("x = 1", "may hold"), ("[[expected]", "valid TOML"),
        (entry + "untill = '1'", "untill cannot be"), (entry + "until = 3", "until cannot be"), (entry + "until = 'soon'", "until is 'soon'"),
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(UsageError, match=said):
            read_expected(path)


def test_levels_need_every_case():
    ok = _results()
    assert standing(ok, "bronze", whole=True).level == "bronze"
    assert standing(ok, "bronze", whole=False).level == ""
    assert standing([], "bronze", whole=True).level == ""
    assert standing(_results(status="failed"), "bronze", whole=True).level == ""
    assert standing(_results(status="not run"), "bronze", whole=True).level == ""
    assert standing(ok, "silver", whole=True).level == "bronze"


def test_a_case_that_does_not_apply_fails_where_it_is_required():
    def away(session, numbers):
        raise NotApplicable("no such thing")

    def broken(session, numbers):
        raise Failure("guard", "outside", margin=3.0)

    with Session(Target("ref")) as session:
        assert Case("a/b/c/d/e#bound", "a", "g", away).run(session).status == "n/a"
        required = Case("a/b/c/d/e#bound", "a", "g", away, required=True).run(session)
        assert (required.status, required.rule) == ("failed", "honest")
        result = Case("a/b/c/d/e#bound", "a", "g", broken).run(session)
        assert (result.status, result.rule, result.margin) == ("failed", "guard", 3.0)


def test_a_run_writes_reports_that_verify_until_they_are_edited(tmp_path, capsys):
    code = run_command(["conformance", "run", "--backend", "ref", "--quick", "--report-dir", str(tmp_path / "r"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {p.name for p in (tmp_path / "r").iterdir()} == {"conformance.json", "junit.xml", "conformance.md", "conformance.html", "badge.svg"}
    assert report["standing"]["level"] == ""
    assert report["standing"]["native"] == report["standing"]["native_of"]
    path = tmp_path / "r" / "conformance.json"
    assert verify(path) == []
    assert run_command(["conformance", "verify", str(path)]) == 0

    def edited(change):
        body = json.loads(path.read_text())
        change(body)
        other = tmp_path / "edited.json"
        other.write_text(json.dumps(sealed(body)))
        return verify(other)

    assert edited(lambda b: b["cases"].pop(3))
    assert edited(lambda b: b["cases"].append(b["cases"][0]))
    assert edited(lambda b: b["cases"].clear())
    assert edited(lambda b: b["cases"][0].update(status="failed"))
    assert edited(lambda b: b["cases"][0].update(required=not b["cases"][0]["required"]))
    assert edited(lambda b: b["standing"].update(level="gold"))
    assert edited(lambda b: b.update(quick=False))
    assert edited(lambda b: b["cases"][0].update(surprise=1))
    assert edited(lambda b: next(c for c in b["cases"] if c["margin"]).update(margin=1.5))
    assert not edited(lambda b: b["cases"].reverse())
    (tmp_path / "junk.json").write_text("[]")
    with pytest.raises(UsageError):
        verify(tmp_path / "junk.json")
    capsys.readouterr()


def test_the_command_says_which_case_failed_and_exits_with_1(bad, tmp_path, capsys):
    code = run_command(["conformance", "run", "--backend", "bad", "--plugin", bad, "--op", "rope", "--quick", "--dump", str(tmp_path / "d")])
    out, err = capsys.readouterr()
    assert code == 1
    assert "no level" in out
    assert "no rope today" in err
    assert list((tmp_path / "d").glob("rope*.npz"))
    assert run_command(["conformance", "run", "--backend", "ref", "--op", "frob"]) == 2
    assert run_command(["conformance", "run", "--backend", "nobody"]) == 2
    assert run_command(["conformance", "list", "--op", "softmax", "--quick"]) == 0
    assert "softmax/f32" in capsys.readouterr().out


@pytest.mark.parametrize("isa", [name for name, missing in isa.variants().items() if not missing])
def test_the_quick_cases_of_every_level_pass_on_cpu_avx(isa):
    results = check_backend("cpu_avx", level="gold", quick=True, options={"isa": isa})
    assert [f"{r.id}: {r.message}" for r in results if r.status not in ("passed", "n/a")] == []
    assert {r.group for r in results} >= {"models", "serving", "contract", "honesty", "determinism", "attention"}


def test_a_tiny_model_of_every_kind_agrees_with_the_f64_graph_on_ref():
    results = check_backend("ref", level="silver", cases=["model/*#model"])
    logits = [r for r in results if "/logits#" in r.id]
    assert len(logits) >= 11
    assert [f"{r.id}: {r.message}" for r in results if r.status != "passed"] == []
    assert all(r.margin < 0.75 for r in logits)
