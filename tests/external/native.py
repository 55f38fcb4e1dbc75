"""llama.cpp's native interface on top of our server, for llama.cpp's own suite: /completion, /slots, and defaults that its flags set.

An ASGI layer around our application. A native request becomes one of /v1/completions; its answer is worded by a `Writer` of this file
instead of ours, so everything between is what our clients get. The product has none of this.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fastllm.core.errors import FastLLMError
from fastllm.server import app as server_app
from fastllm.server.answers import error_body
from fastllm.server.completions import CompletionWriter
from fastllm.server.generation import Answer, Usage
from fastllm.server.sse import frame

__all__ = ["Native", "Setup"]

SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "stream", "ignore_eos", "cache_prompt", "grammar", "json_schema")
SAME += ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty", "min_tokens")
SEEDED = ("/v1/chat/completions", "/chat/completions", "/v1/completions", "/apply-template")


@dataclass
class Setup:
    """What the flags of llama-server say. n_ctx: of one slot."""

    n_slots: int = 1
    n_ctx: int = 4096
    n_predict: int = -1
    seed: int = 42
    slots: bool = False
    verbose: bool = False
    reasoning: str = "auto"


@dataclass
class Ask:
    """A native request while it runs."""

    body: dict[str, Any]
    several: bool
    n_predict: int
    tokens: dict[int, list[int]] = field(default_factory=dict)  # choice -> ids
    entries: dict[int, list[Any]] = field(default_factory=dict)  # choice -> log-probabilities
    told: int = 0


class NativeWriter:
    """A `Writer` of native answers."""

    def __init__(self, setup: Setup, ask: Ask, name: str, generation: Any):
        self._setup, self._ask, self._name, self._generation = setup, ask, name, generation
        self.plain: dict[int, Any] = {}

    def _piece_of(self, token_id: int) -> dict[str, Any]:
        raw = self._generation.tokenizer.decode_bytes(token_id, skip_special=False)
        return {"id": token_id, "token": raw.decode("utf-8", "replace"), "bytes": list(raw)}

    def _entry(self, entry: Any) -> dict[str, Any]:
        top = [{**self._piece_of(i), "logprob": min(p, 0.0)} for i, p in entry.top]
        return {**self._piece_of(entry.token_id), "logprob": min(entry.logprob, 0.0), "top_logprobs": top}

    def start(self) -> bytes:
        """Nothing before the first token."""
        return b""

    def piece(self, answer: Answer, text: str, logprobs: list[Any]) -> bytes:
        """A chunk of a stream, with the ids of its tokens."""
        ids = [entry.token_id for entry, *_ in logprobs]
        found = [self._entry(entry) for entry, *_ in logprobs]
        self._ask.tokens.setdefault(answer.index, []).extend(ids)
        self._ask.entries.setdefault(answer.index, []).extend(found)
        if not self._generation.ready.stream or not ids:
            return b""
        chunk = {"index": answer.index, "content": text, "tokens": ids, "stop": False, "id_slot": 0}
        return frame({**chunk, **({"completion_probabilities": found} if self._ask.body.get("n_probs") else {})})

    def finish(self, answer: Answer) -> bytes:
        """The last chunk comes at the end, with the timings."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """The last chunk of each answer."""
        last = [self._whole(answer, usage) for answer in self._generation.answers]
        return b"".join(frame({**one, "content": "", "tokens": []}) for one in last)

    def error(self, error: FastLLMError) -> bytes:
        """As ours."""
        return frame(error_body(error, self._generation.request_id))

    def body(self, usage: Usage) -> Any:
        """The whole answer; a list of them for a list of prompts."""
        found = [self._whole(answer, usage) for answer in self._generation.answers]
        return found if self._ask.several else found[0]

    def _timings(self, usage: Usage) -> dict[str, Any]:
        found = usage.llama()
        for kind in ("prompt", "predicted"):
            count = found[f"{kind}_n"] - (kind == "predicted")
            found[f"{kind}_per_token_ms"] = found[f"{kind}_ms"] / count if count > 0 else 0.0
        if found["predicted_n"] > 1:
            found["predicted_per_second"] = 1e3 / found["predicted_ms"] * (found["predicted_n"] - 1)
        return found

    def _whole(self, answer: Answer, usage: Usage) -> dict[str, Any]:
        ask, generation = self._ask, self._generation
        prompt = generation.ready.prompts[answer.prompt].tolist()
        ends = sorted(set(generation.tokenizer.end_ids)) if ask.body.get("ignore_eos") else []
        kind = "word" if answer.stopped is not None else "limit" if answer.finish_reason == "length" else "eos"
        settings = {
            "n_predict": ask.n_predict,
            "seed": generation.seed,
            "temperature": generation.params.temperature,
            "logit_bias": [{"token": token, "bias": None} for token in ends],
            "adaptive_target": -1.0,  # samplers that are not there are off
            "adaptive_decay": 0.0,
        }
        whole = {
            "index": answer.index,
            "content": answer.text,
            "tokens": ask.tokens.get(answer.index, []) if ask.body.get("return_tokens") else [],
            "id_slot": 0,
            "stop": True,
            "model": self._name,
            "tokens_predicted": answer.num_tokens,
            "tokens_evaluated": len(prompt),
            "generation_settings": settings,
            "prompt": "".join(generation.tokenizer.id_to_piece(i) if i in generation.tokenizer.special_ids else self._piece_of(i)["token"] for i in prompt),
            "has_new_line": "\n" in answer.text,
            "truncated": kind == "limit" and len(prompt) + answer.num_tokens >= self._setup.n_ctx,
            "stop_type": kind,
            "stopping_word": answer.stopped or "",
            "tokens_cached": usage.cached_tokens,
            "timings": self._timings(usage),
        }
        if ask.body.get("n_probs"):
            whole["completion_probabilities"] = ask.entries.get(answer.index, [])
        fields = ask.body.get("response_fields")
        return {name: _at(whole, name) for name in fields} if fields else whole


def _at(whole: dict[str, Any], path: str) -> Any:
    found: Any = whole
    for name in path.split("/"):
        found = found[name]
    return found


def _telling(scope: Any, send: Any) -> Any:
    """`send` that notes an answer of 500 and above where the runner looks: no case may bring one about, not even an excluded one. 501 says
    that a route is switched off, as llama.cpp says it of /slots."""

    async def told(message: Any) -> None:
        status = message.get("status", 0)
        if status >= 500 and status != 501 and not (status == 503 and scope["path"] == "/health"):  # a server that loads is asked until it is ready
            with open(os.environ["FASTLLM_EXTERNAL_FAULTS"], "a") as file:
                print(f"status={status} path={scope['path']}", file=file)
        await send(message)

    return told


class Native:
    """ASGI: native routes here, everything else as it comes to ours."""

    def __init__(self, inner: Any, runtime: Any, setup: Setup):
        self._inner, self._runtime, self._setup = inner, runtime, setup
        self._asks: dict[str, Ask] = {}
        self._numbers = itertools.count()
        prefix, ours = server_app.WRITERS["completion"]

        def writer(identity: Any, generation: Any) -> Any:
            ask = self._asks.get(generation.request_id)
            if ask is None:
                return ours(identity, generation)
            return NativeWriter(setup, ask, runtime.settings.name, generation)

        server_app.WRITERS["completion"] = (prefix, writer)
        assert ours is CompletionWriter

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        send = _telling(scope, send)
        method, path = scope["method"], scope["path"]
        if method == "POST" and path in ("/completion", "/completions"):
            await self._completion(scope, receive, send)
        elif method == "GET" and path == "/slots":
            await self._slots(scope, receive, send)
        elif method == "GET" and path == "/metrics" and self._runtime.settings.metrics:
            await self._metrics(scope, receive, send)
        elif method == "POST" and path.endswith("/embeddings"):
            await self._embeddings(scope, receive, send)
        elif method == "POST" and path in SEEDED:
            await self._seeded(scope, receive, send)
        else:
            await self._inner(scope, receive, send)

    async def _forward(self, scope: Any, body: Any, send: Any, receive: Any, path: str | None = None, request_id: str = "") -> None:
        """Hands a request with another body to our application."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"transfer-encoding")]
        headers.append((b"content-length", str(len(raw)).encode()))
        if request_id:
            headers = [(k, v) for k, v in headers if k != b"x-request-id"] + [(b"x-request-id", request_id.encode())]
        given = [{"type": "http.request", "body": raw, "more_body": False}]

        async def instead() -> Any:
            return given.pop() if given else await receive()

        target = path or scope["path"]
        await self._inner({**scope, "path": target, "raw_path": target.encode(), "headers": headers}, instead, send)

    async def _completion(self, scope: Any, receive: Any, send: Any) -> None:
        raw = await _read(receive)
        try:
            body = json.loads(raw)
            asked, ask = self._translate(body)
        except (ValueError, KeyError, AttributeError, FastLLMError):  # ours says what is wrong
            await self._forward(scope, raw, send, receive, "/v1/completions")
            return
        name = f"native-{next(self._numbers)}"
        self._asks[name] = ask
        try:
            await self._forward(scope, asked, send, receive, "/v1/completions", name)
        finally:
            del self._asks[name]

    def _translate(self, body: dict[str, Any]) -> tuple[dict[str, Any], Ask]:
        """A native body as one of /v1/completions."""
        asked = {name: body[name] for name in SAME if body.get(name) is not None}
        asked.setdefault("seed", self._setup.seed)
        n_predict = body.get("n_predict", body.get("max_tokens", self._setup.n_predict))
        if n_predict >= 0:
            asked["max_tokens"] = n_predict
        asked["logprobs"] = body.get("n_probs") or 0
        bias = body.get("logit_bias")
        if bias:
            pairs = bias.items() if isinstance(bias, dict) else bias
            asked["logit_bias"] = {str(i): max(-100, amount) for key, amount in pairs for i in self._ids_of(key)}
        prompt = body["prompt"]
        several = isinstance(prompt, list) and any(isinstance(one, (list, dict)) for one in prompt)
        several |= isinstance(prompt, list) and len(prompt) > 0 and all(isinstance(one, str) for one in prompt)
        asked["prompt"] = [self._prompt(one) for one in prompt] if several else self._prompt(prompt)
        if asked.get("stop") == []:
            del asked["stop"]
        return asked, Ask(body, several, n_predict)

    def _ids_of(self, key: Any) -> list[int]:
        if isinstance(key, int) or (isinstance(key, str) and key.isdecimal()):
            return [int(key)]
        return self._runtime.model.tokenizer.encode(str(key), add_special=False, parse_special=True)

    def _prompt(self, prompt: Any) -> Any:
        """A prompt as ids; the parts of a mixed one one after the other. Raises ValueError for what is no text."""
        tokenizer = self._runtime.model.tokenizer
        if isinstance(prompt, dict):
            if prompt.get("multimodal_data"):
                raise ValueError("pictures")
            if "content" in prompt:
                prompt = "".join(part["text"] for part in prompt["content"])
            else:
                prompt = prompt["prompt_string"]
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_special=True, parse_special=True)
        ids: list[int] = []
        for part in prompt:
            ids += [part] if isinstance(part, int) else tokenizer.encode(part, add_special=not ids, parse_special=True)
        return ids

    async def _slots(self, scope: Any, receive: Any, send: Any) -> None:
        from fastllm.server.gate import send_json

        if not self._setup.slots:
            await send_json(send, 501, {"error": {"message": "slots are off", "type": "not_supported_error", "code": 501}}, {})
            return
        running = self._runtime.model.engine.stats().running
        found = [{"id": i, "n_ctx": self._setup.n_ctx, "speculative": False, "is_processing": i < running} for i in range(self._setup.n_slots)]
        await send_json(send, 200, found, {})

    async def _embeddings(self, scope: Any, receive: Any, send: Any) -> None:
        """Inputs of texts, ids and objects in one another, as ids; what ours takes, and what nobody does, goes as it is."""
        raw = await _read(receive)
        try:
            body = json.loads(raw)
            given = body["input"]
            mixed = isinstance(given, list) and len({type(part) for part in given}) > 1
            several = isinstance(given, list) and not any(isinstance(part, int) for part in given)
            if isinstance(given, dict) or mixed or (several and not all(isinstance(part, str) for part in given)):
                body["input"] = [self._prompt(part) for part in given] if several else self._prompt(given)
        except (ValueError, KeyError, TypeError, AttributeError):
            await self._forward(scope, raw, send, receive)
            return
        await self._forward(scope, body, send, receive)

    async def _metrics(self, scope: Any, receive: Any, send: Any) -> None:
        """Our own numbers under llama.cpp's names; what is asked of drafts and of rates is 0."""
        messages = await self._collect(scope, b"", receive, "/metrics")
        found = {m.name: m for m in text_string_to_metric_families(messages[1]["body"].decode())}

        def value(family: str, sample: str = "") -> float:
            return next(s.value for s in found[f"fastllm_{family}"].samples if s.name == f"fastllm_{sample or family}")

        cached, prefills, decodes = value("prefix_hit_tokens", "prefix_hit_tokens_total"), "prefill_seconds", "decode_seconds"
        numbers = {
            "prompt_tokens_total": value("prompt_tokens", "prompt_tokens_total") - cached,
            "prompt_tokens_cached_total": cached,
            "prompt_seconds_total": value(prefills, f"{prefills}_sum"),
            "tokens_predicted_total": value("generated_tokens", "generated_tokens_total"),
            "tokens_predicted_seconds_total": value(decodes, f"{decodes}_sum"),
            "n_decode_total": value("step_seconds", "step_seconds_count"),
            "n_tokens_max": value("request_prompt_tokens", "request_prompt_tokens_sum"),
            **dict.fromkeys(("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total"), 0.0),
            "requests_processing": value("requests_running"),
            "requests_deferred": value("requests_waiting"),
            **dict.fromkeys(("prompt_tokens_seconds", "predicted_tokens_seconds", "n_busy_slots_per_decode"), 0.0),
        }
        text = ""
        for name, number in numbers.items():
            kind = "counter" if name.endswith("_total") or name == "n_tokens_max" else "gauge"
            text += f"# HELP llamacpp:{name} As ours.\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {number}\n"
        headers = [(k, v) for k, v in messages[0]["headers"] if k != b"content-length"] + [(b"Process-Start-Time-Unix", str(int(self._runtime.started_at)).encode())]
        await send({**messages[0], "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})

    async def _seeded(self, scope: Any, receive: Any, send: Any) -> None:
        """The seed of the flags; and with --verbose the prompt that the template made."""
        raw = await _read(receive)
        try:
            body = json.loads(raw)
            if "template" not in scope["path"]:
                body.setdefault("seed", self._setup.seed)
            if "enable_thinking" in (self._runtime.model.planned.files.chat_template or "") and scope["path"] != "/v1/completions":
                body["chat_template_kwargs"] = {"enable_thinking": self._setup.reasoning != "off", **(body.get("chat_template_kwargs") or {})}
        except (ValueError, AttributeError):
            await self._forward(scope, raw, send, receive)
            return
        if "template" in scope["path"]:
            await self._forward(scope, body, send, receive)
            return
        if self._setup.n_predict >= 0 and "max_tokens" not in body and "max_completion_tokens" not in body:
            body["max_tokens"] = body.pop("n_predict", self._setup.n_predict)
        verbose = (self._setup.verbose or body.get("verbose") is True) and not body.get("stream") and "chat" in scope["path"]
        if not verbose:
            await self._forward(scope, body, send, receive)
            return
        messages = await self._collect(scope, body, receive, scope["path"])
        if messages[0]["status"] == 200:
            rendered = await self._collect(scope, body, receive, "/apply-template")
            answer = json.loads(messages[1]["body"])
            answer["__verbose"] = {"prompt": json.loads(rendered[1]["body"])["prompt"]}
            messages[1]["body"] = json.dumps(answer).encode()
            headers = [(k, v) for k, v in messages[0]["headers"] if k != b"content-length"]
            messages[0]["headers"] = [*headers, (b"content-length", str(len(messages[1]["body"])).encode())]
        for message in messages:
            await send(message)

    async def _collect(self, scope: Any, body: Any, receive: Any, path: str) -> list[Any]:
        """Our application's whole answer: its start, and one body."""
        found: list[Any] = []

        async def keep(message: Any) -> None:
            found.append(message)

        await self._forward(scope, body, keep, receive, path)
        whole = b"".join(message.get("body", b"") for message in found[1:])
        return [found[0], {"type": "http.response.body", "body": whole}]


async def _read(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return b"".join(parts)
