"""What a grammar costs a decode step: answers that are held to one beside the same answers without, in turns.

    python scripts/measure_masks.py [MODEL …] [--threads N] [--rounds N] [--batch 1 8] [--tokens 96]

For each batch size every round runs the batch free, and once for each grammar with every row of it held, in an order that changes. A step is the time
between tokens of an answer; told are the medians over rounds, and the median, the least and the most of the ratios within a round.
docs/server.md has the figures.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Callable
from typing import Any

from fastllm import LLM, SamplingParams
from fastllm.core.request import Request

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}}
PEOPLE = {"type": "array", "items": {**PERSON, "required": ["name", "age", "tags"]}, "minItems": 200}  # does not end before the tokens do
REGEX = r"([a-z]{3,12} ){40,200}"  # a counted one: among the dearest that the library has


def grammars(llm: LLM) -> dict[str, Callable[[], Any] | None]:
    """Name -> what makes the constraint of an answer."""
    return {
        "free": None,
        "JSON schema": llm.grammars.json_schema(PEOPLE),
        "counted regex": llm.grammars.regex(REGEX),
    }


def step_ms(llm: LLM, made: Callable[[], Any] | None, batch: int, tokens: int, seed: int, temperature: float) -> float:
    """Milliseconds between two tokens, of `batch` answers side by side."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True, min_tokens=tokens)
    prompts = [[rng.randrange(40, 2000) for _ in range(16)] for _ in range(batch)]
    handles = [llm.loaded.engine.submit(Request(prompt, params, sorted(llm.tokenizer.end_ids), constraint=made)) for prompt in prompts]
    for handle in handles:
        handle.result()
    times = [handle.timings for handle in handles]
    return statistics.median(t.decode_s / (t.decode_tokens - 1) for t in times if t.decode_tokens > 1) * 1e3


def measure(asked: argparse.Namespace, model: str) -> None:
    """Prints a table of one model."""
    with LLM(model, threads=asked.threads, max_batch_size=max(asked.batch), ctx=1024) as llm:
        made, waits = grammars(llm), list[float]()
        llm.loaded.engine.on_masks = waits.append
        for batch in asked.batch:
            rows: dict[str, list[float]] = {name: [] for name in made}
            waited = dict.fromkeys(made, 0.0)
            for number in range(asked.rounds + 1):
                names = list(made)
                random.Random(number).shuffle(names)
                for name in names:
                    waits.clear()
                    found = step_ms(llm, made[name], batch, asked.tokens, number, asked.temperature)
                    if number:  # the first warms up
                        rows[name].append(found)
                        waited[name] = max(waited[name], statistics.median(waits) if waits else 0.0)
            free = rows["free"]
            print(f"{model}, {batch} at a time: {statistics.median(free):.2f} ms a step without a grammar")
            for name, values in rows.items():
                if name != "free":
                    ratios = sorted((a / b - 1) * 100 for a, b in zip(values, free, strict=True))
                    said = f"{statistics.median(values):.2f} ms, {statistics.median(ratios):+.1f} % ({ratios[0]:+.1f} to {ratios[-1]:+.1f})"
                    print(f"    {name:<14} {said}; waits {waited[name] * 1e6:.0f} µs for masks", flush=True)


def main() -> None:
    """Measures each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    asked = parser.parse_args()
    for model in asked.models:
        measure(asked, model)


if __name__ == "__main__":
    main()
