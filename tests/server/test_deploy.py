"""What docs/server.md tells to write for nginx and systemd, run as it stands there."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx2
import pytest

DOCUMENT = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
KEY = {"authorization": "Bearer correct-horse-1"}


def block(title):
    """The first block of code under a title."""
    return re.search(rf"^## {title}$.*?^```text\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def nginx(tmp_path):
    """nginx(port of the server) -> its own address."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    running = []

    def start(port):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            own = probe.getsockname()[1]
        location = block("Behind nginx").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        folders = "".join(f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        http = f"access_log off; {folders} server {{ listen 127.0.0.1:{own}; {location} }}"
        main = f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/errors; worker_processes 1; events {{}} http {{ {http} }}"
        (tmp_path / "nginx.conf").write_text(main)
        running.append(subprocess.Popen([program, "-e", f"{tmp_path}/errors", "-c", str(tmp_path / "nginx.conf")], stderr=subprocess.PIPE))
        return f"http://127.0.0.1:{own}/llm"

    yield start
    for process in running:
        process.terminate()
        process.communicate(timeout=60)


def test_behind_nginx_streams_flow_and_a_client_that_goes_is_seen(start, nginx, brake, wait_until):
    server = start(keys=("correct-horse-1",), root_path="/llm")
    try:
        with httpx2.Client(base_url=nginx(server.port), headers=KEY, timeout=60) as http:
            limit = time.monotonic() + 60
            while True:
                try:
                    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
                    break
                except httpx2.ConnectError:
                    assert time.monotonic() < limit
            held = brake(server)
            body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                lines = answer.iter_lines()
                held.step(3)
                assert json.loads(next(lines).removeprefix("data: "))["choices"]  # it is here while the engine stands before the next step
                assert server.runtime.active
            wait_until(lambda: not server.runtime.active)
            held.release()
            wait_until(lambda: server.engine.stats().blocks_used == 0)
            assert server.engine.stats().requests_cancelled == 1
            big = http.post("/v1/completions", json={"prompt": "x " * 2_000_000})
            assert (big.status_code, big.json()["error"]["code"]) == (400, "context_length_exceeded")
    finally:
        server.close()


def test_the_systemd_unit_is_one(tmp_path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    unit = block("As a systemd unit")
    command = tmp_path / "fastllm"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    path = tmp_path / "fastllm.service"
    path.write_text(unit.replace("/opt/fastllm/bin/fastllm", str(command)))
    done = subprocess.run([program, "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if "fastllm" in line]
    assert not ours, done.stderr
    assert "Restart=on-failure" in unit
