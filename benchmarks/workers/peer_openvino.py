"""OpenVINO GenAI on a GGUF file, which it reads itself; its own performance metrics count."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Worker, serve


class OpenVino(Worker):
    """One pipeline."""

    def load(self, path: str, threads: int, context: int, streams: int, options: dict[str, Any]) -> dict[str, str]:
        """Compiles for the CPU with that number of threads."""
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", **options}
        self.pipeline = openvino_genai.LLMPipeline(path, "CPU", properties)
        self.rng = np.random.default_rng(1)
        self.vocab_size = 1000  # of the random prompts: every model has so many
        return {"version": openvino_genai.__version__}

    def _metrics(self, tokens: int, new: int) -> Any:
        ids = openvino.Tensor(self.rng.integers(0, self.vocab_size, (1, max(tokens, 1))).astype(np.int64))
        mask = openvino.Tensor(np.ones((1, max(tokens, 1)), np.int64))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.min_new_tokens, config.ignore_eos, config.do_sample = new, new, True, False
        return self.pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config).perf_metrics

    def prefill(self, tokens: int) -> float:
        """Seconds to the first token."""
        return float(self._metrics(tokens, 1).get_ttft().mean) / 1e3

    def decode(self, context: int, tokens: int) -> float:
        """Seconds a token after the first."""
        return float(self._metrics(context, tokens + 1).get_tpot().mean) / 1e3


if __name__ == "__main__":
    serve(OpenVino())
