"""The table of routes, and how a request that generates is answered.

Handlers read the body (bounded in size and pace), have it prepared, submit it, and hand over to a `Reply`, which sends while it watches
for the client to go. FastAPI holds the table and publishes it, the gate runs what is in it; bodies are validated where they are prepared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response

from ..core.errors import (
    BodyTooLarge,
    Cancelled,
    NotFound,
    RequestTimeout,
    SwitchedOff,
    UnsupportedContent,
    UnsupportedMedia,
)
from . import info, listing, page
from .answers import Identity, is_fault
from .bodies import check_ignored
from .chat import ChatWriter
from .completions import CompletionWriter
from .embeddings import EmbeddingsWriter, RerankWriter, Vectors
from .gate import Gate, Visit, send_error, send_json
from .generation import Generation, Writer
from .messages import PING as MESSAGES_PING
from .messages import MessagesWriter
from .openapi import describe
from .prepare import Prepared
from .responses import ResponsesWriter
from .runtime import Runtime
from .sse import STREAM_HEADERS, Outbox, Receive, Scope, Send, wait_for_disconnect

__all__ = ["ROUTES", "make_app"]

ROUTES: Final[tuple[tuple[str, str, str, dict[str, Any]], ...]] = (
    ("POST", "/v1/chat/completions", "Answer a conversation.", {"body": "chat", "stream": True}),
    ("POST", "/v1/completions", "Continue texts or token ids.", {"body": "completion", "stream": True}),
    ("POST", "/v1/responses", "OpenAI's Responses; nothing is stored.", {"body": "responses", "stream": True}),
    ("GET", "/v1/responses/{response_id}", "404: nothing is stored.", {}),
    ("DELETE", "/v1/responses/{response_id}", "404: nothing is stored.", {}),
    ("POST", "/v1/responses/input_tokens", "Tokens that the conversation of a Response takes.", {"body": "responses_count"}),
    ("POST", "/v1/messages", "Anthropic's Messages.", {"body": "messages", "stream": True}),
    ("POST", "/v1/messages/count_tokens", "Tokens that the conversation takes.", {"body": "count"}),
    ("POST", "/v1/embeddings", "With --embedding: vectors of texts.", {"body": "embeddings"}),
    ("POST", "/v1/rerank", "With --embedding: texts by their likeness to a query, in the shape of Jina or TEI.", {"body": "rerank"}),
    ("POST", "/v1/chat/completions/input_tokens", "Tokens that the conversation takes.", {"body": "input_tokens"}),
    ("POST", "/apply-template", "The exact prompt that the model's template makes of a conversation.", {"body": "template"}),
    ("POST", "/tokenize", "Token ids of a text or a conversation.", {"body": "tokenize"}),
    ("POST", "/detokenize", "The text of token ids.", {"body": "detokenize"}),
    ("GET", "/tokenizer_info", "Special tokens and size of the vocabulary.", {}),
    ("GET", "/v1/models", "The models that answer.", {"query": listing.QUERY}),
    ("GET", "/v1/models/{model_id:path}", "One model.", {}),
    ("GET", "/live", "200 while the process answers.", {}),
    ("GET", "/health", "503 while the model loads, when no step has ended for 60 s, and when the engine has failed.", {}),
    ("GET", "/ready", "200 if a new request would be taken now.", {}),
    ("GET", "/metrics", "Prometheus metrics.", {"media": "text/plain"}),
    ("GET", "/props", "What the model is, and the default of each setting.", {}),
    ("GET", "/v1/requests", "With --dev: requests that run, without their texts.", {}),
    ("POST", "/v1/cancel", "With --dev: cancels a request by its id.", {"body": "cancel"}),
    ("GET", "/openapi.json", "This description.", {}),
)
"""Method, path, what it does, and for the description: the kind of its body, whether it streams, its media type, its parameters."""

WRITERS: Final[dict[str, tuple[str, Callable[[Identity, Generation], Writer]]]] = {
    "chat": ("chatcmpl-", ChatWriter),
    "completion": ("cmpl-", CompletionWriter),
    "responses": ("resp_", ResponsesWriter),
    "messages": ("msg_", MessagesWriter),
    "embeddings": ("embd-", EmbeddingsWriter),
    "rerank": ("rank-", RerankWriter),
}
"""Kind of a request -> prefix of its id, and who words its answers."""


async def read_body(request: Request, limit: int, pause_s: float) -> bytes:
    """The whole body. Raises UnsupportedMedia, BodyTooLarge, RequestTimeout; never reads on after that."""
    visit: Visit = request.scope["visit"]
    kinds = [value.partition(";")[0].strip().lower() for value in request.headers.getlist("content-type")]
    codings = {value.strip().lower() for value in request.headers.getlist("content-encoding")}
    if kinds != ["application/json"] or not codings <= {"identity"}:
        raise UnsupportedMedia("the body must be application/json, not compressed", fix="send the header Content-Type: application/json")
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes", fix="send less, or start the server with a larger --max-body")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and int(length[:19]) > limit:
        raise too_large
    parts, size = [], 0
    while True:
        try:
            async with asyncio.timeout(pause_s):  # unlike wait_for, without a task of its own
                message = await request.receive()
        except TimeoutError:
            raise RequestTimeout(f"the body stopped coming for {pause_s:g} s", fix="send it without a pause") from None
        if message["type"] == "http.disconnect":
            raise Cancelled("the client has gone")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large
        if not message.get("more_body", False):
            visit.close = False
            return b"".join(parts)


def reply_headers(ready: Prepared, seed: int | None = None) -> dict[str, str]:
    """What an answer says about how the request was taken."""
    headers = {} if seed is None else {"x-fastllm-seed": str(seed)}
    if ready.ignored:
        headers["x-fastllm-ignored"] = ", ".join(_ascii(name) for name in ready.ignored[:32])
    if ready.warnings:
        headers["x-fastllm-warning"] = "; ".join(_ascii(line) for line in ready.warnings)
    return headers


def _ascii(text: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in text[:200]).strip() or "?"


class Reply(Response):
    """Sends a generation's answer, and cancels the generation when the client goes."""

    def __init__(self, runtime: Runtime, generation: Generation, headers: dict[str, str]):
        super().__init__()
        self._runtime, self._generation, self._more = runtime, generation, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One answer."""
        generation, outbox = self._generation, self._generation.outbox
        scope["visit"].generation = generation
        watcher = asyncio.create_task(wait_for_disconnect(receive))
        try:
            if outbox is None:
                await self._whole(scope, send, watcher)
            else:
                await self._stream(outbox, scope, send, watcher)
        finally:
            watcher.cancel()
            generation.cancel()
            self._runtime.leave(generation, outbox)

    async def _stream(self, outbox: Outbox, scope: Scope, send: Send, watcher: asyncio.Task[None]) -> None:
        headers = {**STREAM_HEADERS, **self._more}
        await send({"type": "http.response.start", "status": 200, "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]})
        if "transport" in scope:
            outbox.abort = scope["transport"].abort
            if scope["http_version"] == "1.1":
                outbox.connect(scope["transport"])
        sender = asyncio.create_task(outbox.drain_into(send))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done() and not watcher.done():
                await sender
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _whole(self, scope: Scope, send: Send, watcher: asyncio.Task[None]) -> None:
        generation = self._generation
        done = asyncio.create_task(generation.done.wait())
        try:
            await asyncio.wait({done, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()
        if not generation.done.is_set():
            return
        if generation.error is not None:
            if is_fault(generation.error):
                self._runtime.log.fault(scope["visit"], generation.error)
            await send_error(send, scope["visit"], generation.error, self._more)
        else:
            await send_json(send, 200, generation.writer.body(generation.usage()), self._more)


def make_app(runtime: Runtime) -> Gate:
    """The whole application for a runtime."""
    settings = runtime.settings
    app = FastAPI(title="fastllm", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    def generates(kind: str) -> Callable[[Request], Awaitable[Response]]:
        embeds = kind in ("embeddings", "rerank")

        async def handler(request: Request) -> Response:
            runtime.check_open()
            if embeds != (settings.embedding is not None):
                if embeds:
                    raise UnsupportedContent("this server generates, and embeds no texts", fix="start it with --embedding")
                raise UnsupportedContent("this server embeds texts, and generates none", fix="start it without --embedding")
            body = await read_body(request, settings.max_body, settings.body_pause_s)
            with runtime.preparing() as pool:
                ready: Prepared = await pool.prepare(kind, body)
                del body
                runtime.check_open(taken=True)
                visit: Visit = request.scope["visit"]
                visit.charge(len(ready.prompts) * (ready.params.merged_with(runtime.defaults).n or 1))
                constraint = await runtime.compile(ready)
                runtime.check_open(taken=True)
                made = Vectors if embeds else Generation
                generation = made(runtime, ready, visit.request_id, make_outbox(kind) if ready.stream else None)
                prefix, writer = WRITERS[kind]
                generation.writer = writer(Identity(prefix, settings.name, visit.request_id), generation)
                generation.constraint = constraint
                generation.submit()
                runtime.enter(generation, generation.outbox)
                return Reply(runtime, generation, reply_headers(ready, None if embeds else generation.seed))  # nothing is drawn for a vector

        return handler

    def make_outbox(kind: str) -> Outbox:
        return Outbox(runtime.bridge.soon, ping=MESSAGES_PING) if kind == "messages" else Outbox(runtime.bridge.soon)

    def prepares(kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            runtime.check_open()
            body = await read_body(request, settings.max_body, settings.body_pause_s)
            with runtime.preparing() as pool:
                ready: Prepared = await pool.prepare(kind, body)
            return Response(ready.answer, headers=reply_headers(ready), media_type="application/json")

        return handler

    async def not_stored(request: Request) -> Response:
        raise NotFound("no response is stored here", fix="send the whole conversation as input")

    async def tokenizer_info(request: Request) -> Response:
        return JSONResponse(info.tokenizer(runtime.model))

    async def props(request: Request) -> Response:
        return JSONResponse(info.props(runtime))

    async def requests(request: Request) -> Response:
        check_dev()
        return JSONResponse({"object": "list", "data": info.requests(runtime)})

    async def cancel(request: Request) -> Response:
        check_dev()
        body = await read_body(request, settings.max_body, settings.body_pause_s)
        wanted, ignored = info.cancel_id(body)
        check_ignored(ignored, settings.strict)
        found = [generation for generation, _ in runtime.active if generation.request_id == wanted]
        if not found:
            raise NotFound("no request of this id runs", fix="GET /v1/requests lists them")
        for generation in found:
            generation.fail(Cancelled("the request was cancelled by /v1/cancel"))
        return JSONResponse({"id": wanted, "cancelled": True}, headers=reply_headers(Prepared(ignored=ignored)))

    def check_dev() -> None:
        if not settings.dev:
            raise NotFound("there is no such route", fix="start the server with --dev")

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def health(request: Request) -> Response:
        state = runtime.state()
        headers = {"retry-after": "2"} if state == "loading" else {}
        well = state in ("ready", "draining")
        return JSONResponse({"status": "ok" if well else state}, 200 if well else 503, headers)

    async def ready(request: Request) -> Response:
        state = runtime.state()
        if state == "ready" and runtime.full():
            state = "full"
        return JSONResponse({"status": state}, 200 if state == "ready" else 503, {} if state == "ready" else {"retry-after": "2"})

    def anthropic_entry(name: str) -> dict[str, Any]:
        return listing.anthropic_entry(name, runtime.started_at, runtime.model.context)

    def entry(name: str) -> dict[str, Any]:
        return listing.entry(name, runtime.started_at, runtime.info())

    async def models(request: Request) -> Response:
        query, pages = request.query_params.multi_items(), "anthropic-version" in request.headers
        headers = reply_headers(Prepared(ignored=listing.ignored(query, pages=pages)))
        if not pages:
            return JSONResponse(listing.listed([entry(name) for name in settings.names]), headers=headers)
        names, said = listing.anthropic_page(settings.names, query)
        return JSONResponse({"data": [anthropic_entry(name) for name in names], **said}, headers=headers)

    async def model(request: Request) -> Response:
        name = listing.one(request.path_params["model_id"], settings.names)
        return JSONResponse(anthropic_entry(name) if "anthropic-version" in request.headers else entry(name))

    async def metrics(request: Request) -> Response:
        if not settings.metrics:
            raise SwitchedOff("metrics are switched off", fix="start the server without --no-metrics")
        return Response(runtime.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(request: Request) -> Response:
        return JSONResponse(describe(app, settings))

    handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/chat/completions": generates("chat"),
        "/v1/completions": generates("completion"),
        "/v1/responses": generates("responses"),
        "/v1/responses/{response_id}": not_stored,
        "/v1/responses/input_tokens": prepares("responses_count"),
        "/v1/messages": generates("messages"),
        "/v1/messages/count_tokens": prepares("count"),
        "/v1/embeddings": generates("embeddings"),
        "/v1/rerank": generates("rerank"),
        "/v1/chat/completions/input_tokens": prepares("input_tokens"),
        "/apply-template": prepares("template"),
        "/tokenize": prepares("tokenize"),
        "/detokenize": prepares("detokenize"),
        "/tokenizer_info": tokenizer_info,
        "/props": props,
        "/v1/requests": requests,
        "/v1/cancel": cancel,
        "/v1/models": models,
        "/v1/models/{model_id:path}": model,
        "/live": live,
        "/health": health,
        "/ready": ready,
        "/metrics": metrics,
        "/openapi.json": openapi,
    }
    for method, path, summary, extra in ROUTES:
        methods = [method, "HEAD"] if method == "GET" else [method]  # uvicorn sends the head of what GET would get
        app.add_api_route(path, handlers[path], methods=methods, summary=summary, response_model=None, openapi_extra=extra)
    page.register(app, settings)
    return Gate(app, runtime)
