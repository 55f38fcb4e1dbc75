"""Holds answers to what /openapi.json says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema_rs

OF_HTTP = {"content-type", "content-length", "transfer-encoding", "connection", "date"}
"""Headers that OpenAPI has no place for, or that every answer of HTTP has."""


class Description:
    """An OpenAPI document that answers are compared with."""

    def __init__(self, document: dict[str, Any]):
        self.document = document
        self._paths = [(re.compile(re.sub(r"{\w+}", ".+", path)), path) for path in sorted(document["paths"], key=lambda path: "{" in path)]
        self._checks: dict[str, Any] = {}

    def operation(self, method: str, path: str) -> dict[str, Any] | None:
        """What the document says of a request; None: nothing, as of an unknown path or a method that a route has not."""
        path = path.rstrip("/") or "/"
        for form in (path, f"/v1{path}", path.removeprefix("/v1")):
            for pattern, told in self._paths:
                if pattern.fullmatch(form):
                    return self.document["paths"][told].get(method.lower())
        return None

    def check(self, schema: dict[str, Any], value: Any) -> None:
        """Raises AssertionError if the value is not what the schema says."""
        key = json.dumps(schema)
        if key not in self._checks:
            self._checks[key] = jsonschema_rs.Draft202012Validator({**schema, "components": self.document["components"]})
        faults = [f"{fault.message} at {fault.instance_path}" for fault in self._checks[key].iter_errors(value)]
        assert not faults, f"{faults}: {json.dumps(value)[:500]}"

    def answer(self, method: str, path: str, status: int, headers: Mapping[str, str], raw: bytes) -> None:
        """Raises AssertionError if an answer is not described. raw: b"" of a stream, whose events are checked by `events`."""
        told = self._told(method, path, status)
        if told is None:
            return
        assert told, f"{method} {path}: {status}: {raw[:300]!r}"
        self._headers(told, headers, f"{method} {path} {status}")
        media, content = headers.get("content-type", "").partition(";")[0], told.get("content", {})
        if raw:
            assert media in content, (method, path, status, media)
        if raw and media == "application/json":
            self.check(content[media]["schema"], json.loads(raw))

    def _told(self, method: str, path: str, status: int) -> dict[str, Any] | None:
        """What is said of an answer; {}: nothing; None: whatever keeps a request out is the same as for a path that is there."""
        operation, shared = self.operation(method, path), self.document["components"]["responses"]
        if method == "OPTIONS" and status == 204:
            return shared["Options"]
        if operation is None:
            return shared["MethodNotAllowed"] if status == 405 else shared["NotFound"] if status == 404 else None
        return operation["responses"].get(str(status), {})

    def _headers(self, told: dict[str, Any], headers: Mapping[str, str], where: str) -> None:
        described = told["headers"]
        for name, header in described.items():
            assert name in headers or not header.get("required"), f"{where}: no {name}"
        for name, value in headers.items():
            if name.lower() in OF_HTTP:
                continue
            assert name.lower() in described, f"{where}: {name}: {value}"
            schema = described[name.lower()]["schema"]
            self.check(schema, int(value) if schema["type"] == "integer" else value)

    def events(self, path: str, events: list[Any]) -> None:
        """Raises AssertionError if the events of a stream are not described."""
        schema = self.operation("POST", path)["responses"]["200"]["content"]["text/event-stream"]["schema"]
        for event in events:
            if isinstance(event, dict):
                self.check(schema, event)
