"""`fastllm backends`: which backends there are and why one is not ready."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

__all__ = ["backends_command"]

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


@click.group("backends", invoke_without_command=True)
@click.pass_context
def backends_command(context: click.Context) -> None:
    """List backends, or show one: their state, devices, options and where they come from."""
    if context.invoked_subcommand is None:
        context.invoke(list_backends, as_json=False, plugins_file=None, plugin_paths=(), debug=False)


@backends_command.command("list")
@_options
def list_backends(as_json: bool, plugins_file: Path | None, plugin_paths: tuple[Path, ...], debug: bool) -> None:
    """One line per backend. State: ready, unavailable, broken, disabled or incompatible, with the reason."""
    from ..core.plugins import BackendRegistry

    registry = BackendRegistry(plugins_file, plugin_paths)
    states = registry.states()
    if as_json:
        click.echo(json.dumps([s.as_dict() for s in states], indent=1))
        return
    width = max((len(s.name) for s in states), default=4)
    click.echo(f"{'NAME':{width}}  {'STATE':12} {'PRIORITY':>8}  DEVICES OR REASON")
    for s in states:
        devices = ", ".join(d.name for d in s.devices)
        note = devices or ": ".join(filter(None, (s.reason, s.hint)))
        click.echo(f"{s.name:{width}}  {s.state:12} {s.priority if s.priority is not None else '-':>8}  {note}")
    for line in registry.messages:
        click.echo(f"fastllm: {line}", err=True)


@backends_command.command("show")
@click.argument("name")
@_options
def show_backend(name: str, as_json: bool, plugins_file: Path | None, plugin_paths: tuple[Path, ...], debug: bool) -> int:
    """Everything about one backend: state, version, options with their defaults, environment. Exits with its state's code."""
    from ..core.plugins import BackendRegistry

    registry = BackendRegistry(plugins_file, plugin_paths)
    state = registry.state(name)
    facts = state.as_dict()
    if state.state == "ready":
        facts["environment"] = registry.environment(name)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        for key, value in facts.items():
            if isinstance(value, dict):
                for sub, text in value.items():
                    click.echo(f"{key}.{sub:20} {text}")
            elif value not in (None, "", []):
                click.echo(f"{key:20} {value}")
    return state.exit_code
