"""/v1/responses on the wire: OpenAI's events of a stream, or one response. Nothing is stored."""

from __future__ import annotations

import secrets
from typing import Any

from ..core.errors import FastLLMError
from ..core.request import TokenLogprobs
from .answers import Identity, error_body
from .generation import Answer, Generation, Usage
from .logprobs import chat_entry
from .sse import event_frame

__all__ = ["ResponsesWriter"]


class ResponsesWriter:
    """A `Writer` with one message of one text. `sequence_number` counts the events."""

    def __init__(self, identity: Identity, generation: Generation):
        self._identity, self._generation = identity, generation
        self._item_id = f"msg_{secrets.token_hex(12)}"
        self._number = -1
        self._open = False
        self._logprobs: list[dict[str, Any]] = []

    def _event(self, name: str, **data: Any) -> bytes:
        self._number += 1
        return event_frame(name, {"sequence_number": self._number, **data})

    def _response(self, status: str, usage: Usage | None = None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        generation = self._generation
        params, detail = generation.params, generation.ready.detail
        incomplete = status == "incomplete"
        return {
            "id": self._identity.id,
            "object": "response",
            "created_at": self._identity.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "model": self._identity.model,
            "output": [] if usage is None else [self._item("incomplete" if incomplete else "completed")],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": params.logprobs or 0,
            "store": False,
            "background": False,
            "previous_response_id": None,
            "text": {"format": {"type": "text"}},
            "tools": [],
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **detail,
        }

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self._generation.answers[0].text, self._logprobs)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def start(self) -> bytes:
        """The response, still empty."""
        first = self._event("response.created", response=self._response("in_progress"))
        return first + self._event("response.in_progress", response=self._response("in_progress"))

    def _begin(self) -> bytes:
        if self._open:
            return b""
        self._open = True
        added = self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
        return added + self._event("response.content_part.added", **self._place(), part=self._part("", []))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def piece(self, answer: Answer, text: str, logprobs: list[tuple[TokenLogprobs, int | None]]) -> bytes:
        """A delta; the first opens item and part."""
        entries = [chat_entry(self._generation.tokenizer, entry, cut) for entry, cut in logprobs]
        self._logprobs += entries
        if not self._generation.ready.stream or not text:
            return b""
        shown = [{key: entry[key] for key in ("token", "logprob", "top_logprobs")} for entry in entries]
        return self._begin() + self._event("response.output_text.delta", **self._place(), delta=text, logprobs=shown)

    def finish(self, answer: Answer) -> bytes:
        """Closes part and item."""
        if not self._generation.ready.stream:
            return b""
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        shown = [{key: entry[key] for key in ("token", "logprob", "top_logprobs")} for entry in self._logprobs]
        frames = self._begin() + self._event("response.output_text.done", **self._place(), text=answer.text, logprobs=shown)
        frames += self._event("response.content_part.done", **self._place(), part=self._part(answer.text, self._logprobs))
        return frames + self._event("response.output_item.done", output_index=0, item=self._item(status))

    def _status(self) -> str:
        return "incomplete" if self._generation.answers[0].finish_reason == "length" else "completed"

    def end(self, usage: Usage) -> bytes:
        """The whole response again."""
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status, usage))

    def error(self, error: FastLLMError) -> bytes:
        """A failed response."""
        told = error_body(error, self._identity.request_id)["error"]
        body = {"code": "server_error", "message": told["message"]}
        return self._event("response.failed", response=self._response("failed", error=body))

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole response."""
        return self._response(self._status(), usage)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
