"""What quantising costs: perplexity of the two real models in our formats against their own bf16 twin, and of rounded activations.

Both models come quantised; decoded to bf16 they are float models with the weights of a real one. The text is the one that
`measure_accuracy.py` uses: 210 tokens, so that a change of perplexity below some percent says little. The divergence of whole
distributions says more: from the twin, and, for rounded activations, from the same weights with f32 activations.

    python scripts/measure_quantising.py [MODEL]    prints the table (fetches the models on the first run; some minutes)
    python scripts/measure_quantising.py smollm2 --write    also puts it into docs/numerics.md
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from measure_accuracy import MODELS, REFERENCE, Model, perplexity, tell

from fastllm.convert import convert_model
from fastllm.formats import open_model, resolve
from fastllm.formats.quant_rules import QuantRules
from fastllm.loading import LoadOptions

DTYPES = ("bf16", "int8", "int4g32", "int4g64", "int4", "int4 minmax")
BEGIN, END = "<!-- measured: python scripts/measure_quantising.py smollm2 --write -->\n", "<!-- end measured quantising -->"


def converted(source: Path, out: Path, dtype: str) -> Path:
    """`source` in another dtype."""
    name, _, method = dtype.partition(" ")
    with open_model(source) as files:
        convert_model(files, out, QuantRules(name, method=method or "search"), LoadOptions())
    return out


def logits(path: Path, ids: list[int], act: str) -> tuple[np.ndarray, float]:
    """(log-probabilities [n, V], MiB of weights) of a file."""
    with open_model(path) as files:
        model = Model(files, "cpu_avx", {"act": act})
        try:
            rows = model.logits(ids[:-1]).astype(np.float64)
        finally:
            model.close()
        top = rows.max(axis=1, keepdims=True)
        return rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True)), files.size_bytes / (1 << 20)


def divergence(true: np.ndarray, found: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of rows of log-probabilities [n, V]."""
    return float((np.exp(true) * (true - found)).sum(axis=1).mean())


def lines() -> Iterable[str]:
    """The table, line by line as it is measured."""
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    yield "| model | weights | MiB | perplexity | change | KL from the twin | `act=int8`: perplexity | change | KL of the rounding |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, key in MODELS.items():
        if name not in sys.argv[1:] and any(m in sys.argv[1:] for m in MODELS):
            continue
        ids = reference[key]["perplexity"]["ids"]
        with tempfile.TemporaryDirectory() as folder:
            twin = converted(resolve(name), Path(folder) / "twin.flm", "bf16")
            base, _ = logits(twin, ids, "f32")
            want = perplexity(base, ids[1:])
            for dtype in DTYPES:
                path = twin if dtype == "bf16" else converted(twin, Path(folder) / f"{dtype.replace(' ', '-')}.flm", dtype)
                (exact, size), (rounded, _) = logits(path, ids, "f32"), logits(path, ids, "int8")
                ours, also = perplexity(exact, ids[1:]), perplexity(rounded, ids[1:])
                yield (
                    f"| {name} | `{dtype}` | {size:.0f} | {ours:.4f} | {100 * (ours / want - 1):+.2f} % | {divergence(base, exact):.4f} "
                    f"| {also:.4f} | {100 * (also / ours - 1):+.2f} % | {divergence(exact, rounded):.4f} |"
                )
                if path != twin:
                    path.unlink()


def main() -> None:
    """Prints the table; `--write` also stores it."""
    tell(lines(), BEGIN, END)


if __name__ == "__main__":
    main()
