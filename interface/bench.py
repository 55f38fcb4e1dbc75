"""Measuring a loaded model: prefill, decode, batches, mixed load, overheads, each beside the limit of the machine.

Used by `fastllm bench` and by the repository's `benchmarks/`. Everything goes through the engine as a request would; times are taken where a
token is handed out (`on_event`, in the engine's thread). A speed is worth little alone, since neighbours move this machine's absolute
numbers, so every measurement is taken between two measurements of its limit and reported as a ratio as well:

    decode    bytes of weights and cache that one step reads / read bandwidth over a buffer of as many bytes
    prefill   operations of the linear layers (a multiply-add is two) / peak of the best instruction for their type
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .core.errors import UsageError
from .core.graph import KVSpec
from .core.request import Request, RequestHandle, TokenEvent
from .core.sampling import SamplingParams

if TYPE_CHECKING:
    from .loading import LoadedModel

__all__ = ["Bench", "Row", "Spread", "alternate", "number"]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeats (`statistics.quantiles`, inclusive)."""

    median: float
    q1: float
    q3: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Of at least one sample."""
        values = tuple(float(s) for s in samples)
        if not values:
            raise ValueError("a spread of no samples")
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return cls(median, q1, q3, values)

    def text(self, percent: bool = False) -> str:
        """`median (q1 – q3)` in three or four digits; the median alone if there is one sample."""
        show = (lambda v: f"{100 * v:.0f} %") if percent else number
        return show(self.median) if len(self.samples) < 2 else f"{show(self.median)} ({show(self.q1)} – {show(self.q3)})"


@dataclass
class Row:
    """One line of a table. cell: what was measured (`decode`), with params ({"context": 2048}); value and its unit; limit: the
    median of the machine's limit in the same unit, and how it was measured; ratio: of each value to the limits beside it. reason: why
    there is no value."""

    cell: str
    params: dict[str, Any] = field(default_factory=dict)
    unit: str = ""
    value: Spread | None = None
    limit: float | None = None
    limit_of: str = ""
    ratio: Spread | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def number(value: float) -> str:
    """Three digits, or all before the point, with separators."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def alternate(repeat: int, measure: Callable[[], float], limit: Callable[[], float | None] | None = None) -> tuple[list[float], list[float]]:
    """`repeat` values, each between two measurements of the limit: (values, limits: the mean of the two beside each; [] without limit).

    A limit that cannot be measured (None) gives [].
    """
    values: list[float] = []
    limits: list[float] = []
    before = limit() if limit else None
    for _ in range(repeat):
        values.append(measure())
        after = limit() if limit else None
        if before is not None and after is not None:
            limits.append((before + after) / 2)
        before = after
    return values, limits if len(limits) == repeat else []


class Watch:
    """Times at which a request's tokens were handed out. Call it as `on_event`; `wait` for its end."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._done = threading.Event()

    def __call__(self, handle: RequestHandle, event: TokenEvent | None) -> None:
        if event is None:
            self._done.set()
        elif event.token_id is not None:
            self.times.append(time.perf_counter())

    def wait(self, handle: RequestHandle) -> None:
        """Raises what the request failed with."""
        self._done.wait()
        handle.result()


class Bench:
    """Measures one model. The model must be loaded with room for what is asked: context, sequences, cache."""

    def __init__(self, loaded: LoadedModel):
        self.loaded = loaded
        self.engine = loaded.engine
        self.plan = loaded.planned.plan
        self.backend = loaded.planned.backends[loaded.backend]
        self.vocab_size = loaded.planned.definition.vocab_size
        self._seeds = itertools.count(1)

    # what a step costs at least ---------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step of one sequence reads."""
        return self.plan.bytes_per_token()

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values of one token in all layers."""
        values = self.plan.graph.values
        caches = [p for (_, name), p in self.plan.places.items() if isinstance(values[name].spec, KVSpec)]
        return sum(p.block_bytes for p in caches) / self.plan.limits.block_size

    def linear_ops(self, rows: str) -> int:
        """Operations of the linear layers for one row, of those that run for every token (rows="T") or every sampled row ("R")."""
        values, total = self.plan.graph.values, 0
        for node in self.plan.graph.nodes:
            if node.op == "linear" and values[node.outputs[0]].shape[0] == rows and node.inputs[1] is not None:
                n, k = values[node.inputs[1]].shape
                total += 2 * int(n) * int(k)
        return total

    @property
    def multiply_type(self) -> str:
        """What the linear layers multiply with: int8 for quantised weights, unless activations stay exact, else bf16 or f32."""
        sizes: dict[str, int] = {}
        for place in self.plan.places.values():
            if place.arena in ("weights", "mapped") and len(place.shape) > 1:
                kind = place.dtype if place.layout is None else place.layout.format
                kind = kind if kind in ("bf16", "f16", "f32") else "int8"
                sizes[kind] = sizes.get(kind, 0) + place.nbytes
        kind = max(sizes, key=lambda k: sizes[k], default="f32")
        options = self.loaded.planned.options
        exact = "f32" in (options.compute_dtype, options.backend_options.get("act"))
        return "f32" if exact else "bf16" if kind == "f16" else kind

    def read_limit(self, nbytes: float) -> float | None:
        """Steps per second if a step did nothing but read so many bytes."""
        rate = self.backend.read_bandwidth(int(nbytes))
        return None if rate is None else rate / nbytes

    def peak(self) -> tuple[str, float | None]:
        """(type, operations per second) of the instruction that prefill is measured against."""
        kind = self.multiply_type
        rate = self.backend.peak_ops(kind)
        return (kind, rate) if rate is not None or kind == "f32" else ("f32", self.backend.peak_ops("f32"))

    # requests ---------------------------------------------------------------------------------------------------------

    def prompt(self, tokens: int, seed: int | None = None) -> list[int]:
        """Random ids; another prompt at every call, unless the seed is given."""
        rng = np.random.default_rng(next(self._seeds) if seed is None else (1 << 40) + seed)
        return [int(i) for i in rng.integers(0, self.vocab_size, tokens)]

    def start(self, prompt: Sequence[int], new: int, watch: Watch | None = None) -> tuple[RequestHandle, Watch]:
        """Submits a request for `new` greedy tokens, whatever the model says."""
        if len(prompt) + new > self.loaded.context:
            raise UsageError(
                f"{len(prompt):,} + {new:,} tokens do not fit in the context of {self.loaded.context:,}", fix=f"--ctx {len(prompt) + new}"
            )
        watch = watch or Watch()
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        return self.engine.submit(Request(list(prompt), params), watch), watch

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt of so many tokens to the first new one."""
        start = time.perf_counter()
        handle, watch = self.start(self.prompt(tokens), 1)
        watch.wait(handle)
        return watch.times[0] - start

    def decode(self, context: int, tokens: int) -> float:
        """Seconds per token of one stream, over `tokens` steps that begin at this context. The prompt of a context is computed once
        and found again in the cache afterwards."""
        handle, watch = self.start(self.prompt(max(context, 1), seed=context), tokens + 1)
        watch.wait(handle)
        return (watch.times[-1] - watch.times[0]) / tokens

    def batch(self, streams: int, tokens: int, context: int = 16) -> float:
        """Tokens per second of all streams together, while all of them decode."""
        prompts = [self.prompt(context) for _ in range(streams)]
        with self.engine._wake:  # all arrive in one step: a small model would have finished the first before the last comes
            started = [self.start(prompt, tokens + 1) for prompt in prompts]
        for handle, watch in started:
            watch.wait(handle)
        begin, end = max(w.times[0] for _, w in started), min(w.times[-1] for _, w in started)
        made = sum(begin < t <= end for _, w in started for t in w.times)
        if made == 0:
            raise UsageError(f"{streams} streams of {tokens} tokens never ran together", fix="more tokens, or a larger max_batch_size")
        return made / (end - begin)

    def mixed(self, streams: int, prompt_tokens: int, tokens: int) -> dict[str, float]:
        """A long prompt arrives while streams decode: the largest gap between two tokens of one stream and the median gap before
        the prompt, in seconds, and their ratio."""
        prompts, long = [self.prompt(16) for _ in range(streams)], self.prompt(prompt_tokens)
        arrived: list[tuple[float, RequestHandle, Watch]] = []

        class First(Watch):
            """Submits the long prompt when a quarter of its own tokens are there: at a fixed step, whatever the speed."""

            def __call__(watch, handle: RequestHandle, event: TokenEvent | None) -> None:  # noqa: N805
                super().__call__(handle, event)
                if len(watch.times) == max(2, tokens // 4) and not arrived:
                    arrived.append((time.perf_counter(), *self.start(long, 1)))

        with self.engine._wake:
            started = [self.start(prompt, tokens, Watch() if i else First()) for i, prompt in enumerate(prompts)]
        for handle, watch in started:
            watch.wait(handle)
        arrival, handle, last = arrived[0]
        last.wait(handle)
        gaps = [(b, b - a) for _, w in started for a, b in itertools.pairwise(w.times)]
        calm = [gap for end, gap in gaps if end <= arrival]
        busy = [gap for end, gap in gaps if arrival < end and end - gap < last.times[0]]
        median, worst = statistics.median(calm), max(busy)
        return {"median_gap_s": median, "max_gap_s": worst, "ratio": worst / median, "prompt_s": last.times[0] - arrival}

    def overhead(self, tokens: int) -> dict[str, float]:
        """Where a decode step's time goes that is not the backend's, in seconds (medians over the steps): `python` is everything
        but the native program and the choice of the token; `sample` is that choice."""
        runner: Any = self.engine._runner
        native, sampled, ends = [0.0], [0.0], []
        programs = list(runner._programs)
        sample = runner._sample

        class Timed:
            """A program that adds up its time."""

            def __init__(self, program: Any):
                self.program = program

            def run(self, dims: Any) -> None:
                start = time.perf_counter()
                self.program.run(dims)
                native[-1] += time.perf_counter() - start

            def close(self) -> None:
                self.program.close()

        def timed_sample(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = sample(*args, **kwargs)
            ends.append(time.perf_counter())
            sampled[-1] += ends[-1] - start
            native.append(0.0)
            sampled.append(0.0)
            return result

        runner._programs = [None if p is None else Timed(p) for p in programs]
        runner._sample = timed_sample
        try:
            self.decode(0, tokens)
        finally:
            runner._programs = programs
            del runner._sample  # the class's own again
        steps = np.diff(np.asarray(ends))[1:]
        inside, choice = np.asarray(native[1 : len(ends)])[1:], np.asarray(sampled[1 : len(ends)])[1:]
        return {
            "step_s": float(np.median(steps)),
            "native_s": float(np.median(inside)),
            "sample_s": float(np.median(choice)),
            "python_s": float(np.median(steps - inside - choice)),
        }

    def attention(self, tokens: int) -> dict[str, float]:
        """Seconds from a prompt of so many tokens to the first new one, and those of the calling thread in attention, waiting at barriers
        left out. Raises UsageError for a backend whose programs have no `profile`."""
        runner: Any = self.engine._runner
        programs = [p for p in runner._programs if hasattr(p, "profile")]
        if not programs:
            raise UsageError(f"backend '{self.loaded.backend}' compiles no program that says what its time goes to", fix="cpu_avx does")
        for program in programs:
            program.profile(True)
        whole = self.prefill(tokens)
        return {"whole_s": whole, "attention_s": sum(program.profile(False).get("attention", 0.0) for program in programs)}

    # rows -------------------------------------------------------------------------------------------------------------

    def prefill_row(self, tokens: int, repeat: int) -> Row:
        """Prompt tokens per second, beside the peak of the multiply instruction."""
        kind, rate = self.peak()
        ops = self.linear_ops("T") + self.linear_ops("R") / tokens  # of one token
        unknown = rate is None
        values, limits = alternate(repeat, lambda: tokens / self.prefill(tokens), None if unknown else lambda: (self.peak()[1] or 0.0) / ops)
        return _row("prefill", {"tokens": tokens}, values, limits, f"{kind} peak / {ops / 1e9:.2f} G operations a token")

    def attention_row(self, tokens: int, repeat: int) -> Row:
        """Seconds of attention in a prompt, beside the whole prompt's."""
        found = [self.attention(tokens) for _ in range(repeat)]
        whole = statistics.median(f["whole_s"] for f in found)
        share = Spread.of(f["attention_s"] / f["whole_s"] for f in found)
        return Row("attention of a prompt", {"tokens": tokens}, "s", Spread.of(f["attention_s"] for f in found), whole, "whole prompt", share)

    def decode_row(self, context: int, tokens: int, repeat: int) -> Row:
        """Tokens per second of one stream, beside the read bandwidth over weights and cache."""
        nbytes = self.weight_bytes + self.kv_bytes * (context + tokens / 2)
        self.decode(context, 1)  # the context's prompt
        values, limits = alternate(repeat, lambda: 1 / self.decode(context, tokens), lambda: self.read_limit(nbytes))
        return _row("decode", {"context": context, "tokens": tokens}, values, limits, f"read bandwidth / {nbytes / 1e6:.0f} MB a token")

    def batch_row(self, streams: int, tokens: int, repeat: int) -> Row:
        """Tokens per second of several streams, beside the read bandwidth over the weights, which a step reads once for all."""
        nbytes = self.weight_bytes + self.kv_bytes * streams * (16 + tokens / 2)

        def limit() -> float | None:
            steps = self.read_limit(nbytes)
            return None if steps is None else steps * streams

        values, limits = alternate(repeat, lambda: self.batch(streams, tokens), limit)
        return _row("batch", {"streams": streams, "tokens": tokens}, values, limits, f"{streams} × read bandwidth / {nbytes / 1e6:.0f} MB a step")


def _row(cell: str, params: dict[str, Any], values: list[float], limits: list[float], limit_of: str) -> Row:
    """Speeds with their limits."""
    if not limits:
        return Row(cell, params, "tok/s", Spread.of(values))
    ratio = Spread.of(v / limit for v, limit in zip(values, limits, strict=True))
    return Row(cell, params, "tok/s", Spread.of(values), statistics.median(limits), limit_of, ratio)
