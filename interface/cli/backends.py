"""`fastllm backends`: which backends there are and why one is not ready."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from .backend_author import check_backend, new_backend, show_status
from .command import Group

__all__ = ["backends_command"]

NAME_CHARS = 32
"""The longest name that a backend may have: one that claims a longer one is shown as broken, and does not push the others' columns away."""

_shared = (
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option("--plugins-file", type=click.Path(dir_okay=False, path_type=Path), help="A plugins.toml with defaults for backends."),
    click.option("--plugin", "plugin_paths", type=click.Path(dir_okay=False, path_type=Path), multiple=True, help="A backend in a Python file."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
)


def _options(command: Any) -> Any:
    for option in reversed(_shared):
        command = option(command)
    return command


@click.group("backends", cls=Group, invoke_without_command=True)
@click.pass_context
def backends_command(context: click.Context) -> None:
    """List backends, show one, or write one.

    Without a command, `list`. A backend is chosen with `fastllm run --backend NAME`. `fastllm backend` is the same.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_backends, as_json=False, plugins_file=None, plugin_paths=(), debug=False)


@backends_command.command("list")
@_options
def list_backends(as_json: bool, plugins_file: Path | None, plugin_paths: tuple[Path, ...], debug: bool) -> None:
    """Show one line per backend.

    The state is ready, unavailable, broken, disabled or incompatible; what is not ready comes with the reason. Native ops and level are
    those of the reports that the backend's package brings (`fastllm conformance publish`): L1 ran on a CPU, L2 on a device.
    """
    from ..conformance.published import standing_of
    from ..core.plugins import BackendRegistry
    from .terminal import escape_controls

    registry = BackendRegistry(plugins_file, plugin_paths, waiting=_say)
    states = registry.states()
    for line in registry.messages:
        _say(line)
    published = {s.name: _published(s) for s in states}
    if as_json:
        click.echo(json.dumps([{**s.as_dict(), "conformance": published[s.name]} for s in states], indent=1))
        return
    names = {s.name: s.name if len(s.name) <= NAME_CHARS else f"{s.name[: NAME_CHARS - 1]}…" for s in states}
    width = max(map(len, names.values()), default=4)
    click.echo(f"{'NAME':{width}}  {'STATE':12} {'PRIORITY':>8}  {'NATIVE':6}  {'LEVEL':9}  DEVICES OR REASON")
    for s in states:
        devices = ", ".join(d.name for d in s.devices)
        note = devices or ": ".join(filter(None, (s.reason, s.hint)))
        priority = "-" if s.priority is None else s.priority
        native, level = standing_of(published[s.name])
        click.echo(escape_controls(f"{names[s.name]:{width}}  {s.state:12} {priority:>8}  {native or '-':6}  {level or 'no report':9}  {note}"))


@backends_command.command("show")
@click.argument("name")
@_options
def show_backend(name: str, as_json: bool, plugins_file: Path | None, plugin_paths: tuple[Path, ...], debug: bool) -> int:
    """Show one backend with its options.

    State, version, devices, options with their defaults, environment. Exits with the code of its state: 0 ready, 2 disabled or
    unknown, 3 broken, 4 unavailable.
    """
    from ..core.plugins import BackendRegistry
    from .terminal import escape_controls

    registry = BackendRegistry(plugins_file, plugin_paths, waiting=_say)
    state = registry.state(name)
    for line in registry.messages:
        _say(line)
    facts = state.as_dict()
    if state.state == "ready":
        facts["environment"], facts["environment_error"] = registry.environment_or_fault(name)
    published = _published(state)
    if as_json:
        click.echo(json.dumps({**facts, "conformance": published}, indent=1))
    else:
        facts["conformance"] = {_label(s): f"{s['level']} {s['verification']}, native {s['native']}/{s['native_of']}, {s['version']}" for s in published} or "no report"
        rows = list(_rows(facts))
        width = max(len(key) for key, _ in rows)
        for key, value in rows:
            click.echo(escape_controls(f"{key:{width}}  {value}"))
    return state.exit_code


def _say(line: str) -> None:
    from .terminal import say

    say(f"fastllm: {line}")


def _published(state: Any) -> list[dict[str, Any]]:
    """What a backend's package says it reached. A package that is not to be imported is not looked for."""
    from ..conformance.published import read_published
    from ..host import plugin_folder

    return read_published(plugin_folder(state.module)) if state.state in ("ready", "unavailable") else []


def _label(summary: dict[str, Any]) -> str:
    """A run by its options: `isa=avx2`."""
    return " ".join(f"{k}={v}" for k, v in summary.get("options", {}).items()) or "run"


backends_command.add_command(new_backend)
backends_command.add_command(show_status)
backends_command.add_command(check_backend)


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts of one backend as lines for people; empty ones are left out."""
    for key, value in facts.items():
        if key == "devices":
            for device in value:
                detail = f" ({device['detail']})" if device["detail"] else ""
                yield f"device {device['id']}", f"{device['name']}{detail}"
        elif key == "options":
            for name, option in value.items():
                choices = f", one of {', '.join(map(str, option['choices']))}" if option["choices"] else ""
                yield f"option {name}", f"{option['help']} ({option['type']}{choices}; default {option['default']})"
        elif isinstance(value, dict):
            for name, text in value.items():
                yield f"{key} {name}", str(text)
        elif key.endswith("_s"):
            yield key.removesuffix("_s"), f"{1000 * value:.1f} ms"
        elif value not in (None, ""):
            yield key.replace("_", " "), str(value)
