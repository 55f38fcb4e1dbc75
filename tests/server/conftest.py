"""A server in a thread of the test process, on a port of its own, around a tiny model; and clients for it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from fastllm.loading import LoadedModel, LoadOptions, load_model
from fastllm.server.openapi import describe
from fastllm.server.runtime import Runtime
from fastllm.server.serve import open_sockets, serve
from fastllm.server.settings import ServerSettings

from .described import Description

WAIT_S = 60


def _interface() -> Any:
    spec = importlib.util.spec_from_file_location("interface_conftest", Path(__file__).parents[1] / "interface" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder: two layers, random weights, byte tokenizer, ChatML template, context 1024."""
    parts = _interface()
    folder = tmp_path_factory.mktemp("served") / "tiny"
    folder.mkdir()
    shutil.copy(parts.FIXTURES / "llama" / "model.safetensors", folder)
    config = json.loads((parts.FIXTURES / "llama" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    (folder / "tokenizer.json").write_text(parts.byte_tokenizer().to_str())
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    settings = {**special, "chat_template": parts.TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.5, "top_p": 0.9}))
    return folder


class Server:
    """A running server: url, runtime (look, do not touch: it belongs to the loop's thread), engine. What `client` gets in JSON is held to what
    /openapi.json says."""

    def __init__(self, settings: ServerSettings, load: Callable[[], LoadedModel], hosts=("127.0.0.1",), wait: bool = True, tls: Any = None):
        self.settings = settings
        self.sockets = open_sockets(hosts, 0, None)
        self.port = self.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.code: int | None = None
        self.error: BaseException | None = None
        self.runtime: Runtime | None = None
        self.client = httpx2.Client(base_url=self.url, timeout=WAIT_S, event_hooks={"response": [self._described]})
        self._up = threading.Event()
        self._load, self._tls = load, tls
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until it is ready."""
        assert self._up.wait(WAIT_S)
        if self.error is not None:
            raise self.error

    @cached_property
    def description(self) -> Description:
        """What it says of its routes."""
        return Description(describe(self.runtime.gate.app, self.settings))

    def _described(self, answer: Any) -> None:
        if self.runtime is not None:
            streams = answer.headers.get("content-type", "").startswith("text/event-stream")
            request, raw = answer.request, b"" if streams else answer.read()
            self.description.answer(request.method, request.url.path.removeprefix(self.settings.root_path), answer.status_code, answer.headers, raw)

    def _run(self) -> None:
        def ready(runtime: Runtime) -> None:
            self.runtime = runtime
            self.loop = asyncio.get_running_loop()
            self._up.set()

        try:
            self.code = asyncio.run(serve(self.settings, self.sockets, self._load, ready=ready, signals=False, tls=self._tls))
        except BaseException as error:
            self.error = error
        finally:
            self._up.set()

    @property
    def engine(self):
        """The engine behind it."""
        return self.runtime.model.engine

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the server's loop."""

        async def on_loop() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(WAIT_S)

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def close(self) -> None:
        """Ends it, and waits."""
        self.client.close()
        if self.runtime is not None and self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.runtime.stop)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@pytest.fixture(scope="session")
def start(model_folder) -> Callable[..., Server]:
    """start(options={}, **settings) -> a server; the caller closes it. before: called before the model is loaded."""

    def start(
        options: dict[str, Any] | None = None,
        model: Path | None = None,
        wait: bool = True,
        before: Callable[[], Any] = lambda: None,
        tls: Any = None,
        **settings: Any,
    ) -> Server:
        chosen = LoadOptions(offline=True, **{"backend": "cpu_avx", "threads": 1, **(options or {})})
        given = {"names": ("tiny", "org/tiny"), "preparers": 1, **settings}
        return Server(ServerSettings(**given), lambda: (before(), load_model(model or model_folder, chosen))[1], wait=wait, tls=tls)

    return start


@pytest.fixture(scope="session")
def server(start) -> Iterator[Server]:
    """One server for all tests that do not change it."""
    running = start()
    yield running
    running.close()


@pytest.fixture
def claude(server):
    """Anthropic's client, which validates what it reads."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client


@pytest.fixture
def client(server):
    """OpenAI's client, which validates what it reads."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client


@pytest.fixture
def http(server) -> httpx2.Client:
    """A plain HTTP client."""
    return server.client


@pytest.fixture
def served(tmp_path, model_folder) -> Iterator[Callable[..., SimpleNamespace]]:
    """served(*options, form="server") -> a ready process, and a client for it. log: a file for its stderr that is not to be read."""
    running = []

    def start(*options, form=("server",), env=None, model=True, log=None):
        command = [sys.executable, "-m", "fastllm", *form, *([str(model_folder)] if model else []), *(() if "--uds" in options else ("--port", "0")), *options]
        environment = {**os.environ, "FASTLLM_OFFLINE": "1", "XDG_STATE_HOME": str(tmp_path), **(env or {})}
        log = (tmp_path / f"log{len(running)}").open("a+") if log is None else log  # appended to: reading moves where the process would write
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, stdin=subprocess.DEVNULL)

        def said():
            log.seek(0)
            return log.read()

        running.append((process, log))
        url = process.stdout.readline().strip()
        assert url, said()
        transport = httpx2.HTTPTransport(uds=url.removeprefix("unix:")) if url.startswith("unix:") else None
        client = httpx2.Client(base_url="http://localhost" if transport else url, transport=transport, timeout=WAIT_S)

        def end(number=signal.SIGTERM):
            client.close()
            process.send_signal(number)
            return process.wait(WAIT_S)

        return SimpleNamespace(url=url, http=client, process=process, end=end, said=said)

    yield start
    for process, log in running:
        process.kill()
        process.wait()
        process.stdout.close()
        log.close()


class Brake:
    """Holds an engine's thread before each step, so that tests decide what happens meanwhile. `error`: raised instead of the step."""

    def __init__(self, engine: Any):
        self._engine, self._runner = engine, engine._runner
        self._go, self.entered = threading.Semaphore(0), threading.Semaphore(0)
        self.error: Exception | None = None
        self._open = False
        engine._runner = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Any) -> Any:
        """One step, when it is let."""
        self.entered.release()
        if not self._open:
            assert self._go.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error
        return self._runner.run(batch)

    def wait(self) -> None:
        """Until the engine stands before a step."""
        assert self.entered.acquire(timeout=WAIT_S)

    def step(self, times: int = 1) -> None:
        """Lets steps run."""
        self._go.release(times)

    def release(self) -> None:
        """Off: the engine runs as always."""
        self._open = True
        self._engine._runner = self._runner
        self._go.release(1 << 20)


@pytest.fixture
def brake() -> Iterator[Callable[[Server], Brake]]:
    """brake(server) -> its engine held; let go at the end."""
    made: list[Brake] = []

    def hold(server: Server) -> Brake:
        made.append(Brake(server.engine))
        return made[-1]

    yield hold
    for one in made:
        one.release()


class Script:
    """Stands between engine and model, and says a text instead of what the model says, token by token, as far as the request's own grammar
    lets it; what that refused is noted, and the model's choice is taken. For one request at a time."""

    def __init__(self, server: Server):
        self._engine, self._runner = server.engine, server.engine._runner
        self._tokenizer = server.runtime.model.tokenizer
        server.engine._runner = self
        self.say("")

    def say(self, text: str) -> None:
        """From the next request on."""
        self._at, self.refused = 0, list[int]()
        self._ids = [*self._tokenizer.encode(text, add_special=False, parse_special=True), 2]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Any) -> Any:
        """One step."""
        if not len(batch.sample_rows):
            return self._runner.run(batch)
        sampler = batch.sampler
        rows = sampler()
        batch.sampler = lambda: rows
        result, token = self._runner.run(batch), self._ids[min(self._at, len(self._ids) - 1)]
        batch.sampler = sampler  # the next step may use this batch again
        self._at += 1
        held = [constraint for row, _, constraint, _ in rows.holds.rows if row == 0] if rows.holds is not None else []
        mask = held[0].mask() if held else None
        if mask is None or mask[token // 32] >> (token % 32) & 1:
            result.ids[0] = token
        else:
            self.refused.append(token)
        return result


@pytest.fixture
def script(server: Server) -> Iterator[Script]:
    """The session's server, which says what a test writes."""
    made = Script(server)
    yield made
    made._engine._runner = made._runner


def until(condition: Callable[[], bool], why: str = "") -> None:
    """Waits for what another thread will do."""
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, why
        time.sleep(0.002)


def frames(raw: bytes) -> list[Any]:
    """The events of a stream: parsed data, "[DONE]", or a comment as it is."""
    assert raw.endswith(b"\n\n")
    found: list[Any] = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            found.append(block)
            continue
        [line] = [x for x in block.split("\n") if x.startswith("data: ")]
        data = line.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


@pytest.fixture(scope="session")
def parse() -> Callable[[bytes], list[Any]]:
    """parse(bytes of a stream) -> its events."""
    return frames


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """wait_until(condition): for what another thread will do."""
    return until
