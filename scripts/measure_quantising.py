"""What quantising costs: perplexity of the two real models in our formats against their own bf16 twin, and of rounded activations.

Both models come quantised; decoded to bf16 they are float models with the weights of a real one. The text is the one that
`measure_accuracy.py` uses. Beside each perplexity stands its change against the twin, and against the same weights with f32 activations.

    python scripts/measure_quantising.py            prints the table (fetches the models on the first run; some minutes)
    python scripts/measure_quantising.py --write    also puts it into docs/numerics.md
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from measure_accuracy import MODELS, REFERENCE, ROOT, Model, perplexity

from fastllm.convert import convert_model
from fastllm.formats import open_model, resolve
from fastllm.formats.quant_rules import QuantRules
from fastllm.loading import LoadOptions

DTYPES = ("bf16", "int8", "int4g32", "int4g64", "int4", "int4 minmax")
BEGIN, END = "<!-- measured: python scripts/measure_quantising.py --write -->\n", "<!-- end measured quantising -->"


def converted(source: Path, out: Path, dtype: str) -> Path:
    """`source` in another dtype."""
    name, _, method = dtype.partition(" ")
    with open_model(source) as files:
        convert_model(files, out, QuantRules(name, method=method or "search"), LoadOptions())
    return out


def measured(path: Path, ids: list[int], act: str) -> tuple[float, float]:
    """(perplexity, MiB of weights) of a file."""
    with open_model(path) as files:
        model = Model(files, "cpu_avx", {"act": act})
        try:
            return perplexity(model.logits(ids[:-1]), ids[1:]), files.size_bytes / (1 << 20)
        finally:
            model.close()


def lines() -> Iterable[str]:
    """The table, line by line as it is measured."""
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    yield "| model | weights | MiB | perplexity | against the bf16 twin | of this, rounded activations |"
    yield "|---|---|---|---|---|---|"
    for name, key in MODELS.items():
        ids = reference[key]["perplexity"]["ids"]
        with tempfile.TemporaryDirectory() as folder:
            twin = converted(resolve(name), Path(folder) / "twin.flm", "bf16")
            base, _ = measured(twin, ids, "f32")
            for dtype in DTYPES:
                path = twin if dtype == "bf16" else converted(twin, Path(folder) / f"{dtype.replace(' ', '-')}.flm", dtype)
                (found, size), (exact, _) = measured(path, ids, "int8"), measured(path, ids, "f32")
                yield f"| {name} | `{dtype}` | {size:.0f} | {found:.4f} | {100 * (found / base - 1):+.2f} % | {100 * (found / exact - 1):+.3f} % |"


def main() -> None:
    """Prints the table; `--write` also stores it."""
    table = []
    for line in lines():
        print(line, flush=True)
        table.append(line)
    if "--write" in sys.argv[1:]:
        path = ROOT / "docs" / "numerics.md"
        text = path.read_text(encoding="utf-8")
        new = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: BEGIN + "\n".join(table) + "\n" + END, text, flags=re.DOTALL)
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
