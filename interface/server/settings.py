"""What a server is told at its start, after command line, variables and configuration file are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PING_S", "READ_S", "SLOW_READER_S", "STALLED_S", "UNSENT_BYTES", "ServerSettings"]

PING_S: Final = 15.0
READ_S: Final = 2.0  # of the processor, for the grammar of a request
UNSENT_BYTES: Final = 256 << 10  # of a stream, after which its sequence pauses
SLOW_READER_S: Final = 30.0  # a pause may last, before the request is cancelled
STALLED_S: Final = 60.0  # without the end of a step while there is work: the engine counts as stalled


@dataclass(frozen=True)
class ServerSettings:
    """Options of `fastllm server`.

    names: the model's names, the first is answered. keys: accepted API keys; empty: none is asked for. hosts: accepted `Host` names
    besides the local ones; origins: of web pages that may call. local: bound to loopback only, so `Host` must be local. max_tokens:
    new tokens of a request that does not say. max_body: bytes. drain_s: seconds that running requests get at the end. queue_timeout_s:
    seconds a request may wait, None: for ever. ping_s: silence after which a stream gets a comment. strict: unknown fields are refused. web: the
    page at `/` is served. embedding: how texts are pooled to vectors; None: the server generates. key_concurrent, key_per_minute:
    answers of one key, None: no limit. tool_parser: a name of `text.output.FORMATS`, or auto; reasoning_format: none leaves reasoning in the
    content; thinking: whether the model thinks first where a request does not say and its template has that switch, None: the template's own
    choice. request_template: bodies may bring a chat template; log_prompts: prompts and answers go to the log. read_s: of a processor, for the grammar
    of a request.
    """

    names: tuple[str, ...] = ("model",)
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    local: bool = True
    root_path: str = ""
    max_tokens: int = 8192
    max_n: int = 16
    max_body: int = 32 << 20
    drain_s: float = 30.0
    queue_timeout_s: float | None = None
    ping_s: float = PING_S
    slow_reader_s: float = SLOW_READER_S
    body_pause_s: float = 30.0
    strict: bool = False
    strict_model: bool = False
    metrics: bool = True
    metrics_aliases: bool = False
    json_log: bool = False
    dev: bool = False
    web: bool = True
    preparers: int = 2
    read_s: float = READ_S
    embedding: str | None = None
    key_concurrent: int | None = None
    key_per_minute: int | None = None
    tool_parser: str = "auto"
    reasoning_format: str = "auto"
    thinking: bool | None = None
    request_template: bool = False
    log_prompts: bool = False

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]
