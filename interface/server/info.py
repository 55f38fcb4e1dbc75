"""What the server says about itself: properties, tokenizer, requests that run. Never a prompt, and no path but a file's name."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..text.output import detect_reasoning
from .bodies import explain, parse_body
from .schemas import CancelBody
from .tools import tool_parser

if TYPE_CHECKING:
    from ..loading import LoadedModel
    from .runtime import Runtime

__all__ = ["cancel_id", "props", "requests", "tokenizer"]


def tokenizer(model: LoadedModel) -> dict[str, Any]:
    """GET /tokenizer_info."""
    t = model.tokenizer

    def piece(index: int | None) -> str | None:
        return None if index is None else t.id_to_piece(index)

    return {
        "vocab_size": t.vocab_size,
        "bos_token": piece(t.bos_id),
        "eos_token": piece(t.eos_id),
        "unk_token": piece(t.unk_id),
        "end_token_ids": sorted(set(t.end_ids)),
        "add_bos_token": t.add_bos,
        "model_max_length": model.context,
        "chat_template": model.planned.files.chat_template,
    }


def props(runtime: Runtime) -> dict[str, Any]:
    """GET /props, in llama.cpp's shape; what is ours is in `fastllm`."""
    model, settings = runtime.model, runtime.settings
    planned = model.planned
    params = {k: v for k, v in asdict(runtime.defaults).items() if k not in ("seed", "logprobs", "prompt_logprobs") and v is not None}
    plan = {
        "backend": model.backend,
        "threads": model.threads,
        "weights_bytes": planned.plan.total_bytes("weights"),
        "kv_bytes": planned.plan.total_bytes("kv"),
        "fallback_ops": len(planned.plan.fallbacks),
    }
    return {
        "total_slots": planned.options.max_batch_size,
        "default_generation_settings": {"n_ctx": model.context, "params": {**params, "max_tokens": settings.max_tokens}},
        "chat_template": planned.files.chat_template or "",
        "model_path": Path(planned.files.path).name,
        "modalities": {"vision": False, "audio": False},
        "fastllm": {
            "defaults": runtime.origins(),
            "plan": plan,
            "seed": "drawn for each request that names none; in x-fastllm-seed",
            "tool_parser": tool_parser(model.template, settings.tool_parser) if model.template else None,
            "reasoning": detect_reasoning("\0".join(model.template.literals)) if model.template else None,
        },
    }


def requests(runtime: Runtime) -> list[dict[str, Any]]:
    """GET /v1/requests."""
    now = time.monotonic()
    return [
        {
            "id": generation.request_id,
            "age_s": round(now - generation.submitted_at, 3),
            "state": generation.state(),
            "prompt_tokens": sum(len(p) for p in generation.ready.prompts),
            "tokens": sum(answer.num_tokens for answer in generation.answers),
            "stream": outbox is not None,
        }
        for generation, outbox in tuple(runtime.active)
    ]


def cancel_id(body: bytes) -> tuple[str, list[str]]:
    """The id that a body of /v1/cancel names, and fields that nobody reads. Raises InvalidRequest."""
    try:
        asked = CancelBody.model_validate(parse_body(body))
    except ValidationError as error:
        raise explain(error) from None
    return asked.id, [name for name, value in (asked.model_extra or {}).items() if value is not None]
