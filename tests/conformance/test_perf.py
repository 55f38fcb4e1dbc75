"""The perf report: what is measured, what it is held against, floors, and comparing two reports. Speeds themselves are not asserted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fastllm.api import UsageError
from fastllm.cli.main import run_command
from fastllm.conformance.case import CaseResult, Requirements
from fastllm.conformance.levels import standing
from fastllm.conformance.perf import Floor, build_perf, compare, perf_reasons, perf_rows, perf_text, read_floors, read_old
from fastllm.conformance.perf_cases import perf_cases
from fastllm.conformance.report import markdown, page
from fastllm.conformance.runner import Job, run_cases
from fastllm.conformance.session import Session, Target
from fastllm.conformance.suite import serving
from fastllm.conformance.suite.soak import soak_case


def measured(case_id, op, seconds, *, nbytes=0.0, flops=0.0, spread=0.0, **more):
    times = {"min_s": seconds * (1 - spread), "median_s": seconds, "q1_s": seconds * (1 - spread), "q3_s": seconds * (1 + spread), "runs": 5, "calls": 10}
    return CaseResult(case_id, op, "perf", "gold", status="passed", impl=op, native=True, facts={**times, "bytes": nbytes, "flops": flops, **more})


def results(slower=1.0, spread=0.0):
    leaving = {"nodes": 9, "fallbacks": 2, "inherited": 1, "switches": 4, "copies": 3, "copy_bytes": 640}
    return [
        measured("probe/-/-/128MiB/copy#perf", "probe", 0.01, nbytes=1e9),
        measured("probe/f32*f32/row/a/multiply#perf", "probe", 0.1, flops=1e10, nbytes=1e6),
        measured("probe/f32*q4_0/row/a/multiply#perf", "probe", 0.1, flops=4e10, nbytes=1e6),
        measured("rms_norm/f32/row/b/typical#perf", "rms_norm", 0.02 * slower, nbytes=1e9, spread=spread),
        measured("linear/f32*f32/row/c/prompt#perf", "linear", 0.2, flops=1e10, nbytes=1e6),
        measured("linear/f32*q4_0/row/c/prompt#perf", "linear", 0.2, flops=1e10, nbytes=1e6),
        measured("model/mid-q4_0/-/s8-t1/streams#perf", "model", 0.05, nbytes=5e8, tokens=8, **leaving),
    ]


def test_an_item_is_held_against_the_roof_of_its_kind():
    perf = build_perf(results(), [], emulated=False)
    assert perf["roofs"] == {"bytes_per_s": 1e11, "flops_per_s_plain": 1e11, "flops_per_s_any": 4e11}
    fraction = {i["id"].rpartition("/")[0]: i.get("fraction") for i in perf["items"]}
    assert fraction["rms_norm/f32/row/b"] == pytest.approx(0.5)
    assert fraction["linear/f32*f32/row/c"] == pytest.approx(0.5)
    assert fraction["linear/f32*q4_0/row/c"] == pytest.approx(0.125)
    model = perf["items"][-1]
    assert model["tokens_per_s"] == pytest.approx(160)
    assert "2 fallbacks, 1 inherited, 4 switches, 3 copies, 640 bytes" in perf_rows(perf)[-1][-1]
    assert any("50%" in line for line in perf_text(perf))


def test_floors_decide_gold_and_nothing_else(tmp_path):
    path = tmp_path / "conformance.toml"
    path.write_text('[[floor]]\nid = "rms_norm/*"\nfraction = 0.4\n\n[[floor]]\nid = "model/mid*"\ntokens_per_s = 200\n')
    floors = read_floors(path)
    assert floors == [Floor("rms_norm/*", "fraction", 0.4), Floor("model/mid*", "tokens_per_s", 200.0)]
    perf = build_perf(results(), floors, emulated=False)
    assert [f["met"] for f in perf["floors"]] == [True, False]
    (why,) = perf_reasons(perf)
    assert "model/mid*" in why
    assert "reaches 160" in why
    gold = [CaseResult("engine/a/-/b/c#serve", "engine", "serving", level, status="passed") for level in ("bronze", "silver", "gold")]
    gold += [CaseResult(f"linear/f32*{f}/row/a/b#bound", "linear", "linear", "silver", status="passed", native=True) for f in ("f16", "q8_0", "q4_0")]
    gold += [CaseResult("attention/f32/row/a/b#bound", "attention", "attention", "silver", status="passed", native=True)]
    for given, level in ((perf, "silver"), (None, "silver"), (build_perf(results(), floors[:1], emulated=False), "gold"), (build_perf([], [], emulated=True), "silver")):
        assert standing(gold, "gold", whole=True, perf=given).level == level
    assert not build_perf(results(), [Floor("rmsnorm/*", "fraction", 0.1)], emulated=False)["floors"][0]["met"]


@pytest.mark.parametrize("wrong", ["id = 'x'", "id = 'x'\nfraction = 2", "id = 'x'\nfraction = '1'", "fraction = 1", "id = 'x'\ntokens_per_s = 0", "id = 'x'\nfraction = 0.1\ntokens_per_s = 3", "id = 'x'\nfraction = 0.1\nwhy = 'y'"])
def test_a_floor_that_cannot_be_is_refused(tmp_path, wrong):
    (tmp_path / "conformance.toml").write_text("[[floor]]\n" + wrong)
    with pytest.raises(UsageError, match="floor 1"):
        read_floors(tmp_path / "conformance.toml")


def test_only_changes_that_are_large_and_apart_are_told(tmp_path):
    old = tmp_path / "old.json"
    for slower, spread, told in ((1.0, 0.0, 0), (1.04, 0.0, 0), (1.3, 0.0, 1), (1.3, 0.2, 0), (0.5, 0.1, 1)):
        old.write_text(json.dumps({"perf": build_perf(results(spread=spread), [], emulated=False), "date": "2026-01-01", "device": "x"}))
        found = compare(build_perf(results(slower, spread), [], emulated=False), read_old(old), str(old))
        assert len(found["changes"]) == told, (slower, spread)
        assert found["compared"] == 7
    assert found["changes"][0]["change"] == pytest.approx(-0.5)
    for text in ("{}", "[", '{"perf": null}', '{"perf": {"items": []}}', '{"perf": {"items": [{"id": "a", "median_s": "x"}]}}'):
        old.write_text(text)
        with pytest.raises(UsageError, match="has no perf report"):
            read_old(old)
    with pytest.raises(UsageError, match="cannot read"):
        read_old(tmp_path / "none.json")


def test_a_report_to_compare_with_is_read_before_anything_runs(tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr("fastllm.conformance.run.run_cases", lambda *a: ran.append(a))
    (tmp_path / "old.json").write_text("{}")
    options = ("conformance", "run", "--backend", "ref", "--quick", "--perf", "--compare")
    assert [run_command([*options, str(tmp_path / name)]) for name in ("old.json", "none.json")] == [2, 2]
    assert "has no perf report" in capsys.readouterr().err
    assert ran == []


def test_items_are_measured_through_the_backend():
    names = ("/empty#perf", "attention/f32/paged/r256", "kv_write/", "linear/f32*q4_0/row/m8", "model/tiny")
    chosen = [c for c in perf_cases().values() if any(n in c.id for n in names)]
    assert len(chosen) == len(names)
    found = run_cases(Job(Target("cpu_avx"), jobs=1), chosen)
    assert [r.message for r in found if r.status != "passed"] == []
    for r in found:
        assert r.facts["runs"] >= 5
        assert r.facts["min_s"] * r.facts["calls"] >= 0.2
        assert r.facts["q1_s"] <= r.facts["median_s"] <= r.facts["q3_s"]
    assert found[-1].facts["fallbacks"] == found[-1].facts["switches"] == 0


def test_an_emulated_device_reports_what_leaves_it_and_no_speed():
    chosen = [c for c in perf_cases().values() if c.id.startswith(("rope/", "model/tiny"))]
    target = Target("fake", {"without": "rms_norm"})
    found = run_cases(Job(target, jobs=1, requirements=Requirements(emulated=True)), chosen)
    perf = build_perf(found, [], emulated=True)
    assert not any("median_s" in i for i in perf["items"])
    assert [i["status"] for i in perf["items"]] == ["n/a", "passed"]
    assert perf["items"][1]["fallbacks"] == 5
    assert perf["items"][1]["copy_bytes"] > 0
    assert perf_text(perf) == ["emulated devices report no speed"]


def test_the_report_has_the_perf_part_in_every_form(tmp_path, capsys, monkeypatch):
    few = {k: v for k, v in perf_cases().items() if "kv_write/" in k}
    monkeypatch.setattr("fastllm.conformance.perf_cases.perf_cases", lambda: few)
    (tmp_path / "conformance.toml").write_text('[[floor]]\nid = "kv_write/*"\nfraction = 0.000001\n')
    options = ["--backend", "cpu_avx", "--case", "softmax/f32/row/m3-n1000/normal#bound", "--perf", "--expected", str(tmp_path / "conformance.toml")]
    assert run_command(["conformance", "run", *options, "--report-dir", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "OF ROOF" in out
    assert "floor kv_write/*: fraction 1e-06: met" in out
    report = json.loads((tmp_path / "a" / "conformance.json").read_text())
    assert "## Speed" in markdown(report)
    assert "kv_write/f32" in page(report)
    assert run_command(["conformance", "run", *options, "--compare", str(tmp_path / "a" / "conformance.json")]) == 0
    assert "1 items against" in capsys.readouterr().out
    assert run_command(["conformance", "run", "--backend", "ref", "--quick", "--compare", "x.json"]) == 2
    assert run_command(["conformance", "verify", str(tmp_path / "a" / "conformance.json")]) == 0


def test_a_slow_call_is_not_repeated(monkeypatch):
    monkeypatch.setattr("fastllm.conformance.speed.LONGEST_S", 0.0)
    case = next(c for c in perf_cases().values() if c.op == "rope")
    with Session(Target("ref")) as session:
        result = replace(case).run(session)
    assert (result.status, "too slow to repeat" in result.message) == ("n/a", True)


def test_a_soak_serves_in_rounds_and_a_leak_in_one_of_them_is_seen(capsys, monkeypatch, tmp_path):
    case = "softmax/f32/row/m3-n1000/normal#bound"
    code = run_command(["conformance", "run", "--backend", "cpu_avx", "--case", case, "--soak", "0.02", "--json", "--report-dir", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    (soak,) = [c for c in report["cases"] if c["id"].startswith("soak/")]
    assert (code, soak["status"], soak["facts"]["steps"]) == (0, "passed", 960 * soak["facts"]["rounds"])
    assert run_command(["conformance", "verify", str(tmp_path / "conformance.json")]) == 0
    assert run_command(["conformance", "run", "--backend", "ref", "--soak", "61"]) == 2
    sizes = iter(range(0, 1 << 40, 1 << 25))
    monkeypatch.setattr(serving, "resident_bytes", lambda: next(sizes) + 1)
    monkeypatch.setattr(serving, "soak", lambda *_: None)
    for part in ("streams", "cancels", "exhaustion"):
        monkeypatch.setattr(serving, part, lambda *_: None)
    with Session(Target("ref")) as session:
        result = soak_case(0.001).run(session)
    assert (result.status, result.rule) == ("failed", "leak")
