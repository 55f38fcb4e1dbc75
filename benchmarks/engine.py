"""Our engine, alone: speed beside the machine's limits, start, memory, overheads, mixed load.

Cells are named on the command line, so that a run can be cut in pieces: `prefill:512`, `attention:8192`, `decode:2048` (the context),
`batch:8`, and those of `SINGLE`. What a user waits for (start, import, memory) is measured in processes of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastllm.bench import Bench, Row, Spread
from fastllm.core import _kernels
from fastllm.core.errors import FastLLMError, UsageError
from fastllm.loading import LoadOptions, load_model

from .environments import cache_folder
from .resident import STAGES, resident_rows

__all__ = ["DEFAULT_CELLS", "SINGLE", "engine_rows", "needs"]

DEFAULT_CELLS = (
    *(f"prefill:{n}" for n in (32, 512, 2048)),
    *(f"decode:{n}" for n in (0, 2048, 4096)),
    *(f"batch:{n}" for n in (8, 32)),
    "mixed",
    "overhead",
    "sampling",
    "first-token",
    "load",
    "import",
    "idle",
)
ALONE = ("first-token", "load", "resident", "import", "sampling")
"""Cells that load no model in this process."""
OWN = ("backend", "dtype")
NUMBERED = ("prefill", "attention", "decode", "batch")
SINGLE = ("mixed", "overhead", "sampling", "first-token", "load", "resident", "import", "idle")
VOCABULARY = 262_144
MIXED_STREAMS, MIXED_PROMPT = 7, 2000


def parse(cell: str) -> tuple[str, int]:
    """(name, number or 0). Raises UsageError for a cell that there is not."""
    name, colon, argument = cell.partition(":")
    if name in SINGLE and not colon:
        return name, 0
    if name in NUMBERED and argument.isdigit() and (int(argument) or name == "decode"):
        return name, int(argument)
    raise UsageError(f"no cell '{cell}'; there are {', '.join(f'{n}:N' for n in NUMBERED)}, {', '.join(SINGLE)}")


def needs(cells: Sequence[str]) -> tuple[int, int]:
    """(context, sequences) that these cells need. Raises UsageError."""
    context, sequences = 512, 1
    for name, number in map(parse, cells):
        if name in ("prefill", "decode"):
            context = max(context, number + 192)
        elif name == "attention":
            context = max(context, number + 64)  # a small model may have no more
        elif name == "batch":
            sequences = max(sequences, number)
        elif name == "mixed":
            context, sequences = max(context, MIXED_PROMPT + 64), max(sequences, MIXED_STREAMS + 1)
    return context, sequences


def split(options: Mapping[str, str]) -> dict[str, Any]:
    """Keywords of `LoadOptions`: `backend` and `dtype` are its own, the rest belongs to the backend."""
    own = {k: v for k, v in options.items() if k in OWN}
    return {**own, "backend_options": {k: v for k, v in options.items() if k not in OWN}}


def engine_rows(model: str, options: Mapping[str, str], threads: int, cells: Sequence[str], repeat: int) -> Iterator[Row]:
    """One row or two a cell, as soon as it is measured. What fails is a row with the reason. Raises UsageError for a cell that there
    is not."""
    context, sequences = needs(cells)
    loaded = None
    try:
        if any(parse(c)[0] not in ALONE for c in cells):
            room = -(-context // 64) * 64 + 64 + (sequences - 1) * 256
            choices = {"threads": threads, "ctx": context, "max_batch_size": sequences, "kv_cache_tokens": room, "offline": True}
            try:
                loaded = load_model(model, LoadOptions(**choices, **split(options)))
            except FastLLMError as error:
                yield Row("load", reason=str(error))
                return
        bench = Bench(loaded) if loaded else None
        for cell in cells:
            name, number = parse(cell)
            try:
                yield from measure(name, number, bench, model, options, threads, repeat)
            except (FastLLMError, RuntimeError, OSError, ValueError) as error:
                yield Row(name, {"argument": number} if number else {}, reason=f"{type(error).__name__}: {error}"[:300])
    finally:
        if loaded is not None:
            loaded.close()


def measure(name: str, number: int, bench: Bench | None, model: str, options: Mapping[str, str], threads: int, repeat: int) -> list[Row]:
    """The rows of one cell."""
    alone: dict[str, Callable[[], list[Row]]] = {
        "first-token": lambda: first_token(model, options, threads, repeat),
        "load": lambda: load_rows(model, options, threads, repeat),
        "resident": lambda: resident(model, options, threads),
        "import": lambda: import_rows(repeat),
        "sampling": lambda: sampling_rows(repeat),
    }
    if name in alone:
        return alone[name]()
    assert bench is not None
    if name == "prefill":
        return [bench.prefill_row(number, repeat)]
    if name == "attention":
        return [bench.attention_row(number, min(repeat, 3))]
    if name == "decode":
        return [bench.decode_row(number, tokens_for(bench), repeat)]
    if name == "batch":
        return [bench.batch_row(number, 24, repeat)]
    if name == "mixed":
        found = [bench.mixed(MIXED_STREAMS, MIXED_PROMPT, 150) for _ in range(min(repeat, 3))]
        params = {"streams": MIXED_STREAMS, "prompt": MIXED_PROMPT}
        worst, calm = (Spread.of(1e3 * f[k] for f in found) for k in ("max_gap_s", "median_gap_s"))
        return [Row("mixed load, longest gap", params, "ms", worst, calm.median, "median gap before", Spread.of(f["ratio"] for f in found))]
    if name == "overhead":
        found = [bench.overhead(64) for _ in range(repeat)]
        python, sample = (Spread.of(1e6 * f[k] for f in found) for k in ("python_s", "sample_s"))
        step = 1e6 * statistics.median(f["step_s"] for f in found)
        share = Spread.of(f["sample_s"] / f["step_s"] for f in found)
        return [
            Row("step overhead, Python", {}, "µs", python, step, "whole step", Spread.of(f["python_s"] / f["step_s"] for f in found)),
            Row("step overhead, greedy choice", {"vocabulary": bench.vocab_size}, "µs", sample, step, "whole step", share),
        ]
    bench.decode(0, 8)
    time.sleep(0.2)
    before, start = time.process_time(), time.perf_counter()
    time.sleep(2.0)
    share = 100 * (time.process_time() - before) / (time.perf_counter() - start)
    return [Row("idle CPU", {}, "% of a core", Spread.of([share]))]


def tokens_for(bench: Bench) -> int:
    """Decode steps that take about half a second, 16 to 64."""
    return int(min(max(0.5 / max(bench.decode(0, 4), 1e-4), 16), 64))


def _python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def _environment() -> dict[str, str]:
    """That of a user: compiled modules are kept, as those of installed packages are. Where the surroundings forbid it, a start would
    measure Python's compiler: then they are kept in a folder of their own, for all runs."""
    values = dict(os.environ)
    if values.pop("PYTHONDONTWRITEBYTECODE", ""):
        values.setdefault("PYTHONPYCACHEPREFIX", str(cache_folder() / "pycache"))
    return values


def _last_line(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=_environment())
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:] or f"exit code {done.returncode}")
    return done.stdout.strip().splitlines()[-1]


def first_token(model: str, options: Mapping[str, str], threads: int, repeat: int) -> list[Row]:
    """Seconds from starting the command to the first byte of its answer."""
    command = [sys.executable, "-m", "fastllm", "run", model, "--raw", "--prompt", "Once upon a time", "--max-tokens", "1", "-q", "--ctx", "512"]
    command += ["--offline", "--ignore-eos", *(["--threads", str(threads)] if threads else [])]
    for key, value in options.items():
        command += [f"--{key}", value] if key in OWN else ["--backend-opt", f"{key}={value}"]
    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=_environment()) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(1)
            seconds.append(time.perf_counter() - start)
            error = process.stderr.read().decode(errors="replace")
            if process.wait():
                raise RuntimeError(error.strip()[-300:])
    return [Row("command to first token", {}, "s", Spread.of(seconds[1:]))]  # the first run fills the page cache, and compiles modules


LOAD = """
import json, sys
from pathlib import Path
from fastllm.loading import LoadOptions, load_model
values = json.loads(sys.argv[1])
loaded = load_model(values.pop("model"), LoadOptions(**values))
from fastllm.llm import LLM, SamplingParams
llm = LLM.of(loaded)
llm.generate("Once upon a time", SamplingParams(max_tokens=8, ignore_eos=True))
plan = loaded.planned.plan
peak = next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
needed = plan.total_bytes("weights") + plan.total_bytes("kv")
llm.close()
print(json.dumps([loaded.load_s, peak, needed]))
"""


def load_rows(model: str, options: Mapping[str, str], threads: int, repeat: int) -> list[Row]:
    """Seconds to load from the page cache, and peak resident memory beside packed weights and cache, of a new process."""
    values = {"model": model, "ctx": 512, "max_batch_size": 1, "threads": threads, "offline": True, **split(options)}
    found = [json.loads(_last_line(_python(LOAD, json.dumps(values)))) for _ in range(min(repeat, 3))]
    peaks, needed = Spread.of(f[1] / 1e6 for f in found), found[0][2] / 1e6
    return [
        Row("load", {}, "s", Spread.of(f[0] for f in found)),
        Row("peak memory", {}, "MB", peaks, needed, "packed weights + cache", Spread.of(p / needed for p in peaks.samples)),
    ]


def resident(model: str, options: Mapping[str, str], threads: int) -> list[Row]:
    """Where the memory of a process goes that loaded the model and answered."""
    values = {"model": model, "ctx": 512, "max_batch_size": 1, "threads": threads, "offline": True, **split(options)}
    return resident_rows(*json.loads(_last_line(_python(STAGES, json.dumps(values)))))


def import_rows(repeat: int) -> list[Row]:
    """Seconds of `import fastllm` in a new interpreter, and of `fastllm --help` as a whole."""
    code = "import time; start = time.perf_counter(); import fastllm; print(time.perf_counter() - start)"
    seconds = [float(_last_line(_python(code))) for _ in range(repeat)]
    whole = []
    for _ in range(repeat):
        start = time.perf_counter()
        _last_line([sys.executable, "-m", "fastllm", "--help"])
        whole.append(time.perf_counter() - start)
    return [Row("import fastllm", {}, "s", Spread.of(seconds)), Row("fastllm --help", {}, "s", Spread.of(whole))]


def sampling_rows(repeat: int) -> list[Row]:
    """Microseconds to choose one of 262,144 tokens, greedily and with the default settings (temperature 0.7, top-k 40, top-p 0.95)."""
    logits = np.random.default_rng(1).standard_normal((1, VOCABULARY)).astype(np.float32) * 3
    rows = []
    for label, temperature, top_k, top_p in (("greedy", 0.0, 0, 1.0), ("defaults", 0.7, 40, 0.95), ("all tokens", 1.0, 0, 1.0)):
        arguments = {
            "u": np.array([0.5]),
            "temperature": np.array([temperature], np.float32),
            "top_k": np.array([top_k], np.int32),
            "top_p": np.array([top_p], np.float32),
            "min_p": np.zeros(1, np.float32),
            "adjust_start": np.zeros(2, np.int32),
            "adjust_ids": np.zeros(0, np.int32),
            "adjust_bias": np.zeros(0, np.float32),
            "adjust_repeat": np.zeros(0, np.float32),
            "adjust_sub": np.zeros(0, np.float32),
            "mask": None,
        }
        times = []
        for _ in range(20 * repeat):
            start = time.perf_counter()
            _kernels.sample(logits, **arguments)
            times.append(1e6 * (time.perf_counter() - start))
        groups = [statistics.median(times[i::repeat]) for i in range(repeat)]
        rows.append(Row("sampling", {"vocabulary": VOCABULARY, "settings": label}, "µs", Spread.of(groups)))
    return rows

