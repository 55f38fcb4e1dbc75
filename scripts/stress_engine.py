"""Random schedules on a real model: a request must get the same tokens and log-probabilities, bit for bit, whatever else happens.

    python scripts/stress_engine.py [MODEL] [--minutes 2] [--seed N] [--kv-dtype int8] [--threads N]

Requests of known answer (greedy and drawn, several choices, penalties, log-probabilities of answer and prompt, grammars; prompts that share beginnings)
are answered alone first, by an engine without prefix cache. Then they run among others in an engine whose cache is too small for all of them:
requests are submitted in bursts, cancelled whole or by choice, paused and resumed, also while a step runs; sequences are preempted, computed again,
found in the cache. Afterwards no block may be left. Each difference is printed with the seed and the round, and the exit code is 1. The seed gives the
requests, the limits, and what each round draws; when a step ends, and so what it meets, is the clock's: a fault may need several runs to come again.

It looks for what a soak of the server would show as "a probe has another answer": blocks that are freed while somebody still writes them, blocks
that are found and hold something else, samplers that lose their place, kernels whose rows depend on their neighbours.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fastllm import LLM, SamplingParams
from fastllm.core.errors import Cancelled, FastLLMError, QueueFull
from fastllm.core.request import Request, RequestHandle, Result

BLOCK = 64
WAIT_S = 300.0
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}, "required": ["name", "age"]}


@dataclass
class Known:
    """A request and what it gets when it runs alone."""

    request: Request
    answer: Any = None


@dataclass
class Stress:
    """One model under random schedules. faults: what differed. rng: of the round; amid_rng: of the engine's thread, which draws when it likes."""

    llm: LLM
    seed: int
    known: list[Known]
    rng: random.Random = field(default_factory=random.Random)
    amid_rng: random.Random = field(default_factory=random.Random)
    round: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    running: list[tuple[RequestHandle, Known | None]] = field(default_factory=list)

    def amid(self) -> None:
        """In the engine's thread, while a step runs: clients stall, read on, leave."""
        running = tuple(self.running)  # others come and go meanwhile
        if running and self.amid_rng.random() < 0.3:
            handle, known = self.amid_rng.choice(running)
            kind = self.amid_rng.random()
            if kind < 0.4:
                handle.pause()
                handle.resume()
            elif kind < 0.6 and known is None:
                handle.cancel()

    def submit(self) -> None:
        """A burst of requests: known ones, and neighbours that nobody looks at."""
        for _ in range(self.rng.randint(1, 6)):
            known = self.rng.choice(self.known) if self.rng.random() < 0.6 else None
            size = self.rng.choice((1, 5, 33, 64, 65, 130, 250))
            noise = [self.rng.randrange(40, min(self.llm.tokenizer.vocab_size, 4000)) for _ in range(size)]
            params = SamplingParams(max_tokens=self.rng.randint(1, 80), temperature=0.8, seed=self.rng.randrange(100), n=self.rng.choice((1, 1, 2)), ignore_eos=True)
            try:
                handle = self.llm.loaded.engine.submit(known.request if known else Request(noise, params))
            except QueueFull:
                self.counts["refused"] += 1
                return
            except FastLLMError as error:
                self.fault(f"a request is not taken: {error}")
                return
            self.running.append((handle, known))

    def disturb(self) -> None:
        """Something happens to one of those that run."""
        handle, known = self.rng.choice(self.running)
        kind = self.rng.random()
        if kind < 0.25:
            handle.cancel()
        elif kind < 0.4 and known is None:
            handle.cancel(self.rng.randrange(handle.params.n or 1))
        elif kind < 0.7:
            handle.pause()
        else:
            handle.resume()

    def collect(self, *, wait: bool = False) -> None:
        """Looks at those that have ended; wait: at all of them."""
        for handle, _ in self.running if wait else ():
            handle.resume()
        for item in tuple(self.running):
            handle, known = item
            if not wait and not handle.done:
                continue
            self.running.remove(item)
            try:
                found = told(handle.result(WAIT_S))
            except Cancelled:
                self.counts["cancelled"] += 1
                continue
            except (FastLLMError, TimeoutError) as error:
                self.fault(f"a request {'of known answer ' if known else ''}failed: {error}")
                continue
            self.counts["ended"] += 1
            if known is not None:
                self.compare(known, found)

    def compare(self, known: Known, found: Any) -> None:
        """Notes a difference."""
        self.counts["compared"] += 1
        if found != known.answer:
            params = {name: value for name, value in vars(known.request.params).items() if value is not None}
            self.fault(f"a prompt of {len(known.request.prompt_ids)} tokens, {params}:\n   alone {known.answer!r:.300}\n   here  {found!r:.300}")

    def fault(self, text: str) -> None:
        """Notes what is wrong."""
        self.faults.append(f"seed {self.seed}, round {self.round}: {text}")

    def run(self, seconds: float, enough: Callable[[Stress], Any]) -> None:
        """Random schedules for so long, or until it is enough."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(self.faults) < 5 and not enough(self):
            self.round += 1
            self.rng = random.Random(f"{self.seed} {self.round}")
            if len(self.running) < self.rng.choice((2, 8, 20)):
                self.submit()
            if self.running and self.rng.random() < 0.5:
                self.disturb()
            if self.rng.random() < 0.05:
                self.collect(wait=True)
            time.sleep(self.rng.choice((0.0, 0.001, 0.01, 0.05)))
            self.collect()
        self.collect(wait=True)

    def alone(self) -> None:
        """The requests of known answer once more, one by one, with all that is cached."""
        for one in self.known:
            try:
                self.compare(one, told(self.llm.loaded.engine.submit(one.request).result(WAIT_S)))
            except (FastLLMError, TimeoutError) as error:
                self.fault(f"a request fails at the end: {error}")

    def seen(self) -> Counter[str]:
        """What happened so far: counts of requests, and of the engine."""
        stats = self.llm.loaded.engine.stats()
        return self.counts + Counter(preempted=stats.preemptions, found=stats.prefix_hit_tokens, steps=stats.steps)


def told(result: Result) -> Any:
    """All that a client learns, to the last bit."""
    choices = [(c.token_ids, c.finish_reason, [(p.token_id, p.logprob, p.top) for p in c.logprobs]) for c in result.choices]
    return choices, result.prompt_logprobs


def requests(llm: LLM, rng: random.Random, count: int) -> list[Known]:
    """Requests of every kind. Their prompts begin like one another, up to and around the ends of blocks."""
    size = min(llm.tokenizer.vocab_size, 4000)
    texts = [[rng.randrange(40, size) for _ in range(420)] for _ in range(3)]
    grammar = llm.grammars.json_schema(SCHEMA)
    made = []
    for number in range(count):
        length = rng.choice((1, 2, 7, 31, 33, 63, 64, 65, 127, 128, 129, 200, 257))
        prompt = texts[number % 3][:length] if rng.random() < 0.7 else [rng.randrange(40, size) for _ in range(length)]
        more: dict[str, Any] = {"max_tokens": rng.choice((1, 3, 12, 30)), "seed": number, "ignore_eos": True, "temperature": rng.choice((0.0, 0.7, 1.2))}
        more |= rng.choice(({}, {}, {"n": 3}, {"logprobs": 3}, {"repetition_penalty": 1.3, "presence_penalty": 0.5}, {"top_k": 20, "top_p": 0.9}, {"logprobs": 1, "prompt_logprobs": True}))
        constraint = grammar if number % 7 == 6 else None
        made.append(Known(Request(prompt, SamplingParams(**more), sorted(llm.tokenizer.end_ids) if constraint else (), f"known-{number}", constraint=constraint)))
    return made


def stress_model(
    model: str, seconds: float, seed: int, *, count: int = 48, cache: int = 448, enough: Callable[[Stress], Any] = lambda stress: False, **options: Any
) -> Stress:
    """Loads a model twice, and puts it under random schedules for so long, or until it is enough. options: of the model, for both."""
    rng = random.Random(seed)
    with LLM(model, prefix_cache=False, max_batch_size=4, **options) as llm:
        known = requests(llm, rng, count)
        for one in known:
            one.answer = told(llm.loaded.engine.submit(one.request).result(WAIT_S))
    shape = {"max_batch_size": rng.choice((8, 16)), "prefill_chunk": rng.choice((48, 128, 512)), "block_size": rng.choice((16, 16, 32, 64))}
    with LLM(model, kv_cache_tokens=cache, max_queue=32, **shape, **options) as llm:
        for one in known:  # a grammar belongs to the tokenizer of its engine
            one.request = one.request if one.request.constraint is None else replace(one.request, constraint=llm.grammars.json_schema(SCHEMA))
        stress, engine = Stress(llm, seed, known), llm.loaded.engine
        stress.amid_rng.seed(seed)
        run = engine._runner.run

        def disturbed(batch: Any) -> Any:
            result = run(batch)
            stress.amid()
            return result

        engine._runner.run = disturbed  # type: ignore[method-assign]
        stress.run(seconds, enough)
        stress.alone()
        end = time.monotonic() + 5
        while engine.stats().blocks_used and time.monotonic() < end:
            time.sleep(0.01)
        stats = engine.stats()
        if stats.blocks_used or stats.running or stats.waiting:
            stress.fault(f"left behind: {stats.blocks_used} blocks, {stats.running} that run, {stats.waiting} that wait")
        stress.counts = stress.seen()
    return stress


def main() -> int:
    """Prints what was seen; 1 if something differed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--known", type=int, default=48, help="requests whose answer is known")
    parser.add_argument("--kv-dtype", default=None)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache", type=int, default=448, help="tokens that the cache holds")
    asked = parser.parse_args()
    seed = random.randrange(1 << 30) if asked.seed is None else asked.seed
    print(f"{asked.model}, seed {seed}", flush=True)
    options = {"threads": asked.threads, "kv_dtype": asked.kv_dtype, "ctx": 384}
    stress = stress_model(asked.model, asked.minutes * 60, seed, count=asked.known, cache=asked.cache, **options)
    print(", ".join(f"{name} {count}" for name, count in stress.counts.items()))
    print("\n".join(f"FAULT {fault}" for fault in stress.faults) or "no fault")
    return 1 if stress.faults else 0


if __name__ == "__main__":
    sys.exit(main())
