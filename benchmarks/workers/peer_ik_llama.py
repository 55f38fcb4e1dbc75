"""ik_llama.cpp through the low-level API of ik-llama-cpp-python: no sampling, random tokens, micro-batches of 512. A cache cannot be cut back
through that API, so every decode computes its context again (outside of the measured time)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from ik_llama_cpp import __version__
from ik_llama_cpp import _ctypes_api as api
from protocol import Worker, serve


class IkLlama(Worker):
    """One model and one context."""

    def load(self, path: str, threads: int, context: int, streams: int, options: dict[str, Any]) -> dict[str, str]:
        """Loads as llama.cpp is loaded."""
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"ik_llama.cpp cannot load {path}")
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = context + 64 * streams, 512, 512, streams
        params.n_threads = params.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("ik_llama.cpp cannot make a context")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.memory_of_batch = api.llama_batch_init(512, 0, 1)
        self.rng = np.random.default_rng(1)
        return {"version": __version__}

    def _run(self, ids: Any, positions: Any, sequences: Any, every_logit: bool = False) -> None:
        batch = self.memory_of_batch
        batch.n_tokens = len(ids)
        for i, (token, position, sequence) in enumerate(zip(ids, positions, sequences, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), int(position), 1
            batch.seq_id[i][0] = int(sequence)
            batch.logits[i] = every_logit or i == len(ids) - 1
        if code := api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        api.llama_get_logits_ith(self.context, len(ids) - 1)

    def _prompt(self, tokens: int, sequence: int = 0) -> None:
        ids = self.rng.integers(0, self.vocab_size, tokens)
        for start in range(0, tokens, 512):
            part = ids[start : start + 512]
            self._run(part, range(start, start + len(part)), [sequence] * len(part))

    def prefill(self, tokens: int) -> float:
        """Seconds for a new prompt."""
        api.llama_kv_cache_clear(self.context)
        start = time.perf_counter()
        self._prompt(tokens)
        return time.perf_counter() - start

    def decode(self, context: int, tokens: int) -> float:
        """Seconds a token."""
        begin = max(context, 1)
        api.llama_kv_cache_clear(self.context)
        self._prompt(begin)
        start = time.perf_counter()
        for i, token in enumerate(self.rng.integers(0, self.vocab_size, tokens)):
            self._run([token], [begin + i], [0])
        return (time.perf_counter() - start) / tokens

    def batch(self, streams: int, tokens: int) -> float:
        """Tokens per second of all streams, one token of each a step."""
        api.llama_kv_cache_clear(self.context)
        for sequence in range(streams):
            self._prompt(16, sequence)
        start = time.perf_counter()
        for i in range(tokens):
            self._run(self.rng.integers(0, self.vocab_size, streams), [16 + i] * streams, range(streams), every_logit=True)
        return streams * tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    serve(IkLlama())
