"""llama.cpp through llama-cpp-python's low-level API, as llama-bench does it: no sampling, random tokens, micro-batches of 512.

Options: `flash` (off is the faster one on CPUs), `ubatch`.
"""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
import numpy as np
from protocol import Worker, serve


class LlamaCpp(Worker):
    """One model and one context."""

    def load(self, path: str, threads: int, context: int, streams: int, options: dict[str, Any]) -> dict[str, str]:
        """Maps the model and reserves the cache."""
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = context + 64 * streams, 512, int(options.get("ubatch", 512)), streams
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified, params.no_perf = True, True
        on, off = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = on if options.get("flash") == "on" else off
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory_handle = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch_memory = llama_cpp.llama_batch_init(512, 0, 1)
        self.rng, self.filled = np.random.default_rng(1), -1
        return {"version": llama_cpp.__version__, "build": llama_cpp.llama_print_system_info().decode()}

    def _run(self, ids: Any, positions: Any, sequences: Any, last_only: bool = True) -> None:
        batch = self.batch_memory
        batch.n_tokens = len(ids)
        for i, (token, position, sequence) in enumerate(zip(ids, positions, sequences, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), int(position), 1
            batch.seq_id[i][0] = int(sequence)
            batch.logits[i] = not last_only or i == len(ids) - 1
        code = llama_cpp.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        llama_cpp.llama_synchronize(self.context)

    def _prompt(self, tokens: int, sequence: int = 0) -> None:
        ids = self.rng.integers(0, self.vocab_size, tokens)
        for start in range(0, tokens, 512):
            part = ids[start : start + 512]
            self._run(part, range(start, start + len(part)), [sequence] * len(part))

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory_handle, True)
        self.filled = -1

    def prefill(self, tokens: int) -> float:
        """Seconds for a new prompt."""
        self._clear()
        start = time.perf_counter()
        self._prompt(tokens)
        return time.perf_counter() - start

    def decode(self, context: int, tokens: int) -> float:
        """Seconds a token; the context stays from call to call."""
        if self.filled != context:
            self._clear()
            self._prompt(max(context, 1))
            self.filled = context
        begin = max(context, 1)
        ids = self.rng.integers(0, self.vocab_size, tokens)
        start = time.perf_counter()
        for i, token in enumerate(ids):
            self._run([token], [begin + i], [0])
        seconds = time.perf_counter() - start
        llama_cpp.llama_memory_seq_rm(self.memory_handle, 0, begin, -1)
        return seconds / tokens

    def batch(self, streams: int, tokens: int) -> float:
        """Tokens per second of all streams, one token of each a step."""
        self._clear()
        for sequence in range(streams):
            self._prompt(16, sequence)
        start = time.perf_counter()
        for i in range(tokens):
            self._run(self.rng.integers(0, self.vocab_size, streams), [16 + i] * streams, range(streams), last_only=False)
        seconds = time.perf_counter() - start
        self._clear()
        return streams * tokens / seconds


if __name__ == "__main__":
    serve(LlamaCpp())
