"""Transformers' model on torch. Option `dtype`: bf16, or int8 (torch's dynamic quantisation of the linear layers of the f32 model)."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from protocol import Worker, serve


class Torch(Worker):
    """One model, eager, as `from_pretrained` gives it."""

    @torch.inference_mode()
    def load(self, path: str, threads: int, context: int, streams: int, options: dict[str, Any]) -> dict[str, str]:
        """Loads the folder."""
        torch.set_num_threads(threads)
        int8 = options.get("dtype") == "int8"
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32 if int8 else torch.bfloat16)
        if int8:
            model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
        self.model = model.eval()
        self.vocab_size = model.config.vocab_size
        return {"version": f"{torch.__version__}, transformers {transformers.__version__}"}

    def _ids(self, rows: int, tokens: int) -> Any:
        return torch.randint(0, self.vocab_size, (rows, max(tokens, 1)))

    def _prompt(self, rows: int, tokens: int) -> Any:
        return self.model(self._ids(rows, tokens), use_cache=True, logits_to_keep=1).past_key_values

    def _steps(self, rows: int, context: int, tokens: int) -> float:
        cache = self._prompt(rows, context)
        start = time.perf_counter()
        for _ in range(tokens):
            cache = self.model(self._ids(rows, 1), past_key_values=cache, use_cache=True).past_key_values
        return time.perf_counter() - start

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        """Seconds for a new prompt."""
        start = time.perf_counter()
        self._prompt(1, tokens)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, context: int, tokens: int) -> float:
        """Seconds a token."""
        return self._steps(1, context, tokens) / tokens

    @torch.inference_mode()
    def batch(self, streams: int, tokens: int) -> float:
        """Tokens per second of a batch."""
        return streams * tokens / self._steps(streams, 16, tokens)


if __name__ == "__main__":
    serve(Torch())
