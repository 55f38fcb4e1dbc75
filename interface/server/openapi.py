"""/openapi.json: made of the table of routes, of the models that check the bodies, of those that the tests hold answers to, and of the server's
options, so that it cannot say something else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .answer_schemas import ANSWERS, Status
from .bodies import NEUTRAL, REFUSED, WITH_TEMPLATE
from .chat_schemas import AnthropicError, Error
from .event_schemas import EVENTS
from .gate import PUBLIC
from .page import PATHS as PAGE
from .schemas import BODIES
from .settings import ServerSettings

__all__ = ["describe"]

_STATUSES: Final = {
    "400": "The request is not what this route takes; `param` names the field.",
    "401": "No key, or a wrong one.",
    "403": "A foreign Host or Origin.",
    "404": "No such model.",
    "408": "The body stopped coming.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "The key is above its limit; `Retry-After` says when to come again.",
    "500": "The server failed on this request.",
    "501": "The route is switched off.",
    "503": "Loading, shutting down, or full; `Retry-After` says when to come again.",
}
_WAIT: Final = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
_TAKEN: Final = {
    "x-fastllm-ignored": {"description": "Fields without effect.", "schema": {"type": "string"}},
    "x-fastllm-warning": {"description": "What was done otherwise than asked.", "schema": {"type": "string"}},
}
_SEED: Final = {"x-fastllm-seed": {"description": "The seed that was used.", "schema": {"type": "integer"}}}
_DEV: Final = ("/v1/requests", "/v1/cancel")
_EMBEDS: Final = ("/v1/embeddings", "/v1/rerank")


def describe(app: FastAPI, settings: ServerSettings) -> dict[str, Any]:
    """The OpenAPI document of an application."""
    from .answers import fingerprint

    paths: dict[str, Any] = {}
    for route in app.routes:
        extra = route.openapi_extra or {}  # type: ignore[attr-defined]
        path = route.path.replace(":path}", "}")  # type: ignore[attr-defined]
        name = (path.strip("/") or "page").replace("/", "_").replace("{", "").replace("}", "").replace("-", "_").replace(".", "_")
        operation: dict[str, Any] = {"summary": route.summary, "responses": _responses(path, extra, settings)}  # type: ignore[attr-defined]
        if body := extra.get("body"):
            operation["requestBody"] = {"required": True, "content": _json([BODIES[body]])}
        if found := re.search(r"{(\w+)}", path):
            operation["parameters"] = [{"name": found[1], "in": "path", "required": True, "schema": {"type": "string"}}]
        if query := extra.get("query"):
            operation["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
        if path in PUBLIC:
            operation["security"] = []
        for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]  # GET's, without a body
            paths.setdefault(path, {})[method.lower()] = {**operation, "operationId": f"{method.lower()}_{name}"}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "fastllm", "version": fingerprint().removeprefix("b-fastllm-")},
        "paths": paths,
        "components": {
            "schemas": _requests(settings) | _answers(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"}},
        },
    }
    if settings.keys:
        document["security"] = [{"bearer": []}, {"key": []}]
    if settings.root_path:
        document["servers"] = [{"url": settings.root_path}]
    return document


def _responses(path: str, extra: dict[str, Any], settings: ServerSettings) -> dict[str, Any]:
    """Status -> answer of an operation."""
    body, statuses = extra.get("body"), {"400", "403", "500"}
    if path not in PUBLIC:
        statuses |= {"503"} | ({"401"} if settings.keys else set())
    if body:
        statuses |= {"408", "413", "415"} | ({"429"} if settings.key_concurrent or settings.key_per_minute else set())
    if path == "/v1/models/{model_id}" or (body and settings.strict_model):
        statuses.add("404")
    found = {status: _error(path, _STATUSES[status]) for status in sorted(statuses)}
    stored = path == "/v1/responses/{response_id}"
    if stored:
        found["404"] = _error(path, "Nothing is stored.")
    if path in _DEV:
        found["404"] = _error(path, "No request of this id runs." if settings.dev else "The server runs without --dev.")
    off = (path == "/metrics" and not settings.metrics) or (path in PAGE and not settings.web)
    if off:
        found["501"] = _error(path, _STATUSES["501"])
    if path in ("/health", "/ready"):
        found["503"] = {"description": "Not now.", "content": _json([Status])}
    if path in PAGE and not off:
        found["304"] = {"description": "The same as before."}
    for status in {"429", "503"} & found.keys():
        found[status]["headers"] = _WAIT
    embeds = path in _EMBEDS
    answers = embeds == (settings.embedding is not None) if embeds or extra.get("stream") else path not in _DEV or settings.dev
    if answers and not off and not stored:
        found["200"] = _answer(path, extra)
    return dict(sorted(found.items()))


def _answer(path: str, extra: dict[str, Any]) -> dict[str, Any]:
    if path in ANSWERS:
        content = _json(ANSWERS[path])
    else:
        media = extra.get("media", "application/json")
        content = {media: {"schema": {"type": "object" if media == "application/json" else "string"}}}
    told = {"description": "The answer.", "content": content}
    if path in EVENTS:
        told["description"] = "The answer; with `stream`, events whose `data` is one of these each" + (", and at the end `[DONE]`." if Error in EVENTS[path] else ".")
        content["text/event-stream"] = {"schema": _one_of(EVENTS[path])}
    headers = {**(_TAKEN if extra.get("body") else {}), **(_SEED if path in EVENTS else {})}
    return {**told, "headers": headers} if headers else told


def _error(path: str, text: str) -> dict[str, Any]:
    """An error as the route words it; the lists of models in both ways."""
    theirs, both = path.startswith("/v1/messages"), path.startswith("/v1/models")
    return {"description": text, "content": _json([AnthropicError] if theirs else [Error, AnthropicError] if both else [Error])}


def _json(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    return {"application/json": {"schema": _one_of(models)}}


def _one_of(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    found = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _schemas(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    _, made = models_json_schema([(model, "validation") for model in dict.fromkeys(models)], ref_template="#/components/schemas/{model}")
    found: dict[str, Any] = made["$defs"]
    return found


def _requests(settings: ServerSettings) -> dict[str, Any]:
    """Schemas of the bodies, with what this server's options change, and what is refused."""
    found = _schemas(BODIES.values())
    for kind, model in BODIES.items():
        properties = found[model.__name__]["properties"]
        for name, instead in REFUSED[kind].items():
            if not (name == "chat_template" and settings.request_template and kind in WITH_TEMPLATE):
                properties[name] = {"enum": list(NEUTRAL), "description": f"Not supported{f': {instead}' if instead else ''}."}
        if kind != "cancel":
            properties["modalities"] = {"enum": [None, ["text"]], "description": "Text only."}
        for name in ("n", "best_of"):
            if name in properties:
                number = next(form for form in properties[name]["anyOf"] if form["type"] == "integer")
                number["maximum"] = min(settings.max_n, number.get("maximum", settings.max_n))
    return found


def _answers() -> dict[str, Any]:
    """Schemas of the answers. What may be left out has a default in its model, which no answer has."""
    found = _schemas([*(model for models in (*ANSWERS.values(), *EVENTS.values()) for model in models), Error, AnthropicError])
    for schema in found.values():
        for value in schema.get("properties", {}).values():
            value.pop("default", None)
    return found
