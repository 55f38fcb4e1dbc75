"""The web page as the server gives it out, and `fastllm webui`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import httpx2
import pytest

WAIT_S = 60


def test_the_page_needs_no_key_and_what_it_calls_does(start):
    running = start(keys=("a-good-key",))
    try:
        text = running.client.get("/").text
        for path in re.findall(r'(?:src|href)="(assets/[^"]+)"', text):
            assert running.client.get(f"/{path}").status_code == 200
        assert running.client.get("/v1/models").status_code == 401
        assert running.client.get("/props").status_code == 401
    finally:
        running.close()


def test_the_page_comes_with_its_policy_and_is_packed_once(http):
    answer = http.get("/", headers={"accept-encoding": "identity"})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert http.get("/", headers={"if-none-match": answer.headers["etag"], "accept-encoding": "identity"}).status_code == 304
    assert http.get("/assets/app.js").headers["content-encoding"] == "gzip"
    assert http.get("/assets/../page.py").status_code == 404
    assert http.post("/").status_code == 405


def test_without_the_page_its_routes_say_so(start):
    running = start(web=False)
    try:
        for path in ("/", "/assets/app.js"):
            answer = running.client.get(path)
            assert answer.status_code == 501
            assert "--no-web" in answer.json()["error"]["message"]
    finally:
        running.close()


def test_the_page_knows_the_prefix_of_a_proxy(start):
    running = start(root_path="/llm")
    try:
        for address in ("/llm", "/llm/", "/"):
            found = re.search(r'src="(/llm/assets/app\.js[^"]*)"', running.client.get(address).text)
            assert running.client.get(found[1]).status_code == 200
    finally:
        running.close()


@pytest.fixture
def webui(tmp_path, model_folder):
    """webui(*options, **environment) -> (what it printed on stdout first, and then end() -> exit code and stderr)."""
    running = []

    def start(*options, **environment):
        command = [sys.executable, "-m", "fastllm", "webui", str(model_folder), "--port", "0", *options]
        plain = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")}
        log = (tmp_path / "log").open("w+")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**plain, "FASTLLM_OFFLINE": "1", **environment})
        running.append((process, log))

        def end():
            process.send_signal(signal.SIGTERM)
            code = process.wait(WAIT_S)
            log.seek(0)
            return code, log.read()

        return process.stdout.readline().strip(), end

    yield start
    for process, log in running:
        process.kill()
        process.wait()
        process.stdout.close()
        log.close()


def test_webui_opens_the_page_in_the_browser(webui, tmp_path):
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    os.mkfifo(seen)
    browser.write_text(f'#!/bin/sh\necho "$1" > "{seen}"\n')
    browser.chmod(0o755)
    address, end = webui("--root-path", "/llm", BROWSER=f"{browser} %s")
    assert seen.read_text() == f"{address}/llm/\n"
    assert httpx2.get(f"{address}/llm/").status_code == 200
    code, said = end()
    assert code == 0
    assert f"the page is at {address}/llm/; the browser opens it" in said


@pytest.mark.parametrize(("options", "environment"), [(["--no-open"], {"BROWSER": "false %s"}), ([], {})])
def test_webui_prints_the_address_where_there_is_no_browser(webui, options, environment):
    address, end = webui("--quiet", *options, **environment)
    code, said = end()
    assert code == 0
    assert said.count(f"fastllm: the page is at {address}/\n") == 1


@pytest.mark.parametrize("options", [["--no-web"], ["--uds", "x"], ["--embedding"]])
def test_webui_refuses_what_leaves_no_page(model_folder, options):
    done = subprocess.run([sys.executable, "-m", "fastllm", "webui", str(model_folder), *options], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert f"{options[0]} leaves no page to open" in done.stderr
