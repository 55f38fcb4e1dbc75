"""`fastllm bench MODEL`: how fast a model runs here, as shares of what the machine can do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .collector import collector_at_rest
from .command import Command, model_argument
from .options import load_options, model_options

if TYPE_CHECKING:
    from ..bench import Bench, Row

__all__ = ["model_command"]


@click.command("model", cls=Command)
@model_argument()
@click.option("--input-tokens", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt, and context of the second decode.")
@click.option("--output-tokens", type=click.IntRange(2), default=32, show_default=True, help="Steps of each decode.")
@click.option("--batch", type=click.IntRange(1), multiple=True, help="Streams that decode together; may be repeated. One is always measured.  [default: 8]")
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Rounds before anything counts.")
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True, help="Measurements of each line.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options
def model_command(model: str | None, **values: Any) -> None:
    """Measure prompt and answer speed of MODEL, with random tokens.

    Each line is a median with quartiles, and a share of this machine's limit, measured before and after every repeat: read bandwidth for
    decoding, the peak of the best multiply instruction for prompts. Other programs that run lower both.

    \b
    fastllm bench
    fastllm bench ./model.gguf --input-tokens 2048 --batch 8 --batch 32 --json
    """
    from ..bench import Bench
    from ..core.errors import UsageError
    from ..loading import DEFAULT_MODEL, load_model
    from .terminal import Reporter

    streams = sorted(set(values["batch"] or (values["max_batch_size"] or 8,)) - {1})
    most = max(streams, default=1)
    if most > (values["max_batch_size"] or most):
        raise UsageError(f"--batch {most} is more than --max-batch-size {values['max_batch_size']}", fix=f"--max-batch-size {most}, or leave it out")
    room = values["input_tokens"] + values["output_tokens"] + 1
    own = 16 + values["output_tokens"] + 1  # of a stream in a batch
    if values["ctx"] is not None and values["ctx"] < max(room, own):
        raise UsageError(
            f"--ctx {values['ctx']} does not hold --input-tokens {values['input_tokens']} and --output-tokens {values['output_tokens']}", fix=f"--ctx {max(room, own)}"
        )
    given = values["ctx"] is not None or values["kv_cache_size"] is not None
    values["ctx"] = values["ctx"] or max(room, own, 64)
    # The prompt of a context stays beside new prompts; a stream is admitted if there is a spare block for it and every other.
    blocks = 2 * -(-room // 64) + most * (1 + -(-own // 64))
    with collector_at_rest(), Reporter.of(values, silent=values["as_json"]) as reporter:
        callbacks = {"progress": reporter.progress, "message": reporter.message, "licence": reporter.licence}
        size: dict[str, Any] = {"max_batch_size": values["max_batch_size"] or most}
        if values["kv_cache_size"] is None:
            size["kv_cache_tokens"] = max(64 * blocks, values["ctx"])
        with _told_by_its_options(values, given):
            loaded = load_model(model or DEFAULT_MODEL, load_options(values, **size, **callbacks))
    try:
        bench = Bench(loaded)
        facts = {"model": loaded.name, "backend": loaded.backend, "threads": loaded.threads, "load_s": loaded.load_s}
        if not values["as_json"]:
            click.echo(f"{loaded.name} on {loaded.backend}, {loaded.threads} thread{'s' * (loaded.threads != 1)}, loaded in {loaded.load_s:.2f} s")
        rows = []
        for row in measure(bench, streams, values):
            rows.append(row)
            if not values["as_json"]:
                click.echo(line(row))
    finally:
        loaded.close()
    if values["as_json"]:
        click.echo(json.dumps({**facts, "rows": [row.as_dict() for row in rows]}))


@contextlib.contextmanager
def _told_by_its_options(values: dict[str, Any], given: bool) -> Iterator[None]:
    """A context or a cache that was computed here and not given is nothing that a user can change: the error names what can be. Where there is no room
    for the weights, it stays as it is: fewer tokens help nothing."""
    from ..core.errors import OutOfMemory, UsageError

    try:
        yield
    except (UsageError, OutOfMemory) as error:
        most = error.fields.get("max_position")
        if given or not (most or error.fields.get("weights_fit")):
            raise
        asked = f"--input-tokens {values['input_tokens']} and --output-tokens {values['output_tokens']}"
        if most is None:
            raise OutOfMemory(error.message, who=asked, why=error.why, fix="fewer of them, or a smaller --batch", **error.fields) from None
        left = most - values["output_tokens"] - 1
        fix = f"--input-tokens {left}" if left > 0 else f"--input-tokens {most // 2} --output-tokens {most // 2 - 1}"
        raise UsageError(f"{asked} are more than the {most:,} tokens this model was made for", who=error.who, fix=fix) from None


def measure(bench: Bench, streams: list[int], values: dict[str, Any]) -> Iterator[Row]:
    """The rows, each as soon as it is there."""
    prompt, new, repeat = values["input_tokens"], values["output_tokens"], values["repeat"]
    for _ in range(values["warmup"]):
        bench.prefill(prompt)
        bench.decode(0, new)
    yield bench.prefill_row(prompt, repeat)
    yield bench.decode_row(0, new, repeat)
    yield bench.decode_row(prompt, new, repeat)
    for count in streams:
        yield bench.batch_row(count, new, repeat)


def line(row: Row) -> str:
    """One line of the report."""
    from ..bench import number

    what = {"prefill": "prompt of {tokens:,} tokens", "decode": "answer, context {context:,}", "batch": "{streams} answers at once, in all"}[row.cell]
    value = row.value.text() if row.value else ""
    share = f"{row.ratio.text(percent=True)} of {number(row.limit)}: {row.limit_of}" if row.ratio and row.limit else "no limit known"
    return f"{what.format(**row.params):28} {f'{value} {row.unit}':32} {share}"
