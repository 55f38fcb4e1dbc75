"""`verify`: whether a JSON report agrees with itself and with this suite.

Everything that follows from something else is made again and compared: the list of cases, expected failures, counts, level, badge, roofs,
fractions, floors; and its digest. So a report in which cases were dropped, added or turned does not pass, unless all that follows was forged with it. It
proves that a report is consistent, not that it is honest: margins and seconds are the vendor's word until somebody runs the suite again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastllm.api import API_VERSION, OPSET, UsageError

from .case import RULES, STATUSES, Case, CaseResult, matches
from .expected import ExpectedFailure, apply_expected
from .levels import NEVER_EXPECTED, SUITE_VERSION, select, standing
from .perf import DERIVED, Floor, build_perf
from .perf_cases import perf_items
from .report import SCHEMA, digest_of
from .runner import Selection
from .speed import RUN_S, RUNS
from .suite import all_cases
from .suite.soak import named_soak

__all__ = ["verify"]

KINDS = ("device", "cpu", "emulated")
NEEDED = ("schema", "suite", "api", "opset", "backend", "version", "asked", "quick", "filters", "standing", "perf", "cases", "execution", "device_kind", "emulated", "expected", "floors", "tolerance", "digest")  # fmt: skip


def verify(path: str | Path) -> list[str]:
    """What is wrong with a JSON report; [] if it is consistent. Raises UsageError for something that is no report of this suite."""
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice.extend(f"key '{name}' is in one object {names.count(name)} times: which of them counts depends on who reads" for name in found if names.count(name) > 1)
        return found

    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", who=str(path), fix="name a conformance.json") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", who=str(path)) from None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA or not set(NEEDED) <= set(report):
        raise UsageError(f"{path} is not a conformance report of schema {SCHEMA}", who=str(path), fix="run the suite again, with --report-dir")
    if report["suite"] != SUITE_VERSION:
        raise UsageError(f"{path} is of suite {report['suite']}; this is suite {SUITE_VERSION}", who=str(path), fix="verify it with the engine that made it")
    try:
        return [*twice, *_head(report), *_cases(report), *_expected(report), *_perf(report), *_standing(report)]
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
        return [*twice, f"a part cannot be read: {type(error).__name__}: {error}"]


def _head(report: Mapping[str, Any]) -> list[str]:
    """Whether it was changed, versions, and what kind of device it was."""
    changed = digest_of(report) != report["digest"]
    wrong = ["digest: the report is not as it was written; something in it was changed or left out"] if changed else []
    api = ".".join(map(str, API_VERSION))
    for what, found, right in (("opset", report["opset"], OPSET), ("api", report["api"], api), ("standing.api", report["standing"]["api"], api)):
        if found != right:
            wrong.append(f"{what} is {found!r}; suite {SUITE_VERSION} is for {right!r}")
    kind, emulated = report["device_kind"], report["emulated"]
    if kind not in KINDS or not isinstance(emulated, bool):
        return [*wrong, f"the device is of kind {kind!r}, emulated {emulated!r}; a kind is one of {', '.join(KINDS)}"]
    right = "emulated" if emulated or kind == "emulated" else kind
    if report["execution"] != right or emulated != (right == "emulated"):
        wrong.append(f"execution is {report['execution']!r}; a device of kind {kind!r} with emulated {emulated} gives {right!r}")
    return wrong


def _results(report: Mapping[str, Any]) -> list[CaseResult]:
    return [CaseResult.from_dict(c) for c in report["cases"]]


def _selection(report: Mapping[str, Any]) -> Selection:
    return Selection(report["asked"], bool(report["quick"]), tuple(report["filters"]["op"]), tuple(report["filters"]["case"]))


def _wanted(selection: Selection) -> set[str]:
    """The suite's own cases that a selection runs."""
    pool = list(all_cases().values())
    chosen = select(pool, selection.level, selection.quick)
    if selection.cases:
        chosen = [c for c in pool if any(matches(c.id, p) for p in selection.cases)]
    return {c.id for c in chosen if not selection.ops or any(matches(c.op, p) for p in selection.ops)}


def _cases(report: Mapping[str, Any]) -> list[str]:
    """Which cases there are, and each by itself."""
    results, selection = _results(report), _selection(report)
    wanted, ids = _wanted(selection), [r.id for r in results]
    own = [i for i in ids if not i.startswith(("vendor/", "expected/", "soak/"))]
    wrong = ["the report has no cases"] if not results else []
    if len(set(ids)) != len(ids):
        wrong.append("a case is listed twice")
    wrong += [f"case '{i}' is missing" for i in wanted - set(own)]
    wrong += [f"case '{i}' does not belong to {selection.level}, or to the filters" for i in own if i not in wanted]
    known = {**all_cases(), **named_soak(ids)}
    for result in results:
        case = known.get(result.id)
        if case is not None and (case.level, case.required, case.op, case.group) != (result.level, result.required, result.op, result.group):
            wrong.append(f"case '{result.id}' is {case.level}, required {case.required}; the report says {result.level}, {result.required}")
        if case is not None and case.bin != result.bin:
            wrong.append(f"case '{result.id}' is calibrated as '{case.bin}'; the report says '{result.bin}'")
        if result.id.startswith("vendor/") and result.required:
            wrong.append(f"case '{result.id}' is the vendor's own and cannot be required")
        if why := _contradiction(result, case, report["backend"]):
            wrong.append(f"case '{result.id}' {why}")
    return wrong


def _contradiction(r: CaseResult, case: Case | None, backend: str) -> str:
    """Where status, rule, margin and message of a case do not go together; "" if they do."""
    inside = r.margin is None or 0 <= r.margin <= 1
    if r.status not in STATUSES:
        return f"is '{r.status}'; it must be one of {', '.join(STATUSES)}"
    if r.status == "passed":
        if not inside or r.rule:
            return f"passed with a margin of {r.margin}, and rule '{r.rule}'"
        if case is not None and case.bin and r.margin is None:
            return "passed without a margin"
        if r.native and r.impl.startswith("ref.") and backend.partition(":")[0] != "ref":
            return f"is called native, but ran as {r.impl}"
        return ""
    if not r.message:
        return f"is {r.status} without a reason"
    if r.status in ("n/a", "not run"):
        if r.status == "n/a" and r.required:
            return "is required and cannot be n/a"
        return f"is {r.status}, but has margin {r.margin} and rule '{r.rule}'" if r.margin is not None or r.rule else ""
    if r.rule not in RULES and case is not None:
        return f"is {r.status} by rule '{r.rule}', which there is not"
    if r.rule == "bound" and r.margin is not None and inside:
        return f"is {r.status} by its bound with a margin of {r.margin}"
    return f"cannot be expected: its rule is {r.rule}" if r.status == "expected" and r.rule in NEVER_EXPECTED else ""


def _expected(report: Mapping[str, Any]) -> list[str]:
    """Expected failures, marked again from the entries."""
    entries = [ExpectedFailure(**e) for e in report["expected"]]
    before = [replace(r, status="failed") if r.status == "expected" else r for r in _results(report) if not r.id.startswith("expected/")]
    # apply_expected changes what it is given
    marked = {r.id: r.status for r in apply_expected([replace(r) for r in before], entries, report["version"], whole=_selection(report).whole, known=all_cases())}
    found = {r.id: r.status for r in _results(report)}
    return [f"case '{i}' is {found.get(i, 'missing')}; the expected failures give {marked.get(i, 'none')}" for i in {**found, **marked} if found.get(i) != marked.get(i)]


def _perf(report: Mapping[str, Any]) -> list[str]:
    """Roofs, fractions, floors: made again from the seconds, bytes and operations of the items."""
    perf = report["perf"]
    if perf is None:
        return []
    wrong = []
    ids, wanted = [i["id"] for i in perf["items"]], {c.id: c for c in perf_items(_selection(report).ops)}
    if sorted(ids) != sorted(wanted):
        odd = sorted(set(ids) ^ set(wanted)) or sorted(i for i in ids if ids.count(i) > 1)
        wrong.append(f"the perf items are not those of suite {SUITE_VERSION}: {', '.join(odd[:3])}")
    if perf["emulated"] != report["emulated"]:
        wrong.append(f"perf.emulated is {perf['emulated']!r}; the report says {report['emulated']!r}")
    results = []
    for item in perf["items"]:
        facts = {k: v for k, v in item.items() if k not in ("id", "op", "status", "impl", "native", "message", *DERIVED)}
        case = wanted.get(item["id"])
        if case is None:
            continue
        results.append(CaseResult(item["id"], item["op"], "perf", "gold", False, item["status"], "", item["message"], item["impl"], item["native"], facts=facts))
        if item["op"] != case.op or item["status"] not in STATUSES or (item["status"] != "passed" and not item["message"]):
            wrong.append(f"perf item '{item['id']}' is of {item['op']}, {item['status']!r}")
        elif item["status"] == "passed" and not report["emulated"] and (why := _not_measured(facts)):
            wrong.append(f"perf item '{item['id']}': {why}")
    if wrong:
        return wrong
    made = build_perf(results, [Floor(**f) for f in report["floors"]], emulated=perf["emulated"])
    return [f"perf.{part} does not follow from what was measured" for part in ("roofs", "items", "floors") if _plain(made[part]) != perf[part]]


def _not_measured(facts: Mapping[str, Any]) -> str:
    """Why these are no seconds of five runs of 0.2 s; "" if they may be."""
    low, q1, median, q3 = (facts.get(n) for n in ("min_s", "q1_s", "median_s", "q3_s"))
    numbers = [low, q1, median, q3, facts.get("bytes", 0.0), facts.get("flops", 0.0), facts.get("runs"), facts.get("calls")]
    if not all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers):
        return "seconds, runs or calls are missing"
    if not 0 < low <= q1 <= median <= q3 or facts["runs"] < RUNS or low * facts["calls"] < 0.999 * RUN_S:  # type: ignore[operator]
        return f"{facts['runs']} runs of {facts['calls']} calls, {low}, {q1}, {median}, {q3} s are no measurement"
    return ""


def _plain(value: Any) -> Any:
    """As a JSON file gives it back."""
    return json.loads(json.dumps(value))


def _standing(report: Mapping[str, Any]) -> list[str]:
    """Counts, native ops, level, badge."""
    results, selection, claimed = _results(report), _selection(report), report["standing"]
    earned = _plain(standing(results, selection.level, whole=selection.whole, tolerated=bool(report["tolerance"]), perf=report["perf"]).as_dict())
    wrong = [f"{key} is {claimed.get(key)!r}; the cases give {earned[key]!r}" for key in ("level", "reasons", "counts", "native", "native_of", "inherited", "badge") if claimed.get(key) != earned[key]]
    counts: Sequence[int] = list(claimed["counts"].values())
    if sum(counts) != len(results):
        wrong.append(f"the counts sum to {sum(counts)}; there are {len(results)} cases")
    return wrong
