"""`fastllm backend check`: what a vendor runs before publishing. Packaging, imports, probe, opening, self-test, quick suite; a line each.

A step that fails does not end the others where they can still say something. Nothing here knows a backend.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .core.errors import FastLLMError
from .core.plugins import BackendRegistry, probe_in_child
from .host import plugin_folder

__all__ = ["CheckLine", "check_backend_package"]

ENGINE = "fastllm-engine"


@dataclass(frozen=True)
class CheckLine:
    """One step: what was looked at, whether it is as it should be, and what was seen or is to be done."""

    step: str
    ok: bool
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def check_backend_package(
    name: str, options: Mapping[str, str], plugins_file: Path | None = None, plugin_paths: Sequence[Path] = (), say: Callable[[str], None] = lambda _: None
) -> Iterator[CheckLine]:
    """The steps, as they end. name: NAME[:DEVICE]. say: gets what there is to say of other plug-ins. Raises BackendNotFound for a name that nobody has, and
    BackendBroken where a file of plugin_paths that does not load may have it."""
    registry = BackendRegistry(plugins_file, plugin_paths)
    for line in registry.messages:
        say(line)
    bare = name.partition(":")[0]
    registry.check_name(bare)
    state = registry.state(bare, probe=False)
    file = next((p for p in plugin_paths if str(p) == state.distribution), None)
    if file is None:
        yield _packaging(state.distribution, bare)
    yield _imports(state.module, plugin_folder(state.module), file)
    probe = probe_in_child(bare, plugins_file=plugins_file, plugin_paths=registry.files_of(bare))
    found = probe.state.get("state") if probe.outcome == "answered" else ""
    reason = str(probe.state.get("reason", "")) if found else f"the probe {probe.outcome}: {probe.detail}"
    devices = ", ".join(f"{d['id']} {d['name']} ({d['kind']})" for d in probe.state.get("devices", ()))
    yield CheckLine("probe", found == "ready", devices if found == "ready" else f"{found or 'broken'}: {reason}")
    if found != "ready":
        return
    if fault := probe.state.get("environment_error"):
        yield CheckLine("environment", False, f"it failed to answer fastllm_environment: {fault}")
    opened = _opened(registry, name, options)
    yield opened
    if opened.ok:
        yield _quick(name, options, plugins_file, registry.files_of(bare))


def _packaging(distribution: str, name: str) -> CheckLine:
    """Metadata of the distribution: who it is, and which engines it runs with."""
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return CheckLine("packaging", False, f"{distribution} is not installed")
    wrong = []
    points = [p for p in found.entry_points if p.group == "fastllm.backends"]
    if distribution != ENGINE:
        needs = [r for r in found.requires or () if re.match(rf"{ENGINE}\b", r)]
        if not needs:
            wrong.append(f'it does not depend on {ENGINE}: add "{ENGINE}>=X,<X+1"')
        elif "<" not in needs[0] and "==" not in needs[0]:
            wrong.append(f'"{needs[0]}" has no upper bound: a later engine may have another interface')
    module = next(p.value for p in points if p.name == name)
    folder, top = plugin_folder(module), plugin_folder(module.partition(".")[0])
    if top is not None and not (top / "py.typed").is_file():
        wrong.append(f"py.typed is missing in {top}")
    if folder is not None and not (folder / "__init__.py").is_file():
        wrong.append(f"{folder} has no __init__.py")
    return CheckLine("packaging", not wrong, "; ".join(wrong) or f"{distribution} {found.version}, {len(points)} entry point{'s' * (len(points) != 1)}")


def _imports(module: str, folder: Path | None, file: Path | None) -> CheckLine:
    """Every import statement of the package, also those inside of functions."""
    files = [file] if file is not None else sorted(folder.rglob("*.py")) if folder is not None else []
    own = module.rpartition(".")[0]
    inner = "fastllm.backends." if own.startswith("fastllm.backends.") else f"{own}."
    bad = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for imported in names:
                allowed = imported in ("fastllm.api", "fastllm.conformance", own) or imported.startswith(inner)
                if imported.partition(".")[0] == "fastllm" and not allowed:
                    bad.append(f"{path.name}:{node.lineno} imports {imported}")  # type: ignore[attr-defined]
    return CheckLine("imports", not bad, "; ".join(bad[:5]) or f"{len(files)} files import fastllm.api and nothing else of fastllm")


def _opened(registry: BackendRegistry, name: str, options: Mapping[str, str]) -> CheckLine:
    """Opens the device in a child process, and asks for one `linear` and eight tokens."""
    from .opening import self_test_in_child

    try:
        selection = registry.select(name)
        step, text = self_test_in_child(registry, str(selection), options)
    except FastLLMError as error:
        return CheckLine("open", False, f"{error.message}{': ' + error.why if error.why else ''}")
    if step == "not tested":
        return CheckLine("self-test", False, f"it could not run: {text}")
    return CheckLine(step or "self-test", not step, text or f"{selection}: one linear and eight tokens of a tiny model are right")


def _quick(name: str, options: Mapping[str, str], plugins_file: Path | None, plugin_paths: tuple[str, ...]) -> CheckLine:
    """One case of each kind, of Bronze."""
    try:
        return _quick_run(name, options, plugins_file, plugin_paths)
    except FastLLMError as error:
        return CheckLine("quick cases", False, f"{error.message}{': ' + error.why if error.why else ''}")


def _quick_run(name: str, options: Mapping[str, str], plugins_file: Path | None, plugin_paths: tuple[str, ...]) -> CheckLine:
    from .conformance.run import RunOptions, run_suite
    from .conformance.runner import Selection
    from .conformance.session import Target

    target = Target(name, dict(options), None if plugins_file is None else str(plugins_file), plugin_paths)
    run = run_suite(RunOptions(target, Selection(quick=True)))
    bad = [f"{r.id}: {r.message}" for r in run.results if r.status in ("failed", "not run")]
    counts = run.report["standing"]["counts"]
    text = f"{counts['passed']} passed, {counts['expected']} expected failures, {counts['n/a']} n/a; native {run.earned.native}/{run.earned.native_of}"
    return CheckLine("quick cases", not bad, "; ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "") or text)
