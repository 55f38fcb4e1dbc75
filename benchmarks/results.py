"""Results: a JSON file of rows that grows cell by cell, and the tables made of it.

A file is {"schema": 1, "machine": {…}, "rows": [record, …]}. A record is a `fastllm.bench.Row` and who it belongs to:

    suite    limits | engine | peers | backends | containers   model    name or file of the model
    engine   fastllm | llama.cpp | …            options  {"threads": 2, "isa": "avx512", …}: what was set or found
    ours     spread of fastllm, measured in turns with `value` (peers: `ratio` is then ours / theirs; backends: of cpu_avx, `ratio` is theirs / ours)
    commit, when                                the version that was measured and the time
    others   cores that other programs (and the hypervisor's other guests) took while it was measured

Machines are shared, so a run may be cut in pieces: a record replaces the one with the same suite, model, engine, options, cell and params.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastllm.bench import Row, Spread, number

__all__ = ["SCHEMA", "OthersClock", "check", "load", "machine", "merge", "record", "save", "table"]

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
    "others": (float, int),
    "commit": str,
    "when": str,
}


def record(suite: str, model: str, engine: str, options: Mapping[str, Any], row: Row, ours: Any = None) -> dict[str, Any]:
    """A row as it is stored. ours: a Spread, for peers."""
    from dataclasses import asdict

    stamp = {"commit": commit(), "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    owner = {"suite": suite, "model": model, "engine": engine, "options": dict(options)}
    return json.loads(json.dumps({**owner, **row.as_dict(), "ours": asdict(ours) if ours else None, "others": 0.0, **stamp}))


class OthersClock:
    """How much of the machine others take, from one call of `share` to the next (Linux; 0 elsewhere)."""

    def __init__(self) -> None:
        self._last, self._share = self._read(), 0.0

    def share(self) -> float:
        """Cores that neither this process nor its children used, a mean since the last call. The system counts in ticks of 10 ms, so
        a call within half a second of the last repeats its answer."""
        now = self._read()
        wall = now[0] - self._last[0]
        if wall >= 0.5:
            self._share = round(max(0.0, (now[1] - self._last[1] - (now[2] - self._last[2])) / wall), 2)
            self._last = now
        return self._share

    def _read(self) -> tuple[float, float, float]:
        """(now, CPU seconds of the whole machine, CPU seconds of our processes)."""
        import psutil

        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return time.perf_counter(), 0.0, 0.0
        user, nice, system, _, _, irq, softirq, steal = (int(f) for f in fields[:8])
        whole = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        me, own = psutil.Process(), 0.0
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                own += times.user + times.system + times.children_user + times.children_system
        return time.perf_counter(), whole, own


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
    for place, row in enumerate(rows):
        where = f"rows[{place}]"
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
    """How many steps a decode took is how it was measured, not what."""
    values = [row[name] for name in KEY]
    if "tokens" in row["params"] and row["cell"] not in ("prefill", "attention of a prompt"):
        values[-1] = {k: v for k, v in row["params"].items() if k != "tokens"}
    return json.dumps(values, sort_keys=True)


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


def spread(value: Mapping[str, Any] | None, percent: bool = False) -> str:
    """`median (q1 – q3)` of a stored spread."""
    return "–" if value is None else Spread(**value).text(percent)


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
            who_else = "cpu_avx" if row["suite"] == "backends" else "fastllm"
            beside, ratio = f"{who_else} {spread(row['ours'])}", f"{row['ratio']['median']:.2f} ×"
        else:
            beside = "" if row["limit"] is None else f"{number(row['limit'])}: {row['limit_of']}"
            ratio = spread(row["ratio"], percent=True)
        lines.append(f"| {row['model']} | {who} | {cell_name(row)} | {value} | {beside} | {ratio} |")
    return "\n".join(lines)
