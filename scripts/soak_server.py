"""A server under more load than it can take, for as long as asked; afterwards it must be as it was.

    python scripts/soak_server.py [MODEL] [--minutes 10]        # prints the table of docs/server.md; 1 if there was a fault

Clients chat, send long prompts, ask for several choices and log-probabilities, send broken bodies, leave in the middle (one in five),
read slowly, or do not read at all; one sends bodies of 20 MB, which are refused or tokenised. /health is polled by a process of its own.
Seeded probes, streamed or not, are asked alone before the load, during it and after it. It fails, and says why, if an answer is wrong or
lost, a status is unexpected, blocks, descriptors or threads are left, memory grows (in a run of five minutes or more), /health is slow, or files of fastllm change meanwhile: then
processes that the server starts later are of another version, and the run says nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import subprocess
import sys
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import fastllm
from fastllm.cli.bench_serve import _Target, percentile

PROBES = [{"prompt": f"{i} " * (1 + 9 * i), "max_tokens": 12, "seed": i, "temperature": 0.9, "ignore_eos": True} for i in range(4)]
ANSWER_S = 120  # an answer that takes longer is lost
STALL_S = 40  # a client that reads nothing is cut after 30 s
BIG_BYTES = 20_000_000
HEALTH_MS = 100
MB_A_MINUTE = 1.0
FEW = 50  # gaps in a tenth of the time; fewer tell nothing


@dataclass
class Report:
    """What happened. faults: what must not."""

    requests: int = 0
    cancelled: int = 0
    refused: int = 0
    compared: int = 0
    stalled: int = 0
    big: int = 0
    faults: list[str] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes)
    gaps: list[tuple[float, float]] = field(default_factory=list)  # mean time between tokens, a probe each: (when, seconds)

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
        slow = rng.random() < 0.15
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


async def probe(target: _Target, number: int, *, streamed: bool = False, gaps: list[tuple[float, float]] | None = None) -> str | None:
    """The text of a probe; None if the server was full."""
    if streamed:
        return await streamed_probe(target, number, [] if gaps is None else gaps)
    status, body = await ask(target, "/v1/completions", PROBES[number])
    if status == 503:
        return None
    return body["choices"][0]["text"] if status == 200 and body else f"status {status}"


async def streamed_probe(target: _Target, number: int, gaps: list[tuple[float, float]]) -> str | None:
    """The same, joined from a stream; notes the mean time between its tokens."""
    status, reader, writer = await target.open("POST", "/v1/completions", json.dumps({**PROBES[number], "stream": True}).encode())
    try:
        if status != 200:
            return None if status == 503 else f"status {status}"
        text, first, count = "", 0.0, 0
        while line := await reader.readline():
            now = time.monotonic()
            if line.startswith(b"data: [DONE]"):
                if count > 1:
                    gaps.append((now, (now - first) / (count - 1)))
                return text
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"error {event['error']}"
                text += event["choices"][0]["text"]
                first, count = first or now, count + 1
        return text + " (cut)"
    finally:
        writer.close()


async def stall(target: _Target) -> str:
    """A client that asks for much, and reads nothing until the server cuts it."""
    body = {"prompt": "x", "n": 4, "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20}
    status, _, writer = await target.open("POST", "/v1/completions", json.dumps(body).encode())
    try:
        if status != 200:
            return "refused" if status == 503 else f"status {status}"
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(STALL_S)
        return "stalled"
    finally:
        writer.transport.abort()


async def big_bodies(target: _Target, end: float, report: Report, size: int) -> None:
    """Prompts that can never fit, and texts to tokenise, as large as bodies get."""
    words = "a word " * (size // 7)
    bodies = [("/v1/completions", json.dumps({"prompt": words}).encode()), ("/tokenize", json.dumps({"content": words}).encode())]
    del words
    while time.monotonic() < end:
        path, raw = bodies[report.big % 2]
        try:
            async with asyncio.timeout(ANSWER_S):
                status, _ = await ask(target, path, raw)
            if status not in (200, 400, 503) or (status == 200 and path != "/tokenize"):
                report.fault(f"a body of {len(raw)} bytes to {path} got {status}")
        except TimeoutError:
            report.fault(f"lost: no answer to a body of {len(raw)} bytes in {ANSWER_S} s")
        except (OSError, IndexError, ValueError) as error:
            report.fault(f"the connection of a body of {len(raw)} bytes failed: {type(error).__name__}")
        report.big += 1
        await asyncio.sleep(2)


async def client(target: _Target, seed: int, end: float, wanted: list[str], report: Report) -> None:
    """One client until the end. Of many clients the first does not read."""
    rng = random.Random(seed)
    while seed == 0 and time.monotonic() + STALL_S < end:
        report.requests += 1
        outcome = await stall(target)
        report.stalled += outcome == "stalled"
        if outcome not in ("stalled", "refused"):
            report.fault(f"a client that reads nothing: {outcome}")
        await asyncio.sleep(0.5)
    history: list[dict[str, str]] = []
    while time.monotonic() < end:
        report.requests += 1
        kind, outcome = rng.randrange(8), "done"
        try:
            async with asyncio.timeout(ANSWER_S):
                if kind < 2:
                    number = rng.randrange(len(PROBES))
                    text = await probe(target, number, streamed=rng.random() < 0.5, gaps=report.gaps)
                    report.compared += text is not None
                    if text is None:
                        outcome = "refused"
                    elif text != wanted[number]:
                        outcome = f"probe {number} got {text!r} instead of {wanted[number]!r}"
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
            await asyncio.sleep(0.2 + 0.3 * rng.random())


async def watch(target: _Target, process: psutil.Process, end: float, report: Report) -> None:
    """Memory at 10 Hz, and /health by another process, which this one's work cannot delay."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--health", f"http://{target.host}:{target.port}", str(max(end - start, 0.2))]
    asking = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=1 << 24)
    while time.monotonic() < end:
        report.memory.append((time.monotonic() - start, process.memory_info().rss))
        await asyncio.sleep(0.1)
    said, _ = await asking.communicate()
    report.health_ms, faults = json.loads(said)
    for fault in faults:
        report.fault(fault)


def health(url: str, seconds: float) -> tuple[list[float], list[str]]:
    """How long /health takes at 10 Hz, in ms, and what went wrong."""
    parts = urllib.parse.urlsplit(url)
    found: list[float] = []
    faults: set[str] = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        asked = time.perf_counter()
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                faults.add(f"/health said {answer.status}")
            found.append((time.perf_counter() - asked) * 1e3)
        except (OSError, http.client.HTTPException) as error:
            faults.add(f"/health does not answer: {type(error).__name__}")
        finally:
            connection.close()
        time.sleep(0.1)
    return found, sorted(faults)


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


def slowing(gaps: list[tuple[float, float]]) -> float | None:
    """p99 of the mean times between tokens in the last tenth of the time over that in the first; None: there are too few."""
    if not gaps:
        return None
    start, end = gaps[0][0], gaps[-1][0]
    tenth = (end - start) / 10
    first, last = [g for at, g in gaps if at < start + tenth], [g for at, g in gaps if at > end - tenth]
    return percentile(last, 0.99) / percentile(first, 0.99) if min(len(first), len(last)) >= FEW else None


def newest() -> float:
    """When a file of fastllm was changed last."""
    folder = Path(fastllm.__file__).parents[1]
    rooms = ("core", "text", "models", "formats", "interface", "backends")
    return max(file.stat().st_mtime for room in rooms for kind in ("*.py", "*.so") for file in (folder / room).rglob(kind))


async def soak(
    url: str, process: psutil.Process, seconds: float, *, clients: int = 24, settle_s: float = 30.0, big_bytes: int = BIG_BYTES
) -> Report:
    """Runs the load and looks at what is left; the report's faults are empty if all is well."""
    target, report = _Target(url, None), Report()
    await fill(target)
    wanted = [str(await probe(target, number)) for number in range(len(PROBES))]
    descriptors, threads = process.num_fds(), process.num_threads()
    end = time.monotonic() + seconds
    others = (client(target, seed, end, wanted, report) for seed in range(clients))
    await asyncio.gather(watch(target, process, end, report), big_bodies(target, end, report, big_bytes), *others)
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
                report.compared += 1
                while (found := await probe(target, number)) is None:  # full: others are still on their way out
                    await asyncio.sleep(0.1)
                if found != text:
                    report.fault(f"a probe has another answer afterwards: {found!r} instead of {text!r}")
        except TimeoutError:
            report.fault("a probe has no answer afterwards")


def main() -> int:
    """Starts a server, soaks it, prints a report; 1 if it failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--health", nargs=2, metavar=("URL", "SECONDS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.health:
        print(json.dumps(health(asked.health[0], float(asked.health[1]))))
        return 0
    command = [sys.executable, "-m", "fastllm", "server", asked.model, "--port", "0", "-q", "--max-batch-size", "8", "--max-queue", "8", "--ctx", "1024"]
    before = newest()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        report = asyncio.run(soak(url, psutil.Process(server.pid), asked.minutes * 60))
    finally:
        server.terminate()
        code = server.wait()
    growth, slowest, later = slope(report.memory), percentile(report.health_ms, 0.99), slowing(report.gaps)
    if growth > MB_A_MINUTE and asked.minutes >= 5:  # before, the memory of the first of everything is not over
        report.fault(f"memory grows by {growth:.2f} MB a minute")
    if slowest > HEALTH_MS:
        report.fault(f"/health takes {slowest:.0f} ms at p99")
    if code:
        report.fault(f"the server ended with {code}")
    if newest() != before:
        report.fault("files of fastllm changed while it ran: this run says nothing")
    table(asked, report, growth, later)
    print("\n".join(f"FAULT {fault}" for fault in report.faults) or "no fault")
    return 1 if report.faults else 0


def table(asked: argparse.Namespace, report: Report, growth: float, later: float | None) -> None:
    """What happened, as Markdown."""
    resident, asked_health = [size / 1e6 for _, size in report.memory], report.health_ms
    rows = {
        "requests · left by their clients · refused (503) · clients cut that did not read": f"{report.requests} · {report.cancelled} · {report.refused} · {report.stalled}",
        "answers compared with those of a run alone · bodies of 20 MB": f"{report.compared} · {report.big}",
        "memory at first · at most · slope after the first fifth": f"{resident[0]:.0f} MB · {max(resident):.0f} MB · {growth:+.2f} MB a minute",
        f"`/health` p50 · p99 · at most, of {len(asked_health)} calls": f"{percentile(asked_health, 0.5):.1f} · {percentile(asked_health, 0.99):.1f} · {max(asked_health):.1f} ms",
        "p99 of the mean time between tokens of probes, last tenth of the time over the first": "too few" if later is None else f"{later:.2f}",
        "faults": f"{len(report.faults)}",
    }
    print(f"| {asked.minutes:g} minutes, `{asked.model}` | |\n|---|---|")
    print("\n".join(f"| {name} | {value} |" for name, value in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
