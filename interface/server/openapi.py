"""/openapi.json: made of the table of routes and of the models that check the bodies, so that it cannot say something else."""

from __future__ import annotations

import re
from typing import Any, Final

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from .page import PATHS as PAGE
from .schemas import BODIES

__all__ = ["describe"]

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES: Final = {
    "400": "The body is not what this route takes; `param` names the field.",
    "401": "No key, or a wrong one.",
    "403": "A foreign Host or Origin.",
    "404": "No such model.",
    "408": "The body stopped coming.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "The key is above its limit.",
    "500": "The server failed on this request.",
    "501": "The route is switched off.",
    "503": "Loading, shutting down, or full; `Retry-After` says when to come again.",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application."""
    from .answers import fingerprint

    kinds = list(BODIES)
    _, made = models_json_schema([(BODIES[k], "validation") for k in kinds], ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for route in app.routes:
        extra = route.openapi_extra or {}  # type: ignore[attr-defined]
        path = route.path.replace(":path}", "}")  # type: ignore[attr-defined]
        body = extra.get("body")
        operation: dict[str, Any] = {
            "summary": route.summary,  # type: ignore[attr-defined]
            "operationId": (path.strip("/") or "page").replace("/", "_").replace("{", "").replace("}", "").replace("-", "_").replace(".", "_"),
            "responses": {"200": _answer(extra)} | {s: _error(text) for s, text in _STATUSES.items() if body or s in _of_get(path)},
        }
        if body:
            reference = {"$ref": f"#/components/schemas/{BODIES[body].__name__}"}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        if found := re.search(r"{(\w+)}", path):
            operation["parameters"] = [{"name": found[1], "in": "path", "required": True, "schema": {"type": "string"}}]
        if query := extra.get("query"):
            operation["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
            operation["responses"]["400"] = _error(_STATUSES["400"].replace("The body is not", "A parameter is not"))
        for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]  # GET's, without a body
            operation = {**operation, "operationId": f"{method.lower()}_{operation['operationId']}"}
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "fastllm", "version": fingerprint().removeprefix("b-fastllm-")},
        "paths": paths,
        "components": {
            "schemas": {**made.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"}},
        },
    }


def _of_get(path: str) -> tuple[str, ...]:
    return ("401", "403", "503") + (("404",) if "{" in path or path == "/v1/requests" else ()) + (("501",) if path == "/metrics" or path in PAGE else ())


def _answer(extra: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {extra.get("media", "application/json"): {}}
    if extra.get("stream"):
        content["text/event-stream"] = {}
    return {"description": "The answer.", "content": content}


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
