"""The perf report: what `perf_cases` measured, as fractions of a roof that was measured through the backend in the same run.

    {"emulated": False, "roofs": {...}, "items": [...], "floors": [...], "compared": {...}}

It passes and fails by nothing but the floors that a vendor declares (`[[floor]]` in conformance.toml), which Gold asks for. An emulated
device reports no speed, only what leaves it. Called by `run`; `report` prints it; `verify` judges it again.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastllm.api import UsageError

from .blocks import PLAIN_BYTES
from .case import CaseResult, matches

__all__ = ["DERIVED", "Floor", "build_perf", "compare", "perf_reasons", "perf_rows", "perf_text", "read_floors", "read_old", "roofs"]

NOISE = 0.05
"""A change that is smaller is not told, however narrow the spreads are."""
FEW = 8
"""Operations per byte up to which an op counts as one that reads and writes."""
UNITS = ("fraction", "tokens_per_s")
DERIVED = ("fraction", "tokens_per_s", "bound")
"""What an item has beside what was measured."""


@dataclass(frozen=True)
class Floor:
    """What a vendor promises: items that match `id` reach at least `least` of `unit`, the fraction of the roof or tokens per second."""

    id: str
    unit: str
    least: float


def read_floors(path: str | Path) -> list[Floor]:
    """The `[[floor]]` entries of a conformance.toml: `id`, and `fraction` or `tokens_per_s`. Raises UsageError for others."""
    found = []
    for number, entry in enumerate(tomllib.loads(Path(path).read_text(encoding="utf-8")).get("floor", []), 1):
        units = [u for u in UNITS if u in entry] if isinstance(entry, dict) else []
        if len(units) != 1 or set(entry) != {"id", *units} or not isinstance(entry["id"], str):
            raise UsageError(f"{path}, floor {number}: it has an id, and one of {' and '.join(UNITS)}", who=str(path))
        least = entry[units[0]]
        if isinstance(least, bool) or not isinstance(least, int | float) or not least > 0 or (units[0] == "fraction" and least > 1):
            raise UsageError(f"{path}, floor {number}: {units[0]} is {least!r}; it must be a number above 0{', at most 1' if units[0] == 'fraction' else ''}", who=str(path))
        found.append(Floor(entry["id"], units[0], float(least)))
    return found


def roofs(results: Sequence[CaseResult]) -> dict[str, float]:
    """What probes and ops reached at best: bytes_per_s of those that read and write and multiply little, flops_per_s of products with
    plain weights and of all. What could not be measured is left out."""
    best: dict[str, float] = {}

    def reach(name: str, amount: float, seconds: float) -> None:
        if amount:
            best[name] = max(best.get(name, 0.0), amount / seconds)

    for r in results:
        if r.status != "passed" or r.op == "model" or "min_s" not in r.facts:
            continue
        nbytes, flops, seconds = r.facts["bytes"], r.facts["flops"], r.facts["min_s"]
        if flops <= FEW * nbytes:
            reach("bytes_per_s", nbytes, seconds)
        reach("flops_per_s_any", flops, seconds)
        if _plain(r.id):
            reach("flops_per_s_plain", flops, seconds)
    return best


def _plain(case_id: str) -> bool:
    """True if the second operand, or the only one, is plain."""
    return case_id.split("/")[1].rpartition("*")[2] in PLAIN_BYTES


def _item(result: CaseResult, roof: Mapping[str, float]) -> dict[str, Any]:
    """A result as an item: fraction is of the time that the roof allows; tokens_per_s of models."""
    facts = dict(result.facts)
    item = {"id": result.id, "op": result.op, "status": result.status, "impl": result.impl, "native": result.native, "message": result.message, **facts}
    if result.status != "passed" or "median_s" not in facts:
        return item
    if result.op == "model":
        item["tokens_per_s"] = facts["tokens"] / facts["median_s"]
    flops = roof.get("flops_per_s_plain" if _plain(result.id) else "flops_per_s_any")
    bound = [facts["bytes"] / roof["bytes_per_s"]] if facts.get("bytes") and "bytes_per_s" in roof and facts.get("tokens", 1) == 1 else []
    bound += [facts["flops"] / flops] if facts.get("flops") and flops else []
    if bound and max(bound) > 0:
        item["fraction"] = max(bound) / facts["median_s"]
        item["bound"] = "memory" if (len(bound) == 1 and facts.get("bytes")) or bound[0] == max(bound) else "products"
    return item


def build_perf(results: Sequence[CaseResult], floors: Sequence[Floor], *, emulated: bool) -> dict[str, Any]:
    """The report's part, as plain data."""
    roof = {} if emulated else roofs(results)
    items = [_item(r, roof) for r in results]
    return {"emulated": emulated, "roofs": roof, "items": items, "floors": [_judged(f, items, emulated) for f in floors]}


def _judged(floor: Floor, items: Sequence[Mapping[str, Any]], emulated: bool) -> dict[str, Any]:
    fits = [i for i in items if matches(i["id"], floor.id) and floor.unit in i]
    lowest = min(fits, key=lambda i: float(i[floor.unit]), default=None)
    found = None if lowest is None else float(lowest[floor.unit])
    why = "" if lowest is not None else "emulated devices report no speed" if emulated else "it matches no item that was measured"
    return {"id": floor.id, "unit": floor.unit, "least": floor.least, "found": found, "met": found is not None and found >= floor.least, "message": why}


def perf_reasons(perf: Mapping[str, Any] | None) -> list[str]:
    """Why a perf report does not do for Gold; [] if it does."""
    if perf is None:
        return ["there is no perf report"]
    if perf["emulated"]:
        return ["emulated devices report no speed, and Gold needs a perf report"]
    missing = [f"{i['id']}: {i['message'] or i['status']}" for i in perf["items"] if i["status"] not in ("passed", "n/a")]
    if not any("median_s" in i for i in perf["items"]):
        missing.append("the perf report has no measurement")
    for f in perf["floors"]:
        judged = _judged(Floor(f["id"], f["unit"], f["least"]), perf["items"], perf["emulated"])
        if not judged["met"]:
            reached = judged["message"] if judged["found"] is None else f"reaches {judged['found']:.3g}"
            missing.append(f"floor {f['id']}: declared {f['unit']} {f['least']:g}, {reached}")
    return missing


def read_old(path: str | Path) -> dict[str, Any]:
    """A report to compare with. Raises UsageError for a file that has no perf part."""
    fix = "name a conformance.json that was made with --perf"
    try:
        before = json.loads(Path(path).read_text(encoding="utf-8"))
        measured = [i for i in before["perf"]["items"] if "median_s" in i]
        usable = all(isinstance(i["id"], str) and i["median_s"] > 0 and i["q1_s"] <= i["q3_s"] for i in measured)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", who="--compare", fix=fix) from None
    except (ValueError, KeyError, TypeError):
        usable, measured = False, []
    if not usable or not measured:
        raise UsageError(f"{path} has no perf report", who="--compare", fix=fix)
    return dict(before)


def compare(perf: Mapping[str, Any], before: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Items whose median is more than 5 % away from an older report's, and whose middle halves do not overlap. name: of that report."""
    known = {i["id"]: i for i in before["perf"]["items"] if "median_s" in i}
    changes = []
    for item in perf["items"]:
        was = known.get(item["id"])
        if was is None or "median_s" not in item:
            continue
        ratio = item["median_s"] / was["median_s"] - 1
        apart = item["q1_s"] > was["q3_s"] or item["q3_s"] < was["q1_s"]
        if abs(ratio) > NOISE and apart:
            changes.append({"id": item["id"], "old_s": was["median_s"], "new_s": item["median_s"], "change": ratio})
    return {
        "old": name, "date": before.get("date", ""), "device": before.get("device", ""), "compared": sum("median_s" in i and i["id"] in known for i in perf["items"]),
        "changes": sorted(changes, key=lambda c: -abs(c["change"])),
    }  # fmt: skip


def perf_text(perf: Mapping[str, Any]) -> list[str]:
    """The items as lines for a terminal."""
    if perf["emulated"]:
        return ["emulated devices report no speed"]
    rows = [("ITEM", "µs", "LEAST; SPREAD", "RATE", "OF ROOF", "RUNS AS"), *perf_rows(perf)]
    width = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [f"{r[0]:{width[0]}}  {r[1]:>{width[1]}}  {r[2]:>{width[2]}}  {r[3]:>{width[3]}}  {r[4]:>{width[4]}}  {r[5]}" for r in rows]
    return lines + [f"floor {f['id']}: {f['unit']} {f['least']:g}: {'met' if f['met'] else 'not met'}" for f in perf["floors"]]


def perf_rows(perf: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The items as rows of a table: id, median, spread, rate, fraction of the roof, implementation or why there is none."""
    rows: list[tuple[str, ...]] = []
    for i in perf["items"]:
        if "median_s" not in i:
            left = f"{i['fallbacks']} of {i['nodes']} nodes leave, {i['copy_bytes']:,} bytes per token" if "fallbacks" in i else i["message"]
            rows.append((i["id"], "–", "–", "–", "–", left))
            continue
        spread = f"{1e6 * i['min_s']:.4g}; {1e6 * (i['q3_s'] - i['q1_s']):.2g}"
        if "tokens_per_s" in i:
            rate = f"{i['tokens_per_s']:.4g} tokens/s"
        elif i.get("bound") == "products":
            rate = f"{i['flops'] / i['median_s'] / 1e9:.4g} GFLOP/s"
        else:
            rate = f"{i['bytes'] / i['median_s'] / 1e9:.3g} GB/s" if i.get("bytes") else "–"
        note = i["impl"]
        if i["op"] == "model":
            note = f"{i['fallbacks']} fallbacks, {i['inherited']} inherited, {i['switches']} switches, {i['copies']} copies, {i['copy_bytes']:,} bytes per token"
        rows.append((i["id"], f"{1e6 * i['median_s']:.4g}", spread, rate, f"{i['fraction']:.0%}" if "fraction" in i else "–", note))
    return rows
