"""`fastllm backend new | status | check`: for those who write a backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..core.errors import UsageError
from .command import Command, model_argument
from .options import backend_origin, load_options, model_options

__all__ = ["check_backend", "new_backend", "show_status"]

STYLES = ("numpy", "cython", "cupy", "opencl")  # of fastllm.scaffold, which `--help` does not import


@click.command("new", cls=Command)
@click.argument("vendor")
@click.option("--style", type=click.Choice(STYLES), default="numpy", show_default=True, help="What the kernels will be written in.")
@click.option("--dir", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Folder to write into.  [default: this one]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def new_backend(vendor: str, style: str, folder: Path, as_json: bool) -> None:
    """Write a backend package, fastllm-backend-VENDOR, that installs and works before a single op is written.

    Every op is inherited at first, and runs on `cpu_avx`. Its README says how to go on.
    """
    from ..scaffold import extras, write_backend
    from .terminal import escape_controls

    files = write_backend(vendor, style, folder)
    target = folder / f"fastllm-backend-{vendor.replace('_', '-')}"
    if as_json:
        click.echo(json.dumps({"folder": str(target), "style": style, "files": [str(f) for f in files]}, indent=1))
        return
    for file in files:
        click.echo(escape_controls(str(file)))
    extra = extras(style)
    click.echo(escape_controls(f"next: cd {target} && pip install -e '.{extra}' && fastllm conformance run --backend {vendor} --level bronze"))


@click.command("status", cls=Command)
@click.argument("name")
@model_argument()
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="Decode steps to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options
def show_status(name: str, model: str | None, steps: int, **values: Any) -> None:
    """Show what backend NAME computes itself in MODEL, what it inherits, what leaves it, and what each op costs.

    The model is run op by op; the first op that is not native is the one to write next. Native means: not inherited, and nothing was
    downloaded. The time of an op is that of the device it RUNS ON, so what is inherited or leaves shows another backend's.
    """
    from ..backend_status import backend_status
    from ..loading import DEFAULT_MODEL
    from .terminal import Reporter, escape_controls

    given = {key: values.pop(key) for key in ("backend", "device")}
    if any(given.values()):
        fix = f"leave it out; with a device: fastllm backend status {name.partition(':')[0]}:DEVICE"
        raise UsageError(f"the backend is the first argument, and that is '{name}'", who=backend_origin(given), fix=fix)
    with Reporter.of(values, silent=values["as_json"]) as reporter:
        callbacks = {"progress": reporter.progress, "message": reporter.message, "licence": reporter.licence}
        asked = {**values, "backend": name, "fallback": values["fallback"] or "allow", "max_batch_size": values["max_batch_size"] or 1}
        options = load_options(asked, backend_origin=f"backend status {name}", **callbacks)
        status = backend_status(name.partition(":")[0], model or DEFAULT_MODEL, options, steps)
        reporter.stop()
    if values["as_json"]:
        click.echo(json.dumps(status.as_dict(), indent=1))
        return
    ranges = ", ".join(f"{dim} {low}–{high:,}" for dim, (low, high) in status.ranges.items())
    click.echo(escape_controls(f"{name}: native {status.native} of the {status.total} kinds of op that {status.model} has ({ranges})"))
    width = max(7, *(len(op.device) for op in status.ops))
    click.echo(f"{'OP':12} {'STATE':10} {'RUNS ON':{width}} {'NODES':>5} {'SHARE':>7} {'MS':>9}  AS")
    for op in status.ops:
        how = f"{op.impl}: {op.reason}" if op.state == "fallback" else op.impl
        click.echo(escape_controls(f"{op.op:12} {op.state:10} {op.device:{width}} {op.count:5} {op.share:7.1%} {1e3 * op.seconds:9.3f}  {how}"))
    parts = ", ".join(f"{1e3 * seconds:.2f} {where}" for where, seconds in status.by_device().items())
    click.echo(escape_controls(f"a decode step, op by op, without copies: {1e3 * status.step_s:.2f} ms: {parts}"))
    click.echo(f"copied between devices: {status.copy_bytes_per_token:,} bytes per token")


@click.command("check", cls=Command)
@click.argument("name", metavar="NAME[:DEVICE]")
@click.option("--backend-opt", metavar="KEY=VALUE", multiple=True, help="Option of the backend; may be repeated.")
@click.option("--plugins-file", type=click.Path(dir_okay=False, path_type=Path), help="A plugins.toml with defaults for backends.")
@click.option("--plugin", "plugin_paths", type=click.Path(dir_okay=False, path_type=Path), multiple=True, help="A backend in a Python file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def check_backend(name: str, backend_opt: tuple[str, ...], plugins_file: Path | None, plugin_paths: tuple[Path, ...], as_json: bool, debug: bool) -> int:
    """Check a backend before it is published: packaging, imports, probe, opening, self-test, quick cases.

    About a minute. Exit code 0 only if every line is ok; a level takes `fastllm conformance run`.
    """
    from ..backend_check import check_backend_package
    from .options import parse_pairs
    from .terminal import escape_controls, say

    lines = []
    for line in check_backend_package(name, parse_pairs(backend_opt), plugins_file, plugin_paths, lambda text: say(f"fastllm: {text}")):
        lines.append(line)
        if not as_json:
            click.echo(escape_controls(f"{'ok' if line.ok else 'WRONG':5}  {line.step:12} {line.text}"))
    good = all(line.ok for line in lines)
    if as_json:
        click.echo(json.dumps({"backend": name, "ok": good, "steps": [line.as_dict() for line in lines]}, indent=1))
    return 0 if good else 1
