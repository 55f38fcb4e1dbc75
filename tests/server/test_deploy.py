"""What docs/server.md tells to write for nginx and systemd, run as it stands there."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx2
import psutil
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
            address = str(http.base_url).rpartition("/llm")[0]  # what a browser says of the page, which is at a port of its own
            own = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}, headers={"origin": address})
            assert (own.status_code, http.get("/", headers={"origin": address}).status_code) == (200, 200)
            assert http.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
            held = brake(server)
            body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}  # drawn tokens may begin inside of a character
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


def instructions(recipe):
    """[(instruction, arguments)] of a Dockerfile; of those in JSON the list."""
    lines = re.sub(r"\\\n\s*", " ", recipe).splitlines()
    found = [line.split(" ", 1) for line in lines if line.strip() and not line.startswith("#")]
    return [(name, json.loads(rest) if rest.startswith("[") else rest) for name, rest in found]


def test_the_container_runs_what_its_recipe_says(served, model_folder, tmp_path):
    """Entry point and command of the recipe, as they stand there, with the model and the keys in place of the volumes'. The image itself is built by
    scripts/check_container.py, which needs a tool for images."""
    steps = instructions(block("In a container"))
    assert {name for name, _ in steps} == {"FROM", "RUN", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    last = dict(steps)
    assert (last["USER"], last["EXPOSE"]) == ("fastllm", "8000")
    assert [rest for name, rest in steps if name == "RUN"][-1].endswith(" fastllm")  # the user is there before it is named
    program, *words = [*last["ENTRYPOINT"], *last["CMD"]]
    keys = tmp_path / "keys"
    keys.write_text("correct-horse-1\n")
    places = {"/models/model.gguf": str(model_folder), "/run/secrets/keys": str(keys)}
    assert program == "fastllm"
    assert set(places) <= set(words)
    server = served(form=[places.get(word, word) for word in words], model=False)
    port = server.url.rpartition(":")[2]
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        assert http.get("/ready").status_code == 200
        assert http.get("/v1/models").status_code == 401
        assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}, headers=KEY).status_code == 200
    assert server.end() == 0


TOOL = """#!/bin/sh
echo "$0 $@" >>"$LOG"
case "$1" in
inspect) echo '{"OCIv1": {"config": {"User": "fastllm", "Entrypoint": ["fastllm"], "Cmd": ["server"]}}}' ;;
run) sleep 600 & echo $! >"$LOG.child"; wait ;;
esac
"""


@pytest.mark.parametrize("tool", ["docker", "buildah"])
def test_the_check_of_the_container_leaves_none_behind_and_asks_no_other(tool, tmp_path, monkeypatch, capsys, wait_until):
    """With a tool that starts something which would go on without it."""
    spec = importlib.util.spec_from_file_location("check_container", Path(__file__).parents[2] / "scripts" / "check_container.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    program, log, child = tmp_path / tool, tmp_path / "log", tmp_path / "log.child"
    program.write_text(TOOL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setattr("sys.argv", ["check_container.py", str(tmp_path), "--tool", tool, "--built"])
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(script, "ADDRESS", other.getsockname())
        assert script.main() == 1
    assert "answers already" in capsys.readouterr().out
    assert not log.exists()

    def failed(process):
        wait_until(lambda: child.exists() and child.read_text().endswith("\n"))
        return "it failed"

    monkeypatch.setattr(script, "check", failed)
    assert script.main() == 1  # nobody listens there now
    assert "it failed" in capsys.readouterr().out
    name = f"fastllm-check-{os.getpid()}"
    calls = [line.split()[1:] for line in log.read_text().splitlines()]
    if tool == "docker":
        assert [c[:4] for c in calls] == [["run", "--rm", "--name", name], ["rm", "-f", name]]
    else:
        assert [c[0] for c in calls] == ["from", "inspect", "run", "rm"]
        assert calls[0] == ["from", "--name", name, "fastllm-check"]
        assert calls[-1] == ["rm", name]
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(child.read_text())).status() == psutil.STATUS_ZOMBIE
