"""`fastllm server`: the model behind the HTTP interfaces that clients know, for as long as the process lives."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..core.errors import UsageError
from .command import Command, model_argument
from .files import read_text
from .options import load_options, model_options, sampling_options, thinking_option
from .sizes import Size
from .variables import PortOption

if TYPE_CHECKING:
    from ..core.sampling import SamplingParams
    from ..server.settings import ServerSettings

__all__ = ["run_server", "server_command", "server_options"]

PARSERS: Final = (
    "hermes", "qwen3-coder", "llama3-json", "llama-pythonic", "mistral", "deepseek-v3", "deepseek-v3.1", "glm4.5", "kimi-k2", "minimax", "phi", "granite", "gpt-oss"
)  # fmt: skip
"""Names of `text.output.FORMATS`, which loads too much for --help."""

ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)
LEAST_BODY: Final = 1024  # bytes; a server that takes no ordinary request is of no use
MIN_KEY: Final = 8  # characters; shorter keys are guessed


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What only a server takes, in the order of the help."""
    options = (
        click.option("--host", "hosts", multiple=True, default=("127.0.0.1",), envvar="FASTLLM_HOST", help="Address or name to listen on; may be repeated.  [default: 127.0.0.1]"),
        click.option("--port", cls=PortOption, type=click.IntRange(0, 65535), default=8000, help="0 picks a free one, and prints it.  [default: 8000]"),
        click.option("--uds", type=click.Path(dir_okay=False), help="Listen on this Unix socket, and on no port."),
        click.option("--root-path", default="", help="Prefix of all routes behind a proxy, such as /llm."),
        click.option("--model-name", "model_names", multiple=True, envvar="FASTLLM_MODEL_NAME", help="Name that clients use; may be repeated.  [default: the model's]"),
        click.option("--api-key", "api_keys", multiple=True, envvar="FASTLLM_API_KEY", help="A key that clients must send; may be repeated. Process lists show it: better --api-key-file."),
        click.option("--api-key-file", type=click.Path(dir_okay=False, path_type=Path), help="A file with one key a line; SIGHUP reads it again."),
        click.option("--key-concurrent", type=click.IntRange(1), help="Answers (prompts times n) of one key at the same time; more get 429.  [default: no limit]"),
        click.option("--key-per-minute", type=click.IntRange(1), help="Answers (prompts times n) of one key in a minute; more get 429.  [default: no limit]"),
        click.option("--tls-cert", type=click.Path(dir_okay=False), help="Serve HTTPS with this certificate (PEM, with its chain); SIGHUP reads it again."),
        click.option("--tls-key", type=click.Path(dir_okay=False), help="The certificate's private key (PEM).  [default: in the file of --tls-cert]"),
        click.option("--insecure", is_flag=True, help="Listen to other machines without asking for a key."),
        click.option("--allowed-host", "allowed_hosts", multiple=True, envvar="FASTLLM_ALLOWED_HOST", help="Further name by which clients may call a local server."),
        click.option("--cors-origin", "cors_origins", multiple=True, envvar="FASTLLM_CORS_ORIGIN", help="Origin of web pages that may call, or *; may be repeated."),
        click.option("--max-tokens", "-n", type=click.IntRange(1), default=8192, help="New tokens of a request that does not say.  [default: 8192]"),
        click.option("--max-n", type=click.IntRange(1, 16), default=16, help="Most answers per prompt.  [default: 16]"),
        click.option("--max-queue", type=click.IntRange(1, 1 << 20), default=256, help="Requests that may wait; more get 503.  [default: 256]"),
        click.option("--queue-timeout", type=click.FloatRange(0.001), help="Seconds a request may wait.  [default: for ever]"),
        click.option("--schedule", type=click.Choice(["fcfs", "shortest-remaining"]), default="fcfs", help="Who runs first.  [default: fcfs]"),
        click.option("--max-body", type=Size(LEAST_BODY), default="32MiB", help="Largest body.  [default: 32MiB]"),
        click.option("--grammar-time", type=click.FloatRange(0.1), default=2.0, help="Seconds of a processor that the schema or grammar of a request may take to read.  [default: 2]"),
        click.option("--drain", type=click.FloatRange(0), default=30.0, help="Seconds that running requests get at the end.  [default: 30]"),
        click.option("--sse-ping", type=click.FloatRange(0.1), default=15.0, help="Seconds of silence of a stream before a comment is sent.  [default: 15]"),
        click.option("--embedding", type=click.Choice(["last", "mean", "cls"]), is_flag=False, flag_value="last", help="Serve vectors of texts, pooled so, instead of answers; without a value: last."),
        click.option("--tool-parser", type=click.Choice(["auto", *PARSERS]), default="auto", help="Form of the model's tool calls.  [default: auto, by its template]"),
        thinking_option,
        click.option("--reasoning-format", type=click.Choice(["auto", "deepseek", "none"]), default="auto", help="none leaves reasoning in the content.  [default: auto, apart]"),
        click.option("--allow-request-template", is_flag=True, help="Requests may bring a chat template of their own, which runs in the sandbox."),
        click.option("--log-prompts", is_flag=True, help="Write prompts and answers into the log."),
        click.option("--strict-model", is_flag=True, help="Refuse requests that name another model."),
        click.option("--no-metrics", is_flag=True, help="Switch /metrics off."),
        click.option("--no-web", is_flag=True, help="Switch the web page off."),
        click.option("--metrics-aliases", type=click.Choice(["vllm"]), help="Metrics under these names, too."),
        click.option("--log-format", type=click.Choice(["text", "json"]), default="text", help="Of the log on stderr; --progress json makes it json, too.  [default: text]"),
        click.option("--dev", is_flag=True, help="Routes that list and cancel running requests."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command("server", cls=Command)
@model_argument()
@server_options
@sampling_options(without=("max_tokens", "seed", "ignore_eos"))
@model_options
def server_command(model: str | None, **values: Any) -> int:
    """Serve MODEL to clients of the OpenAI and Anthropic interfaces.

    MODEL is what `fastllm run` takes. Options can also be given as variables (FASTLLM_ and the name: FASTLLM_PORT) and in a file
    (--config); a flag wins over a variable, a variable over the file. Sampling options are the defaults of requests that do not say.

    \b
    fastllm server ./model.gguf --port 8080
    fastllm server smollm2 --host 0.0.0.0 --api-key-file keys.txt
    """
    return run_server(model, values)


def run_server(model: str | None, values: dict[str, Any], opened: Callable[[Sequence[str]], None] = lambda addresses: None) -> int:
    """Serves until a signal; returns the exit code. opened: called with the addresses when the model is ready."""
    from .run import use_threads

    use_threads(values["threads"])
    import asyncio

    from ..loading import DEFAULT_MODEL, load_model, resolved
    from ..server.serve import open_sockets, serve, shown_address
    from ..server.tls import Tls
    from .terminal import Reporter, say

    name = model or DEFAULT_MODEL
    settings, read_keys = _settings(name, values)
    if values["tls_key"] and not values["tls_cert"]:
        raise UsageError("--tls-key is the key of a certificate, and none is named", fix="--tls-cert FILE")
    tls = Tls(values["tls_cert"], values["tls_key"]) if values["tls_cert"] else None
    for place in ("hosts", "port"):
        if values["uds"] and click.get_current_context().get_parameter_source(place) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--uds is a socket of its own, beside which --{place.rstrip('s')} has no meaning", who="--uds", fix="leave one of them out")
    sockets = open_sockets(() if values["uds"] else values["hosts"], values["port"], values["uds"])
    try:
        with Reporter.of(values) as reporter:
            extra = {"max_queue": values["max_queue"], "schedule": values["schedule"], "embedding": values["embedding"] is not None, "helpers": settings.preparers + 1}
            options = load_options(values, progress=reporter.progress, message=reporter.message, licence=reporter.licence, **extra)
            path = os.fspath(resolved(name, options))  # a download happens here, where a signal can end it, and not in the thread that loads
            addresses = [shown_address(made, tls is not None) for made in sockets]
            if not values["quiet"]:
                say(f"fastllm: loading {settings.name}; listening at {', '.join(addresses)}")

            def ready(runtime: Any) -> None:
                reporter.stop()
                click.echo("\n".join(addresses))
                sys.stdout.flush()
                if not values["quiet"]:
                    loaded = runtime.model
                    say(f"fastllm: {settings.name} is ready: context {loaded.context:,} tokens, {loaded.backend}, {loaded.threads} threads")
                opened(addresses)

            load = lambda: load_model(path, options)  # noqa: E731
            defaults = _defaults(values)
            return asyncio.run(serve(settings, sockets, load, ready=ready, read_keys=read_keys, defaults=defaults, tls=tls))
    finally:
        for made in sockets:
            made.close()


def _settings(name: str, values: dict[str, Any]) -> tuple[ServerSettings, Callable[[], Sequence[str]] | None]:
    """The server's settings, and how its keys are read again. Raises UsageError for an unsafe combination."""
    from ..server.serve import is_loopback
    from ..server.settings import ServerSettings
    from .terminal import say

    read_keys = _key_reader(values)
    keys = tuple(read_keys() if read_keys else values["api_keys"])
    for limit in ("key_concurrent", "key_per_minute"):
        if values[limit] is not None and not keys:
            raise UsageError(f"--{limit.replace('_', '-')} limits keys, and there is none", fix="--api-key-file FILE")
    local = not values["uds"] and all(is_loopback(host, values["port"]) for host in values["hosts"])
    if not local and not values["uds"] and not keys and not values["insecure"]:
        what = f"--host {' '.join(values['hosts'])} lets other machines in, and there is no key"
        raise UsageError(what, who="--host", fix="--api-key-file FILE, or --insecure to allow everybody")
    if click.get_current_context().get_parameter_source("api_keys") is click.core.ParameterSource.COMMANDLINE and not values["quiet"]:
        say("fastllm: --api-key can be read in process lists; --api-key-file cannot")
    root = values["root_path"].rstrip("/")
    if root and not root.startswith("/"):
        raise UsageError(f"--root-path {root} does not begin with /", fix=f"--root-path /{root}")
    for origin in values["cors_origins"]:
        if not ORIGIN.fullmatch(origin):
            raise UsageError(f"--cors-origin {origin} is no origin of pages, and none would match it", fix="write it as https://example.org, with a port if it has one, or *")
    base = Path(name.rstrip("/")).name.removesuffix(".gguf") if Path(name).exists() else name
    settings = ServerSettings(
        names=values["model_names"] or (base,),
        keys=keys,
        hosts=tuple(host.lower() for host in values["allowed_hosts"]),
        origins=values["cors_origins"],
        local=local,
        root_path=root,
        max_tokens=values["max_tokens"],
        max_n=values["max_n"],
        max_body=values["max_body"],
        read_s=values["grammar_time"],
        drain_s=values["drain"],
        queue_timeout_s=values["queue_timeout"],
        ping_s=values["sse_ping"],
        strict=values["strict"],
        strict_model=values["strict_model"],
        tool_parser=values["tool_parser"],
        reasoning_format=values["reasoning_format"],
        thinking={"on": True, "off": False}.get(values["thinking"]),
        request_template=values["allow_request_template"],
        log_prompts=values["log_prompts"],
        metrics=not values["no_metrics"],
        web=not values["no_web"],
        metrics_aliases=values["metrics_aliases"] == "vllm",
        json_log="json" in (values["log_format"], values["progress"]),
        dev=values["dev"],
        embedding=values["embedding"],
        key_concurrent=values["key_concurrent"],
        key_per_minute=values["key_per_minute"],
    )
    return settings, read_keys


def _key_reader(values: dict[str, Any]) -> Callable[[], Sequence[str]] | None:
    """Reads all keys, those of the file anew; None without a file."""
    for key in values["api_keys"]:
        _check_key(key, "--api-key")
    path: Path | None = values["api_key_file"]
    if path is None:
        return None

    def read() -> Sequence[str]:
        lines = [line.strip() for line in read_text("--api-key-file", path).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise UsageError(f"--api-key-file {path} holds no key", who="--api-key-file", fix="write one key a line into it")
        for key in keys:
            _check_key(key, f"--api-key-file {path}")
        return (*values["api_keys"], *keys)

    return read


def _check_key(key: str, where: str) -> None:
    if len(key) < MIN_KEY or not all("!" <= c <= "~" for c in key):
        raise UsageError(f"{where}: a key must have at least {MIN_KEY} visible ASCII characters, without blanks", fix="make one: openssl rand -hex 24")


def _defaults(values: dict[str, Any]) -> SamplingParams:
    """What requests get that do not say, where a flag does."""
    from ..core.sampling import SamplingParams

    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    given = {name: values[name] for name in names if values[name] is not None}
    return SamplingParams(**given, repetition_penalty=values["repeat_penalty"])
