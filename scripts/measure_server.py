"""Measures what serving costs: a server at eight clients against the engine alone at a batch of eight, the first token of a short request
while a long prompt is read, and how soon /health answers meanwhile and while a body of 20 MB is refused.

    python scripts/measure_server.py [MODEL] [--threads N] [--rounds N] [--input N] [--output N] [--only throughput|latency]

Everything is measured in one run, in turns, `rounds` times; the median, the least and the most are printed. A round of clients is compared with the engine
alone before and after it, and left out if these two differ: then somebody else had the machine. docs/server.md has the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

import psutil

from fastllm import LLM, SamplingParams
from fastllm.cli.bench_serve import percentile, run_load
from fastllm.core.request import Request
from fastllm.server.log import Log
from fastllm.server.runtime import Runtime
from fastllm.server.serve import open_sockets, serve
from fastllm.server.settings import ServerSettings

CLIENTS = 8
WAVES = 2  # requests of each client
STEADY = 0.1  # of the speed alone before and after a round


def decode_rate(answers: Iterable[tuple[int, float]]) -> float:
    """Tokens per second of answers that were written side by side: of each its tokens after the first, over the seconds since the first."""
    return sum((tokens - 1) / seconds for tokens, seconds in answers if tokens > 1) / WAVES


def alone_once(llm: LLM, number: int, size_in: int, size_out: int) -> tuple[float, float]:
    """8 × 2 requests, 8 at a time, without text and without HTTP: tokens per second in all, and while answers are written."""
    rng, params = random.Random(number), SamplingParams(max_tokens=size_out, temperature=0, ignore_eos=True)
    prompts = [[rng.randrange(32, llm.tokenizer.vocab_size) for _ in range(size_in)] for _ in range(WAVES * CLIENTS)]
    start = time.perf_counter()
    handles = [llm.loaded.engine.submit(Request(prompt, params)) for prompt in prompts]
    tokens = sum(len(h.result().choices[0].token_ids) for h in handles)
    seconds = time.perf_counter() - start
    return tokens / seconds, decode_rate((h.timings.decode_tokens, h.timings.decode_s) for h in handles)


class Server:
    """`fastllm server` in a process of its own."""

    def __init__(self, model: str, threads: int):
        command = [sys.executable, "-m", "fastllm", "server", model, "--port", "0", "-t", str(threads), "-q", "--max-batch-size", str(CLIENTS)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def end(self) -> None:
        """Stops it."""
        self.process.terminate()
        self.process.wait()

    def post(self, body: bytes) -> int:
        """The status of a completion."""
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)

    def health_ms(self, seconds: float, until: threading.Event) -> list[float]:
        """How long /health takes, again and again until the event or the time is over."""
        found, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end and not until.is_set():
            start = time.perf_counter()
            with urllib.request.urlopen(f"{self.url}/health") as answer:
                answer.read()
            found.append((time.perf_counter() - start) * 1e3)
            time.sleep(0.005)
        return found


def meanwhile(server: Server, work: Any) -> list[float]:
    """/health while `work()` runs in a thread."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set()))
    thread.start()
    found = server.health_ms(60, done)
    thread.join()
    return found


def main() -> None:
    """Measures and prints."""
    if sys.argv[1:2] == ["--clients"]:
        clients(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--long", type=int, default=4000)
    parser.add_argument("--input", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--only", choices=["throughput", "latency"])
    asked = parser.parse_args()
    if asked.only != "latency":
        throughput(asked)
    if asked.only != "throughput":
        latency(asked)


class Hosted:
    """A server in a thread of this process, around an engine that is asked directly, too: the same weights in the same memory in both cases."""

    def __init__(self, llm: LLM):
        self.sockets, self._up = open_sockets(("127.0.0.1",), 0, None), threading.Event()
        self.url = f"http://127.0.0.1:{self.sockets[0].getsockname()[1]}"
        self.thread = threading.Thread(target=self._run, args=(llm,))
        self.thread.start()
        self._up.wait()

    def _run(self, llm: LLM) -> None:
        async def run() -> None:
            self.loop = asyncio.get_running_loop()
            await serve(ServerSettings(), self.sockets, lambda: llm.loaded, ready=self._ready, signals=False)

        self.tid = threading.get_native_id()
        asyncio.run(run())

    def _ready(self, runtime: Runtime) -> None:
        self.runtime = runtime
        runtime.log = Log(stream=open(os.devnull, "w"))  # noqa: SIM115
        self._up.set()

    def loop_cpu_s(self) -> float:
        """CPU time of the thread with the event loop: HTTP, text and streaming."""
        with open(f"/proc/self/task/{self.tid}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9

    def prepare_cpu_s(self) -> float:
        """CPU time of the processes that read bodies."""
        return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children() if child.pid in self.runtime.pool.pids)  # type: ignore[union-attr]

    def load(self, number: int, size_in: int, size_out: int) -> dict[str, float]:
        """Eight clients in a process of their own: tokens, tokens/s, the same while answers are written, and their own CPU time."""
        words = [str(word) for word in (self.url, number, size_in, size_out)]
        done = subprocess.run([sys.executable, __file__, "--clients", *words], stdout=subprocess.PIPE, check=True)
        found: dict[str, float] = json.loads(done.stdout)
        return found

    def end(self) -> None:
        """Stops it."""
        self.loop.call_soon_threadsafe(self.runtime.stop)
        self.thread.join()


def clients(url: str, number: str, size_in: str, size_out: str) -> None:
    """The other end of `Hosted.load`."""
    load = run_load(url, requests=WAVES * CLIENTS, clients=CLIENTS, seed=int(number), input_tokens=int(size_in), output_tokens=int(size_out))
    before_s = time.process_time()
    samples, seconds = asyncio.run(load)
    cpu_s = time.process_time() - before_s
    tokens = sum(s.tokens for s in samples)
    decode = decode_rate((s.tokens, s.total_s - s.ttft_s) for s in samples)
    print(json.dumps({"tokens": tokens, "rate": tokens / seconds, "decode": decode, "seconds": seconds, "cpu_s": cpu_s}))


def throughput(asked: argparse.Namespace) -> None:
    """The server at eight clients beside its own engine alone, in turns."""
    alone: list[tuple[float, float]] = []  # tokens/s in all, and while answers are written: before each round of clients, and after the last
    rounds: list[list[float]] = []  # the same of the server, CPU of the loop, of preparation and of the clients in µs a token, and in parts of the machine
    with LLM(asked.model, threads=asked.threads, max_batch_size=CLIENTS) as llm:
        server = Hosted(llm)
        try:
            for number in range(asked.rounds + 2):
                if number:  # the first warms up
                    alone.append(alone_once(llm, number, asked.input, asked.output))
                if number <= asked.rounds:
                    before = server.loop_cpu_s(), server.prepare_cpu_s()
                    found = server.load(number, asked.input, asked.output)
                    loop_s, prepare_s = server.loop_cpu_s() - before[0], server.prepare_cpu_s() - before[1]
                    cores_s = found["seconds"] * len(os.sched_getaffinity(0))
                    costs = [loop_s, prepare_s, found["cpu_s"]]
                    shares = [*(s / found["tokens"] * 1e6 for s in costs), *(s / cores_s for s in costs)]
                    rounds.append([found["rate"], found["decode"], *shares])
        finally:
            server.end()
    rows = []
    for round_, (before_it, after_it) in zip(rounds[1:], itertools.pairwise(alone), strict=True):
        mean_whole, mean_decoding = ((x + y) / 2 for x, y in zip(before_it, after_it, strict=True))
        if abs(before_it[1] - after_it[1]) <= STEADY * mean_decoding:
            rows.append([mean_whole, mean_decoding, *round_])
    print(f"{asked.model}, {CLIENTS} at a time, prompts of {asked.input}, answers of {asked.output} tokens; {len(rows)} rounds of clients, each between two of the engine alone")
    if left := asked.rounds - len(rows):
        print(f"left out: {left} rounds, for the engine was more than {STEADY:.0%} faster or slower after them than before: others had the machine")
    if not rows:
        sys.exit("no round is left; use a calmer machine, or more --rounds")
    whole, decode_alone, served, decode, *costs = (list(column) for column in zip(*rows, strict=True))
    print(f"while answers are written: engine alone {spread(decode_alone)} tokens/s, server {spread(decode)}, {ratio(decode, decode_alone)}")
    print(f"with prompts and connections: engine alone {spread(whole)} tokens/s, server {spread(served)}, {ratio(served, whole)}")
    for name, us, share in zip(("HTTP, text and streaming", "the processes that read requests", "the clients, which are on the same cores"), costs[:3], costs[3:], strict=True):
        print(f"CPU of {name}: {spread(us)} µs a token, {spread([s * 100 for s in share], 2)} % of the cores")


def spread(values: list[float], digits: int = 0) -> str:
    """The median, and from where to where."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Of each pair."""
    return f"{spread([a / b * 100 for a, b in zip(ours, theirs, strict=True)], 1)} % of it"


def latency(asked: argparse.Namespace) -> None:
    """The first token of a short request, and /health, while the server is busy."""
    server = Server(asked.model, asked.threads)
    try:
        rng = random.Random(0)

        def long_prompt() -> bytes:
            return json.dumps({"prompt": [rng.randrange(32, 4000) for _ in range(asked.long)], "max_tokens": 1}).encode()

        alone, ttft, chunks = [], [], asked.long / 512
        for number in range(asked.rounds + 1):
            start = time.perf_counter()
            server.post(long_prompt())
            chunk_s = (time.perf_counter() - start) / chunks
            thread = threading.Thread(target=server.post, args=(long_prompt(),))
            thread.start()
            time.sleep(chunk_s * rng.uniform(1, chunks - 2))
            [sample], _ = asyncio.run(run_load(server.url, requests=1, clients=1, input_tokens=16, output_tokens=2, seed=100 + number))
            thread.join()
            if number:  # the first warms up
                alone.append(chunk_s * 1e3)
                ttft.append(sample.ttft_s * 1e3)
        print(f"prefill of {asked.long} tokens: {spread(alone)} ms a chunk of 512; {asked.rounds} pairs in turns")
        print(f"first token of a short request at some time meanwhile: {spread(ttft)} ms, {spread([t / c for t, c in zip(ttft, alone, strict=True)], 2)} chunks")

        huge = json.dumps({"prompt": "a word " * 3_000_000}).encode()
        for name, work in (
            ("while a prompt is read", lambda: server.post(long_prompt())),
            ("while 20 MB are refused", lambda: [server.post(huge) for _ in range(3)]),
        ):
            times = meanwhile(server, work)
            print(f"/health {name}: p50 {percentile(times, 0.5):.1f} ms, p99 {percentile(times, 0.99):.1f} ms ({len(times)} calls)")
    finally:
        server.end()


if __name__ == "__main__":
    main()
