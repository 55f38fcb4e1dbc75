"""`fastllm server` as a process and as a command line: options, variables, files, signals, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fastllm import loading

WAIT_S = 60


def test_it_serves_logs_without_texts_and_ends_at_a_signal(served):
    server = served("--progress", "json", "--model-name", "mine")
    answer = server.http.post("/v1/completions", json={"prompt": "my secret words", "max_tokens": 3, "seed": 1})
    assert answer.json()["model"] == "mine"
    children = psutil.Process(server.process.pid).children()
    assert len(children) == 1
    assert server.end() == 0
    psutil.wait_procs(children, timeout=WAIT_S)
    assert not any(child.is_running() for child in children)
    log = server.said()
    assert {json.loads(line)["event"] for line in log.splitlines()} >= {"message", "request"}  # the log, too, is JSON then
    assert '"tokens": 3' in log
    assert answer.headers["x-request-id"] in log
    assert "secret" not in log
    assert "Traceback" not in log


DRIVER = """
import ctypes, signal
from fastllm.api import API_VERSION, OPSET, BackendSpec, DeviceInfo, Ready, RefBackend, hookimpl

class Odd(RefBackend):
    name = "odd"

@hookimpl
def fastllm_backends():
    return [BackendSpec("odd", API_VERSION, OPSET)]

@hookimpl
def fastllm_probe(name):
    return Ready((DeviceInfo("0", "odd"),))

@hookimpl
def fastllm_open_backend(name, device, options):
    take = ctypes.CDLL(None).signal
    take.argtypes, take.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        take(number, 0)  # SIG_DFL
    return Odd()
"""


def test_a_driver_that_takes_the_signals_natively_does_not_keep_them(served, tmp_path):
    plugin, keys = tmp_path / "odd.py", tmp_path / "keys"
    plugin.write_text(DRIVER)
    keys.write_text("first-key-123\n")
    server = served("--plugin", str(plugin), "--backend", "odd", "--fallback", "allow", "--api-key-file", str(keys))
    keys.write_text("second-key-456\n")
    server.process.send_signal(signal.SIGHUP)
    while server.http.get("/v1/models", headers={"x-api-key": "second-key-456"}).status_code != 200:
        pass
    assert server.end() == 0


def test_the_binary_form_serves_too_and_a_key_file_is_read_again(served, model_folder, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# mine\nfirst-key-123\n")
    server = served("--api-key-file", str(keys), form=("--model", str(model_folder), "--http-mode"), model=False)
    assert server.http.get("/v1/models").status_code == 401
    assert server.http.get("/v1/models", headers={"x-api-key": "first-key-123"}).status_code == 200
    keys.write_text("second-key-456\n")
    server.process.send_signal(signal.SIGHUP)
    while server.http.get("/v1/models", headers={"x-api-key": "second-key-456"}).status_code != 200:
        pass
    assert server.http.get("/v1/models", headers={"x-api-key": "first-key-123"}).status_code == 401
    assert server.end(signal.SIGINT) == 0
    assert "key-456" not in server.said()


def test_a_socket_of_the_file_system(served, tmp_path):
    path = tmp_path / "s"
    server = served("--uds", str(path))
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert path.stat().st_mode & 0o007 == 0
    assert server.end() == 0
    assert not path.exists()


@pytest.mark.parametrize("place", [("--port", "8001"), ("--host", "0.0.0.0")])
def test_a_socket_of_the_file_system_has_no_port(command, tmp_path, place):
    seen = command("--uds", str(tmp_path / "s"), *place)
    assert seen.code == 2
    assert f"beside which {place[0]} has no meaning" in seen.err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("log", ["full", "closed"])
def test_a_log_that_cannot_be_written_keeps_nobody_from_being_served(served, log):
    if log == "full":
        stderr = open("/dev/full", "w")  # noqa: SIM115 - the fixture closes it
    else:
        reader, writer = os.pipe()
        os.close(reader)
        stderr = os.fdopen(writer, "w")
    for options in ((), ("--progress", "json")):
        server = served(*options, log=stderr)
        assert server.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
        assert server.end() == 0


@pytest.fixture
def command(monkeypatch, capsys, model_folder):
    """command(*options) -> exit code, stderr, and with what the server would have been started: its settings, what loads its model."""
    import fastllm.server.serve as serve
    from fastllm.cli.main import run_command

    def call(*options, model=model_folder):
        seen = SimpleNamespace(settings=None, options=None)

        async def instead(settings, sockets, load, **more):
            seen.settings, seen.load, seen.defaults = settings, load, more["defaults"]
            return 0

        monkeypatch.setattr(serve, "serve", instead)
        seen.code = run_command(["server", str(model), "--port", "0", *options])
        seen.err = capsys.readouterr().err
        return seen

    return call


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(command, tmp_path, monkeypatch):
    file = tmp_path / "server.toml"
    file.write_text('max-queue = 3\nmax_n = 2\ndrain = 1.5\nallowed-host = "a.example"\nmax-body = "1KiB"\n')
    monkeypatch.setenv("FASTLLM_MAX_N", "3")
    monkeypatch.setenv("FASTLLM_DRAIN", "2.5")
    seen = command("--config", str(file), "--drain", "3.5")
    assert (seen.settings.max_n, seen.settings.drain_s, seen.settings.hosts, seen.settings.max_body) == (3, 3.5, ("a.example",), 1024)


def test_how_long_a_grammar_may_take_to_read_is_an_option(command):
    assert [command(*options).settings.read_s for options in ((), ("--grammar-time", "0.5"))] == [2.0, 0.5]


def test_the_log_is_json_where_one_of_two_options_asks_for_it(command):
    assert [command(*options).settings.json_log for options in ((), ("--log-format", "json"), ("--progress", "json"))] == [False, True, True]


def test_a_model_is_looked_for_in_the_folder_of_cache_dir(command, model_folder, tmp_path, monkeypatch):
    repo, commit = tmp_path / "given" / "hub" / "models--org--name", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(model_folder, repo / "snapshots" / commit)
    monkeypatch.setattr(loading, "load_model", lambda path, options: path)
    seen = command("--offline", "--cache-dir", str(tmp_path / "given"), model="org/name")
    assert seen.code == 0, seen.err
    assert Path(seen.load()) == repo / "snapshots" / commit
    assert command("--offline", model="org/name").settings is None


def test_upstreams_spellings_are_understood(command):
    seen = command("--model_name", "a", "--api_key", "0123456789", "--max_batch", "3", "--page_size", "64", "--dev_mode", "--top_k", "5")
    assert seen.code == 0
    assert (seen.settings.names, seen.settings.keys, seen.settings.dev, seen.defaults.top_k) == (("a",), ("0123456789",), True, 5)
    assert "process lists" in seen.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "--insecure"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--api-key", "short"), "at least 8"),
        (("--api-key-file", "/nonexistent"), "No such file"),
        (("--root-path", "x"), "begin with /"),
        (("--max-body", "many"), "512MiB"),
        (("--kv-cache-size", "x"), "size"),
        (("--max-n", "17"), "17"),
        (("--config", "/nonexistent"), "/nonexistent"),
    ],
)
def test_unsafe_and_wrong_options_are_usage_errors(command, options, said):
    seen = command(*options)
    assert seen.code == 2
    assert said in seen.err
    assert seen.settings is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max-body = 1", "1 is too small: 1,024 bytes at least"),
        ("max-body = -5", "-5 is no size"),
        ("kv-cache-size = -5", "-5 is no size"),
    ],
)
def test_a_size_of_a_file_has_the_limits_of_one_that_is_typed(command, tmp_path, line, said):
    (tmp_path / "server.toml").write_text(line + "\n")
    seen = command("--config", str(tmp_path / "server.toml"))
    assert (seen.code, said in seen.err) == (2, True), seen.err
    assert seen.settings is None


def test_a_number_of_a_file_is_a_size_in_bytes(command, tmp_path):
    (tmp_path / "server.toml").write_text(f"max-body = {3 << 20}\n")
    assert command("--config", str(tmp_path / "server.toml")).settings.max_body == 3 << 20


def test_unknown_keys_of_a_file_are_named(command, tmp_path):
    file = tmp_path / "server.toml"
    file.write_text("prot = 1\n")
    seen = command("--config", str(file))
    assert seen.code == 2
    assert "no option 'prot'" in seen.err


def test_a_port_in_use_is_a_usage_error_before_anything_is_loaded(command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        seen = command("--port", str(taken.getsockname()[1]))
    assert seen.code == 2
    assert "--port 0" in seen.err


def test_insecure_is_needed_to_let_everybody_in(command):
    assert command("--host", "0.0.0.0", "--insecure").settings.local is False
    assert command("--host", "0.0.0.0", "--api-key", "0123456789").settings.local is False
    assert command("--host", "localhost").settings.local is True
