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
from .headers import HEADERS
from .page import HEADERS as PAGE_HEADERS
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
    "499": "It was cancelled by /v1/cancel.",
    "500": "The server failed on this request.",
    "501": "The route is switched off.",
    "503": "Loading, shutting down, or full; `Retry-After` says when to come again.",
}
_DEV: Final = ("/v1/requests", "/v1/cancel")
_EMBEDS: Final = ("/v1/embeddings", "/v1/rerank")
_OTHERWISE: Final = """Every path answers OPTIONS as `components.responses.Options`, and methods that it has not as `components.responses.MethodNotAllowed`; \
a path that there is not is answered as `components.responses.NotFound`, once the request may come in. Every path but `/` is there with and without `/v1`, and with `/` at its end."""

Headers = tuple[str, ...]
_ALL: Final[Headers] = ("x-request-id", "request-id", "x-content-type-options")
_PAGES: Final[Headers] = ("access-control-allow-origin", "access-control-expose-headers", "vary")
_TAKEN: Final[Headers] = ("x-fastllm-ignored", "x-fastllm-warning")
_STREAMED: Final[Headers] = ("cache-control", "x-accel-buffering")
_FILES: Final[Headers] = (*PAGE_HEADERS, "etag", "cache-control", "vary")
_PREFLIGHT: Final[Headers] = ("access-control-allow-methods", "access-control-allow-headers", "access-control-max-age")


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
        for method in sorted(route.methods):  # type: ignore[attr-defined]
            told = operation if method != "HEAD" else {**operation, "responses": _without_bodies(operation["responses"])}
            paths.setdefault(path, {})[method.lower()] = {**told, "operationId": f"{method.lower()}_{name}"}
    responses = {
        "Options": _with({"description": "What may be asked."}, ("allow!", *(_PREFLIGHT if settings.origins else ())), settings),
        "MethodNotAllowed": _with(_error("/v1/models", "The path is there, for the methods of `Allow`."), ("allow!", "x-should-retry!"), settings),
        "NotFound": _with(_error("/v1/models", "There is no such path."), ("x-should-retry!",), settings),
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "fastllm", "version": fingerprint().removeprefix("b-fastllm-"), "description": _OTHERWISE},
        "paths": paths,
        "components": {
            "schemas": _requests(settings) | _answers(),
            "responses": responses,
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
    body, statuses, embeds = extra.get("body"), {"400", "403", "500"}, path in _EMBEDS
    off = (path == "/metrics" and not settings.metrics) or (path in PAGE and not settings.web)
    generates = embeds or bool(extra.get("stream"))
    answers = embeds == (settings.embedding is not None) if generates else path not in _DEV or settings.dev
    if path not in PUBLIC:
        statuses |= {"503"} | ({"401"} if settings.keys else set())
    if body and answers:  # else it is not read
        statuses |= {"408", "413", "415"}
    if body and settings.keys and (settings.key_concurrent or settings.key_per_minute):
        statuses.add("429")
    if path == "/v1/models/{model_id}" or (body and answers and settings.strict_model and path != "/v1/cancel"):
        statuses.add("404")
    if generates and answers and settings.dev:
        statuses.add("499")
    found = {status: _error(path, _STATUSES[status]) for status in sorted(statuses)}
    stored = path == "/v1/responses/{response_id}"
    if stored:
        found["404"] = _error(path, "Nothing is stored.")
    if path in _DEV and not settings.dev:
        found["404"] = _error(path, "The server runs without --dev.")
    elif path == "/v1/cancel":
        found["404"] = _error(path, "No request of this id runs.")
    if off:
        found["501"] = _error(path, _STATUSES["501"])
    found = {status: _with(told, _error_headers(status, generates and answers), settings) for status, told in found.items()}
    if path in ("/health", "/ready"):
        found["503"] = _with({"description": "Not now.", "content": _json([Status])}, ("retry-after!" if path == "/ready" else "retry-after",), settings)
    if path in PAGE and not off:
        found["304"] = _with({"description": "The same as before."}, tuple(f"{name}!" for name in _FILES), settings)
    if answers and not off and not stored:
        found["200"] = _answer(path, extra, settings)
    return dict(sorted(found.items()))


def _answer(path: str, extra: dict[str, Any], settings: ServerSettings) -> dict[str, Any]:
    if path in ANSWERS:
        content = _json(ANSWERS[path])
    else:
        media = extra.get("media", "application/json")
        content = {media: {"schema": {"type": "object" if media == "application/json" else "string"}}}
    told = {"description": "The answer.", "content": content}
    names = _TAKEN if extra.get("body") else ("x-fastllm-ignored",) if extra.get("query") else ()
    if path in EVENTS:
        told["description"] = "The answer; with `stream`, events whose `data` is one of these each" + (", and at the end `[DONE]`." if Error in EVENTS[path] else ".")
        content["text/event-stream"] = {"schema": _one_of(EVENTS[path])}
        names += ("x-fastllm-seed!", *_STREAMED)
    if path in PAGE:
        names += (*(f"{name}!" for name in _FILES), "content-encoding")
    return _with(told, names, settings)


def _error(path: str, text: str) -> dict[str, Any]:
    """An error as the route words it; the lists of models in both ways."""
    theirs, both = path.startswith("/v1/messages"), path.startswith("/v1/models")
    return {"description": text, "content": _json([AnthropicError] if theirs else [Error, AnthropicError] if both else [Error])}


def _error_headers(status: str, generated: bool) -> Headers:
    """Of an error. generated: it may come when the request has been taken, and then tells how, too."""
    names: Headers = ("www-authenticate!",) if status == "401" else ("retry-after",) if status in ("429", "503") else ()
    if status not in ("408", "500", "503"):
        names += ("x-should-retry" if status == "429" else "x-should-retry!",)
    return names + ((*_TAKEN, "x-fastllm-seed") if generated and status in ("400", "499", "500", "503") else ())


def _with(told: dict[str, Any], names: Headers, settings: ServerSettings) -> dict[str, Any]:
    """An answer with its headers; a name with `!` is always there."""
    every = (*names, *(f"{name}!" for name in _ALL), *(_PAGES if settings.origins else ()))
    said = {name.rstrip("!"): {**HEADERS[name.rstrip("!")], **({"required": True} if name[-1] == "!" else {})} for name in sorted(every)}
    return {**told, "headers": said}


def _without_bodies(responses: dict[str, Any]) -> dict[str, Any]:
    return {status: {key: value for key, value in told.items() if key != "content"} for status, told in responses.items()}


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
