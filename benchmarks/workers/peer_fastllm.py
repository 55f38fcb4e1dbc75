"""fastllm itself as a worker, with the measuring code of `fastllm bench`. Runs in fastllm's environment.

Options: `isa`, `kv_dtype` and what else `--backend-opt` of the backend takes; `dtype` and `backend` are those of the command line.
"""

from __future__ import annotations

from typing import Any

from protocol import Worker, serve

from fastllm.bench import Bench
from fastllm.loading import LoadOptions, load_model


class Ours(Worker):
    """One loaded model."""

    def load(self, path: str, threads: int, context: int, streams: int, options: dict[str, Any]) -> dict[str, Any]:
        """Loads with room for the longest context once, and a little for every other stream."""
        from importlib.metadata import version

        chosen = dict(options)
        named = {name: chosen.pop(name) for name in ("backend", "dtype") if name in chosen}
        longest = context - context % 64
        room = longest + 64 + (streams - 1) * 256
        loaded = load_model(
            path,
            LoadOptions(threads=threads, ctx=longest, max_batch_size=streams, kv_cache_tokens=room, backend_options=chosen, offline=True, **named),
        )
        self.bench = Bench(loaded)
        found = {name: getattr(self.bench.backend, name, "") for name in ("isa", "threads")}
        return {"version": version("fastllm-engine"), "build": found["isa"], "threads": found["threads"]}

    def prefill(self, tokens: int) -> float:
        """Seconds from submitting a prompt to its first token."""
        return self.bench.prefill(tokens)

    def decode(self, context: int, tokens: int) -> float:
        """Seconds a token."""
        return self.bench.decode(context, tokens)

    def batch(self, streams: int, tokens: int) -> float:
        """Tokens per second of all streams."""
        return self.bench.batch(streams, tokens)


if __name__ == "__main__":
    serve(Ours())
