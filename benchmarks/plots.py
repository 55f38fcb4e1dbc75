"""Growth curves from results files: cost against context, streams, threads and model size, as SVG files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .environments import WORKERS, environment

__all__ = ["FIGURES", "draw", "figures"]

FIGURES = ("context", "streams", "threads", "size")
MAIN = "llama1b-q4_0"
SIZES = {"llama135m-q4_0": 0.135, "llama360m-q4_0": 0.362, "llama1b-q4_0": 1.236, "llama3b-q4_0": 3.213}
"""Model -> billions of weights."""

Rows = Sequence[Mapping[str, Any]]


def figures(rows: Rows) -> dict[str, dict[str, Any]]:
    """Name -> what `workers/plot.py` draws; a figure without two points of ours is left out."""
    most = max((r["options"].get("threads", 1) for r in rows), default=1)
    ours = [r for r in rows if r["suite"] == "engine" and set(r["options"]) == {"threads"} and r["value"]]
    full = [r for r in ours if r["options"]["threads"] == most]
    peers = [r for r in rows if r["suite"] == "peers" and r["engine"] == "llama.cpp" and r["model"] == MAIN and r["value"]]
    main = [r for r in full if r["model"] == MAIN]
    drawn = {
        "context": _figure("Decode, 1B shape, Q4_0", "tokens of context", "ms a token", False, [
            _line("fastllm", _of(main, "decode"), lambda r: r["params"]["context"], _ms),
            _line("llama.cpp", _of(peers, "decode"), lambda r: r["params"]["context"], _ms),
            _line("read bandwidth", _of(main, "decode"), lambda r: r["params"]["context"], lambda r: 1e3 / r["limit"], dashed=True),
        ]),
        "streams": _figure("Streams that decode together, 1B shape, Q4_0", "streams", "tokens/s in all", True, [
            _line("fastllm", [*_start(main), *_of(main, "batch")], _streams, lambda r: r["value"]["median"]),
            _line("llama.cpp", [*_start(peers), *_of(peers, "batch")], _streams, lambda r: r["value"]["median"]),
        ]),
        "threads": _figure("Threads, 1B shape, Q4_0", "threads", "speed, one thread = 1", False, [
            _relative(name, [r for r in ours if r["model"] == MAIN and r["cell"] == cell and r["params"] == params])
            for name, cell, params in _thread_lines(ours)
        ]),
        "size": _figure("Model size, Q4_0", "billions of weights", "ms a token", False, [
            _line("fastllm", _sized(full), lambda r: SIZES[r["model"]], _ms),
            _line("read bandwidth", _sized(full), lambda r: SIZES[r["model"]], lambda r: 1e3 / r["limit"], dashed=True),
        ]),
    }  # fmt: skip
    return {name: figure for name, figure in drawn.items() if figure["lines"] and len(figure["lines"][0]["x"]) > 1}


def _of(rows: Rows, cell: str) -> list[Mapping[str, Any]]:
    return [r for r in rows if r["cell"] == cell]


def _start(rows: Rows) -> list[Mapping[str, Any]]:
    """One stream: the decode at context 0."""
    return [r for r in rows if r["cell"] == "decode" and r["params"]["context"] == 0]


def _sized(rows: Rows) -> list[Mapping[str, Any]]:
    return [r for r in _start(rows) if r["model"] in SIZES]


def _streams(row: Mapping[str, Any]) -> int:
    return int(row["params"].get("streams", 1))


def _ms(row: Mapping[str, Any]) -> float:
    return 1e3 / float(row["value"]["median"])


def _thread_lines(rows: Rows) -> list[tuple[str, str, Mapping[str, Any]]]:
    found: dict[str, tuple[str, str, Mapping[str, Any]]] = {}
    for row in rows:
        if row["model"] == MAIN and row["options"]["threads"] == 1 and row["cell"] in ("prefill", "decode"):
            size = row["params"].get("tokens") if row["cell"] == "prefill" else row["params"]["context"]
            name = f"prefill, {size} tokens" if row["cell"] == "prefill" else f"decode, context {size}"
            found[name] = (name, row["cell"], row["params"])
    return list(found.values())


def _line(name: str, rows: Iterable[Mapping[str, Any]], x: Any, y: Any, dashed: bool = False) -> dict[str, Any]:
    points = sorted((x(r), y(r)) for r in rows)
    return {"name": name, "x": [p[0] for p in points], "y": [p[1] for p in points], "dashed": dashed}


def _relative(name: str, rows: Rows) -> dict[str, Any]:
    """Speed by threads, over that of one thread."""
    line = _line(name, rows, lambda r: r["options"]["threads"], lambda r: r["value"]["median"])
    return {**line, "y": [y / line["y"][0] for y in line["y"]]}


def _figure(title: str, x: str, y: str, log: bool, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "x": x, "y": y, "log": log, "lines": [line for line in lines if line["x"]]}


def draw(rows: Rows, folder: Path) -> list[Path]:
    """Writes the figures. Raises Unavailable without matplotlib, RuntimeError if it fails."""
    python = environment("plots").python
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, figure in figures(rows).items():
        path = folder / f"{name}.svg"
        command = [os.fspath(python), os.fspath(WORKERS / "plot.py"), os.fspath(path)]
        done = subprocess.run(command, input=json.dumps(figure), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{path.name}: {done.stderr.strip()[-300:]}")
        made.append(path)
    return made
