"""Other engines on the same model, in turns with ours: A B A B, medians and ratios.

Each engine, ours too, runs in a process of its own that speaks `workers/protocol.py`, so all are loaded while one is measured. Those that are not
are stopped (SIGSTOP): the threads of some engines spin while they wait for work, and would take the cores. What cannot be installed, loaded or
measured is a row with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastllm.bench import Row, Spread
from fastllm.core.errors import UsageError

from .engine import needs, parse
from .environments import WORKERS, Unavailable, environment
from .models import model_path

__all__ = ["OURS", "PEERS", "Peer", "Process", "WorkerError", "asked", "backend_rows", "peer_rows", "speed"]


@dataclass(frozen=True)
class Peer:
    """How an engine is measured. source: type of file it reads (`gguf` or `hf`, made of the same weights); environment "" is ours."""

    environment: str
    worker: str
    source: str = "gguf"
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0
    note: str = ""


PEERS: dict[str, Peer] = {
    "llama.cpp": Peer("llama.cpp", "peer_llama_cpp.py"),
    "llama.cpp-flash": Peer("llama.cpp", "peer_llama_cpp.py", options={"flash": "on"}, note="flash attention"),
    "llama.cpp-avx2": Peer("llama.cpp-avx2", "peer_llama_cpp.py"),
    "ik_llama.cpp": Peer("ik_llama.cpp", "peer_ik_llama.py"),
    "ftllm-1": Peer("ftllm", "peer_ftllm.py", "hf", {"dtype": "int4g128"}, threads=1),
    "ftllm-2": Peer("ftllm", "peer_ftllm.py", "hf", {"dtype": "int4g128"}, threads=2),
    "openvino": Peer("openvino", "peer_openvino.py"),
    "onnxruntime": Peer("onnxruntime", "peer_onnxruntime.py", "hf"),
    "torch-bf16": Peer("torch", "peer_torch.py", "hf", {"dtype": "bf16"}),
    "torch-int8": Peer("torch", "peer_torch.py", "hf", {"dtype": "int8"}),
}


class WorkerError(Exception):
    """What a worker answered instead of a result, or that it died."""


class Process:
    """A worker and what it starts, a process group of its own that runs only while it answers. Close it. patience_s: a worker that does not
    answer for so long is ended; it may have to convert a model.

    Nobody stays behind stopped: ending works on stopped processes, and a worker whose parent dies is killed (`protocol.serve`).
    """

    patience_s = 220.0

    def __init__(self, python: str | Path, script: Path, log: Path | None = None, prefix: Sequence[str] = ()):
        """prefix: a command in front, which becomes the worker (`taskset -c 0`)."""
        self._log = log.open("wb") if log else None
        # a folder of this repository in front of the search path would hide packages of the same name
        self._process = subprocess.Popen(
            [*prefix, os.fspath(python), os.fspath(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log or subprocess.DEVNULL,
            text=True,
            cwd=script.parent,
            process_group=0,
        )

    def call(self, do: str, **arguments: Any) -> Any:
        """The result; the worker is stopped when it is there. Raises WorkerError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        given_up = threading.Event()
        late = threading.Timer(self.patience_s, lambda: (given_up.set(), self._signal(signal.SIGKILL)))
        late.start()
        try:
            self._signal(signal.SIGCONT)
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            if line:
                self._stop()
        except OSError:
            line = ""
        finally:
            late.cancel()
        if not line:
            code = self._process.wait()
            if given_up.is_set():
                raise WorkerError(f"the engine did not {do} within {self.patience_s:g} s")
            raise WorkerError(f"the engine's process ended while it was asked to {do}" + (f" (signal {-code})" if code < 0 else f" (exit code {code})"))
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def _signal(self, number: int) -> None:
        """To the whole group, as long as its first process has not been waited for: then its number may be somebody else's."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, number)

    def _stop(self) -> None:
        """Stops the group and waits until its first process is, or has ended (WNOWAIT: its exit code is for `wait`)."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        """Ends the process."""
        self._signal(signal.SIGCONT)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        if self._log:
            self._log.close()


def start(peer: Peer, name: str, log: Path | None) -> tuple[Process, str]:
    """The peer's process, and which build it is. Raises Unavailable."""
    if not peer.environment:
        return Process(sys.executable, WORKERS / peer.worker, log), peer.note
    made = environment(peer.environment)
    return Process(made.python, WORKERS / peer.worker, log), ", ".join(filter(None, (made.note, peer.note)))


OURS = Peer("", "peer_fastllm.py")


def peer_rows(
    model: str, names: Sequence[str], cells: Sequence[str], repeat: int, threads: int, options: Mapping[str, str], logs: Path | None = None
) -> Iterator[tuple[str, dict[str, Any], Row, Spread | None]]:
    """(peer, its options, row, our spread) for every peer and cell, as soon as it is measured. options: of our engine."""
    context, streams = needs(cells)
    context = -(-context // 64) * 64 + 64
    paths: dict[str, str] = {}

    def load(peer: Peer, name: str, chosen: Mapping[str, Any]) -> tuple[Process, dict[str, Any]]:
        source = peer.source
        if source not in paths:
            shape = model.partition("-")[0]
            paths[source] = os.fspath(model_path(f"{shape}-hf" if source == "hf" else model))
        process, build = start(peer, name, logs / f"{name}.log" if logs else None)
        try:
            count = peer.threads or threads
            facts = process.call("load", path=paths[source], threads=count, context=context, streams=streams, options=dict(chosen))
        except BaseException:
            process.close()
            raise
        return process, {"threads": count, **chosen, "version": facts["version"], **({"build": build} if build else {})}

    ours, _ = load(OURS, "fastllm", options)
    try:
        for name in names:
            peer = PEERS[name]
            try:
                theirs, found = load(peer, name, peer.options)
            except (WorkerError, Unavailable, RuntimeError) as error:
                yield name, dict(peer.options), Row("load", {}, reason=str(error)), None
                continue
            try:
                for cell in cells:
                    yield name, found, *compare(cell, ours, theirs, repeat)
            finally:
                theirs.close()
    finally:
        ours.close()


def backend_rows(model: str, names: Sequence[str], cells: Sequence[str], repeat: int, threads: int) -> Iterator[tuple[str, dict[str, Any], Row, Spread | None]]:
    """(backend, what was found, row with its share of the speed of `cpu_avx`, spread of `cpu_avx`) for every backend and cell, in turns as with other engines.

    threads: 0 = as many as each takes by itself; a backend that computes with another number than was asked for is not measured. Raises WorkerError if `cpu_avx` fails."""
    context, streams = needs(cells)
    asked_for = {"path": os.fspath(model_path(model)), "threads": threads, "context": -(-context // 64) * 64 + 64, "streams": streams}
    ours, _ = start(OURS, "fastllm", None)
    try:
        mine = ours.call("load", **asked_for, options={"backend": "cpu_avx"})["threads"]
        for name in names:
            theirs, _ = start(OURS, name, None)
            try:
                facts = theirs.call("load", **asked_for, options={"backend": name})
                if threads and facts["threads"] != threads:
                    raise WorkerError(f"it computes with {facts['threads'] or 'its own number of'} threads, not the {threads} that were asked for; leave --threads out")
            except WorkerError as error:
                theirs.close()
                yield name, {}, Row("load", {}, reason=str(error)), None
                continue
            found = {**({"threads": facts["threads"]} if facts["threads"] else {}), "ours.threads": mine, "version": facts["version"]}
            try:
                for cell in cells:
                    yield name, found, *compare(cell, ours, theirs, repeat, share=True)
            finally:
                theirs.close()
    finally:
        ours.close()


def compare(cell: str, ours: Process, theirs: Process, repeat: int, share: bool = False) -> tuple[Row, Spread | None]:
    """One cell of both in turns: (row of the peer with our ratio, our spread), or why the peer has none. share: the ratio is its speed over ours, not ours over its.
    Raises WorkerError if ours fails."""
    name, params = asked(cell)
    mine, others = [], []
    for turn in range(repeat + 1):  # the first is to warm up
        own = speed(ours, name, params)
        try:
            other = speed(theirs, name, params)
        except WorkerError as error:
            return Row(name, params, reason=str(error)), None
        if turn:
            mine.append(own)
            others.append(other)
    ratio = Spread.of(b / a if share else a / b for a, b in zip(mine, others, strict=True))
    return Row(name, params, "tok/s", Spread.of(others), ratio=ratio, limit_of="this backend / cpu_avx" if share else "fastllm / this engine"), Spread.of(mine)


def asked(cell: str) -> tuple[str, dict[str, int]]:
    """What a worker is asked for, and with what. Raises UsageError for a cell that workers do not measure."""
    name, size = parse(cell)
    params: dict[str, dict[str, int]] = {"prefill": {"tokens": size}, "decode": {"context": size, "tokens": 24}, "batch": {"streams": size, "tokens": 24}}
    if name not in params:
        raise UsageError(f"workers have no cell '{cell}'; there are prefill:N, decode:N, batch:N")
    return name, params[name]


def speed(process: Process, name: str, params: Mapping[str, int]) -> float:
    """Tokens per second. Raises WorkerError."""
    value = float(process.call(name, **params))
    return value if name == "batch" else (params["tokens"] if name == "prefill" else 1) / value
