"""Who may call: keys, Host, Origin, and templates that do not end."""

from __future__ import annotations

import json
import shutil

import pytest

KEYS = ("correct-horse-1", "battery-staple-2")
PUBLIC = ("/live", "/health", "/ready", "/", "/assets/app.js", "/assets/app.css", "/assets/icon.svg")


@pytest.fixture(scope="module")
def guarded(start):
    server = start(keys=KEYS, origins=("https://chat.example",))
    yield server
    server.close()


def status(server, headers=None, path="/v1/models", method="GET"):
    return server.client.request(method, path, headers=headers or {})


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_in_both_headers(guarded, key):
    assert status(guarded, {"authorization": f"Bearer {key}"}).status_code == 200
    assert status(guarded, {"x-api-key": key}).status_code == 200
    assert status(guarded, {"authorization": f"bearer {key}", "x-api-key": key}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer")],
        [("authorization", "Bearer wrong-key-00")],
        [("authorization", f"Basic {KEYS[0]}")],
        [("x-api-key", "")],
        [("authorization", f"Bearer {KEYS[0]}"), ("x-api-key", KEYS[1])],
        [("authorization", f"Bearer {KEYS[0]}"), ("authorization", "Bearer wrong-key-00")],
        [("x-api-key", "schl\xfcssel-123".encode("latin-1"))],
    ],
)
def test_everything_else_is_refused(guarded, headers):
    answer = guarded.client.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert KEYS[0] not in answer.text


def test_a_key_in_the_url_is_refused_even_beside_a_right_one(guarded):
    assert status(guarded, {"x-api-key": KEYS[0]}, f"/v1/models?api_key={KEYS[0]}").status_code == 401


def test_every_route_but_the_public_ones_wants_a_key(guarded):
    """Walks the table of routes, in every spelling."""
    document = status(guarded, {"x-api-key": KEYS[0]}, "/openapi.json").json()
    paths = [p.replace("{model_id}", "tiny").replace("{response_id}", "x") for p in document["paths"]]
    assert len(paths) > 15
    for path in paths:
        for spelling in (path, path + "/", path.removeprefix("/v1"), "/v1" + path if not path.startswith("/v1") and path != "/" else path):
            for method in ("GET", "POST"):
                wanted = path not in PUBLIC
                assert (status(guarded, path=spelling, method=method).status_code == 401) == wanted, spelling
    assert status(guarded, path="/nothing").status_code == 401


def test_the_key_is_asked_before_the_body_is_read(guarded):
    with guarded.connect() as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n")
        assert raw.makefile("rb").read(12) == b"HTTP/1.1 401"


def test_pages_of_other_origins_are_refused_unless_named(guarded):
    key = {"x-api-key": KEYS[0]}
    assert status(guarded, {**key, "origin": "https://evil.example"}).status_code == 403
    assert status(guarded, {**key, "origin": "null"}).status_code == 403
    own = status(guarded, {**key, "origin": guarded.url})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers
    named = status(guarded, {**key, "origin": "https://chat.example"})
    assert named.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-credentials" not in named.headers


def test_preflights_need_no_key_and_allow_named_origins_only(guarded):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = status(guarded, {**ask, "origin": "https://chat.example"}, "/v1/chat/completions", "OPTIONS")
    assert answer.status_code == 204
    assert not {"content-length", "transfer-encoding"} & set(answer.headers)  # RFC 9110, 8.6, and RFC 9112, 6.1
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert status(guarded, {**ask, "origin": "https://evil.example"}, "/v1/chat/completions", "OPTIONS").status_code == 403


def test_keys_can_be_replaced_while_the_server_runs(start):
    server = start(keys=("first-key-123",))
    try:
        server.call(lambda: server.runtime.gate.set_keys(["second-key-123"]))
        assert status(server, {"x-api-key": "first-key-123"}).status_code == 401
        assert status(server, {"x-api-key": "second-key-123"}).status_code == 200
    finally:
        server.close()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("page.localhost", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_without_a_key_only_local_names_reach_a_local_server(server, host, code):
    assert status(server, {"host": host}).status_code == code
    assert status(server, {"host": host, "origin": f"http://{host}"}).status_code == code  # rebinding: both are the page's name


def test_defects_show_no_traceback_and_no_path(start, capsys):
    server = start()
    try:

        async def broken(kind, body):
            raise RuntimeError("/secret/path is broken")

        server.runtime.pool.prepare = broken
        http = server.client
        answer = http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["x-request-id"] in answer.text
        assert "secret" not in answer.text
        claude = http.post("/v1/messages", json={"max_tokens": 1, "messages": []})
        assert claude.json()["error"]["type"] == "api_error"
    finally:
        server.close()
    assert "/secret/path is broken" in capsys.readouterr().err


def test_no_answer_of_any_route_names_a_path_or_shows_code(server, http, model_folder):
    document = http.get("/openapi.json").json()
    messages = [{"role": "user", "content": "Hi"}]
    good = {"messages": messages, "prompt": "a", "input": "a", "tokens": [70], "content": "a", "max_tokens": 2, "id": "x"}
    bad = [{}, [], None, {**good, "messages": "x", "prompt": {}, "input": 1, "tokens": "x", "id": 1, "content": 1}]
    bad += [{**good, "temperature": 99, "chat_template": "{{ x }}"}, {**good, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}}}]
    bad += [{**good, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}]
    words = (str(model_folder), str(model_folder.parent), "Traceback", 'File "', "site-packages", ".py", "root:", "/home/", "/tmp/", "/root")
    seen = 0
    for path, methods in document["paths"].items():
        for method in methods:
            for body in [good, *bad] if method == "post" else [None]:
                target = path.replace("{model_id}", "no/such").replace("{response_id}", "x")
                answer = http.request(method.upper(), target, json=body)
                shown = answer.text + str(answer.headers)
                assert answer.status_code < 500 or answer.status_code == 501, (path, body, answer.text)
                assert not [word for word in words if word in shown and not path.startswith("/assets")], (path, body)
                seen += 1
    assert seen > 80


@pytest.fixture(scope="module")
def endless(start, model_folder, tmp_path_factory):
    """A server whose template does not end for one message, in Python's own code, where no budget is looked at."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(model_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    loop = "{% if messages[0]['content'] == 'loop' %}{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}{% endif %}"
    loop += "{% if messages[0]['content'] == 'long' %}{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}{% endif %}"
    settings["chat_template"] = loop + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    server = start(model=folder)
    yield server
    server.close()


@pytest.mark.parametrize("text", ["loop", "long"])
def test_a_template_that_does_not_end_is_a_bad_request_and_the_next_one_is_answered(endless, text):
    http = endless.client
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "template_error")
    assert "range(" not in answer.text
    assert http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("used_s", "status", "code"),
    [(None, 503, "unavailable"), (100.0, 400, "template_error")],  # one that did not run is not the request's fault
)
def test_a_process_that_does_not_answer_is_killed_and_replaced(start, monkeypatch, used_s, status, code):
    import os
    import signal

    from fastllm.server import pool

    server = start()
    try:
        if used_s is not None:
            used = iter([0.0, used_s])
            monkeypatch.setattr(pool._Process, "cpu_s", lambda self: next(used))
        [pid] = server.call(lambda: server.runtime.pool.pids)
        os.kill(pid, signal.SIGSTOP)
        server.runtime.pool._deadline_s = 0.1
        http = server.client
        answer = http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert ("retry-after" in answer.headers) == (status == 503)
        assert http.get("/health").status_code == 200
        server.runtime.pool._deadline_s = 10
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        server.close()
