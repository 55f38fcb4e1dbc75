"""The gate chooses routes itself. What it chooses is what FastAPI, which holds the table, would choose."""

from __future__ import annotations

import asyncio
import itertools
import json
from functools import cache
from types import SimpleNamespace
from urllib.parse import unquote

import fastapi
import pytest
import starlette
from fastapi.responses import JSONResponse

from fastllm.server.gate import ALIASES, Gate
from fastllm.server.settings import ServerSettings

READ = {"path": str, "methods": set, "path_regex": object, "endpoint": object, "summary": str, "openapi_extra": dict}
"""What the gate and the description read of a route, and of which type it is."""
METHODS = ["GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "get", "PROPFIND"]
PLACES = [
    *("/", "//", "/v1", "/v1/", "/v1//", "/v2/models", "/V1/models", "/v1/v1/models", "/v1/v1/tokenize", "/response", "/v1/response", "/response/x", "/v1/response/x"),
    *("/v1/../v1/models", "/v1/./models", "/./live", "/live/.", "/live/..", "/%2e%2e/live", "/v1/models/..", "/v1/models/../../live", "/live.", "/live;x", "/live%00"),
    *("//v1/models", "/v1//models", "/v1/models//", "/v1%2Fmodels", "/v1%2fmodels%2F", "/%2Fv1/models", "/v1/models/%2F", "/models/%2F%2F", "/%", "/%zz", "/live%20", "/%6Cive"),
    *("/v1/models/org/tiny", "/v1/models/org%2Ftiny", "/models/org//tiny/", "/v1/models/%C3%A9", "/v1/models/é", "/v1/models/a%0Ab", "/v1/models/%FF", "/v1/models/%E2%80%AE"),
    *("/v1/responses/r", "/v1/responses/r/", "/responses/r", "/v1/responses/r/s", "/v1/responses/r%2Fs", "/v1/responses/", "/v1/responses/input_tokens", "/responses/input_tokens/"),
    *("/v1/responses/%0Ar", "/v1/responses/%20", "/v1/responses/{response_id}", "/v1/models/{model_id:path}", "/v1/responses/..", "/v1/responses/r?x", "/assets/", "/assets/app.js/", "/assets/..%2Fapp.js"),
    *("/é", "/%C3%A9", "/%E2%84%A6", "/ＬIVE", "/lıve", "/health\u200b", "/𝓁ive", "/*", "*", "", "live", "/v1models", "/v1.models", "/openapi.json/", "/openapi%2Ejson", "/openapi_json", "/assets/appxjs"),
]  # fmt: skip


def ask(app, method: str, path: str):
    """Status, Allow and JSON of an ASGI application's answer to a request for a path."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    raw = path.encode()
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path, "raw_path": raw}
    asyncio.run(app({**scope, "query_string": b"", "root_path": "", "headers": [(b"host", b"localhost")], "client": None, "server": None}, receive, send))
    head = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    allow = {name.strip() for name in head.get("allow", "").split(",")} - {""}
    return sent[0]["status"], allow, json.loads(body) if body and sent[0]["status"] == 200 else None


@pytest.fixture(scope="module")
def table(server):
    """FastAPI's application with the server's own routes, each of which says who it is and what it was given; and the gate before it."""
    app = fastapi.FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    def told(name):
        async def endpoint(request: fastapi.Request):
            return JSONResponse([name, request.path_params])

        return endpoint

    for route in server.runtime.gate.app.routes:
        app.add_api_route(route.path, told(f"{sorted(route.methods)} {route.path}"), methods=sorted(route.methods))
    nothing = SimpleNamespace(answered=lambda visit: None, access=lambda visit: None, fault=lambda visit, error: pytest.fail(repr(error)))
    settings = {root: ServerSettings(root_path=root) for root in ("", "/llm")}
    gates = {root: Gate(app, SimpleNamespace(settings=own, metrics=nothing, log=nothing, connections=lambda: 1, draining=False)) for root, own in settings.items()}
    return app, gates


def forms(path: str) -> list[str]:
    """The paths that one stands for: without the `/` at its end, and with and without `/v1`."""
    if len(path) > 1 and path.endswith("/") and not path.endswith("//"):
        path = path[:-1]
    path = ALIASES.get(path.removeprefix("/v1"), path)
    other = path.removeprefix("/v1") if path.startswith("/v1/") else "/v1" + path
    return [path] if path.startswith("/v1/v1/") else [path, other]


@cache
def by_fastapi(app, method: str, path: str):
    """Status, Allow and JSON as FastAPI would answer the first of its forms that it has."""
    for form in forms(path):
        status, allow, body = ask(app, method, form)
        if status == 405:  # FastAPI tells the methods of the first route; here they are those of all that have this path
            allow = {name for name in METHODS if name != "OPTIONS" and ask(app, name, form)[0] == 200}
        if status != 404:
            return status, allow, body
    return 404, set(), None


@pytest.mark.parametrize("root", ["", "/llm"])
def test_the_gate_chooses_as_fastapi_does(server, table, root):
    app, gates = table
    real = [route.path.replace("{response_id}", "r").replace("{model_id:path}", "org/tiny") for route in server.runtime.gate.app.routes]
    known = dict.fromkeys(form for path in real for form in (path, path + "/", path + "//", path.removeprefix("/v1"), "/v1" + path, path + "/x", path.upper(), "/" + path))
    paths = [unquote(place) for place in (*PLACES, *known)]
    assert len(paths) > 250
    different = []
    for method, path in itertools.product(METHODS, paths):
        status, allow, body = ask(gates[root], method, root + path)
        if method == "OPTIONS":  # is answered by the gate alone, whatever the path
            assert (status, body) == (204, None)
            continue
        expected = by_fastapi(app, method, path or "/" if root else path)
        if (status, allow - {"OPTIONS"}, body) != expected:
            different.append((method, path, (status, allow, body), expected))
    assert not different, different[:5]


def test_each_method_of_each_route_is_the_gates_own(server):
    gate = server.runtime.gate
    for route in gate.app.routes:
        path = route.path.replace("{response_id}", "r").replace("{model_id:path}", "org/tiny")
        found, ends = gate._route(path)
        assert found == path
        assert {ends[method][0] for method in route.methods} == {route.endpoint}


def test_of_two_patterns_that_fit_a_path_the_first_has_it(table):
    app, runtime = fastapi.FastAPI(openapi_url=None, docs_url=None, redoc_url=None), table[1][""]._runtime

    def told(name):
        async def endpoint(request: fastapi.Request):
            return JSONResponse([name, request.path_params])

        return endpoint

    for path, methods in (("/v1/things/{name}", ["GET"]), ("/v1/things/{way:path}", ["GET", "POST"])):
        app.add_api_route(path, told(path), methods=methods)
    gate = Gate(app, runtime)
    for method, path in itertools.product(("GET", "POST"), ("/v1/things/a", "/v1/things/a/b")):
        status, _, body = ask(gate, method, path)
        assert (status, body) == (200, ask(app, method, path)[2])
    assert ask(gate, "GET", "/v1/things/a")[2] == ["/v1/things/{name}", {"name": "a"}]


def test_a_line_end_is_no_end_of_a_path(server, table):
    """In a pattern, `$` is also before it: FastAPI takes this for the same path without."""
    app, gates = table
    for path, name in (("/live\n", "/live"), ("/v1/models/tiny\n", "/v1/models/{model_id:path}")):
        assert name in ask(app, "GET", path)[2][0]
        assert ask(gates[""], "GET", path)[0] == 404
    assert server.client.get("/v1/models/tiny").status_code == 200
    assert server.client.get("/v1/models/tiny%0A").status_code == 404


def test_routes_of_fastapi_are_what_the_gate_takes_them_for(server):
    versions = f"FastAPI {fastapi.__version__}, Starlette {starlette.__version__}"
    for route in server.runtime.gate.app.routes:
        for name, kind in READ.items():
            assert hasattr(route, name), f"a route of {versions} has no `{name}`, which fastllm/server/gate.py and openapi.py read"
            assert isinstance(getattr(route, name), kind), f"`{name}` of a route of {versions} is {type(getattr(route, name)).__name__}, not {kind.__name__}"
        assert callable(getattr(route.path_regex, "fullmatch", None)), f"`path_regex` of a route of {versions} is no pattern of `re`"
        assert route.endpoint.__module__.startswith("fastllm.server."), f"`endpoint` of a route of {versions} is not the function that was given"
