"""`fastllm doctor`: what this machine offers and what stands in the way."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import click

from ..core.errors import FastLLMError
from .command import Command

__all__ = ["doctor_command"]

SMOKE_S = 120  # that the smoke test may take
SMOKE_TOKENS = 64
LITTLE_MEMORY = 4 << 30  # bytes

PROBE_S = 1.0  # what a probe may take


@click.command("doctor", cls=Command)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--no-smoke", is_flag=True, help="Do not answer 64 tokens with a model that is here; with NAME, do not open it.")
@click.option("--plugins-file", type=click.Path(dir_okay=False, path_type=Path), help="A plugins.toml with defaults for backends.")
@click.option("--plugin", "plugin_paths", type=click.Path(dir_okay=False, path_type=Path), multiple=True, help="A backend in a Python file.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def doctor_command(name: str | None, as_json: bool, no_smoke: bool, plugins_file: Path | None, plugin_paths: tuple[Path, ...], debug: bool) -> int:
    """Check this machine, and answer 64 tokens; with NAME, only that backend.

    Each backend is probed in a process of its own: a driver that crashes or hangs is a line of the report. With NAME, opens and tests it,
    too, and exits with the code of its state (0 ready, 2 disabled or unknown, 3 broken, or it fails its test, 4 unavailable). Without, a backend that is not ready is no failure; it exits
    with 0 if the 64 tokens came or no model is here, else with the code that `fastllm run` ended with.
    """
    from ..core.plugins import BackendRegistry

    registry = BackendRegistry(plugins_file, plugin_paths, waiting=_say)
    names = [name] if name else registry.names()
    if name:
        registry.check_name(name)
    for line in registry.messages:
        _say(line)
    backends = _backends(registry, names, plugins_file)
    if name and backends[name]["state"] == "ready" and not no_smoke:
        backends[name] |= _self_test(registry, name)
    facts: dict[str, Any] = {} if name else {"machine": _machine(), "limits": _limits(), "caches": _caches()}
    facts["backends"] = backends
    if not name:
        facts["smoke"] = {"state": "left out"} if no_smoke else _smoke()
        facts["advice"] = _advice(facts, [f"{error.message}: {error.why}; {error.fix}" for error in registry.failed])
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        _show(facts)
    return int(backends[name]["exit_code"]) if name else int(facts["smoke"].get("exit_code", 0))


def _machine() -> dict[str, str]:
    import os

    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "cores": str(os.cpu_count()),
        "numa nodes": str(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1),
        "allowed cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    }


def _limits() -> dict[str, str]:
    from ..core.cgroup import address_space, available_memory, cpu_quota, memory_limit

    quota, limit, free, left = cpu_quota(), memory_limit(), available_memory(), address_space()
    return {
        "cpu quota": "none" if quota is None else f"{quota:g} cores",
        "memory limit": "none" if limit is None else f"{limit / (1 << 20):,.0f} MiB",
        "address space left": "no limit" if left is None else f"{left / (1 << 20):,.0f} MiB",
        "memory available": "unknown" if free is None else f"{free / (1 << 20):,.0f} MiB",
    }


def _caches() -> dict[str, str]:
    import shutil

    from ..formats.cache import Hooks, writable_root
    from ..formats.sources import list_cached

    notes: list[str] = []
    try:
        root = writable_root(None, Hooks(notice=notes.append))
        cached = list_cached()
    except FastLLMError as error:
        return {"folder": "none", "note": f"{error.message}; {error.fix}"}
    free = shutil.disk_usage(root).free
    result = {"folder": str(root), "free": f"{free / 1e9:.1f} GB", "models": ", ".join(m.name for m in cached) or "none yet"}
    return result | ({"note": "; ".join(notes)} if notes else {})


def _backends(registry: Any, names: list[str], plugins_file: Path | None) -> dict[str, dict[str, Any]]:
    """The state of each, probed in children at the same time, and its environment if it is ready."""
    from ..core.plugins import located, probe_in_children

    def told(name: str, stage: str, limit_s: float) -> None:
        _say(f"waiting for '{name}', in a process of its own, for up to {limit_s:g} s  |  skip it: FASTLLM_DISABLE_PLUGINS={name}")

    found = {}
    for probe in probe_in_children({name: located(plugins_file, registry.files_of(name)) for name in names}, told=told):
        found[probe.name] = dict(probe.state) if probe.outcome == "answered" else _lost(probe)
    return found


def _lost(probe: Any) -> dict[str, Any]:
    """The state of a backend whose child crashed or hung."""
    doing = {"load": "import", "probe": "probe"}.get(probe.stage, probe.stage)
    return {"state": "broken", "reason": f"the {doing} {probe.outcome}: {probe.detail}", "hint": f"FASTLLM_DISABLE_PLUGINS={probe.name}", "exit_code": 3}


def _say(line: str) -> None:
    from .terminal import say

    say(f"fastllm: {line}")


def _self_test(registry: Any, name: str) -> dict[str, Any]:
    """One `linear` and eight tokens of a tiny model on the first device, in a child; what changes of the backend's state if they are wrong."""
    from ..core.errors import BackendBroken
    from ..opening import self_test_in_child

    try:
        step, text = self_test_in_child(registry, name, {}, "--no-smoke")
    except BackendBroken as error:
        return {"self_test": f"failed: {error.message}: {error.why}", "exit_code": error.exit_code}
    if step == "not tested":
        return {"self_test": f"it could not run: {text}"}
    return {"self_test": f"failed: {text}", "exit_code": BackendBroken.exit_code} if step else {"self_test": "one linear and eight tokens of a tiny model are right"}


def _smoke() -> dict[str, Any]:
    """64 tokens of the smallest model that is here, by the real command in a process of its own; with an exit code if they did not come."""
    import subprocess

    from ..formats.sources import list_cached

    try:
        models = sorted(list_cached(), key=lambda m: m.size_bytes)
    except FastLLMError as error:
        return {"state": f"not run: {error.message}", "hint": error.fix}
    if not models:
        return {"state": "not run: no model is here", "hint": "fastllm download"}
    command = ["run", models[0].name, "--prompt", "Count to one hundred: one, two,", "-n", "64", "--ignore-eos", "--temperature", "0"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fastllm", *command, "--offline", "--json", "--quiet"], capture_output=True, text=True, timeout=SMOKE_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"state": f"failed: {models[0].name} gave no 64 tokens in {SMOKE_S} s", "exit_code": 1}
    if done.returncode:
        how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        return {"state": f"failed with {how}: {done.stderr.strip() or 'without a word'}", "exit_code": done.returncode if done.returncode > 0 else 1}
    answer = json.loads(done.stdout)
    times = answer["timings"]
    rate = (times["decode_tokens"] - 1) / max(times["decode_s"], 1e-9)
    whole = len(answer["output_ids"]) == SMOKE_TOKENS
    return {
        "state": "good" if whole else f"failed: {len(answer['output_ids'])} tokens came",
        **({} if whole else {"exit_code": 1}),
        "model": f"{models[0].name} on {answer['backend']}, {answer['threads']} threads",
        "speed": f"loaded in {times['load_s']:.2f} s, first token after {times['ttft_s']:.2f} s, {rate:.1f} tokens/s",
    }


def _flags(facts: dict[str, Any]) -> str:
    """Options that this machine asks for; what is chosen well by itself is not among them."""
    from ..core.cgroup import available_memory

    free = available_memory()
    flags = "--ctx 4096 --kv-dtype int8" if free is not None and free < LITTLE_MEMORY else ""
    if int(facts["machine"]["numa nodes"]) > 1:
        flags = f"{flags}; on one NUMA node: numactl --cpunodebind=0 --membind=0 fastllm …".lstrip("; ")
    return flags


def _advice(facts: dict[str, Any], files: list[str]) -> list[str]:
    """What is to be mended. files: what is wrong with files of `--plugin`."""
    lines = [*files]
    lines += [f"backend '{n}' {fault}" for n, b in facts["backends"].items() if (fault := _fault(n, b))]
    ready = [n for n, b in facts["backends"].items() if b["state"] == "ready"]
    if ready == ["ref"]:
        lines.append("only the numpy backend is ready: answers are right but slow")
    if "note" in facts["caches"]:
        lines.append(f"models: {facts['caches']['note']}")
    lines += _packages()
    if facts["smoke"]["state"].startswith("failed"):
        lines.append("the 64 tokens failed: see smoke above")
    elif not lines:
        lines.append("nothing stands in the way: fastllm run")
    else:
        usable = "the 64 tokens came all the same" if facts["smoke"]["state"] == "good" else "what is ready can be used"
        lines.append(f"{usable}: fastllm run")
    if flags := _flags(facts):
        lines.insert(len(lines) - 1, f"recommended here: {flags}")
    return lines


def _fault(name: str, backend: dict[str, Any]) -> str:
    """What somebody has to mend about a backend that nobody asked for, and how to be rid of it; "" for one that is well, switched off, or whose device is not here."""
    skip = f"fastllm doctor {name}  |  skip it: FASTLLM_DISABLE_PLUGINS={name}"
    if backend["state"] in ("broken", "incompatible"):
        return f"is {backend['state']} and not used: {skip}"
    if backend.get("environment_error"):
        return f"is ready, but does not say its environment: {skip}"
    if backend.get("import_s", 0.0) + backend.get("probe_s", 0.0) > PROBE_S:
        return f"takes long to answer, which every automatic choice waits for: {skip}"
    return ""


def _packages() -> list[str]:
    """Installed packages that get in each other's way."""
    from importlib import metadata

    names = {(d.metadata["Name"] or "").lower() for d in metadata.distributions()}
    lines = []
    wheels = sorted(n for n in names if n == "cupy" or n.startswith(("cupy-cuda", "cupy-rocm")))
    if len(wheels) > 1:
        lines.append(f"{' and '.join(wheels)} are installed, which overwrite each other: pip uninstall all of them, and install one")
    if "fastllm" in names:
        lines.append("another project called fastllm is installed, with a package of the same name: pip uninstall fastllm")
    return lines


def _echo(line: str) -> None:
    from .terminal import escape_controls

    click.echo(escape_controls(line))


def _show(facts: dict[str, Any]) -> None:
    for title, section in facts.items():
        if title == "backends":
            for name, backend in section.items():
                reason = f" – {backend['reason']}" if backend.get("reason") else ""
                hint = f" ({backend['hint']})" if backend.get("hint") else ""
                _echo(f"backend {name}: {backend['state']}{reason}{hint}")
                if backend.get("distribution"):
                    times = f", imported in {1e3 * backend['import_s']:.1f} ms, probed in {1e3 * backend['probe_s']:.1f} ms" if backend["import_s"] else ""
                    _echo(f"  from {backend['distribution']} {backend['version']}".rstrip() + times)
                if backend.get("probe_s", 0.0) > PROBE_S:
                    _echo(f"  slow: its probe took {backend['probe_s']:.1f} s of the {PROBE_S:g} s that it may take; every automatic choice of a backend waits for it")
                if "self_test" in backend:
                    _echo(f"  self-test: {backend['self_test']}")
                for device in backend.get("devices", ()):
                    _echo(f"  device {device['id']}: {device['name']}")
                for key, value in backend.get("environment", {}).items():
                    _echo(f"  {key}: {value}")
                if backend.get("environment_error"):
                    _echo(f"  environment: it failed to answer fastllm_environment: {backend['environment_error']}")
        elif isinstance(section, dict):
            _echo(title)
            for key, value in section.items():
                _echo(f"  {key.replace('_', ' ')}: {value}")
        else:
            for line in section:
                _echo(f"advice: {line}")
