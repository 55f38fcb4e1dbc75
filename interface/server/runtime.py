"""The life of a server: loading, ready, draining, gone; and what all routes share.

`Runtime` is made on the event loop before the model is there, so that health can be asked while it loads. Whoever runs the loop calls
`attach` with the loaded model, `drain` at the end, and reads `exit_code`. A ticker looks once a second after silent streams, clients
that do not read, requests that wait for too long, and an engine that has failed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from ..core.errors import EngineError, FastLLMError, Unavailable
from .bridge import Bridge
from .constraints import Compilation
from .log import Log
from .metrics import Metrics
from .pool import PreparerPool
from .settings import STALLED_S, ServerSettings

if TYPE_CHECKING:
    from ..core.sampling import SamplingParams
    from ..loading import LoadedModel
    from ..text.grammar import GrammarCompiler
    from .gate import Gate
    from .generation import Generation
    from .sse import Outbox

__all__ = ["Runtime"]

FAILED_GRACE_S: Final = 1.0  # for answers to leave, after the engine has failed for good


class Runtime:
    """One server's state. defaults: sampling parameters of requests that do not say, below them the model's own."""

    def __init__(self, settings: ServerSettings, log: Log | None = None, defaults: SamplingParams | None = None):
        from ..core.sampling import SamplingParams

        self.settings, self.log = settings, log or Log(settings.json_log, prompts=settings.log_prompts)
        self.bridge = Bridge(asyncio.get_running_loop())
        self.metrics = Metrics(self, settings.metrics_aliases)
        self.loaded: LoadedModel | None = None
        self.pool: PreparerPool | None = None
        self.draining = False
        self.failed = False
        self.exit_code = 0
        self.active: set[tuple[Generation, Outbox | None]] = set()
        self.started_at = time.time()
        self.connections: Callable[[], int] = lambda: 0
        self.stop: Callable[[], None] = lambda: None
        self.gate: Gate | None = None
        self.compile = Compilation(lambda: self.grammars)
        self._flags = defaults or SamplingParams()
        self.defaults = self._flags
        self._preparing = 0  # requests
        self._late = False  # the drain has come to its end
        self._none_active = asyncio.Event()
        self._none_active.set()
        self._ticker: asyncio.Task[None] | None = None

    # state ------------------------------------------------------------------------------------------------------------

    async def attach(self, loaded: LoadedModel) -> None:
        """Takes the loaded model and starts what answers need; from here on the server is ready. The caller keeps the model."""
        settings, options = self.settings, loaded.planned.options
        given = {name: getattr(options, name) for name in ("chat_template", "tokenizer_from", "cache_dir")}
        kitchen = {
            "path": str(loaded.planned.files.path),
            "files": {name: None if value is None else os.fspath(value) for name, value in given.items()},
            "n_ctx": loaded.context,
            "vocab_size": loaded.planned.definition.vocab_size,
            "names": settings.names,
            "max_tokens": settings.max_tokens,
            "max_n": settings.max_n,
            "strict": settings.strict,
            "strict_model": settings.strict_model,
            "tool_parser": settings.tool_parser,
            "reasoning_format": settings.reasoning_format,
            "request_template": settings.request_template,
            "thinking": settings.thinking,
        }
        self.pool = PreparerPool(kitchen, settings.preparers, read_s=settings.read_s)
        await self.pool.start()
        self.defaults = self._flags.merged_with(loaded.defaults)
        engine = loaded.engine
        self.bridge.open()
        engine.on_step, engine.on_masks, engine.on_handed_out = self.metrics.step, self.metrics.masks, self.bridge.wake
        self.loaded = loaded
        self._ticker = asyncio.create_task(self._tick())

    @property
    def model(self) -> LoadedModel:
        """The loaded model. Raises Unavailable while there is none."""
        if self.loaded is None:
            raise Unavailable("the model is loading", fix="try again later", retry_after_s=2)
        return self.loaded

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Makes grammars for the model; its tables are built when the first is compiled."""
        from ..text.grammar import GrammarCompiler

        return GrammarCompiler(self.model.tokenizer, self.model.planned.definition.vocab_size)

    def state(self) -> str:
        """loading, ready, draining, stalled or failed."""
        if self.failed:
            return "failed"
        if self.loaded is None:
            return "loading"
        if not self.loaded.engine.healthy:
            return "failed"
        if self.loaded.engine.stats().stalled_s > STALLED_S:
            return "stalled"
        return "draining" if self.draining else "ready"

    def check_open(self, *, taken: bool = False) -> PreparerPool:
        """What prepares requests. taken: the request was there before the draining began. Raises Unavailable if none is taken now."""
        if self.draining and (self._late or not taken):
            raise Unavailable("the server is shutting down", fix="try again later", retry_after_s=5)
        if self.model is None or self.pool is None or self.state() == "failed":
            raise Unavailable("the engine has failed, and the server ends", fix="try again later", retry_after_s=5)
        return self.pool

    def full(self) -> bool:
        """The queue would refuse a request now."""
        return self.loaded is not None and self.loaded.engine.num_queued >= self.loaded.engine.max_queue

    # requests ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def preparing(self) -> Iterator[PreparerPool]:
        """A request whose body is there is prepared, which a drain waits for as well. Raises Unavailable if none is taken now."""
        pool = self.check_open()
        self._preparing += 1
        self._none_active.clear()
        try:
            yield pool
        finally:
            self._preparing -= 1
            self._settle()

    def _settle(self) -> None:
        if not self.active and not self._preparing:
            self._none_active.set()

    def enter(self, generation: Generation, outbox: Outbox | None) -> None:
        """A request generates from now on."""
        self.active.add((generation, outbox))
        self._none_active.clear()

    def leave(self, generation: Generation, outbox: Outbox | None) -> None:
        """Its answer is with the client, or lost."""
        self.active.discard((generation, outbox))
        self.metrics.ended(generation)
        self._settle()

    async def _tick(self) -> None:
        interval = min(1.0, self.settings.ping_s / 2, self.settings.slow_reader_s / 2)
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            for generation, outbox in tuple(self.active):
                generation.tick(now)
                if outbox is None:
                    continue
                outbox.tick(now, self.settings.ping_s)
                if outbox.paused_at is not None and now - outbox.paused_at > self.settings.slow_reader_s:
                    generation.cancel()
                    outbox.cut()
            if self.loaded is not None and not self.loaded.engine.healthy and not self.failed:
                await self._fail()

    async def _fail(self) -> None:
        """The engine has failed for good: the process ends, so that a supervisor starts it anew."""
        self.failed, self.exit_code = True, 1
        self.log.event("failed", why="the engine has failed three steps in a row")
        await asyncio.sleep(FAILED_GRACE_S)
        self.stop()

    # the end ----------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """No new requests; those that run get time to end, then an error; then the server stops."""
        if self.draining:
            return
        self.draining = True
        self.log.event("draining", requests=len(self.active))
        try:
            await asyncio.wait_for(self._none_active.wait(), self.settings.drain_s)
        except TimeoutError:
            self.exit_code, self._late = 1, True
            for generation, _ in tuple(self.active):
                error: FastLLMError = Unavailable("the server shuts down", fix="send the request again", retry_after_s=5)
                generation.fail(error)
        self.stop()

    async def close(self) -> None:
        """Ends what `attach` started; the model stays the caller's."""
        if self._ticker is not None:
            self._ticker.cancel()
        for generation, outbox in tuple(self.active):
            generation.fail(EngineError("the server has ended"))
            if outbox is not None:
                outbox.cut()
        if self.pool is not None:
            self.pool.close()
        self.compile.close()
        self.bridge.close()

    def origins(self) -> dict[str, Any]:
        """Each sampling default: its value, and who says so."""
        from ..core.sampling import BUILT_IN

        model = self.model
        said = model.planned.files.generation_config
        found = {}
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if getattr(self._flags, name) is not None:
                origin = "option"
            elif said.get(name) is not None or (name == "temperature" and said.get("do_sample") is False):
                origin = "generation_config.json"
            else:
                origin = "built in"
            found[name] = {"value": getattr(self.defaults.merged_with(BUILT_IN), name), "origin": origin}
        return found

    def info(self) -> dict[str, Any]:
        """`meta` of the model's entry in /v1/models."""
        planned = self.model.planned
        tensors = planned.files.stored
        return {
            "n_ctx": self.model.context,
            "n_params": sum(_count(t.shape) for t in tensors.values()),
            "size": sum(t.data.nbytes for t in tensors.values()),
            "format": "flm" if planned.files.ready is not None else "gguf" if planned.files.kind == "gguf" else "safetensors",
        }


def _count(shape: Any) -> int:
    total = 1
    for size in shape:
        total *= int(size)
    return total
