"""The preparation process: opens the text side of a model, and answers one body after the other on a private socket. One that is asked for grammars says
which of them can be read in time, and does nothing else.

    python -P -m fastllm.server.preparer FD        started by `pool`, ends when its parent does

Frames both ways: a header in JSON, and raw bytes (the body there, token ids back); no pickle. It holds no weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import sys
from typing import Any

import numpy as np

__all__ = ["GRAMMAR", "HEAD", "main", "pack_prepared", "unpack_prepared"]

GRAMMAR = "grammar"  # the kind of a body with the arguments of `ReadLimit`
HEAD = struct.Struct("<II")  # bytes of the header, bytes that follow it


def pack_prepared(ready: Any) -> tuple[dict[str, Any], bytes]:
    """A `Prepared` as header and bytes: its answer, or the ids of all prompts one after the other."""
    if ready.answer is not None:
        return {"answer": True, "ignored": ready.ignored, "warnings": ready.warnings}, ready.answer
    header = {**vars(ready), "params": vars(ready.params), "prompts": [len(p) for p in ready.prompts]}
    return header, b"".join(p.tobytes() for p in ready.prompts)


def unpack_prepared(header: dict[str, Any], data: bytes) -> Any:
    """The inverse of `pack_prepared`."""
    from ..core.sampling import SamplingParams
    from .prepare import Prepared

    if header["answer"]:
        return Prepared(**{**header, "answer": data})
    params = dict(header["params"])
    if params["logit_bias"] is not None:
        params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    ids, at, prompts = np.frombuffer(data, np.int32), 0, []
    for length in header["prompts"]:
        prompts.append(ids[at : at + length])
        at += length
    return Prepared(**{**header, "params": SamplingParams(**params), "prompts": prompts})


def _receive(stream: socket.socket, count: int) -> bytes:
    """Exactly count bytes. Raises EOFError when the parent is gone."""
    parts, left = [], count
    while left:
        part = stream.recv(min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _ok(answer: Any, data: bytes = b"", key: str | None = None) -> tuple[dict[str, Any], bytes]:
    """Header and bytes of a good answer. key: of the grammar that is to be read."""
    return {"ok": answer, "grammar": key}, data


def _answer(stream: socket.socket, header: dict[str, Any], data: bytes = b"") -> None:
    raw = json.dumps(header).encode()
    stream.sendall(HEAD.pack(len(raw), len(data)) + raw + data)


def _open(settings: dict[str, Any]) -> Any:
    """The kitchen: tokenizer and template of the model at settings["path"], whose files are closed again."""
    from ..loading import LoadOptions, open_files, open_text
    from .prepare import Kitchen

    files = open_files(settings.pop("path"), LoadOptions(offline=True, message=lambda _: None, **settings.pop("files")))
    try:
        tokenizer, template = open_text(files, settings["n_ctx"])
    finally:
        files.close()
    return Kitchen(tokenizer, template, **{**settings, "names": tuple(settings["names"])})


def _timing_compiler(kitchen: Any) -> Any:
    from ..text.grammar import GrammarCompiler

    return GrammarCompiler(kitchen.tokenizer, kitchen.vocab_size, timing_only=True)


def _key(ready: Any) -> str | None:
    """What is to be read in time for this request, by content; None: nothing."""
    wanted = ready.constraint
    if wanted is None or ready.answer is not None:
        return None
    return hashlib.sha256(json.dumps([wanted["kind"], wanted["source"]]).encode()).hexdigest()


def main() -> None:
    """Serves until the parent closes the socket."""
    from ..core.errors import FastLLMError, OutOfMemory
    from .kinds import prepare
    from .read_limit import ReadLimit

    limit = ReadLimit(lambda: _timing_compiler(kitchen))
    with socket.socket(fileno=int(sys.argv[1])) as stream:
        try:
            size, _ = HEAD.unpack(_receive(stream, HEAD.size))
            kitchen = _open(json.loads(_receive(stream, size)))
            _answer(stream, {})
            while not limit.spent:
                size, length = HEAD.unpack(_receive(stream, HEAD.size))
                kind = json.loads(_receive(stream, size))["kind"]
                body = _receive(stream, length)
                try:
                    try:
                        if kind == GRAMMAR:
                            header, data = _ok(limit(**json.loads(body)))
                        else:
                            ready = prepare(kitchen, kind, body)
                            header, data = _ok(*pack_prepared(ready), _key(ready))
                    except MemoryError:
                        raise OutOfMemory("there is not enough memory to prepare this request", fix="send less") from None
                except FastLLMError as error:
                    told = {"kind": type(error).__name__, "message": error.message, "who": error.who, "why": error.why, "fix": error.fix}
                    header, data = {"error": {**told, "fields": error.fields}}, b""
                del body
                _answer(stream, {**header, "last": limit.spent}, data)
        except (EOFError, ConnectionError):
            pass
        finally:
            if limit.spent:
                os._exit(0)  # else the thread that still reads a grammar would be waited for


if __name__ == "__main__":
    main()
