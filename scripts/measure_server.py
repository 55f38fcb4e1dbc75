"""Measures what serving costs: a server at eight clients against the engine alone at a batch of eight, the first token of a short request
while a long prompt is read, and how soon /health answers meanwhile and while a body of 20 MB is refused.

    python scripts/measure_server.py [MODEL] [--threads N] [--rounds N] [--input N] [--output N] [--only throughput|latency]

Each pair is measured in the same run, one after the other, `rounds` times; the best and the worst are printed. docs/server.md has the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from fastllm.cli.bench_serve import percentile, run_load

CLIENTS = 8


def engine_alone(model: str, threads: int, rounds: int, size_in: int, size_out: int) -> list[float]:
    """Tokens per second of 8 × 2 requests, 8 at a time, without text and without HTTP."""
    from fastllm import LLM, SamplingParams
    from fastllm.core.request import Request

    rates = []
    with LLM(model, threads=threads, max_batch_size=CLIENTS) as llm:
        size, params = llm.tokenizer.vocab_size, SamplingParams(max_tokens=size_out, temperature=0, ignore_eos=True)
        for number in range(rounds + 1):
            rng = random.Random(number)
            prompts = [[rng.randrange(32, size) for _ in range(size_in)] for _ in range(2 * CLIENTS)]
            start = time.perf_counter()
            handles = [llm.loaded.engine.submit(Request(prompt, params)) for prompt in prompts]
            tokens = sum(len(h.result().choices[0].token_ids) for h in handles)
            if number:  # the first warms up
                rates.append(tokens / (time.perf_counter() - start))
    return rates


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
    alone = engine_alone(asked.model, asked.threads, asked.rounds, asked.input, asked.output)
    server = Server(asked.model, asked.threads)
    served, shares, per_token = [], [], []
    try:
        for number in range(asked.rounds + 1):
            before = server.loop_cpu_s()
            load = run_load(
                server.url, requests=2 * CLIENTS, clients=CLIENTS, input_tokens=asked.input, output_tokens=asked.output, seed=number
            )
            samples, seconds = asyncio.run(load)
            if number:
                tokens, used = sum(s.tokens for s in samples), server.loop_cpu_s() - before
                served.append(tokens / seconds)
                shares.append(used / seconds / len(os.sched_getaffinity(0)))
                per_token.append(used / tokens * 1e6)
    finally:
        server.end()
    print(f"engine alone, batch {CLIENTS}, {asked.input} + {asked.output} tokens: {min(alone):.1f} to {max(alone):.1f} tokens/s")
    print(f"server, {CLIENTS} clients:     {min(served):.1f} to {max(served):.1f} tokens/s, {max(served) / max(alone):.1%} of it")
    print(f"CPU of HTTP, text and streaming: {min(shares):.2%} to {max(shares):.2%} of the cores, {max(per_token):.1f} µs a token")


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
