"""The tables of docs/performance.md, made of the results that are committed. Called by scripts/make_docs.py, so no number is typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastllm.bench import number

from . import results
from .containers import CONTAINERS

__all__ = ["PARTS"]

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]


def rows(suite: str) -> list[Row]:
    """All committed rows of a suite."""
    return [r for path in sorted(RESULTS.glob("*.json")) for r in results.load(path)["rows"] if r["suite"] == suite]


def _table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(line) + " |" for line in lines)])


def machine() -> str:
    """What was measured on."""
    documents = [results.load(path) for path in sorted(RESULTS.glob("*.json"))]
    lines = []
    for facts in {str(d["machine"]): d["machine"] for d in documents}.values():
        commits = sorted({r["commit"] for d in documents if d["machine"] == facts for r in d["rows"]})
        memory = f"{facts['memory_bytes'] / (1 << 30):.0f} GiB"
        lines.append(f"{facts['cpu']}, {facts['threads']} threads ({facts['threads_reason']}), {facts['isa']}, {memory}, {facts['system']}.")
        lines.append(f"Commits: {', '.join(f'`{c}`' for c in commits)}.")
    return "\n".join(lines)


def limits() -> str:
    """Read bandwidth and peaks, a column for each number of threads."""
    found: dict[str, dict[int, str]] = {}
    for r in rows("limits"):
        p = r["params"]
        name = f"peak of `{p['instruction']}` ({p['type']})" if r["cell"] == "peak" else f"{r['cell']}, {p['mib']} MiB"
        found.setdefault(name, {})[r["options"]["threads"]] = f"{results.spread(r['value'])} {r['unit']}" if r["value"] else r["reason"]
    counts = sorted({c for values in found.values() for c in values})
    head = ("limit", *(f"{c} thread{'s' * (c != 1)}" for c in counts))
    return _table(head, [(name, *(values.get(c, "–") for c in counts)) for name, values in found.items()])


def engine() -> str:
    """Our engine beside the limits."""
    lines = []
    for r in rows("engine"):
        options = ", ".join(f"{k} {v}" for k, v in r["options"].items() if k != "threads" or v == 1)
        value = f"{results.spread(r['value'])} {r['unit']}" if r["value"] else r["reason"].replace("|", "/")
        beside = "–" if r["limit"] is None else f"{number(r['limit'])} ({r['limit_of']})"
        lines.append((r["model"], options or "–", results.cell_name(r), value, beside, results.spread(r["ratio"], percent=True)))
    return _table(("model", "options", "cell", "measured", "limit", "share"), lines)


def peers() -> str:
    """Other engines; the ratio is ours over theirs."""
    lines = []
    for r in rows("peers"):
        mine = ", ".join(f"{k.removeprefix('ours.')} {v}" for k, v in r["options"].items() if k.startswith("ours."))
        who = f"{r['engine']} {r['options'].get('version', '')}".strip()
        if r["value"] is None:
            lines.append((r["model"], results.cell_name(r), who, "–", "–", r["reason"].replace("|", "/")))
            continue
        ours = f"{results.spread(r['ours'])}{f' ({mine})' if mine else ''}"
        lines.append((r["model"], results.cell_name(r), who, results.spread(r["value"]), ours, f"{r['ratio']['median']:.2f} ×"))
    return _table(("model", "cell", "engine", "its tokens/s", "fastllm's tokens/s", "fastllm / it"), lines)


def backends() -> str:
    """Other backends of ours beside `cpu_avx`; the share is of its speed."""
    lines = []
    for r in rows("backends"):
        if r["value"] is None:
            lines.append((r["model"], r["engine"], "–", results.cell_name(r), r["reason"].replace("|", "/"), "–", "–", "–"))
            continue
        threads = f"{r['options'].get('threads', '–')} / {r['options'].get('ours.threads', '–')}"
        speeds = results.spread(r["value"]), results.spread(r["ours"]), results.spread(r["ratio"], percent=True)
        lines.append((r["model"], r["engine"], threads, results.cell_name(r), *speeds, f"{r['others']:.1f}"))
    if not lines:
        return "No rows yet: `python -m benchmarks backends` makes them."
    return _table(("model", "backend", "threads, its / `cpu_avx`'s", "cell", "its tokens/s", "`cpu_avx`'s tokens/s", "of it", "cores that others took"), lines)


def containers() -> str:
    """Our engine under quotas and masks with the threads that it chose, beside the best number set by hand. Without rows: what makes them."""
    lines = []
    for r in rows("containers"):
        where, params = r["params"]["container"], {k: v for k, v in r["params"].items() if k != "container"}
        cell = results.cell_name({**r, "params": params})
        if r["value"] is None:
            lines.append((r["model"], where, cell, "–", r["reason"].replace("|", "/"), "–", "–"))
            continue
        best = f"{number(r['limit'])} ({r['limit_of']})"
        lines.append((r["model"], where, cell, str(r["options"]["threads"]), f"{results.spread(r['value'])} {r['unit']}", best, results.spread(r["ratio"], percent=True)))
    if not lines:
        return "No rows yet: `python -m benchmarks containers` (as root) makes them."
    return _table(("model", "container", "cell", "threads it took", "measured", "best by hand", "share"), lines)


def builds() -> str:
    """Which build of each peer was measured."""
    found: dict[str, set[str]] = {}
    for r in rows("peers"):
        if r["value"]:
            text = f"{r['options'].get('version', '')}, {r['options'].get('build', '')}, {r['options']['threads']} threads".replace(", ,", ",")
            found.setdefault(r["engine"], set()).add(text + (f", dtype {r['options']['dtype']}" if "dtype" in r["options"] else ""))
    return _table(("engine", "what was measured"), [(name, "; ".join(sorted(texts))) for name, texts in found.items()])


@dataclass(frozen=True)
class Target:
    """What is asked of a row: `of` its ratio ("ratio") or of its value; at least, or at most, a bound. other: the row it is divided by."""

    what: str
    row: tuple[str, str, str, dict[str, Any]]  # suite, model, cell, params
    bound: float
    of: str = "ratio"
    at_most: bool = False
    engine: str = "fastllm"
    other: tuple[str, str, str, dict[str, Any]] | None = None


def _decode(model: str, bound: float) -> Target:
    return Target(f"decode of {model}, of the read limit", ("engine", model, "decode", {"context": 0}), bound)


def _beats(model: str, cell: str, params: dict[str, Any], bound: float, engine: str = "llama.cpp") -> Target:
    shown = ", ".join(f"{k} {v}" for k, v in params.items())
    return Target(f"{cell} ({shown}) of {model} over {engine}", ("peers", model, cell, params), bound, engine=engine)


def _prefill(model: str, tokens: int, bound: float) -> Target:
    what = f"prefill of {tokens:,} tokens, {model}, of the peak without AMX"
    return Target(what, ("engine", model, "prefill", {"tokens": tokens}), bound)


ONE = "llama1b-q4_0"
START = {"context": 0}
TARGETS = (
    *(_decode(m, 0.90) for m in (ONE, "llama1b-q4_k_m", "llama1b-q8_0", "llama1b-int4g128", "llama1b-int8", "llama1b-bf16")),
    *(_decode(m, 0.75) for m in ("smollm2", "gemma3-270m")),
    _beats(ONE, "decode", START, 1.5),
    _beats("llama1b-q4_k_m", "decode", START, 2.0),
    _beats("llama1b-q8_0", "decode", START, 1.3),
    *(_beats(m, "decode", START, 1.6) for m in ("smollm2", "gemma3-270m")),
    *(_prefill(ONE, n, 0.60) for n in (512, 2048)),
    *(_prefill(m, 512, 0.60) for m in ("llama1b-q4_k_m", "llama1b-q8_0", "llama1b-int4g128", "llama1b-int8", "llama1b-bf16")),
    *(_beats(ONE, "prefill", {"tokens": n}, 1.5) for n in (512, 2048)),
    _beats(ONE, "prefill", {"tokens": 512}, 1.2, "llama.cpp-avx2"),
    Target("8 streams over one, 1B int4", ("engine", ONE, "batch", {"streams": 8}), 5.0, "value", other=("engine", ONE, "decode", START)),
    Target("32 streams over one, 1B int4", ("engine", ONE, "batch", {"streams": 32}), 12.0, "value", other=("engine", ONE, "decode", START)),
    *(Target(f"mixed load: longest gap over the median gap, {m}", ("engine", m, "mixed load, longest gap", {}), 3.0, at_most=True) for m in (ONE, "smollm2")),
    Target("decode at context 4,096 of the limit with cache bytes", ("engine", ONE, "decode", {"context": 4096}), 0.85),
    *(
        Target(f"attention's share of a prompt of {n:,} tokens, {m}", ("engine", m, "attention of a prompt", {"tokens": n}), 0.5, at_most=True)
        for m, n in ((ONE, 8192), ("smollm2", 8128))
    ),
    _decode("moe64-q4_0", 0.85),
    *(Target(f"Python and scheduling of {m}, µs a step", ("engine", m, "step overhead, Python", {}), 50.0, "value", at_most=True) for m in (ONE, "smollm2", "gemma3-270m")),
    *(
        Target(
            f"sampling with {settings}, 262,144 entries, µs (3 % of a step of gemma3-270m)",
            ("engine", "smollm2", "sampling", {"settings": settings}),
            0.03,
            "value",
            at_most=True,
            other=("engine", "gemma3-270m", "decode", START),
        )
        for settings in ("defaults", "all tokens")
    ),
    Target("idle CPU, % of a core", ("engine", "smollm2", "idle CPU", {}), 0.5, "value", at_most=True),
    Target("import fastllm, s", ("engine", "smollm2", "import fastllm", {}), 0.15, "value", at_most=True),
    Target("smollm2 (GGUF), command to first token, s", ("engine", "smollm2", "command to first token", {}), 0.6, "value", at_most=True),
    Target("smollm2 (FLM), command to first token, s", ("engine", "smollm2.flm", "command to first token", {}), 0.4, "value", at_most=True),
    *(
        Target(f"decode of {m}, opencl_generic on the CPU device, of cpu_avx", ("backends", m, "decode", START), 0.25, engine="opencl_generic")
        for m in ("smollm2", "gemma3-270m")
    ),
    *(Target(f"peak memory over packed weights and cache, {m}", ("engine", m, "peak memory", {}), 1.15, at_most=True) for m in (ONE, "smollm2", "gemma3-270m")),
)


TARGETS += tuple(
    Target(f"{cell} of {ONE} in a container with {kind.name.replace('affinity', 'an affinity')}, of the best hand-set threads", ("containers", ONE, cell, {"container": kind.name, **params}), 0.95)
    for kind in CONTAINERS
    for cell, params in (("prefill", {"tokens": 512}), ("decode", START))
)


def targets() -> str:
    """Each target with what was measured, and whether it is met."""
    everything = [r for path in sorted(RESULTS.glob("*.json")) for r in results.load(path)["rows"]]
    lines = []
    for t in TARGETS:
        row = _find(everything, t.row, t.engine)
        bound = f"{'≤' if t.at_most else '≥'} {number(t.bound)}"
        if row is None or row["value"] is None:
            lines.append((t.what, bound, "not measured" if row is None else row["reason"], "–"))
            continue
        value = row[t.of]["median"]
        if t.other is not None:
            other = _find(everything, t.other, "fastllm")
            if other is None or other["value"] is None:
                lines.append((t.what, bound, "not measured", "–"))
                continue
            # a speed over a speed, or microseconds over the step time that a speed stands for
            value = value / other["value"]["median"] if row["unit"] == other["unit"] else value * 1e-6 * other["value"]["median"]
        lines.append((t.what, bound, number(value), "met" if (value <= t.bound if t.at_most else value >= t.bound) else "**missed**"))
    return _table(("target", "bound", "measured", ""), lines)


def _find(everything: list[Row], wanted: tuple[str, str, str, dict[str, Any]], engine: str) -> Row | None:
    """The row of a cell whose parameters hold those wanted and that was measured without options, besides threads and versions."""
    suite, model, cell, params = wanted
    for r in everything:
        if (r["suite"], r["model"], r["cell"], r["engine"]) != (suite, model, cell, engine) or not params.items() <= r["params"].items():
            continue
        mine = {k: v for k, v in r["options"].items() if k not in ("threads", "version", "build") and not k.startswith("ours.")}
        if not mine and (suite in ("peers", "containers") or r["options"].get("threads") != 1):
            return r
    return None


PARTS = {f"performance.{f.__name__}": f for f in (machine, targets, limits, engine, peers, builds, backends, containers)}
"""Name of a generated part -> its text."""
