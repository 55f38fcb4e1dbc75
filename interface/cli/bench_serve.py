"""`fastllm bench serve`: a server under load, as its clients see it.

Closed loop: so many clients, each sends its next request when the last is answered. Open loop: requests come at random at a given rate,
whether or not the server keeps up; only that shows how a queue grows. Works with every server that has OpenAI's streamed completions.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

import click

from ..core.errors import FastLLMError, UsageError
from .command import Command
from .terminal import escape_controls

__all__ = ["Sample", "percentile", "run_load", "serve_command", "summary"]

MAX_REFUSAL_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 16
_SILENT = "the connection was closed without an answer"
WORDS = "time year people way day man thing woman life child world school state family student group country problem hand part".split()


@dataclass
class Sample:
    """One request: seconds to its first text, between its pieces, and in all; tokens of answer and prompt; or what went wrong."""

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""


class _Target:
    """Where requests go."""

    def __init__(self, url: str, key: str | None):
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port, good = parts.hostname or "", parts.port, parts.scheme in ("http", "https") and url.isprintable() and " " not in url
            host.encode("idna")
        except ValueError:  # brackets that do not close, a port beyond 65535, a label of 64 characters
            good = False
        if not good or not host:
            raise UsageError(f"'{url}' is no address of a server", who="URL", fix="write it as http://127.0.0.1:8000")
        self.url, self.host, self.tls = url, host, parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = f"Host: {parts.netloc}\r\nConnection: close\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")

    async def open(self, method: str, path: str, body: bytes = b"") -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a request: (status, reader at the body, writer). One connection a request, as load balancers see it."""
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self._context(), limit=1 << 22)
        writer.write(self._words(method, path, body))
        await writer.drain()
        try:
            status = _status(await reader.readline())
        except ConnectionError:
            writer.close()
            raise
        while (await reader.readline()).strip():
            pass
        return status, reader, writer

    def _context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.tls else None

    def _words(self, method: str, path: str, body: bytes) -> bytes:
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self.base}{path} HTTP/1.1\r\n{self.headers}{kind}\r\n".encode() + body

    async def read(self, path: str, body: bytes, start: float) -> Sample:
        """Sends a request whose answer is a stream; what its client saw, times from `start` (`time.perf_counter`)."""
        request = self._words("POST", path, body)
        transport, reading = await asyncio.get_running_loop().create_connection(lambda: _Reading(request, start), self.host, self.port, ssl=self._context())
        try:
            await reading.ended
        finally:
            transport.close()
        return reading.sample

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON answer; {} where there is none."""
        status, reader, writer = await self.open("GET", path)
        raw = await reader.read()
        writer.close()
        return _object(raw) if status == 200 else {}


def _status(line: bytes) -> int:
    """Of the first line of an answer. Raises ConnectionError for what is none."""
    words = line.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ConnectionError("what answers speaks no HTTP" if words else _SILENT)
    return int(words[1])


def _object(raw: bytes) -> dict[str, Any]:
    """The JSON object in an answer; {} where there is none."""
    try:
        found = json.loads(raw[raw.index(b"{") : raw.rindex(b"}") + 1])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


_HAS_TEXT: Final = re.compile(rb'"text"\s*:\s*"(?!")')  # a client that parses all it gets takes a good part of what a small model leaves of a machine
_LENGTH: Final = re.compile(rb"(?im)^content-length:\s*(\d{1,9})\s*$")
_HAS_MORE: Final = re.compile(rb'"(?:error|usage)"\s*:\s*\{')


def _said(error: Any) -> str:
    """What the server says about a request that it does not answer."""
    message = error.get("message") if isinstance(error, dict) else error
    return f": {escape_controls(message):.300}" if isinstance(message, str) else ""


def _take_more(sample: Sample, frames: bytes) -> None:
    """Counts of tokens, or an error."""
    for line in frames.split(b"\n"):
        if line.startswith(b"data: ") and _HAS_MORE.search(line):
            event = json.loads(line[6:])
            if error := event.get("error"):
                sample.error = f"{error.get('code') or error.get('type')}{_said(error)}"
                return
            if usage := event.get("usage"):
                sample.tokens, sample.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


class _Reading(asyncio.BufferedProtocol):
    """One streamed answer, looked at where it comes in: a stream's reader, with a task to wake for each piece, takes twice as much of a machine that the
    server may be on, too."""

    def __init__(self, request: bytes, start: float):
        self.sample, self.status, self.refusal = Sample(), 0, b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._start, self._last = request, start, start
        self._room = memoryview(bytearray(1 << 16))
        self._rest, self._done = b"", False
        self._refused_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where bytes go."""
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        data = self._rest + self._room[:nbytes]
        try:
            if not self.status:
                head, end, data = data.partition(b"\r\n\r\n")
                status = _status(head) if end or b"\n" in head or len(head) > MAX_HEAD_BYTES else 0
                if not end and len(head) < MAX_HEAD_BYTES:
                    self._rest = head
                    return
                self.status, data = status, b"\n" + data
                self._refused_bytes = int(length[1]) if (length := _LENGTH.search(head)) else MAX_REFUSAL_BYTES
            if self.status == 200:
                self._take(data)
            else:
                self._rest = data
                if len(data) > min(self._refused_bytes, MAX_REFUSAL_BYTES) or _object(data):  # all of it; the server need not close
                    self._transport.close()
        except (ValueError, ConnectionError, KeyError, TypeError, AttributeError) as error:  # what answers is no server of this interface
            self._fail(error)
        if self._done or self.sample.error:
            self._transport.close()

    def _take(self, data: bytes) -> None:
        """Frames, and the beginning of one."""
        now, sample = time.perf_counter(), self.sample
        whole, end, rest = data.rpartition(b"\n")  # frames that are complete, each after a line end
        self._rest = end + rest
        self._done = b"\ndata: [DONE]" in whole + end
        if count := len(_HAS_TEXT.findall(whole)):
            gaps = [now - self._last, *[0.0] * (count - 1)]
            sample.ttft_s = sample.ttft_s or now - self._start
            sample.gaps_s += gaps if self._last > self._start else gaps[1:]
            self._last = now
        if _HAS_MORE.search(whole):
            _take_more(sample, whole)

    def _fail(self, error: Exception) -> None:
        self.sample.error = self.sample.error or f"{type(error).__name__}: {error}".removesuffix(": ")

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        if not self._done and not self.sample.error:
            if exc is not None:
                self._fail(exc)
            elif not self.status:
                self._fail(ConnectionError(_SILENT))
            elif self.status != 200:
                self.sample.error = f"status {self.status}{_said(_object(self._rest).get('error'))}"
            else:
                self.sample.error = "cut"
        self.sample.total_s = time.perf_counter() - self._start
        if not self.ended.done():
            self.ended.set_result(None)


async def _request(target: _Target, body: dict[str, Any]) -> Sample:
    """One streamed completion."""
    start = time.perf_counter()
    try:
        return await target.read("/v1/completions", json.dumps(body).encode(), start)
    except OSError as error:
        return Sample(error=f"{type(error).__name__}: {error}".removesuffix(": "), total_s=time.perf_counter() - start)


async def run_load(url: str, *, requests: int, clients: int, rate: float | None = None, input_tokens: int = 128, output_tokens: int = 64,
                   key: str | None = None, model: str = "default", seed: int = 0) -> tuple[list[Sample], float]:  # fmt: skip
    """Runs a load: (a sample of each request, seconds in all). rate: requests a second that come at random; None: `clients` send one
    after the other. Prompts are random and differ from their first token on, so that no cache of prefixes helps."""
    target, rng = _Target(url, key), random.Random(seed)
    try:
        vocabulary = (await target.get("/tokenizer_info")).get("vocab_size")
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise FastLLMError("the server cannot be reached", who=url, why=why, fix="start it (fastllm server MODEL), or correct the address; https:// if it speaks TLS") from None

    def prompt() -> Any:
        if isinstance(vocabulary, int) and vocabulary > 64:
            return [rng.randrange(32, vocabulary) for _ in range(input_tokens)]
        return " ".join(rng.choice(WORDS) for _ in range(input_tokens))

    more = {"max_tokens": output_tokens, "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    bodies = [{"model": model, "prompt": prompt(), **more} for _ in range(requests)]
    start = time.perf_counter()
    if rate is not None:
        waits, at = [], 0.0
        for _ in bodies:
            waits.append(at)
            at += rng.expovariate(rate)

        async def later(wait_s: float, body: dict[str, Any]) -> Sample:
            await asyncio.sleep(max(0.0, start + wait_s - time.perf_counter()))
            return await _request(target, body)

        return list(await asyncio.gather(*map(later, waits, bodies))), time.perf_counter() - start
    left, samples = iter(bodies), list[Sample]()

    async def client() -> None:
        for body in left:
            samples.append(await _request(target, body))

    await asyncio.gather(*(client() for _ in range(clients)))
    return samples, time.perf_counter() - start


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))] if ordered else 0.0


def summary(samples: list[Sample], seconds: float) -> dict[str, Any]:
    """Counts, rates, and percentiles in milliseconds."""
    good = [s for s in samples if not s.error]
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error:
            errors[sample.error] = errors.get(sample.error, 0) + 1

    def spread(values: list[float]) -> dict[str, float]:
        return {f"p{p}": round(percentile(values, p / 100) * 1e3, 3) for p in (50, 90, 99)}

    tokens = sum(s.tokens for s in good)
    return {
        "requests": len(samples),
        "errors": errors,
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "prompt_tokens": sum(s.prompt_tokens for s in good),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 3),
        "ttft_ms": spread([s.ttft_s for s in good]),
        "itl_ms": spread([gap for s in good for gap in s.gaps_s]),
        "request_ms": spread([s.total_s for s in good]),
    }


@click.command("serve", cls=Command)
@click.argument("url")
@click.option("--clients", "-c", type=click.IntRange(1, 4096), default=8, help="Clients that send one request after the other.  [default: 8]")
@click.option("--rate", type=click.FloatRange(0.001), help="Instead of clients: requests a second, at random times.")
@click.option("--requests", type=click.IntRange(1), default=64, help="Requests in all.  [default: 64]")
@click.option("--input-tokens", type=click.IntRange(1), default=128, help="Tokens of a prompt.  [default: 128]")
@click.option("--output-tokens", type=click.IntRange(1), default=64, help="Tokens of an answer.  [default: 64]")
@click.option("--warmup", type=click.IntRange(0), default=2, help="Requests before, that do not count.  [default: 2]")
@click.option("--model-name", default="default", help="Model to name in requests.")
@click.option("--api-key", envvar="FASTLLM_API_KEY", help="Key to send.")
@click.option("--seed", type=int, help="Of prompts and times; the same again finds its prompts in the cache.  [default: drawn, shown]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def serve_command(url: str, **values: Any) -> int:
    """Load a server at URL, and show what its clients see."""
    seed = random.randrange(1 << 31) if values["seed"] is None else values["seed"]
    same = {"input_tokens": values["input_tokens"], "output_tokens": values["output_tokens"]}
    same |= {"key": values["api_key"], "model": values["model_name"]}

    async def run() -> tuple[list[Sample], float]:
        if values["warmup"]:
            await run_load(url, requests=values["warmup"], clients=values["warmup"], seed=seed + 1, **same)
        asked = {"requests": values["requests"], "clients": values["clients"], "rate": values["rate"], "seed": seed}
        return await run_load(url, **asked, **same)

    found = summary(*asyncio.run(run()))
    load = {"rate": values["rate"]} if values["rate"] else {"clients": values["clients"]}
    found = {"url": url, **load, "input_tokens": values["input_tokens"], "output_tokens": values["output_tokens"], "seed": seed, **found}
    nothing = bool(found["errors"]) and not found["tokens"]
    if values["as_json"]:
        click.echo(json.dumps(found))
    elif nothing:
        why = "; ".join(f"{count} × {error}" for error, count in found["errors"].items())
        raise FastLLMError(f"none of {found['requests']} requests was answered", who=url, why=why, fix="change what the server refuses, or ask it: curl URL/health")
    else:
        click.echo("\n".join(_lines(found)))
    return int(nothing)


def _lines(found: dict[str, Any]) -> list[str]:
    how = f"{found['rate']:g} requests/s" if "rate" in found else f"{found['clients']} clients"
    lines = [f"{found['requests']} requests of {found['input_tokens']} + {found['output_tokens']} tokens, {how}, seed {found['seed']}, {found['seconds']:.1f} s"]
    lines.append(f"{'tokens/s':<22}{found['tokens_per_s']:>10.1f}")
    lines.append(f"{'requests/s':<22}{found['requests_per_s']:>10.2f}")
    names = {"ttft_ms": "first token", "itl_ms": "between tokens", "request_ms": "whole request"}
    for key, name in names.items():
        lines.append(f"{name + ', ms':<22}" + "".join(f"{p} {v:>9.1f}   " for p, v in found[key].items()).rstrip())
    lines += [f"failed: {count} × {error}" for error, count in found["errors"].items()]
    return lines
