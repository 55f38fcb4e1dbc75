"""Builds the container image of docs/server.md as it stands there, and asks it something as a user of it would.

    python scripts/check_container.py MODEL [--tool docker|podman|buildah] [--isolation chroot] [--base IMAGE] [--built]

MODEL: a file or folder, which the container sees as /models/model.gguf (read only), beside a file of keys. The image must start as its user with its own
entry point and command, want the key, answer a completion and end at SIGTERM with 0. --base: an image that stands for `python:3.12-slim` where no
registry can be asked. Prints what was found; 1 if anything is not so. The container is removed however it ends; nothing else may listen on port 8000.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
KEY, ADDRESS, WAIT_S = "correct-horse-1", ("127.0.0.1", 8000), 60


def recipe() -> str:
    """The Dockerfile of the document."""
    found = re.search(r"^## In a container$.*?^```text\n(.*?)^```$", (ROOT / "docs" / "server.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def build(tool: str, more: list[str], text: str) -> None:
    """The image `fastllm-check`, of what git knows of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, files):
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        (Path(folder) / "Dockerfile").write_text(text)
        subprocess.run([tool, "build", *more, "-t", "fastllm-check", "-f", f"{folder}/Dockerfile", folder], check=True)


def command(tool: str, more: list[str], name: str, mounts: dict[Path, str]) -> list[str]:
    """What runs the image's own entry point and command in a container of that name, on this machine's network."""
    volumes = [part for source, target in mounts.items() for part in ("--volume", f"{source}:{target}:ro")]
    if tool != "buildah":
        return [tool, "run", "--rm", "--name", name, "--network", "host", *volumes, "fastllm-check"]
    subprocess.run([tool, "from", "--name", name, "fastllm-check"], check=True, capture_output=True)
    shown = json.loads(subprocess.run([tool, "inspect", name], check=True, capture_output=True, text=True).stdout)
    config: dict[str, Any] = shown["OCIv1"]["config"]
    return [tool, "run", *more, "--user", config["User"], *volumes, name, "--", *config["Entrypoint"], *config["Cmd"]]


def remove(tool: str, name: str, process: subprocess.Popen[str] | None) -> None:
    """Ends the tool and what it started, and removes the container, which may be gone: one that a client of a daemon leaves goes on without it."""
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()
    subprocess.run([tool, "rm", *([] if tool == "buildah" else ["-f"]), name], check=False, capture_output=True)


def taken() -> bool:
    """Whether somebody answers at the container's address already: that one would be asked."""
    try:
        socket.create_connection(ADDRESS, timeout=5).close()
    except OSError:
        return False
    return True


def ask(path: str, body: dict[str, Any] | None = None, key: str = "") -> tuple[int, bytes]:
    """Status and body of one request."""
    request = urllib.request.Request("http://{}:{}{}".format(*ADDRESS, path), None if body is None else json.dumps(body).encode(), {"content-type": "application/json"})
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def check(process: subprocess.Popen[str]) -> str:
    """What is not as it should be, "" if all is."""
    limit, state = time.monotonic() + WAIT_S, 0
    while state != 200:
        if process.poll() is not None or time.monotonic() > limit:
            return f"the container is not ready: exit code {process.poll()}"
        try:
            state = ask("/ready")[0]
        except OSError:
            time.sleep(0.1)
    if (status := ask("/v1/models")[0]) != 401:
        return f"without a key: {status}, not 401"
    status, raw = ask("/v1/completions", {"prompt": "Hi", "max_tokens": 4}, KEY)
    if status != 200:
        return f"a completion: {status} {raw!r}"
    print(json.loads(raw)["choices"][0], json.loads(ask("/props", key=KEY)[1])["fastllm"]["plan"])
    below = psutil.Process(process.pid).children(recursive=True)
    inside = [p for p in below if [word.endswith("/fastllm") for word in p.cmdline()[:2]] == [False, True] and "buildah" not in p.cmdline()[0]]
    (inside[0] if inside else process).terminate()  # docker and podman hand the signal on; buildah would kill
    return "" if process.wait(WAIT_S) == 0 else f"SIGTERM ended it with {process.returncode}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tool", choices=("docker", "podman", "buildah"), default="docker")
    parser.add_argument("--isolation", default="", help="of buildah")
    parser.add_argument("--base", default="")
    parser.add_argument("--built", action="store_true", help="the image is there")
    asked = parser.parse_args()
    more = ["--isolation", asked.isolation] if asked.isolation else []
    if not asked.built:
        build(asked.tool, more, recipe().replace("python:3.12-slim", asked.base) if asked.base else recipe())
    if taken():
        print("port {1} of {0} answers already: end what listens there, then go on with --built".format(*ADDRESS))
        return 1
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(KEY + "\n")
        keys.chmod(0o644)  # the image's user reads it
        name, process = f"fastllm-check-{os.getpid()}", None
        try:
            mounts = {asked.model.resolve(): "/models/model.gguf", keys: "/run/secrets/keys"}
            process = subprocess.Popen(command(asked.tool, more, name, mounts), text=True)
            wrong = check(process)
        finally:
            remove(asked.tool, name, process)
    print(wrong or "the image does what the document says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
