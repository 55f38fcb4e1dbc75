"""Measures what serving costs: a server at eight clients against the engine alone at a batch of eight, the first token of a short request
while a long prompt is read, and how soon /health answers meanwhile and while a body of 20 MB is refused.

    python scripts/measure_server.py [MODEL] [--threads N] [--rounds N] [--input N] [--output N] [--only throughput|latency]

Each pair is measured in the same run, in turns, `rounds` times; the median, the least and the most are printed. docs/server.md has the figures.
"""

from __future__ import annotations

import argparse
import asyncio
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

CLIENTS = 8
WAVES = 2  # requests of each client


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

    def loop_cpu_s(self) -> float:
        """CPU time of the thread with the event loop: HTTP, text and streaming."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9

    def prepare_cpu_s(self) -> float:
        """CPU time of the processes that read bodies."""
        return sum(sum(child.cpu_times()[:2]) for child in psutil.Process(self.process.pid).children())

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
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=4000)
    parser.add_argument("--input", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--only", choices=["throughput", "latency"])
    asked = parser.parse_args()
    if asked.only != "latency":
        throughput(asked)
    if asked.only != "throughput":
        latency(asked)


def throughput(asked: argparse.Namespace) -> None:
    """The server at eight clients beside the engine alone, in turns."""
    size = {"input_tokens": asked.input, "output_tokens": asked.output}
    rows: list[list[float]] = []  # of a round: tokens/s alone, of the server, the same of decoding, CPU of the loop and of preparation in µs a token, in parts of the machine
    server = Server(asked.model, asked.threads)
    try:
        with LLM(asked.model, threads=asked.threads, max_batch_size=CLIENTS) as llm:
            for number in range(asked.rounds + 1):
                alone, alone_decode = alone_once(llm, number, asked.input, asked.output)
                before = server.loop_cpu_s(), server.prepare_cpu_s()
                samples, seconds = asyncio.run(run_load(server.url, requests=WAVES * CLIENTS, clients=CLIENTS, seed=number, **size))
                loop_s, prepare_s = server.loop_cpu_s() - before[0], server.prepare_cpu_s() - before[1]
                tokens = sum(s.tokens for s in samples)
                decode = decode_rate((s.tokens, s.total_s - s.ttft_s) for s in samples)
                if number:  # the first warms up
                    shares = [loop_s / tokens * 1e6, prepare_s / tokens * 1e6, loop_s / seconds / len(os.sched_getaffinity(0))]
                    rows.append([alone, tokens / seconds, alone_decode, decode, *shares])
    finally:
        server.end()
    whole, served, decode_alone, decode, loop_us, prepare_us, share = (list(column) for column in zip(*rows, strict=True))
    print(f"{asked.model}, {CLIENTS} at a time, prompts of {asked.input}, answers of {asked.output} tokens; {asked.rounds} pairs in turns")
    print(f"while answers are written: engine alone {spread(decode_alone)} tokens/s, server {spread(decode)}, {ratio(decode, decode_alone)}")
    print(f"with prompts and connections: engine alone {spread(whole)} tokens/s, server {spread(served)}, {ratio(served, whole)}")
    print(f"CPU of HTTP, text and streaming: {spread(loop_us)} µs a token, {spread([s * 100 for s in share], 2)} % of the cores")
    print(f"CPU of the processes that read requests: {spread(prepare_us)} µs a token")


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
        prompt = [rng.randrange(32, 4000) for _ in range(asked.long)]
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        start = time.perf_counter()
        server.post(body)
        alone_s = time.perf_counter() - start
        chunk_s = alone_s / -(-asked.long // 512)
        ttft = []
        for number in range(asked.rounds):
            body = json.dumps({"prompt": [*prompt[::-1][number:], 5], "max_tokens": 1}).encode()
            thread = threading.Thread(target=server.post, args=(body,))
            thread.start()
            time.sleep(chunk_s)
            [sample], _ = asyncio.run(run_load(server.url, requests=1, clients=1, input_tokens=16, output_tokens=2, seed=100 + number))
            ttft.append(sample.ttft_s)
            thread.join()
        print(f"prefill of {asked.long} tokens: {alone_s:.2f} s, {chunk_s * 1e3:.0f} ms a chunk of 512")
        print(f"first token of a short request meanwhile: {min(ttft) * 1e3:.0f} to {max(ttft) * 1e3:.0f} ms, {max(ttft) / chunk_s:.2f} chunks at worst")

        huge = json.dumps({"prompt": "a word " * 3_000_000}).encode()
        for name, work in (
            ("while a prompt is read", lambda: server.post(json.dumps({"prompt": prompt[1:], "max_tokens": 1}).encode())),
            ("while 20 MB are refused", lambda: [server.post(huge) for _ in range(3)]),
        ):
            times = meanwhile(server, work)
            print(f"/health {name}: p50 {percentile(times, 0.5):.1f} ms, p99 {percentile(times, 0.99):.1f} ms ({len(times)} calls)")
    finally:
        server.end()


if __name__ == "__main__":
    main()
