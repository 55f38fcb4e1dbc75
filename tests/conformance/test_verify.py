"""`verify` makes everything again that follows from something else: a report that was turned in one place does not pass."""

from __future__ import annotations

import copy
import json
import re

import pytest

from fastllm.api import API_VERSION, OPSET, UsageError
from fastllm.cli.main import run_command
from fastllm.conformance.case import CaseResult
from fastllm.conformance.expected import ExpectedFailure, apply_expected
from fastllm.conformance.levels import SUITE_VERSION, standing
from fastllm.conformance.perf import Floor, build_perf
from fastllm.conformance.perf_cases import perf_cases
from fastllm.conformance.published import publish
from fastllm.conformance.report import SCHEMA, sealed
from fastllm.conformance.suite import all_cases
from fastllm.conformance.verify import verify

FLOOR = {"id": "rms_norm/*", "unit": "fraction", "least": 0.01}
WINDOW = {"id": "attention/*/window*", "kind": "future", "reason": "later", "issue": "", "until": ""}


def measured(case):
    if case.op == "model":
        facts = {"tokens": 1, "fallbacks": 0, "inherited": 0, "switches": 0, "copies": 0, "copy_bytes": 0, "bytes": 1e6}
    else:
        facts = {"bytes": 1e6, "flops": 1e7 if case.op in ("linear", "probe") else 0.0}
    times = {"min_s": 0.01, "median_s": 0.011, "q1_s": 0.0105, "q3_s": 0.012, "runs": 5, "calls": 25}
    return CaseResult(case.id, case.op, "perf", "gold", status="passed", impl="acme.x", native=True, facts={**times, **facts})


@pytest.fixture(scope="module")
def honest():
    """A report of Gold as `run_suite` writes it, made without running a case."""
    cases = [CaseResult(c.id, c.op, c.group, c.level, c.required, "passed", impl="acme.x", native=True, margin=0.4 if c.bin else None, bin=c.bin) for c in all_cases().values()]
    perf = build_perf([measured(c) for c in perf_cases().values()], [Floor(**FLOOR)], emulated=False)
    earned = standing(cases, "gold", whole=True, perf=perf)
    assert earned.level == "gold"
    body = {
        "schema": SCHEMA, "suite": SUITE_VERSION, "api": ".".join(map(str, API_VERSION)), "opset": OPSET, "engine": "0", "backend": "acme", "distribution": "acme",
        "version": "0.3", "device": "d", "device_kind": "cpu", "emulated": False, "execution": "cpu", "environment": {}, "options": {}, "sources": "ab", "tolerance": {},
        "expected": [], "floors": [FLOOR], "date": "2026-01-01", "command": "run", "seed": 1, "asked": "gold", "quick": False, "filters": {"op": [], "case": []},
        "time_s": 3.0, "standing": earned.as_dict(), "perf": perf, "cases": [c.as_dict() for c in cases],
    }  # fmt: skip
    return json.loads(json.dumps(body))


@pytest.fixture
def forged(honest, tmp_path):
    def write(change, seal=True):
        body = sealed(honest) if not seal else copy.deepcopy(honest)
        change(body)
        path = tmp_path / "conformance.json"
        path.write_text(json.dumps(sealed(body) if seal else body))
        return path

    return write


def case(body, op="linear"):
    return next(c for c in body["cases"] if c["op"] == op and c["required"] and c["margin"] is not None)


def item(body, op):
    return next(i for i in body["perf"]["items"] if i["op"] == op)


def test_an_honest_report_verifies(forged):
    assert verify(forged(lambda b: None)) == []
    assert verify(forged(lambda b: b["cases"].reverse())) == []


UNSEEN = {
    "another device": lambda b: b.update(device="a better one"),
    "another date": lambda b: b.update(date="2027-01-01"),
    "another seed": lambda b: b.update(seed=2),
    "other sources": lambda b: b.update(sources="cd"),
    "a smaller margin": lambda b: case(b).update(margin=0.1),
    "another implementation": lambda b: case(b).update(impl="acme.better"),
    "something new": lambda b: b.update(certified=True),
    "no digest": lambda b: b.update(digest=""),
}
"""What nothing else in a report follows from, or says otherwise."""


@pytest.mark.parametrize("what", UNSEEN)
def test_a_report_that_was_edited_where_nothing_follows_from_it_is_not_as_it_was_written(forged, what):
    assert verify(forged(lambda b: None, seal=False)) == []
    assert [line.partition(":")[0] for line in verify(forged(UNSEEN[what], seal=False))] == ["digest"]


def turned(status, **more):
    def change(body):
        case(body).update(status=status, **more)
        counts = body["standing"]["counts"]
        counts["passed"] -= 1
        if status in counts:
            counts[status] += 1

    return change


FORGERIES = {
    "a status that there is not": turned("wrong", rule="bound", margin=99, message="x"),
    "a count lowered": lambda b: b["standing"]["counts"].update(passed=b["standing"]["counts"]["passed"] - 1),
    "a count more": lambda b: b["standing"]["counts"].update(wrong=0),
    "passed beyond the bound": lambda b: case(b).update(margin=1.5),
    "passed with a negative margin": lambda b: case(b).update(margin=-1),
    "passed without a margin": lambda b: case(b).update(margin=None),
    "passed, and a rule was broken": lambda b: case(b).update(rule="bound"),
    "native by ref": lambda b: case(b).update(impl="ref.linear"),
    "failed turned into n/a": turned("n/a", margin=None, message="no"),
    "expected without an entry": turned("expected", rule="contract", message="future: later"),
    "wrong numbers expected": lambda b: (turned("expected", rule="bound", margin=9.0, message="future: later")(b), b["expected"].append({**WINDOW, "id": case(b)["id"]})),
    "an expected failure that is not there": lambda b: b["expected"].append(WINDOW),
    "floors raised": lambda b: b["floors"][0].update(least=0.9),
    "floors dropped": lambda b: b["perf"].update(floors=[]),
    "perf items made up": lambda b: b["perf"].update(items=[{"id": "a", "op": "x", "status": "passed", "median_s": 1}]),
    "a perf item dropped": lambda b: b["perf"]["items"].pop(),
    "a perf item twice": lambda b: b["perf"]["items"].append(b["perf"]["items"][0]),
    "a fraction raised": lambda b: item(b, "rms_norm").update(fraction=0.99),
    "a roof lowered": lambda b: b["perf"]["roofs"].update(bytes_per_s=1.0),
    "seconds turned": lambda b: item(b, "rms_norm").update(median_s=0.0101),
    "seconds left out": lambda b: item(b, "rms_norm").pop("q1_s"),
    "a run too short": lambda b: item(b, "rms_norm").update(calls=1),
    "perf called emulated": lambda b: b["perf"].update(emulated=True),
    "ran on a device": lambda b: b.update(execution="device"),
    "a kind that there is not": lambda b: b.update(execution="quantum", device_kind="quantum"),
    "emulated called a device": lambda b: b.update(emulated=True),
    "another opset": lambda b: b.update(opset=9),
    "another interface": lambda b: b.update(api="7.7"),
    "a case of the vendor is required": lambda b: b["cases"].append({**b["cases"][0], "id": "vendor/a/b/c/d/e#bound", "required": True}),
    "quick": lambda b: b.update(quick=True),
    "filtered": lambda b: b["filters"].update(op=["linear"]),
    "looser bounds": lambda b: b.update(tolerance={"x": [2, "y"]}),
    "level": lambda b: b["standing"].update(level="silver"),
    "reasons": lambda b: b["standing"].update(reasons=["the weather"]),
    "a bin": lambda b: case(b).update(bin="linear|f32|other|any"),
    "no longer readable": lambda b: b["standing"].pop("counts"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_what_was_turned_in_one_place_is_found(forged, tmp_path, what):
    path = forged(FORGERIES[what])
    assert verify(path)
    with pytest.raises(UsageError, match="does not verify"):
        publish([path], tmp_path / "published.json")


def test_listed_failures_verify_as_they_were_marked(forged):
    def listed(body):
        results = [CaseResult.from_dict(c) for c in body["cases"]]
        for r in results:
            if "/window" in r.id and r.op == "attention" and r.rule == "":
                r.status, r.rule, r.message, r.margin, r.native = "failed", "contract", "not there", None, None
        results = apply_expected(results, [ExpectedFailure(**WINDOW)], body["version"])
        assert any(r.status == "expected" for r in results)
        body["expected"] = [WINDOW]
        body["cases"] = [r.as_dict() for r in results]
        body["standing"] = standing(results, "gold", whole=True, perf=body["perf"]).as_dict()

    assert verify(forged(listed)) == []


def test_older_schemas_and_suites_are_named(forged):
    for key, value, match in (("schema", SCHEMA - 1, "schema"), ("suite", SUITE_VERSION - 1, "suite")):
        with pytest.raises(UsageError, match=match):
            verify(forged(lambda b, key=key, value=value: b.update({key: value})))


def test_a_key_that_is_there_twice_is_found(forged):
    """Of two devices Python takes the last one, a reader or another parser the first."""
    path = forged(lambda b: None)
    text = path.read_text()
    path.write_text('{"device": "Best NPU", ' + text[1:])
    assert [line.partition(":")[0] for line in verify(path)] == ["key 'device' is in one object 2 times"]
    path.write_text(text.replace('"margin": 0.4', '"margin": 0.1, "margin": 0.4', 1))
    assert [line.partition(":")[0] for line in verify(path)] == ["key 'margin' is in one object 2 times"]


def test_the_command_shows_the_first_faults_and_counts_the_rest(forged, capsys):
    def all_failed(body):
        for case in body["cases"]:
            case["status"] = "failed"

    path = forged(all_failed)
    assert run_command(["conformance", "verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22
    assert re.fullmatch(r"and \d+ more \(all with --json\)", lines[20])
