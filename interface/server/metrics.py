"""/metrics: Prometheus text, under our names, and under vLLM's where `--metrics-aliases vllm` asks for them.

Counters of the engine are read when somebody asks; histograms are filled as tokens come and requests end. A registry of its own for each server, so
that two in one process do not mix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from ..core.cgroup import throttled_periods
from ..core.errors import OutOfMemory, QueueFull, Unavailable

if TYPE_CHECKING:
    from .gate import Visit
    from .generation import Generation
    from .runtime import Runtime

__all__ = ["Metrics"]

SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS: Final = tuple(float(1 << i) for i in range(18))

# ours, vLLM's, what it is, where EngineStats has it
GAUGES: Final = (
    ("requests_running", "num_requests_running", "Sequences that run.", "running"),
    ("requests_waiting", "num_requests_waiting", "Sequences that wait.", "waiting"),
)
COUNTERS: Final = (
    ("prompt_tokens", "prompt_tokens", "Tokens of prompts of finished requests.", None),
    ("generated_tokens", "generation_tokens", "Tokens generated.", "tokens_generated"),
    ("prefix_query_tokens", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_looked_up_tokens"),
    ("prefix_hit_tokens", "prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("preemptions", "num_preemptions", "Sequences that gave their blocks to others.", "preemptions"),
    ("requests_cancelled", None, "Requests whose client had gone.", "requests_cancelled"),
)
LABELLED: Final = {
    "requests_finished": ("request_success", "Requests by how they ended."),
    "requests_rejected": (None, "Requests that were not taken, by why."),
    "errors": (None, "Answers with an error, by status."),
    "build_info": (None, "The version that runs."),
    "stream_unsent_bytes": (None, "Bytes that clients have not taken."),
    "kv_usage_ratio": ("kv_cache_usage_perc", "Part of the cache that is in use."),
    "kv_blocks": ("cache_config_info", "Blocks of the cache that are in use; labels say their size, and how many there are."),
    "fallback_ops": (None, "Runs of ops on another device than the one they were placed on."),
    "throttled_periods": (None, "Periods in which a CPU quota stopped this process, since its control group was made."),
}
TOTALS: Final = frozenset(("requests_finished", "requests_rejected", "errors", "fallback_ops", "throttled_periods"))  # of them, counters
HISTOGRAMS: Final = (
    ("ttft_seconds", "time_to_first_token_seconds", "Submission to first token.", SECONDS),
    ("itl_seconds", "inter_token_latency_seconds", "Between two tokens of a request.", SECONDS),
    ("request_seconds", "e2e_request_latency_seconds", "Submission to last token.", SECONDS),
    ("queue_seconds", "request_queue_time_seconds", "Submission to first step.", SECONDS),
    ("prefill_seconds", "request_prefill_time_seconds", "First step to first token.", SECONDS),
    ("decode_seconds", "request_decode_time_seconds", "First to last token.", SECONDS),
    ("step_tokens", "iteration_tokens_total", "Tokens of a step.", TOKENS),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request.", TOKENS),
    ("request_generated_tokens", "request_generation_tokens", "Generated tokens of a request.", TOKENS),
    ("step_seconds", None, "Duration of a step.", SECONDS),
    ("grammar_mask_seconds", None, "Wait of a step for the masks of its grammars.", (0.00001, 0.00003, 0.0001, 0.0003, *SECONDS)),
)


ENDS: Final = ("stop", "length", "tool_calls")
REASONS: Final = (*ENDS, "cancelled", "error")


class Tally:
    """A histogram that costs one look-up a value: there is one for every token and every step, between two steps that leave nothing of Python
    in the processor's caches. Each is filled by one thread.

    bounds: the upper bounds of its buckets, ascending; the last bucket has none.
    """

    def __init__(self, bounds: Sequence[float]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        """As it is now."""
        names = [*(floatToGoString(bound) for bound in self._bounds), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        return family


class Metrics:
    """aliases: also under vLLM's names, with the labels `model_name` and `engine`."""

    def __init__(self, runtime: Runtime, aliases: bool = False):
        self._runtime, self._aliases = runtime, aliases
        self._registry = CollectorRegistry()
        self._labels = {"model_name": runtime.settings.name, "engine": "0"} if aliases else {}
        self._prompt_tokens = 0
        self._tallies = {ours: Tally(buckets) for ours, _, _, buckets in HISTOGRAMS}
        self.itl = self._tallies["itl_seconds"].add  # seconds between two tokens of a request
        self._finished = Counter("fastllm_requests_finished", LABELLED["requests_finished"][1], ["reason"], registry=self._registry)
        self._success = None
        if aliases:
            names = [*self._labels, "finished_reason"]
            self._success = Counter("vllm:request_success", LABELLED["requests_finished"][1], names, registry=self._registry)
        self._rejected = Counter("fastllm_requests_rejected", LABELLED["requests_rejected"][1], ["why"], registry=self._registry)
        self._errors = Counter("fastllm_errors", LABELLED["errors"][1], ["code"], registry=self._registry)
        for reason in REASONS:  # a series that is not there before its first event has no rate at that event
            self._finished.labels(reason=reason)
            if self._success is not None and reason in ENDS:
                self._success.labels(**self._labels, finished_reason=reason)
        for why in (QueueFull.code, Unavailable.code, OutOfMemory.code):
            self._rejected.labels(why=why)
        for status in ("400", "401", "429", "500", "503"):
            self._errors.labels(code=status)
        from .answers import fingerprint

        build = Gauge("fastllm_build_info", LABELLED["build_info"][1], ["version"], registry=self._registry)
        build.labels(version=fingerprint().removeprefix("b-fastllm-")).set(1)
        self._registry.register(self)

    # what happens -----------------------------------------------------------------------------------------------------

    def step(self, tokens: int, seconds: float) -> None:
        """A step has run. In the engine's thread."""
        self._tallies["step_tokens"].add(tokens)
        self._tallies["step_seconds"].add(seconds)

    def masks(self, seconds: float) -> None:
        """A step had to wait for masks. In the engine's thread."""
        self._tallies["grammar_mask_seconds"].add(seconds)

    def ended(self, generation: Generation) -> None:
        """A request that generated has ended."""
        usage = generation.usage()
        self._prompt_tokens += usage.prompt_tokens
        if generation.error is not None:
            self._finished.labels(reason="cancelled" if generation.cancelled else "error").inc()
            return
        times = usage.timings
        for name, value in (
            ("ttft_seconds", times.ttft_s),
            ("request_seconds", times.ttft_s + times.decode_s),
            ("queue_seconds", times.queue_s),
            ("prefill_seconds", times.prompt_s),
            ("decode_seconds", times.decode_s),
            ("request_prompt_tokens", usage.prompt_tokens),
            ("request_generated_tokens", usage.completion_tokens),
        ):
            self._tallies[name].add(value)
        for answer in generation.answers:
            reason = answer.finish_reason or "error"
            self._finished.labels(reason=reason).inc()
            if self._success is not None:
                self._success.labels(**self._labels, finished_reason=reason).inc()

    def answered(self, visit: Visit) -> None:
        """Any request has been answered."""
        if visit.status >= 400:
            self._errors.labels(code=str(visit.status)).inc()
        if visit.status == 503 and visit.method == "POST":
            self._rejected.labels(why=visit.code or "unavailable").inc()

    # what is asked ----------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers, as they are now; called by the registry."""
        unsent = sum(outbox.unsent for _, outbox in self._runtime.active if outbox is not None)
        yield _ours(GaugeMetricFamily, "stream_unsent_bytes", unsent)
        yield _ours(CounterMetricFamily, "throttled_periods", throttled_periods())
        for ours, theirs, text, _ in HISTOGRAMS:
            yield self._tallies[ours].family(f"fastllm_{ours}", text, {})
            if self._aliases and theirs:
                yield self._tallies[ours].family(f"vllm:{theirs}", text, self._labels)
        model = self._runtime.loaded
        if model is None:
            return
        stats = model.engine.stats()
        names, values = list(self._labels), list(self._labels.values())
        for kind, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for ours, theirs, text, field in rows:
                value = self._prompt_tokens if field is None else getattr(stats, field)
                yield _family(kind, f"fastllm_{ours}", text, [], [], value)
                if self._aliases and theirs:
                    yield _family(kind, f"vllm:{theirs}", text, names, values, value)
        usage = stats.blocks_used / stats.blocks_total
        yield _ours(GaugeMetricFamily, "kv_usage_ratio", usage)
        planned = model.planned
        shape = [str(planned.options.block_size), str(stats.blocks_total)]
        yield _ours(GaugeMetricFamily, "kv_blocks", stats.blocks_used, ["block_size", "total"], shape)
        yield _ours(CounterMetricFamily, "fallback_ops", stats.steps * len(planned.plan.fallbacks))
        if self._aliases:
            yield _family(GaugeMetricFamily, "vllm:kv_cache_usage_perc", LABELLED["kv_usage_ratio"][1], names, values, usage)
            both = [*names, "block_size", "num_gpu_blocks"]
            yield _family(GaugeMetricFamily, "vllm:cache_config_info", "Shape of the cache.", both, [*values, *shape], 1)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)


def _family(kind: Any, name: str, text: str, labels: list[str], values: list[str], value: float) -> Metric:
    family = kind(name, text, labels=labels)
    family.add_metric(values, value)
    return family


def _ours(kind: Any, name: str, value: float, labels: list[str] | None = None, values: list[str] | None = None) -> Metric:
    return _family(kind, f"fastllm_{name}", LABELLED[name][1], labels or [], values or [], value)
