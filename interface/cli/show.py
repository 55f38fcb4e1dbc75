"""`fastllm show`: what a model brings besides weights – sampling defaults, chat template, parsers, the tokens that end an answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from .command import Command, model_argument
from .options import file_options, load_options

if TYPE_CHECKING:
    from ..formats import ModelFiles

__all__ = ["show_command"]

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@click.command("show", cls=Command)
@model_argument()
@click.option("--template", is_flag=True, help="Print the chat template, and nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@file_options
def show_command(model: str | None, template: bool, as_json: bool, **values: Any) -> None:
    """Show how MODEL is talked to: sampling defaults, chat template, form of tool calls and reasoning, and the ids that end an answer.

    Tokenizer and template are opened, no weight is read. `fastllm inspect` shows the weights.
    """
    from ..loading import DEFAULT_MODEL, open_files
    from .terminal import Reporter, escape_controls

    with Reporter.of(values, silent=as_json) as reporter:
        files = open_files(model or DEFAULT_MODEL, load_options(values, progress=reporter.progress, message=reporter.message, licence=reporter.licence))
    with files:
        if template and not as_json:
            click.echo(escape_controls(files.chat_template or "this model has no chat template"))
            return
        facts = describe(model or DEFAULT_MODEL, files)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for key, value in _lines(facts):
        click.echo(escape_controls(f"{key:22} {value}"))


def describe(name: str, files: ModelFiles) -> dict[str, Any]:
    """The facts as plain data."""
    from .. import models
    from ..core.errors import FastLLMError
    from ..loading import _generation_defaults, open_text

    facts: dict[str, Any] = {"model": name, "path": str(files.path), "size_bytes": files.size_bytes, "architecture": files.architecture}
    context = 8192
    try:
        context = models.build(files.kind, files.architecture, files.config, files.tensors, ready=files.ready).max_position
        facts["context"] = context
    except FastLLMError as error:
        facts["not_runnable"] = error.message
    said, defaults = files.generation_config, _generation_defaults(files)
    facts["defaults"] = {
        f: {"value": getattr(defaults, f), "origin": "generation_config.json" if said.get(f) is not None or (f == FIELDS[0] and said.get("do_sample") is False) else "built in"}
        for f in FIELDS
    }
    tokenizer, template = open_text(files, context)

    def token(index: int) -> dict[str, Any]:
        return {"id": index, "text": tokenizer.id_to_piece(index)}

    facts["tokenizer"] = {
        "kind": files.tokenizer.kind if files.tokenizer else None,
        "size": tokenizer.vocab_size,
        "bos": None if tokenizer.bos_id is None else token(tokenizer.bos_id),
        "adds_bos": tokenizer.add_bos,
    }
    facts["end_ids"] = [token(i) for i in sorted(set(tokenizer.end_ids))]
    facts["template"] = None if template is None else _template(template, files.chat_template or "")
    return facts


def _template(template: Any, source: str) -> dict[str, Any]:
    """What a chat template knows, and how answers to its prompts are read."""
    from ..text.output import REASONING, detect_format, detect_reasoning

    literals = "\0".join(template.literals)
    form, thinks = detect_format(literals), detect_reasoning(literals)
    native = template.supports_tools and form is not None
    return {
        "source": source,
        "variables": sorted(template.variables),
        "writes_tools": native,
        "tool_parser": form if native else "hermes",
        "reasoning": None if thinks is None else {"parser": thinks, "opening": REASONING[thinks].opening, "closing": REASONING[thinks].closing},
        "thinking_switch": "enable_thinking" in template.variables,
    }


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts for people."""
    rows: list[tuple[str, str]] = [(key, str(facts[key])) for key in ("model", "path", "architecture", "context", "not_runnable") if key in facts]
    rows[2:2] = [("size", f"{facts['size_bytes'] / 1e6:,.1f} MB")]
    rows += [(name.replace("_", " "), f"{d['value']:g} ({d['origin']})") for name, d in facts["defaults"].items()]
    tokenizer, template = facts["tokenizer"], facts["template"]
    rows.append(("tokenizer", f"{tokenizer['kind']}, {tokenizer['size']:,} entries"))
    bos = tokenizer["bos"]
    rows.append(("begin of text", "none" if bos is None else f"{bos['id']} {bos['text']}{'' if tokenizer['adds_bos'] else ' (not added)'}"))
    rows += [("ends an answer", f"{end['id']} {end['text']}") for end in facts["end_ids"]] or [("ends an answer", "nothing but --max-tokens and --stop")]
    if template is None:
        return [*rows, ("chat template", "none: text is continued, as with --raw")]
    rows.append(("chat template", f"{len(template['source']):,} characters (--template prints it)"))
    rows.append(("its variables", ", ".join(template["variables"]) or "none"))
    rows.append(("tools", "written by the template" if template["writes_tools"] else "described in the system message: the template knows none"))
    rows.append(("tool parser", template["tool_parser"]))
    thinks = template["reasoning"]
    rows.append(("reasoning", "none" if thinks is None else f"{thinks['parser']}: {thinks['opening']} … {thinks['closing']}"))
    rows.append(("thinking switch", "--thinking on|off" if template["thinking_switch"] else "none"))
    return rows
