"""A server under more load than it can take, for as long as asked; afterwards it must be as it was.

    python scripts/soak_server.py [MODEL] [--minutes 10]

Clients chat, send long prompts, ask for several choices and log-probabilities, send broken bodies, leave in the middle (one in five), or
read slowly; /health and /metrics are polled. Seeded probes are asked before, during and after. It fails, and says why, if an answer is
wrong or lost, a status is unexpected, blocks, descriptors or threads are left, memory grows, or /health is slow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from fastllm.cli.bench_serve import _Target, percentile

PROBES = [{"prompt": f"{i} " * (1 + 9 * i), "max_tokens": 12, "seed": i, "temperature": 0.9, "ignore_eos": True} for i in range(4)]
ANSWER_S = 120  # an answer that takes longer is lost
HEALTH_MS = 100
MB_A_MINUTE = 1.0


@dataclass
class Report:
    """What happened. faults: what must not."""

    requests: int = 0
    cancelled: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes)

    def fault(self, text: str) -> None:
        """Notes one; many of a kind are one."""
        if text not in self.faults and len(self.faults) < 50:
            self.faults.append(text)


async def ask(target: _Target, path: str, body: Any) -> tuple[int, Any]:
    """Status and JSON of a request that is not streamed."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, reader, writer = await target.open("POST", path, raw)
    data = await reader.read()
    writer.close()
    try:
        return status, json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])
    except ValueError:
        return status, None


async def stream(target: _Target, path: str, body: dict[str, Any], rng: random.Random) -> str:
    """A streamed request: done, cut (we left), or refused."""
    status, reader, writer = await target.open("POST", path, json.dumps({**body, "stream": True}).encode())
    try:
        if status != 200:
            return "refused" if status == 503 else f"status {status}"
        leaves = rng.randrange(1, 40) if rng.random() < 0.2 else None
        slow = rng.random() < 0.1
        count = 0
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return "done"
            if line.startswith(b"data: {") and b'"error":' in line:
                return "error frame"
            count += line.startswith(b"data: ")
            if leaves is not None and count >= leaves:
                return "cut"
            if slow:
                await asyncio.sleep(0.02)
        return "lost: the stream ended without its end"
    finally:
        writer.close()


async def probe(target: _Target, number: int) -> str | None:
    """The text of a probe; None if the server was full."""
    status, body = await ask(target, "/v1/completions", PROBES[number])
    if status == 503:
        return None
    return body["choices"][0]["text"] if status == 200 and body else f"status {status}"


async def client(target: _Target, seed: int, end: float, wanted: list[str], report: Report) -> None:
    """One client until the end."""
    rng = random.Random(seed)
    history: list[dict[str, str]] = []
    while time.monotonic() < end:
        report.requests += 1
        kind, outcome = rng.randrange(8), "done"
        try:
            async with asyncio.timeout(ANSWER_S):
                if kind < 2:
                    number = rng.randrange(len(PROBES))
                    text = await probe(target, number)
                    if text is None:
                        outcome = "refused"
                    elif text != wanted[number]:
                        outcome = "wrong answer to a probe"
                elif kind < 4:
                    history = [*history[-6:], {"role": "user", "content": "word " * rng.randint(1, 12)}]
                    outcome = await stream(target, "/v1/chat/completions", {"messages": history, "max_tokens": rng.randint(1, 40)}, rng)
                elif kind == 4:
                    body = {"prompt": [rng.randrange(32, 200) for _ in range(rng.randint(200, 600))], "max_tokens": 8}
                    outcome = await stream(target, "/v1/completions", body, rng)
                elif kind == 5:
                    more = {"n": 3, "logprobs": 3, "echo": rng.random() < 0.5, "max_tokens": 16}
                    outcome = await stream(target, "/v1/completions", {"prompt": "several " * 5, **more}, rng)
                elif kind == 6:
                    broken = rng.choice((b"{", b"[]", b'{"prompt": 3}', b'{"prompt": "a", "temperature": 9}', json.dumps({"prompt": "x" * 300_000}).encode()))
                    status, _ = await ask(target, "/v1/completions", broken)
                    outcome = "done" if status in (400, 503) else f"a broken body got {status}"
                else:  # leave before the answer
                    _, _, writer = await target.open("GET", "/live")
                    writer.close()
                    _, writer = await asyncio.open_connection(target.host, target.port)
                    raw = json.dumps({"prompt": "gone", "max_tokens": 200, "ignore_eos": True}).encode()
                    head = f"POST /v1/completions HTTP/1.1\r\n{target.headers}Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
                    writer.write(head.encode() + raw)
                    await writer.drain()
                    await asyncio.sleep(rng.random() * 0.2)
                    writer.close()
                    outcome = "cut"
        except TimeoutError:
            outcome = f"lost: no answer in {ANSWER_S} s"
        except (OSError, IndexError, ValueError) as error:
            outcome = f"the connection failed: {type(error).__name__}"
        report.cancelled += outcome == "cut"
        report.refused += outcome == "refused"
        if outcome not in ("done", "cut", "refused"):
            report.fault(outcome)
        if outcome == "refused":
            await asyncio.sleep(0.05)


async def watch(target: _Target, process: psutil.Process, end: float, report: Report) -> None:
    """Health and memory at 10 Hz."""
    start = time.monotonic()
    while time.monotonic() < end:
        asked = time.perf_counter()
        status, reader, writer = await target.open("GET", "/health")
        await reader.read()
        writer.close()
        report.health_ms.append((time.perf_counter() - asked) * 1e3)
        if status != 200:
            report.fault(f"/health said {status}")
        report.memory.append((time.monotonic() - start, process.memory_info().rss))
        await asyncio.sleep(0.1)


async def watched(target: _Target, process: psutil.Process, end: float, report: Report) -> None:
    """`watch`, also of a server that goes away."""
    try:
        await watch(target, process, end, report)
    except (OSError, IndexError) as error:
        report.fault(f"/health does not answer: {type(error).__name__}")


async def metric(target: _Target, name: str) -> float:
    """One value of /metrics."""
    _, reader, writer = await target.open("GET", "/metrics")
    text = (await reader.read()).decode()
    writer.close()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)


def slope(samples: list[tuple[float, int]]) -> float:
    """MB a minute, by least squares, after the first fifth of the time."""
    late = [s for s in samples if s[0] >= samples[-1][0] / 5]
    mean_t, mean_m = (sum(s[i] for s in late) / len(late) for i in (0, 1))
    spread = sum((t - mean_t) ** 2 for t, _ in late)
    return sum((t - mean_t) * (m - mean_m) for t, m in late) / max(spread, 1e-9) * 60 / 1e6


async def soak(url: str, process: psutil.Process, seconds: float, *, clients: int = 24, settle_s: float = 30.0) -> Report:
    """Runs the load and looks at what is left; the report's faults are empty if all is well."""
    target, report = _Target(url, None), Report()
    await fill(target)
    wanted = [str(await probe(target, number)) for number in range(len(PROBES))]
    descriptors, threads = process.num_fds(), process.num_threads()
    end = time.monotonic() + seconds
    await asyncio.gather(watched(target, process, end, report), *(client(target, seed, end, wanted, report) for seed in range(clients)))
    try:
        await look(target, process, wanted, report, (descriptors, threads), settle_s)
    except OSError as error:
        report.fault(f"the server is gone: {type(error).__name__}")
    return report


async def fill(target: _Target) -> None:
    """Uses every block of the cache once, so that memory that the system gives at the first touch does not look like a leak."""
    rng = random.Random(0)
    prompts = [[rng.randrange(32, 200) for _ in range(1000)] for _ in range(12)]
    for prompt in prompts:
        await ask(target, "/v1/completions", {"prompt": prompt, "max_tokens": 2})


async def look(target: _Target, process: psutil.Process, wanted: list[str], report: Report, before: tuple[int, int], settle_s: float) -> None:
    """What is left when all clients have gone. before: descriptors and threads."""
    descriptors, threads = before
    names = ("fastllm_requests_running", "fastllm_requests_waiting", "fastllm_kv_blocks")
    limit = time.monotonic() + settle_s
    left = dict.fromkeys(names, 1.0)
    while any(left.values()) and time.monotonic() < limit:
        left = {name: await metric(target, name) for name in names}
    report.faults += [f"{name} is {value:g} when all clients have gone" for name, value in left.items() if value]
    while process.num_fds() > descriptors + 4 and time.monotonic() < limit:
        await asyncio.sleep(0.1)
    if process.num_fds() > descriptors + 4:
        report.fault(f"descriptors: {descriptors} before, {process.num_fds()} after")
    if process.num_threads() > threads + 4:
        report.fault(f"threads: {threads} before, {process.num_threads()} after")
    for number, text in enumerate(wanted):
        try:
            async with asyncio.timeout(settle_s):
                if await probe(target, number) != text:
                    report.fault("a probe has another answer afterwards")
        except TimeoutError:
            report.fault("a probe has no answer afterwards")


def main() -> int:
    """Starts a server, soaks it, prints a report; 1 if it failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--minutes", type=float, default=10.0)
    asked = parser.parse_args()
    command = [sys.executable, "-m", "fastllm", "server", asked.model, "--port", "0", "-q", "--max-batch-size", "8", "--max-queue", "8", "--ctx", "1024"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        report = asyncio.run(soak(url, psutil.Process(server.pid), asked.minutes * 60))
    finally:
        server.terminate()
        code = server.wait()
    growth, health = slope(report.memory), percentile(report.health_ms, 0.99)
    if growth > MB_A_MINUTE:
        report.fault(f"memory grows by {growth:.2f} MB a minute")
    if health > HEALTH_MS:
        report.fault(f"/health takes {health:.0f} ms at p99")
    if code:
        report.fault(f"the server ended with {code}")
    print(f"{report.requests} requests, {report.cancelled} left by their clients, {report.refused} refused (503)")
    print(f"memory {growth:+.2f} MB a minute, /health p99 {health:.1f} ms of {len(report.health_ms)} calls")
    print("\n".join(f"FAULT {fault}" for fault in report.faults) or "no fault")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
