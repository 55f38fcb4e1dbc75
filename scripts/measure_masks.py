"""What a grammar costs a decode step: answers that are held to one beside the same answers without, in turns.

    python scripts/measure_masks.py [MODEL …] [--threads N] [--rounds N] [--batch 1 8] [--tokens 96] [--only NAME …]

For each batch size every round runs the batch free, and once for each grammar with every row of it held, in an order that changes. The time of a step is
that between two tokens; it computes the same in every round, so of each step the quickest round counts, which other programs have disturbed least. Told
are the mean of all steps, what it is more than without a grammar, and that of each third of the rounds (of each round, where there are fewer than three).

Nothing of the free answers ends or bans a token, so their rows are sampled as those of any free request. With --temperature each side draws from what may come
there, by the same numbers and the default settings (top_k 40, top_p 0.95): its tokens are others, what the model computes for them is not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from fastllm import LLM, SamplingParams
from fastllm.core.request import Request
from fastllm.text.output.call_grammars import Lexicon, required

TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 200}  # does not end before the tokens do
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}}
PEOPLE = {"type": "array", "items": {**PERSON, "required": ["name", "age", "tags"]}, "minItems": 200}
NOTES = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "notes": TEXTS}, "required": ["city", "days", "notes"]}
QUERY = {"type": "object", "properties": {"query": {"type": "string"}, "more": TEXTS}, "required": ["query", "more"]}
PARTS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu")
LARK = r"""
start: (statement "\n"){100,}
statement: NAME " = " sum | "print(" sum ")" | "if " sum ":\n    " statement
sum: value ((" + " | " - ") value)*
value: NAME | NUMBER | "(" sum ")" | TEXT
NAME: /[a-z_][a-z0-9_]{0,20}/
NUMBER: /[0-9]+(\.[0-9]+)?/
TEXT: /"[^"\n]*"/
"""
LIST = "Here is a JSON file with all countries and their capitals:\n\n```json\n"


def grammars(llm: LLM) -> dict[str, Callable[[], Any] | None]:
    """Name -> what makes the constraint of an answer."""
    made = llm.grammars
    alternatives = "|".join(a + b for a in PARTS for b in PARTS)
    return {
        "free": None,
        "JSON schema": made.json_schema(PEOPLE),
        "JSON object": made.json_object(),
        "required tool call": made.bundle(required("hermes", {"weather": NOTES, "search": QUERY}, Lexicon({}), True, "<tool_call>")),
        "numbers (regex)": made.regex(r"([0-9]{3}-[0-9]{3}-[0-9]{4}\n){100,200}"),
        "counted (regex)": made.regex(r"([a-z]{3,12} ){200,400}"),  # among the dearest that the library has
        "alternatives (regex)": made.regex(f"(({alternatives}) ){{200,400}}"),
        "program (Lark)": made.grammar(LARK),
    }


def steps_s(llm: LLM, made: Callable[[], Any] | None, batch: int, asked: argparse.Namespace) -> list[float] | None:
    """Seconds of each step of `batch` answers that start side by side. None: one of them ended early."""
    ends, times = sorted(llm.tokenizer.end_ids), list[float]()
    params = SamplingParams(max_tokens=asked.tokens, temperature=asked.temperature, seed=1, ignore_eos=True)
    prompts = [llm.tokenizer.encode(f"{10 + number}. {LIST}", add_special=False, parse_special=False) for number in range(batch)]
    handles = list[Any]()

    def told(_handle: Any, event: Any) -> None:
        if event is not None:
            times.append(time.perf_counter())

    def start(_handle: Any, event: Any) -> None:  # between two steps, so that all of them begin with the next
        if event is not None:
            for number, prompt in enumerate(prompts):
                handles.append(llm.loaded.engine.submit(Request(prompt, params, ends, constraint=made), None if number else told))

    llm.loaded.engine.submit(Request([5], SamplingParams(max_tokens=1, temperature=0.0)), start).result()
    lengths = [len(handle.result().choices[0].token_ids) for handle in handles[1:]]
    handles[0].result()
    if min([len(times), *lengths]) < asked.tokens:
        return None
    return [after - before for before, after in itertools.pairwise(times)]


def least(rounds: list[list[float]]) -> float:
    """Seconds of all steps, each in the round in which it was quickest: what a step computes is the same in every round, what disturbs it is not."""
    return sum(map(min, zip(*rounds, strict=True)))


def dearer(held: list[list[float]], free: list[list[float]]) -> list[float]:
    """By how many per cent the steps of a grammar take longer than the same ones without, in each third of the rounds."""
    return [(least(held[n::3]) / least(free[n::3]) - 1) * 100 for n in range(min(3, len(held)))]


def measure(asked: argparse.Namespace, model: str) -> None:
    """Prints a table of one model."""
    with LLM(model, threads=asked.threads, max_batch_size=max(asked.batch), ctx=1024) as llm:
        made = {name: one for name, one in grammars(llm).items() if name == "free" or not asked.only or name in asked.only}
        waits = list[float]()
        llm.loaded.engine.on_masks = waits.append
        for batch in asked.batch:
            rounds: dict[str, list[list[float]]] = {name: [] for name in made}
            waited = dict.fromkeys(made, 0.0)
            for number in range(asked.rounds + 1):
                names = list(made)
                random.Random(number).shuffle(names)
                for name in names:
                    waits.clear()
                    found = steps_s(llm, made[name], batch, asked)
                    if number and found is not None:  # the first warms up
                        rounds[name].append(found)
                        waited[name] = statistics.fmean(waits) if waits else 0.0
            free = rounds.pop("free")
            print(f"{model}, {batch} at a time: {least(free) / len(free[0]) * 1e3:.2f} ms a step without a grammar")
            for name, values in rounds.items():
                if len(values) < asked.rounds:
                    print(f"    {name:<20} its answers end early")
                    continue
                parts = dearer(values, free)
                said = f"{least(values) / len(values[0]) * 1e3:.2f} ms, {(least(values) / least(free) - 1) * 100:+.1f} % ({min(parts):+.1f} to {max(parts):+.1f})"
                print(f"    {name:<20} {said}; waits {waited[name] * 1e6:.0f} µs for masks", flush=True)


def main() -> None:
    """Measures each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--only", nargs="*", default=[], help="of the grammars, by name")
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error("--rounds must be at least 1")
    for model in asked.models:
        measure(asked, model)


if __name__ == "__main__":
    main()
