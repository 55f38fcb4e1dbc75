"""What rounded activations and an int8 cache change in the perplexity of the two real models, as they are stored and in other formats.

A file is evaluated with f32 activations and an f16 cache, then with either rounded, and some with both. The text is of this repository, cut in
windows of 512 tokens, each behind the tokens that the model's tokenizer puts in front of every text (BOS for Gemma, nothing for SmolLM2: a
model that never saw a text without them predicts badly, and small changes become large). The standard error of a change is that of the mean
difference of a token's log-likelihood. Both models come quantised (`stored`); the other files are made of it by
`fastllm convert --allow-requantize`.

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
DTYPES = ("stored", "int4g128", "int8", "q8_0", "q4_0")
CACHED = ("stored", "int8")
"""Where the cache is rounded, too: what that costs has little to do with the format of the weights."""
WINDOW, WINDOWS = 512, 35
LONGER = {("smollm2", "int4g128"): 76}
"""Windows of the text: so many tell a change from the 0.5 % that it may be, but in one row, which gets the whole text."""
NAME = "python scripts/measure_rounding.py --write"
BEGIN, END = f"<!-- measured: {NAME} -->\n", "<!-- end measured rounding -->"


def whole_windows(count: int, step: int, wanted: int) -> range:
    """Where the wanted windows of so many tokens begin. Raises SystemExit where the text has fewer: a row of fewer would say that it has all."""
    if count < wanted * step:
        raise SystemExit(f"{TEXT.name} has {count // step} windows of {step} tokens with this tokenizer; {wanted} are wanted")
    return range(0, wanted * step, step)


def likelihoods(path: Path, text: str, windows: int, options: dict[str, str]) -> np.ndarray:
    """Log-likelihood of every token of the first windows of a text that has one before it in its window, f64."""
    found = []
    with open_model(path) as files:
        tokenizer = open_text(files, WINDOW)[0]
        first = tokenizer.encode("", add_special=True, parse_special=False)
        ids, step = tokenizer.encode(text, add_special=False, parse_special=False), WINDOW - len(first)
        model = Model(files, "cpu_avx", options, WINDOW)
        try:
            for start in whole_windows(len(ids), step, windows):
                window = first + ids[start : start + step]
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
    text = TEXT.read_text(encoding="utf-8")
    yield "| model | weights | tokens | perplexity | `act=int8` | `kv_dtype=int8` | `kv_dtype=int8` where `act=int8` |"
    yield "|---|---|---|---|---|---|---|"
    for name in MODELS:
        source = resolve(name)
        with tempfile.TemporaryDirectory() as folder:
            for dtype in DTYPES:
                path = source
                if dtype != "stored":
                    path = Path(folder) / f"{dtype}.flm"
                    with open_model(source) as files:
                        convert_model(files, path, QuantRules(dtype, allow_requantize=True), LoadOptions())
                windows = LONGER.get((name, dtype), WINDOWS)
                exact, act = (likelihoods(path, text, windows, {"act": a}) for a in ("f32", "int8"))
                caches = ["–", "–"]
                if dtype in CACHED:
                    kv, both = (likelihoods(path, text, windows, {"act": a, "kv_dtype": "int8"}) for a in ("f32", "int8"))
                    caches = [change(exact, kv), change(act, both)]
                yield f"| {name} | `{dtype}` | {len(exact):,} | {np.exp(-exact.mean()):.3f} | {change(exact, act)} | {' | '.join(caches)} |"
                if dtype != "stored":
                    path.unlink()


def main() -> None:
    """Prints the table; `--write` also stores it."""
    tell(lines(), BEGIN, END)


if __name__ == "__main__":
    main()
