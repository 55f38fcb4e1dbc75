"""What rounded activations and an int8 cache change in the perplexity of the two real models, in every format of weights that is fast.

A file is evaluated with f32 activations and an f16 cache, then with either rounded, and with both. The text is of this repository, cut in
windows of 512 tokens; the standard error of a change is that of the mean difference of a token's log-likelihood. Both models come
quantised (`stored`); the other files are made of it by `fastllm convert --allow-requantize`.

    python scripts/measure_rounding.py            prints the table (fetches the models on the first run; some minutes)
    python scripts/measure_rounding.py --write    also puts it into docs/numerics.md
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from measure_accuracy import MODELS, ROOT, Model, tell

from fastllm.convert import convert_model
from fastllm.formats import open_model, resolve
from fastllm.formats.quant_rules import QuantRules
from fastllm.loading import LoadOptions, open_text

TEXT = ROOT / "tests" / "models" / "data" / "perplexity.txt"
DTYPES = ("stored", "int4g128", "q4_0", "int8", "q8_0")
WINDOW = 512
NAME = "python scripts/measure_rounding.py --write"
BEGIN, END = f"<!-- measured: {NAME} -->\n", "<!-- end measured rounding -->"


def likelihoods(path: Path, ids: list[int], options: dict[str, str]) -> np.ndarray:
    """Log-likelihood of every token but the first of each window, f64."""
    found = []
    with open_model(path) as files:
        model = Model(files, "cpu_avx", options, WINDOW)
        try:
            for start in range(0, len(ids) - WINDOW + 1, WINDOW):
                window = ids[start : start + WINDOW]
                for row, token in zip(model.logits(window[:-1]), window[1:], strict=True):
                    top = row.max()
                    found.append(float(row[token] - top) - np.log(np.exp(row - top).sum(dtype=np.float64)))
        finally:
            model.close()
    return np.array(found)


def change(base: np.ndarray, other: np.ndarray) -> str:
    """Change of the perplexity in percent and its standard error."""
    worse = base - other
    return f"{100 * np.expm1(worse.mean()):+.2f} % ± {100 * worse.std() / len(worse) ** 0.5:.2f}"


def lines() -> Iterable[str]:
    """The table, line by line as it is measured."""
    yield "| model | weights | tokens | perplexity | `act=int8` | `kv_dtype=int8` | `kv_dtype=int8` where `act=int8` |"
    yield "|---|---|---|---|---|---|---|"
    for name in MODELS:
        source = resolve(name)
        with open_model(source) as files:
            ids = open_text(files, WINDOW)[0].encode(TEXT.read_text(encoding="utf-8"), add_special=False, parse_special=False)
        with tempfile.TemporaryDirectory() as folder:
            for dtype in DTYPES:
                path = source
                if dtype != "stored":
                    path = Path(folder) / f"{dtype}.flm"
                    with open_model(source) as files:
                        convert_model(files, path, QuantRules(dtype, allow_requantize=True), LoadOptions())
                exact, act, kv, both = (
                    likelihoods(path, ids, options)
                    for options in ({"act": "f32"}, {"act": "int8"}, {"act": "f32", "kv_dtype": "int8"}, {"act": "int8", "kv_dtype": "int8"})
                )
                yield (
                    f"| {name} | `{dtype}` | {len(exact):,} | {np.exp(-exact.mean()):.3f} "
                    f"| {change(exact, act)} | {change(exact, kv)} | {change(act, both)} |"
                )
                if dtype != "stored":
                    path.unlink()


def main() -> None:
    """Prints the table; `--write` also stores it."""
    tell(lines(), BEGIN, END)


if __name__ == "__main__":
    main()
