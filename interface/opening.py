"""Opening the backend that a run gets, with its self-test: a wrong answer is found before a user sees one.

The first time that a (backend, device, options, driver, version) is opened, it computes one `linear` and eight tokens of a tiny model
(`conformance/selfcheck.py`: a tenth of a second on a CPU, seconds where a driver compiles kernels first). What passed is remembered in the
cache folder. A backend that was named and fails is an error; one that `auto` chose is set aside with a line, and the next one takes its
place. Where the host cannot do its part (a full disk), nothing is known: the backend is used, and a line says that it was not tested.

A backend that is asked in child processes is opened in one first (`python -m fastllm.opening`), and tested there: a crash or a hang of its
driver is then an error with an owner as well, and not the end of the command. Its optional hooks that a run calls are called there, too: a
`fastllm_environment` that fails there is not called again, as a run can do without it.

Every command that opens a backend comes through `open_checked` or `open_helper`; the suite opens in its worker processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core.errors import BackendBroken, BackendUnavailable, DownloadError, UsageError, told
from .formats.sources import env_flag
from .host import plugin_folder
from .load_options import LoadOptions, say_note

if TYPE_CHECKING:
    from .core.backend import Backend
    from .core.plugins import BackendRegistry, Selection

__all__ = ["check_first_open", "open_checked", "open_helper", "self_test_in_child"]

TRIAL_S = 120.0
"""Seconds for opening and testing in a child; drivers compile kernels meanwhile, on a slow machine for a minute. Who waits for 2 s is told."""

SILENT = ", whose fastllm_environment failed"
"""Ends the entry of a trial of which only that question failed."""

KEPT = 200
"""Entries of the file that remembers; the oldest go first."""

UNTESTED = "FASTLLM_SELF_TEST=0"
"""How to do without the trial and the test, in every command that comes through `open_checked`; an option for it is not in all of them."""

LATE = ", which did not answer in time"
"""Ends the entry of a trial that hung: `auto` waits for it once, and not in every command."""


def open_checked(
    registry: BackendRegistry,
    selection: Selection,
    options_for: Callable[[Selection], Mapping[str, str]],
    options: LoadOptions,
    use: Callable[[Selection], None] = lambda _: None,
) -> tuple[Selection, Backend]:
    """Opens and tests a selection; returns what was opened, which is another one if `auto` chose and the first was wrong.

    options_for: the `--backend-opt` pairs of a selection; use: what else its plug-in must do for this run. Raises what opening raises, BackendBroken with the wrong numbers, and UsageError
    where nothing may be done differently (`options.strict`)."""
    tested = env_flag("FASTLLM_SELF_TEST", True) if options.self_test is None else options.self_test
    while True:
        values = options_for(selection)
        backend: Backend | None = None
        try:
            if tested:
                _try_in_child(registry, selection, values)
            backend = registry.open(selection, values)
            if note := check_first_open(registry, selection, backend, values) if tested else "":
                say_note(note, options, f"backend '{selection.name}'")
            use(selection)
        except (BackendBroken, BackendUnavailable) as error:
            if backend is not None:
                backend.close()
            if selection.origin != "auto" or options.strict:
                raise
            registry.set_aside(selection.name, error)
            selection = registry.select("auto")
            options.message(told(error, f"so '{selection.name}' is used"))
        except BaseException:
            if backend is not None:
                backend.close()
            raise
        else:
            return selection, backend


def open_helper(registry: BackendRegistry, name: str, origin: str, options: LoadOptions, threads: str = "") -> Backend:
    """Opens, by name, a backend that computes something beside the chosen one, with the same trial and test. origin: what needs it; threads: how many it may
    have, where it takes a number. Raises what opening raises."""
    selection = registry.select(name, origin)

    def options_for(chosen: Selection) -> dict[str, str]:
        return {"threads": threads} if threads and "threads" in chosen.spec.options else {}

    return open_checked(registry, selection, options_for, options)[1]


def _try_in_child(registry: BackendRegistry, selection: Selection, options: Mapping[str, str]) -> None:
    """Opens and tests a backend in a child process, until it passed once with the files that it is made of. What the child finds wrong is found again here, with
    its numbers. Raises BackendBroken for a crash or a hang."""
    if not registry.in_child(selection.name):
        return
    key, place = _key(registry, selection, options, trial=True), _place()
    known = str(_known(place).get(key, "")) if place is not None else ""
    if known.endswith(LATE) and selection.origin == "auto":
        again = f"`fastllm run --backend {selection.name}` tries it again"
        raise registry.fault(selection.name, "open", f"it did not answer within {TRIAL_S:g} s when it was tried last; {again}")
    if not known or known.endswith(LATE):
        try:
            said = _in_child(registry, str(selection), options, UNTESTED)
        except BackendBroken as error:
            if place is not None and error.fields.get("outcome") == "hung":
                _remember(place, key, f"{selection} in a child{LATE}")
            raise
        if said.get("step") == "close":  # all else is found again here, before anything is computed
            raise registry.fault(selection.name, "close", str(said.get("text", "")))
        known = f"{selection} in a child{SILENT if said.get('environment_error') else ''}"
        if place is not None and not said.get("step"):  # what did not open today may crash when it does
            _remember(place, key, known)
    if known.endswith(SILENT):
        registry.leave_environment(selection.name)


def self_test_in_child(registry: BackendRegistry, name: str, options: Mapping[str, str], without: str = "") -> tuple[str, str]:
    """Opens NAME[:DEVICE] in a child process and tests it: ("", "") if it is right, ("open", why it does not open), ("self-test", what is wrong), or
    ("not tested", why). without: how the caller does without that, for the line about a child that takes long. Raises BackendBroken for a crash or a hang."""
    said = _in_child(registry, name, options, without)
    return str(said.get("step", "")), str(said.get("text", ""))


def _in_child(registry: BackendRegistry, name: str, options: Mapping[str, str], without: str) -> dict[str, Any]:
    pairs = [f"--option={key}={value}" for key, value in options.items()]  # one argument each: a value may begin with "-"
    return registry.attempt(name.partition(":")[0], "fastllm.opening", [*pairs, "--", name], TRIAL_S, without)


def check_first_open(registry: BackendRegistry, selection: Selection, backend: Backend, options: Mapping[str, str]) -> str:
    """Tests a backend that was not opened before on this machine as it is now. Returns "", or a line that says why it could not be
    tested. Raises BackendBroken."""
    key = _key(registry, selection, options)
    place = _place()
    if place is not None and key in _known(place):
        return ""
    from .conformance.selfcheck import NotChecked, self_check

    try:
        wrong = self_check(backend)
    except NotChecked as error:
        return f"backend '{selection.name}' was not tested before its first use: {error}  |  without the test: {UNTESTED}"
    if wrong:
        state = registry.state(selection.name, probe=False)
        raise BackendBroken(
            f"backend '{selection.name}' gives wrong answers",
            who=f"{state.distribution} {state.version}  device {selection.device}".strip(),
            why=f"the self-test of the first opening: {wrong}",
            fix=f"fastllm conformance run --backend {selection} --quick  |  skip it: FASTLLM_DISABLE_PLUGINS={selection.name}  |  run it untested: {UNTESTED}",
            backend=selection.name,
        )
    if place is not None:
        _remember(place, key, str(selection))
    return ""


def _key(registry: BackendRegistry, selection: Selection, options: Mapping[str, str], trial: bool = False) -> str:
    """A hash of everything that may change what the backend computes: versions, driver, options, and the files of its package, and of those that its
    `conformance.toml` names. trial: without the driver, who is asked for its version once it is open."""
    from importlib.metadata import version

    from .conformance.sources import source_folders

    state = registry.state(selection.name, probe=False)
    folder = plugin_folder(state.module)
    folders = [] if folder is None else [folder]
    with contextlib.suppress(UsageError):  # a file that is wrong is told by the suite, not in every run
        folders = source_folders(folder) if folder is not None else []
    files = [p for f in folders for p in sorted(f.rglob("*"))] or [Path(state.distribution)]  # a file of --plugin is called as it was given
    stats = [(p.name, s.st_size, s.st_mtime_ns) for p in files if p.suffix != ".pyc" and p.is_file() and (s := p.stat())]
    facts = [
        selection.name, selection.device, sorted(options.items()), state.distribution, state.version, version("fastllm-engine"),
        "trial" if trial else sorted(registry.environment_or_fault(selection.name)[0].items()), stats, sorted(os.environ.get(n, "") for n in ("FASTLLM_ISA",)),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _place() -> Path | None:
    """The file that remembers; None where there is no folder to write to."""
    from .formats.cache import Hooks, writable_root

    with contextlib.suppress(DownloadError, OSError):
        return writable_root(None, Hooks()) / "self-tests.json"
    return None


def _known(place: Path) -> dict[str, Any]:
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(place: Path, key: str, what: str) -> None:
    """Adds an entry. A file that cannot be written only means that the test runs again."""
    entries = {**_known(place), key: what}
    newest = dict(list(entries.items())[-KEPT:])
    with contextlib.suppress(OSError):
        handle, path = tempfile.mkstemp(dir=place.parent, prefix=place.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(newest, file, indent=1)
        os.replace(path, place)


def main() -> None:
    """The child of `self_test_in_child`."""
    import argparse

    from .conformance.selfcheck import NotChecked, self_check, tiny_graph
    from .core.errors import FastLLMError
    from .core.plugins import Answer, BackendRegistry

    parser = argparse.ArgumentParser(prog="python -m fastllm.opening")
    parser.add_argument("--timeout", type=float, default=TRIAL_S)
    parser.add_argument("--plugins-file")
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("name")
    asked = parser.parse_args()
    answer = Answer(asked.timeout)
    said, step = {}, "open"
    try:
        registry = BackendRegistry(asked.plugins_file, asked.plugin)
        selection = registry.select(asked.name)
        answer.stage("open")
        backend = registry.open(selection, dict(pair.split("=", 1) for pair in asked.option))
        answer.stage("compute")
        wrong = self_check(backend)
        said = {"step": "self-test", "text": wrong} if wrong else {}
        if registry.transforms(selection.name):
            step = "fastllm_transform_graph"
            answer.stage(step)
            registry.transform_graph(tiny_graph(), selection)
        step = "close"
        answer.stage(step)
        backend.close()
        answer.so_far(said)
        answer.stage("fastllm_environment")
        if fault := registry.environment_or_fault(selection.name)[1]:
            said["environment_error"] = fault
    except NotChecked as error:
        said = {"step": "not tested", "text": str(error)}
    except FastLLMError as error:
        said = {"step": step, "text": f"{error.message}{': ' + error.why if error.why else ''}"}
    except Exception as error:
        said = {"step": step, "text": f"{type(error).__name__}: {error}"}
    answer.end(said)


if __name__ == "__main__":
    main()
