"""How close the backends are to an independent implementation, on the two real models: greedy agreement and perplexity.

The reference (`tests/models/data/real-models.json`) was made with the fp32 forward of transformers on the decoded weights of the same
files. Its greedy ids are fed back as they are, so that one near tie does not decide the rest; a step's *margin* is the recorded gap
between the best and the second logit.

    python scripts/measure_accuracy.py            prints the table (fetches the models on the first run; minutes, as `ref` is slow)
    python scripts/measure_accuracy.py --write    also puts it into docs/numerics.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fastllm import models
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.plugins import BackendRegistry
from fastllm.core.step import StepBatch
from fastllm.formats import ModelFiles, open_model, resolve

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "tests" / "models" / "data" / "real-models.json"
MODELS = {"smollm2": "smollm2-135m-instruct-q4_1", "gemma3-270m": "gemma-3-270m-q4_k_m"}
VARIANTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("ref", {}),
    ("cpu_avx", {"act": "f32", "kv_dtype": "f32"}),
    ("cpu_avx", {"act": "f32"}),
    ("cpu_avx", {"act": "f32", "kv_dtype": "bf16"}),
    ("cpu_avx", {"act": "f32", "kv_dtype": "int8"}),
    ("cpu_avx", {"act": "int8"}),
    ("cpu_avx", {"act": "int8", "kv_dtype": "int8"}),
)
CLEAR = 0.5
"""Margin from which on every variant should agree."""
CONTEXT, BLOCK = 256, 64
BEGIN, END = "<!-- measured: python scripts/measure_accuracy.py --write -->\n", "<!-- end measured -->"


class Model:
    """A loaded model that gives the logits of every token of one sequence of up to `context` tokens, a multiple of BLOCK. Close it."""

    def __init__(self, files: ModelFiles, backend: str, options: dict[str, str], context: int = CONTEXT):
        definition = models.build(files.kind, files.architecture, files.config, files.tensors, ready=files.ready)
        registry = BackendRegistry()
        self.backend = registry.open(registry.select(backend), options)
        backends = {backend: self.backend}
        self.blocks = context // BLOCK
        limits = StepLimits(context, 1, context, context, BLOCK, self.blocks)
        plan = make_plan(definition.graph, definition.weights, files.stored, backends, Placement.on(backend), limits, fallback="error")
        self.executor = Executor(plan, definition.weights, files.stored, backends)

    def logits(self, ids: list[int]) -> np.ndarray:
        """f32 [n, V] of n ids, computed as one prompt."""
        n = len(ids)
        rows, table = np.arange(n, dtype=np.int32), np.arange(self.blocks, dtype=np.int32)[None]
        start, length = np.array([0, n], np.int32), np.array([n], np.int32)
        return self.executor.run(StepBatch(np.array(ids, np.int32), rows, rows, start, length, table, rows)).logits.copy()

    def close(self) -> None:
        """Returns all memory."""
        self.executor.close()
        self.backend.close()


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of ids [n] under logits [n, V]."""
    rows = logits.astype(np.float64)
    top = rows.max(axis=1, keepdims=True)
    logprobs = rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True))
    return float(np.exp(-logprobs[np.arange(len(ids)), ids].mean()))


def measure(model: Model, reference: dict[str, Any]) -> tuple[str, str, str, str]:
    """(equal greedy ids, equal ones at clear margins, perplexity, its difference from the reference)."""
    equal = count = clear_equal = clear = 0
    for case in reference["cases"]:
        first = len(case["prompt_ids"]) - 1
        got = model.logits(case["prompt_ids"] + case["greedy_ids"][:-1])[first:].argmax(axis=1)
        same = got == np.array(case["greedy_ids"])
        far = np.array(case["greedy_margins"]) >= CLEAR
        equal, count = equal + int(same.sum()), count + len(same)
        clear_equal, clear = clear_equal + int(same[far].sum()), clear + int(far.sum())
    ids = reference["perplexity"]["ids"]
    found, wanted = perplexity(model.logits(ids[:-1]), ids[1:]), reference["perplexity"]["perplexity"]
    return f"{equal} of {count}", f"{clear_equal} of {clear}", f"{found:.4f}", f"{100 * (found / wanted - 1):+.3f} %"


def shown(backend: str, options: dict[str, str]) -> str:
    """A variant as the table names it."""
    return " ".join([f"`{backend}`", *(f"`{k}={v}`" for k, v in options.items())])


def lines() -> Iterable[str]:
    """The table, line by line as it is measured."""
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    yield f"| model | backend | greedy ids equal | of those with margin ≥ {CLEAR} | perplexity | against the reference |"
    yield "|---|---|---|---|---|---|"
    for name, key in MODELS.items():
        yield f"| {name} | reference | – | – | {reference[key]['perplexity']['perplexity']:.4f} | – |"
        with open_model(resolve(name)) as files:
            for backend, options in VARIANTS:
                model = Model(files, backend, options)
                try:
                    yield f"| {name} | {shown(backend, options)} | {' | '.join(measure(model, reference[key]))} |"
                finally:
                    model.close()


def tell(lines: Iterable[str], begin: str, end: str) -> None:
    """Prints a table line by line as it is measured; with `--write` on the command line it also replaces what stands between two marks of docs/numerics.md."""
    table = []
    for line in lines:
        print(line, flush=True)
        table.append(line)
    if "--write" in sys.argv[1:]:
        path = ROOT / "docs" / "numerics.md"
        text = path.read_text(encoding="utf-8")
        new = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: begin + "\n".join(table) + "\n" + end, text, flags=re.DOTALL)
        path.write_text(new, encoding="utf-8")


def main() -> None:
    """Prints the table; `--write` also stores it."""
    tell(lines(), BEGIN, END)


if __name__ == "__main__":
    main()
