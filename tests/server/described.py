"""Holds answers to what /openapi.json says of them."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs


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
                    return self.document["paths"][told].get("get" if method == "HEAD" else method.lower())
        return None

    def check(self, schema: dict[str, Any], value: Any) -> None:
        """Raises AssertionError if the value is not what the schema says."""
        key = json.dumps(schema)
        if key not in self._checks:
            self._checks[key] = jsonschema_rs.Draft202012Validator({**schema, "components": self.document["components"]})
        faults = [f"{fault.message} at {fault.instance_path}" for fault in self._checks[key].iter_errors(value)]
        assert not faults, f"{faults}: {json.dumps(value)[:500]}"

    def answer(self, method: str, path: str, status: int, media: str, raw: bytes) -> None:
        """Raises AssertionError if an answer is not described."""
        operation = self.operation(method, path)
        if operation is None or method == "OPTIONS":
            return
        assert str(status) in operation["responses"], f"{method} {path}: {status}: {raw[:300]!r}"
        content = operation["responses"][str(status)].get("content", {})
        if raw:
            assert media.partition(";")[0] in content, (method, path, status, media)
        if raw and media == "application/json":
            self.check(content[media]["schema"], json.loads(raw))

    def events(self, path: str, events: list[Any]) -> None:
        """Raises AssertionError if the events of a stream are not described."""
        schema = self.operation("POST", path)["responses"]["200"]["content"]["text/event-stream"]["schema"]
        for event in events:
            if isinstance(event, dict):
                self.check(schema, event)
