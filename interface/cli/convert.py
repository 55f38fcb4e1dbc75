"""`fastllm convert` (also `export`): a model as one FLM file, in the formats that were asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import Command, model_argument
from .files import check_new
from .options import dtype_of, file_options, load_options, weight_options

if TYPE_CHECKING:
    from ..convert import ConvertReport

__all__ = ["convert_command"]

WORST = 5
"""Weights with the largest errors that the report names."""


class Size(click.ParamType):
    """Bytes, or a number with K, M or G (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMG]?)i?B?", str(value).strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is no size; write 1G, 512M or a number of bytes", param, ctx)
        return int(float(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2].upper()])


@click.command("convert", cls=Command)
@model_argument(needed=True)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write, NAME.flm.")
@weight_options
@click.option("--method", type=click.Choice(["search", "minmax"]), default="search", show_default=True, help="How scales are found: least error, or fast.")
@click.option("--backend", metavar="NAME", help="Pack the weights as this backend wants them.  [default: the best that is ready]")
@click.option("--no-pack", is_flag=True, help="Keep the weights in their plain order: smaller changes between backends, slower start.")
@click.option("--memory-limit", type=Size(), default="1G", show_default=True, help="Memory to use besides the mapped source.")
@click.option("--threads", "-t", type=click.IntRange(0), default=0, help="CPU threads.  [default: cores this process may use]")
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@file_options
def convert_command(model: str, output: Path, **values: Any) -> None:
    """Write MODEL as one FLM file: weights in the asked formats, tokenizer, template and configuration.

    `fastllm run FILE.flm` starts from it without converting or packing anything. Embedding and head become int8 where the rest becomes int4, and
    so do weights with fewer than 256 inputs; norms stay as they are. The same input gives the same bytes.

    \b
    fastllm convert ./Llama-3.2-1B -o llama.flm --dtype int4
    fastllm convert model.gguf -o model.flm
    """
    from ..convert import convert_model
    from ..formats.quant_rules import QuantRules, listed_rules
    from ..loading import open_files
    from .terminal import Reporter

    check_new("-o", output, values["overwrite"])
    listed = listed_rules(values["dtype_config"], values["moe_dtype"])
    names = ("no_quant_layer", "allow_requantize", "method")
    rules = QuantRules(dtype_of(values), **{name: values[name] for name in names}, group_size=int(values["group_size"]), rules=listed)
    rules.check()
    with Reporter.of(values, silent=values["as_json"]) as reporter:
        callbacks = {"progress": reporter.progress, "message": reporter.message, "licence": reporter.licence}
        options = load_options(values, backend=None, **callbacks)
        with open_files(model, options) as files:
            report = convert_model(
                files, output, rules, options, backend=None if values["no_pack"] else values["backend"] or "", source_name=model,
                memory_bytes=values["memory_limit"],
            )  # fmt: skip
    click.echo(json.dumps(_as_json(report), indent=1) if values["as_json"] else _as_text(report))


def _as_json(report: ConvertReport) -> dict[str, Any]:
    losses = {name: {"format": f, "relative_error": error, "worst_group": worst} for name, (f, error, worst) in report.losses.items()}
    return {
        "path": str(report.path),
        "size_bytes": report.size_bytes,
        "packed_for": report.packed_for,
        "formats": report.formats,
        "notes": report.notes,
        "weights": losses,
    }


def _as_text(report: ConvertReport) -> str:
    lines = [f"{'file':22} {report.path}", f"{'size':22} {report.size_bytes / (1 << 20):,.1f} MiB", f"{'packed for':22} {report.packed_for or 'no backend'}"]
    lines += [f"{'kept as ' + name:22} {size / (1 << 20):,.1f} MiB" for name, size in sorted(report.formats.items(), key=lambda f: -f[1])]
    worst = sorted(report.losses.items(), key=lambda item: -item[1][1])
    if worst:
        mean = sum(error for _, error, _ in report.losses.values()) / len(worst)
        lines.append(f"{'relative error':22} {mean:.4f} on average over {len(worst)} weights, largest:")
        lines += [f"{'':22} {error:.4f} {name} ({format}, worst group {group:.3f})" for name, (format, error, group) in worst[:WORST]]
    return "\n".join(lines)
