"""Reports: what a run saw, as JSON, JUnit XML, Markdown, one HTML file and an SVG badge. `verify` checks the JSON."""

from __future__ import annotations

import hashlib
import html
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from fastllm.api import API_VERSION, OPSET

from .case import CaseResult
from .files import write_whole
from .levels import SUITE_VERSION, Standing
from .perf import perf_rows
from .runner import Selection

__all__ = ["SCHEMA", "build_report", "compared_lines", "digest_of", "markdown", "sealed", "write_reports"]

SCHEMA = 4
COLOURS = {"": "#9f9f9f", "bronze": "#a97142", "silver": "#7f8c9b", "gold": "#c9a227"}


def build_report(
    results: Sequence[CaseResult], earned: Standing, selection: Selection, *, backend: str, command: str, seed: int, engine: str,
    about: Mapping[str, Any], time_s: float, perf: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The report as plain data. about: distribution, version, device, environment, device_kind, emulated,
    execution, sources, tolerance, and the expected failures and floors that were declared."""
    return {
        "schema": SCHEMA,
        "suite": SUITE_VERSION,
        "api": ".".join(map(str, API_VERSION)),
        "opset": OPSET,
        "engine": engine,
        "backend": backend,
        **about,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "seed": seed,
        "asked": selection.level,
        "quick": selection.quick,
        "filters": {"op": list(selection.ops), "case": list(selection.cases)},
        "time_s": round(time_s, 1),
        "standing": earned.as_dict(),
        "perf": perf,
        "cases": [r.as_dict() for r in results],
    }


def digest_of(report: Mapping[str, Any]) -> str:
    """SHA-256 over all of a report but `digest` itself, whatever the order of its keys and its white space."""
    rest = {key: value for key, value in report.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sealed(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report as JSON gives it back, with `digest`: what was changed later by hand is seen. It is no signature."""
    plain = json.loads(json.dumps(report, default=str))
    return {**plain, "digest": digest_of(plain)}


def write_reports(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes every form into a folder (made if need be); returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    forms = {
        "conformance.json": json.dumps(sealed(report), indent=1) + "\n",
        "junit.xml": junit(report),
        "conformance.md": markdown(report),
        "conformance.html": page(report),
        "badge.svg": badge(report),
    }
    files = {folder / name: text for name, text in forms.items()}
    write_whole(files)
    return list(files)


def _by_op(report: Mapping[str, Any]) -> list[tuple[str, dict[str, int], float, set[str]]]:
    """(op, counts, worst margin of the passed, implementations) in the order of the report."""
    rows: dict[str, tuple[dict[str, int], list[float], set[str]]] = {}
    for case in report["cases"]:
        counts, margins, impls = rows.setdefault(case["op"], ({}, [0.0], set()))
        counts[case["status"]] = counts.get(case["status"], 0) + 1
        if case["status"] == "passed" and isinstance(case["margin"], int | float):
            margins.append(case["margin"])
        if case["impl"]:
            impls.add(case["impl"])
    return [(op, counts, max(margins), impls) for op, (counts, margins, impls) in rows.items()]


def _counts_line(report: Mapping[str, Any]) -> str:
    c = report["standing"]["counts"]
    return f"{c['passed']} passed / {c['expected']} expected failures / {c['n/a']} n/a / {c['failed'] + c['not run']} failed"


def markdown(report: Mapping[str, Any]) -> str:
    """For a repository's page."""
    own = report["standing"]
    lines = [
        f"# Conformance of `{report['backend']}`: {own['level'] or 'no level'}",
        "",
        f"**{own['badge']}** · {_counts_line(report)}",
        "",
        f"- backend: {report['distribution']} {report['version']}, device {report['device']}, execution {report['execution']}",
        f"- suite {report['suite']}, interface {report['api']}, opset {report['opset']}, engine {report['engine']}, {report['date']}, seed {report['seed']}",
        f"- command: `{report['command']}` ({report['time_s']} s)",
        f"- sources: {report['sources'][:16] or 'unknown'}",
        "",
        "| op | passed | expected | n/a | failed | worst margin | implementation |",
        "|---|---|---|---|---|---|---|",
    ]
    for op, counts, margin, impls in _by_op(report):
        failed = counts.get("failed", 0) + counts.get("not run", 0)
        cells = (op, counts.get("passed", 0), counts.get("expected", 0), counts.get("n/a", 0), failed, f"{margin:.2f}", ", ".join(sorted(impls)) or "–")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if own["reasons"]:
        lines += ["", "## Why not more", "", *(f"- {_plain(r)}" for r in own["reasons"])]
    bad = [c for c in report["cases"] if c["status"] in ("failed", "not run", "expected")]
    if bad:
        lines += ["", "## Failed", "", *(f"- `{c['id']}` ({c['status']}, {c['rule'] or 'not run'}): {_plain(c['message'])}" for c in bad[:200])]
    if report["perf"] is not None:
        lines += _perf_lines(report["perf"])
    skipped: dict[str, int] = {}
    for case in report["cases"]:
        if case["status"] == "n/a":
            skipped[case["message"]] = skipped.get(case["message"], 0) + 1
    if skipped:
        lines += ["", "## Not applicable", "", *(f"- {_plain(reason)} ({count})" for reason, count in skipped.items())]
    return "\n".join(lines) + "\n"


def _perf_lines(perf: Mapping[str, Any]) -> list[str]:
    """The perf report as Markdown."""
    lines = ["", "## Speed", ""]
    if perf["emulated"]:
        lines.append("Emulated devices report no speed.")
    else:
        lines += [f"Roofs, measured through the backend: {_roof_line(perf)}. Times are of one call, in µs, the middle of five runs of 0.2 s or more."]
    lines += ["", "| item | µs | least; spread | rate | of the roof | implementation |", "|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(_plain(cell) for cell in row) + " |" for row in perf_rows(perf)]
    for floor in perf["floors"]:
        found = "not measured" if floor["found"] is None else f"{floor['found']:.3g}"
        lines.append(f"\nFloor `{floor['id']}`: {floor['unit']} of at least {floor['least']:g}; {found}: {'met' if floor['met'] else 'not met'}.")
    if "compared" in perf:
        lines += ["", *compared_lines(perf["compared"])]
    return lines


def _roof_line(perf: Mapping[str, Any]) -> str:
    units = {"bytes_per_s": "GB/s", "flops_per_s_plain": "GFLOP/s with plain weights", "flops_per_s_any": "GFLOP/s with any"}
    return ", ".join(f"{value / 1e9:.3g} {units[name]}" for name, value in perf["roofs"].items()) or "none could be"


def compared_lines(compared: Mapping[str, Any]) -> list[str]:
    """What changed since an older report, a line each."""
    head = f"{compared['compared']} items against {compared['old']} ({compared['date']}, {compared['device']}): {len(compared['changes'])} differ"
    return [head] + [f"{'slower' if c['change'] > 0 else 'faster'}: {c['id']}: {1e6 * c['old_s']:.4g} → {1e6 * c['new_s']:.4g} µs ({c['change']:+.0%})" for c in compared["changes"]]


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def junit(report: Mapping[str, Any]) -> str:
    """JUnit XML: failures are failures, N/A and expected failures are skipped, with their reasons."""
    cases = report["cases"]
    failed = sum(c["status"] in ("failed", "not run") for c in cases)
    skipped = sum(c["status"] in ("n/a", "expected") for c in cases)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuite name={quoteattr("conformance " + report["backend"])} tests="{len(cases)}" failures="{failed}" skipped="{skipped}" time="{report["time_s"]}">',
    ]
    for case in cases:
        open_tag = f'<testcase classname={quoteattr("conformance." + case["group"])} name={quoteattr(case["id"])} time="{case["time_s"]:.3f}"'
        text = escape(_clean(case["message"]))
        if case["status"] in ("failed", "not run"):
            lines.append(f'{open_tag}><failure type={quoteattr(case["rule"] or "not run")}>{text}</failure></testcase>')
        elif case["status"] in ("n/a", "expected"):
            lines.append(f"{open_tag}><skipped message={quoteattr(_clean(case['message']))}/></testcase>")
        else:
            lines.append(open_tag + "/>")
    return "\n".join([*lines, "</testsuite>"]) + "\n"


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def page(report: Mapping[str, Any]) -> str:
    """One HTML file without anything from elsewhere."""
    own, e = report["standing"], html.escape
    rows = "".join(
        f"<tr class={e(c['status'].replace('/', '').replace(' ', ''))}><td>{e(c['id'])}<td>{e(c['status'])}<td>{e(str(c['margin'] if c['margin'] is None or isinstance(c['margin'], str) else round(c['margin'], 3)))}<td>{e(c['impl'])}<td>{c['time_s']:.2f}<td>{e(c['message'])}</tr>"
        for c in report["cases"]
    )
    ops = "".join(
        f"<tr><td>{e(op)}<td>{n.get('passed', 0)}<td>{n.get('expected', 0)}<td>{n.get('n/a', 0)}<td>{n.get('failed', 0) + n.get('not run', 0)}<td>{m:.2f}<td>{e(', '.join(sorted(i)))}</tr>"
        for op, n, m, i in _by_op(report)
    )
    reasons = "".join(f"<li>{e(r)}</li>" for r in own["reasons"])
    return f"""<!doctype html><html lang=en><meta charset=utf-8><title>Conformance of {e(report["backend"])}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222;background:#fff}}
table{{border-collapse:collapse;width:100%;font-size:13px}}td,th{{border-bottom:1px solid #ddd;padding:.25em .5em;text-align:left;vertical-align:top;word-break:break-word}}
.failed td,.notrun td{{background:#fdd}}.expected td{{background:#fed}}.na td{{color:#777}}h1 span{{color:{COLOURS[own["level"]]}}}
@media(prefers-color-scheme:dark){{body{{background:#181818;color:#ddd}}td,th{{border-color:#444}}.failed td,.notrun td{{background:#622}}.expected td{{background:#540}}}}</style>
<h1>{e(report["backend"])}: <span>{e(own["level"] or "no level")}</span></h1>
<p><b>{e(own["badge"])}</b> · {e(_counts_line(report))}</p>
<p>{e(report["distribution"])} {e(report["version"])} · {e(report["device"])} · execution {e(report["execution"])} · suite {report["suite"]} · interface {e(report["api"])} ·
engine {e(report["engine"])} · {e(report["date"])} · seed {report["seed"]}<br><code>{e(report["command"])}</code></p>
<ul>{reasons}</ul>
<table><tr><th>op<th>passed<th>expected<th>n/a<th>failed<th>worst margin<th>implementation</tr>{ops}</table>
{_perf_page(report["perf"])}<h2>Cases</h2><table><tr><th>id<th>status<th>margin<th>implementation<th>s<th>message</tr>{rows}</table></html>
"""


def _perf_page(perf: Mapping[str, Any] | None) -> str:
    """The perf report as HTML."""
    if perf is None:
        return ""
    e = html.escape
    head = "Emulated devices report no speed." if perf["emulated"] else f"Roofs, measured through the backend: {_roof_line(perf)}"
    rows = "".join("<tr>" + "".join(f"<td>{e(cell)}" for cell in row) + "</tr>" for row in perf_rows(perf))
    floors = "".join(f"<li>floor {e(f['id'])}: {e(f['unit'])} {f['least']:g}: {'met' if f['met'] else 'not met'}" for f in perf["floors"])
    changes = "".join(f"<li>{e(line)}" for line in (compared_lines(perf["compared"]) if "compared" in perf else []))
    return f"<h2>Speed</h2><p>{e(head)}</p><ul>{floors}{changes}</ul><table><tr><th>item<th>µs<th>least; spread<th>rate<th>of the roof<th>implementation</tr>{rows}</table>"


def badge(report: Mapping[str, Any]) -> str:
    """An SVG badge."""
    own = report["standing"]
    left, right = "fastllm", f"{own['badge']} · {'L2' if report['execution'] == 'device' else 'L1'}"
    a, b = 8 * len(left) + 12, round(6.6 * len(right)) + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{a + b}" height="20" role="img" aria-label="{escape(left)}: {escape(right)}">'
        f'<rect width="{a}" height="20" fill="#444"/><rect x="{a}" width="{b}" height="20" fill="{COLOURS[own["level"]]}"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11"><text x="6" y="14">{escape(left)}</text>'
        f'<text x="{a + 6}" y="14">{escape(right)}</text></g></svg>\n'
    )
