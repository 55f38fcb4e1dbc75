"""/v1/embeddings and /v1/rerank: vectors of texts, and texts by the cosine of their vectors to a query's."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ..core.errors import EngineError, FastLLMError, InvalidRequest
from ..core.request import Request, RequestHandle, TokenEvent
from .answer import Answer, Due
from .answers import Identity
from .generation import Generation, Usage
from .sse import Frames

__all__ = ["EmbeddingsWriter", "RerankWriter", "Vectors"]


class Vectors(Generation):
    """A request whose answers are vectors. vectors: f32 [C] of each prompt. Its texts enter the engine one by one, so that they may be more
    than its queue holds."""

    window = 32

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.vectors: dict[int, np.ndarray] = {}
        self.width = self._runtime.model.planned.definition.hidden_size
        wanted = self.ready.detail.get("dimensions")
        if wanted is not None and wanted > self.width:
            raise InvalidRequest(
                f"dimensions is {wanted}; this model has {self.width}", who="dimensions", fix="lower it, or leave it out", param="dimensions"
            )

    def request(self, number: int, prompt: Any, end_ids: list[int]) -> Request:
        """One text, pooled as the server was told."""
        return Request(prompt, self.params, request_id=self.request_id, salt=self.ready.salt, pooling=self._runtime.settings.embedding)

    def _feed(self, answer: Answer, handle: RequestHandle, event: TokenEvent, at: float) -> None:
        if event.embedding is None:
            raise EngineError("the engine gave no vector")
        answer.finish_reason = event.finish_reason
        self.vectors[answer.index] = event.embedding

    def unit(self, number: int) -> np.ndarray:
        """The vector of a prompt, cut to the wanted dimensions, of length 1: f32 [D]."""
        vector = self.vectors[number][: self.ready.detail.get("dimensions") or self.width].astype(np.float64)
        norm = float(np.sqrt((vector * vector).sum()))
        return (vector / norm if norm > 0 else vector).astype(np.float32)


class _Whole:
    """A `Writer` of one object; nothing is streamed, so only `body` says something."""

    def __init__(self, identity: Identity, generation: Generation):
        assert isinstance(generation, Vectors)
        self._identity, self._vectors = identity, generation
        self.plain: dict[int, Frames] = {}

    def start(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, answer: Answer, text: str, logprobs: list[Due]) -> bytes:
        """Nothing."""
        return b""

    def progress(self, told: dict[str, Any]) -> bytes:
        """Nothing: this interface has no such thing."""
        return b""

    def finish(self, answer: Answer) -> bytes:
        """Nothing."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """Nothing."""
        return b""

    def error(self, error: FastLLMError) -> bytes:
        """Nothing."""
        return b""

    def _usage(self, usage: Usage) -> dict[str, int]:
        return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


class EmbeddingsWriter(_Whole):
    """OpenAI's list of vectors of unit length."""

    def body(self, usage: Usage) -> dict[str, Any]:
        """The list, in the order of the texts."""
        data = []
        for number in range(len(self._vectors.ready.prompts)):
            vector = self._vectors.unit(number)
            shown: Any = vector.tolist()
            if self._vectors.ready.detail["base64"]:
                shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": number, "embedding": shown})
        return {"object": "list", "model": self._identity.model, "data": data, "usage": self._usage(usage)}


class RerankWriter(_Whole):
    """Texts in order of likeness."""

    def body(self, usage: Usage) -> Any:
        """Jina's object, or TEI's list."""
        detail = self._vectors.ready.detail
        query = self._vectors.unit(0).astype(np.float64)
        cosines = ((self._vectors.unit(i) * query).sum() for i in range(1, len(self._vectors.ready.prompts)))
        scores = [float(np.clip(cosine, -1.0, 1.0)) for cosine in cosines]  # of the same text it is 1, and rounded a bit above
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: detail["top_n"]]
        texts = detail["texts"]
        if detail["tei"]:
            return [{"index": i, "score": scores[i], **({"text": texts[i]} if texts else {})} for i in order]
        results = [{"index": i, "relevance_score": scores[i], **({"document": {"text": texts[i]}} if texts else {})} for i in order]
        return {"object": "list", "model": self._identity.model, "results": results, "usage": self._usage(usage)}
