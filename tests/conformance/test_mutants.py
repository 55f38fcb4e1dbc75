"""Every mutant is alive and killed by the rule that it names, as the committed table says; bounds are calibrated on both sides."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastllm.conformance
from fastllm.api import UsageError
from fastllm.cli.main import run_command
from fastllm.conformance.calibrate import FOLDER, MOST, calibrate, named_target
from fastllm.conformance.kernels import KERNELS
from fastllm.conformance.mutants import all_mutants, judge_mutant, self_test
from fastllm.conformance.session import Session
from fastllm.conformance.suite import all_cases

TABLE = json.loads((Path(fastllm.conformance.__file__).parent / "kills.json").read_text())


@pytest.mark.timeout(900)
def test_every_mutant_is_killed_by_the_rule_that_it_names():
    kills = self_test()
    assert [f"{k.verdict}: {k.name}: {k.message}" for k in kills if not k.good] == []
    assert len(kills) >= 60
    found = [{"name": k.name, "family": k.family, "what": k.what, "verdict": k.verdict, "rule": k.rule} for k in kills]
    listed = [{n: v for n, v in k.items() if n not in ("case", "margin")} for k in TABLE]
    assert found == listed, "run: fastllm conformance self-test --write conformance/kills.json"


def test_a_mutant_without_a_fault_is_dead_and_one_that_nobody_sees_survives(monkeypatch):
    known = all_mutants()
    honest = replace(known["softmax.last_left_out"], make=known["softmax.last_left_out"].base)
    monkeypatch.setitem(known, "softmax.last_left_out", honest)
    assert judge_mutant("softmax.last_left_out").verdict == "dead"
    elsewhere = replace(known["rms_norm.eps_missing"], cases="rms_norm/f32/row/m3-n33/*#bound")
    monkeypatch.setitem(known, "rms_norm.eps_missing", elsewhere)
    assert judge_mutant("rms_norm.eps_missing").verdict == "survived"
    monkeypatch.setitem(known, "rms_norm.random", replace(known["rms_norm.random"], rule="guard"))
    assert judge_mutant("rms_norm.random").verdict == "survived"
    monkeypatch.setitem(known, "rms_norm.random", replace(known["rms_norm.random"], cases="no/such/case"))
    assert judge_mutant("rms_norm.random").verdict == "error"


def test_mutants_of_other_kinds_must_be_alive_too(monkeypatch):
    known = all_mutants()
    for name in ("softmax.exits", "softmax.downloads", "backend.skips_everything"):
        assert judge_mutant(name).verdict == "killed", name
    for name in ("softmax.downloads", "backend.skips_everything"):
        monkeypatch.setitem(known, name, replace(known[name], make=known[name].base))
        assert judge_mutant(name).verdict == "dead", name
    monkeypatch.setattr("fastllm.conformance.mutants.HONEST", "softmax.exits")  # a base that dies in a worker
    assert judge_mutant("softmax.crashes").verdict == "error"
    monkeypatch.undo()
    known = all_mutants()
    downloads, wrong = known["softmax.downloads"], known["softmax.last_left_out"]
    monkeypatch.setitem(known, "softmax.downloads", replace(downloads, make=wrong.make))  # wrong numbers are not "not native"
    assert judge_mutant("softmax.downloads").verdict == "survived"
    monkeypatch.setitem(known, "softmax.downloads", replace(downloads, base=downloads.make))
    assert judge_mutant("softmax.downloads").verdict == "error"
    nothing = known["backend.skips_everything"]
    monkeypatch.setitem(known, "backend.skips_everything", replace(nothing, base=nothing.make))
    assert judge_mutant("backend.skips_everything").verdict == "error"


def test_a_process_mutant_without_a_fault_is_dead(monkeypatch):
    known = all_mutants()
    monkeypatch.setitem(known, "honest", replace(known["softmax.exits"], name="honest"))  # what `open_mutant` gives under that name
    assert judge_mutant("honest").verdict == "dead"


def test_the_command_fails_for_a_pattern_that_fits_no_mutant(tmp_path, capsys):
    with pytest.raises(UsageError):
        self_test(["nothing.at_all"])
    assert run_command(["conformance", "self-test", "--mutant", "nothing"]) == 2
    assert run_command(["conformance", "self-test", "--mutant", "add.*", "--write", str(tmp_path / "k.json")]) == 0
    assert "mutants killed" in capsys.readouterr().out
    assert {k["verdict"] for k in json.loads((tmp_path / "k.json").read_text())} == {"killed"}


def test_honest_kernels_of_three_kinds_stay_below_three_quarters_of_every_bound_and_mutants_above_twice():
    files = {p.stem: json.loads(p.read_text())["bins"] for p in FOLDER.glob("*.json")}
    assert set(files) == {"ref", "cpu_avx-baseline", "cpu_avx-avx2", "cpu_avx-avx512", "opencl_generic", *KERNELS}
    for name, bins in files.items():
        assert {b: e["margin"] for b, e in bins.items() if e["margin"] > MOST} == {}, name
    for name in ("ref", "cpu_avx-baseline", "cpu_avx-avx2", "cpu_avx-avx512", "blas", "lanes"):
        experts = {b: e["margin"] for b, e in files[name].items() if b.startswith("moe|f32|")}
        assert experts, name
        assert min(experts.values()) > 0, f"{name}: the slack of moe hides every error"
    cases = [c for c in all_cases().values() if c.bin]
    asked = Counter(c.bin for c in cases)
    kinds: dict[str, set[str]] = {}  # bin -> kernels that share nothing: the variants of cpu_avx are one, and Groups is a Blas
    for name, bins in files.items():
        assert {b: (e["cases"], asked[b]) for b, e in bins.items() if e["cases"] != asked[b]} == {}, f"{name} is of other cases"
        for b in bins:
            kinds.setdefault(b, set()).add({"groups": "blas"}.get(name, name.partition("-")[0]))
    few = {c.bin: sorted(kinds.get(c.bin, ())) for c in cases if len(kinds.get(c.bin, ())) < 3}
    assert few == {}, "too few independent kernels: fastllm conformance calibrate --out conformance/calibration"
    assert set(kinds) == {c.bin for c in cases}, "bins of cases that are no more"
    judged_by_bounds = {c.op for c in all_cases().values() if c.rule == "bound"}
    assert judged_by_bounds == {c.op for c in cases}
    assert {k["name"]: k["margin"] for k in TABLE if k["rule"] == "bound" and not float(k["margin"]) >= 2} == {}


def test_a_kernel_that_fails_a_case_does_not_calibrate(monkeypatch, tmp_path):
    class Wrong(KERNELS["blas"]):
        def _own_softmax(self, x):
            return super()._own_softmax(x) * np.float32(1.001)

    monkeypatch.setattr("fastllm.conformance.calibrate.all_cases", lambda: {c.id: c for c in all_cases().values() if c.op == "softmax"})
    with Session(named_target("blas"), opener=lambda **options: (Wrong(), None)) as session:
        monkeypatch.setattr("fastllm.conformance.calibrate.run_cases", lambda job, chosen: [c.run(session) for c in chosen])
        with pytest.raises(UsageError, match="fails softmax/"):
            calibrate([named_target("blas")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_needs_more_of_a_bound_than_allowed_does_not_calibrate(monkeypatch, tmp_path):
    chosen = {c.id: c for c in all_cases().values() if c.op == "softmax"}
    monkeypatch.setattr("fastllm.conformance.calibrate.all_cases", lambda: chosen)
    with Session(named_target("ref")) as session:
        honest = [c.run(session) for c in chosen.values()]
    monkeypatch.setattr("fastllm.conformance.calibrate.run_cases", lambda job, cases: honest)
    assert calibrate([named_target("ref")], None)["ref"]
    honest[1] = replace(honest[1], margin=0.76)
    with pytest.raises(UsageError, match=r"ref needs 0\.76 of the bound of softmax/.* \(bin softmax\|.*; at most 0\.75"):
        calibrate([named_target("ref")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_fits_no_mutant_is_an_error_with_a_few_that_are_like_it():
    with pytest.raises(UsageError, match="fits no mutant") as error:
        self_test(["attention.mask_plus"])
    assert "attention.mask_plus_1" in error.value.fix
    assert len(error.value.fix) < 300
