"""Results: a JSON file of rows that grows cell by cell, and the tables made of it.

A file is {"schema": 1, "machine": {…}, "rows": [record, …]}. A record is a `fastllm.bench.Row` and who it belongs to:

    suite    limits | engine | peers            model    name or file of the model
    engine   fastllm | llama.cpp | …            options  {"threads": 2, "isa": "avx512", …}: what was set or found
    ours     spread of fastllm, measured in turns with `value` (peers only); `ratio` is then ours / theirs
    commit, when                                the version that was measured and the time

Machines are shared, so a run may be cut in pieces: a record replaces the one with the same suite, model, engine, options, cell and params.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastllm.bench import Row

__all__ = ["SCHEMA", "check", "load", "machine", "merge", "record", "save", "table"]

SCHEMA = 1
KEY = ("suite", "model", "engine", "options", "cell", "params")
SPREADS = ("value", "ratio", "ours")
TYPES: dict[str, type | tuple[type, ...]] = {
    "suite": str,
    "model": str,
    "engine": str,
    "options": dict,
    "cell": str,
    "params": dict,
    "unit": str,
    "limit": (float, int, type(None)),
    "limit_of": str,
    "reason": str,
    "commit": str,
    "when": str,
}


def record(suite: str, model: str, engine: str, options: Mapping[str, Any], row: Row, ours: Any = None) -> dict[str, Any]:
    """A row as it is stored. ours: a Spread, for peers."""
    from dataclasses import asdict

    stamp = {"commit": commit(), "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    owner = {"suite": suite, "model": model, "engine": engine, "options": dict(options)}
    return json.loads(json.dumps({**owner, **row.as_dict(), "ours": asdict(ours) if ours else None, **stamp}))


def commit() -> str:
    """The short name of the commit that runs, with `+` for uncommitted changes; "" outside of a repository."""
    git = ["git", "-C", os.fspath(Path(__file__).parent)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if name.returncode:
        return ""
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False).stdout.strip()
    return name.stdout.strip() + "+" * bool(changed)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    from fastllm.backends.cpu_avx import isa
    from fastllm.backends.cpu_avx.plugin import cpu_model, memory_bytes
    from fastllm.backends.cpu_avx.threads import choose_threads

    choice = choose_threads(0)
    return {
        "cpu": cpu_model(),
        "isa": isa.best(),
        "threads": choice.count,
        "threads_reason": choice.reason,
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def check(document: Any) -> list[str]:
    """What is wrong with a results document; [] if it is one."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return [f"schema is not {SCHEMA}"]
    wrong = [] if isinstance(document.get("machine"), dict) else ["machine is no object"]
    rows = document.get("rows")
    if not isinstance(rows, list):
        return [*wrong, "rows is no list"]
    for number, row in enumerate(rows):
        where = f"rows[{number}]"
        wrong += [f"{where}.{name} is missing or of a wrong type" for name, kind in TYPES.items() if not isinstance(row.get(name, ...), kind)]
        for name in SPREADS:
            spread = row.get(name, ...)
            if spread is not None and (not isinstance(spread, dict) or set(spread) != {"median", "q1", "q3", "samples"}):
                wrong.append(f"{where}.{name} is no spread")
        if (row.get("value") is None) == (not row.get("reason")):
            wrong.append(f"{where} has neither or both of value and reason")
    return wrong


def load(path: Path) -> dict[str, Any]:
    """A results file, or an empty document if there is none. Raises ValueError for a file that is none."""
    if not path.exists():
        return {"schema": SCHEMA, "machine": machine(), "rows": []}
    document = json.loads(path.read_text())
    if wrong := check(document):
        raise ValueError(f"{path} is no results file: {wrong[0]}")
    return document


def merge(document: dict[str, Any], records: Iterable[dict[str, Any]]) -> None:
    """Adds records; one with the same key is replaced where it stands."""
    places = {_key(row): i for i, row in enumerate(document["rows"])}
    for new in records:
        place = places.setdefault(_key(new), len(document["rows"]))
        if place == len(document["rows"]):
            document["rows"].append(new)
        else:
            document["rows"][place] = new


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps([row[name] for name in KEY], sort_keys=True)


def save(document: dict[str, Any], path: Path) -> None:
    """Writes it whole, one row a line, so that changes can be read in a diff."""
    rows = ",\n".join("  " + json.dumps(_rounded(row), sort_keys=True) for row in document["rows"])
    part = path.with_name(path.name + ".part")
    head = f' "schema": {SCHEMA},\n "machine": {json.dumps(document["machine"], sort_keys=True)},\n'
    part.write_text("{\n" + head + ' "rows": [\n' + rows + "\n ]\n}\n")
    part.rename(path)


def _rounded(value: Any) -> Any:
    """Five significant digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def number(value: float) -> str:
    """Three or four digits, with separators."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(value: Mapping[str, Any] | None, percent: bool = False) -> str:
    """`median (q1 – q3)`."""
    if value is None:
        return "–"
    show = (lambda v: f"{100 * v:.0f} %") if percent else number
    return show(value["median"]) if len(value["samples"]) < 2 else f"{show(value['median'])} ({show(value['q1'])} – {show(value['q3'])})"


def cell_name(row: Mapping[str, Any]) -> str:
    """`decode, context 2048`."""
    params = ", ".join(f"{k} {v}" for k, v in row["params"].items() if not (row["cell"] in ("decode", "batch") and k == "tokens"))
    return f"{row['cell']}, {params}" if params else row["cell"]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown, one line a record."""
    lines = ["| model | engine | cell | speed | beside | ratio |", "|---|---|---|---|---|---|"]
    for row in rows:
        options = " ".join(f"{k}={v}" for k, v in row["options"].items() if k != "threads")
        who = f"{row['engine']} {options}".strip()
        if row["value"] is None:
            lines.append(f"| {row['model']} | {who} | {cell_name(row)} | – | {row['reason'].replace('|', '/')} | – |")
            continue
        value = f"{spread(row['value'])} {row['unit']}"
        if row["ours"]:
            beside, ratio = f"fastllm {spread(row['ours'])}", f"{row['ratio']['median']:.2f} ×"
        else:
            beside = "" if row["limit"] is None else f"{number(row['limit'])}: {row['limit_of']}"
            ratio = spread(row["ratio"], percent=True)
        lines.append(f"| {row['model']} | {who} | {cell_name(row)} | {value} | {beside} | {ratio} |")
    return "\n".join(lines)
