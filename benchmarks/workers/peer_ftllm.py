"""ftllm on the CPU, through the calls that its own `stream_response` makes. Option `dtype`: what it makes of the weights of a folder."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from generating import Generating
from protocol import serve


class Ftllm(Generating):
    """One model."""

    def load(self, path: str, threads: int, context: int, streams: int, options: dict[str, Any]) -> dict[str, str]:
        """As `ftllm --device cpu -t THREADS --dtype DTYPE` does."""
        from ftllm import llm

        llm.set_device_map("cpu")
        llm.set_cpu_threads(threads)
        self.library = llm.fastllm_lib
        self.llm = llm.model(path, dtype=options.get("dtype", "int4g128"))
        self.vocab_size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        return {"version": version("ftllm")}

    def _launch(self, ids: list[int], new: int) -> int:
        stop_len, stop_list = self.llm.stop_token_ctypes(None)
        array = (ctypes.c_int * len(ids))(*ids)
        numbers = (ctypes.c_float(1.0), 1, ctypes.c_float(1.0), ctypes.c_float(1.0))  # top-p, top-k, temperature, repeat penalty
        return int(self.library.launch_response_llm_model(self.llm.model, len(ids), array, new, new, False, *numbers, False, stop_len, stop_list))

    def _fetch(self, handle: int) -> int | None:
        """The next token; below 0 at the end; None if there is none yet."""
        if not self.library.can_fetch_response_llm_model(self.llm.model, handle):
            return None
        return int(self.library.fetch_response_llm_model(self.llm.model, handle))

    def generate(self, ids: list[int], new: int) -> Iterator[Any]:
        """Asks every 50 µs, so that waiting takes no core from the engine."""
        handle = self._launch(ids, new)
        while True:
            token = self._fetch(handle)
            if token is None:
                time.sleep(50e-6)
            elif token < 0:
                return
            else:
                yield token

    def batch(self, streams: int, tokens: int) -> float:
        """Tokens per second of all streams, from when all have their first to when one has its last."""
        handles = [self._launch(self.prompt(16), tokens + 1) for _ in range(streams)]
        times: list[list[float]] = [[] for _ in handles]
        running = set(range(streams))
        while running:
            idle = True
            for i in tuple(running):
                token = self._fetch(handles[i])
                if token is None:
                    continue
                idle = False
                if token < 0:
                    running.discard(i)
                else:
                    times[i].append(time.perf_counter())
            if idle:
                time.sleep(50e-6)
        begin, end = max(t[0] for t in times), min(t[-1] for t in times)
        return sum(begin < t <= end for ts in times for t in ts) / (end - begin)


if __name__ == "__main__":
    serve(Ftllm())
