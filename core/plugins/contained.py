"""Who is asked in a child process, and what the registry keeps of the answer: the spec, the devices or the error that loading and probing
here would give.

The rule is the same for every plug-in, built-in or not: what stands in `[plugins] in_process` is asked in this process, all else in a child.
The file that comes with fastllm lists those whose module and probe load no driver, so that they cost no process; it speaks of the built-in ones only,
not of another package that an override gives such a name. A user's list replaces it, and means names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from ..backend import BackendSpec, DeviceInfo, Option, Ready
from ..errors import BackendBroken, BackendIncompatible, BackendUnavailable, FastLLMError
from .child import CONTAIN, ChildProbe, ask_children, located
from .config import NAME_PATTERN
from .discovery import Candidate, Source
from .entries import Entry
from .hookspecs import PREFIX
from .report import broken

__all__ = ["NAMED_S", "Contained"]

NAMED_S: Final = 15.0
"""Seconds that a plug-in which was named may take to answer; one that was not has ASK_S."""

_TYPES: Final = {"int": int, "float": float, "bool": bool, "str": str}
_ERRORS: Final[dict[str, type[FastLLMError]]] = {e.code: e for e in (BackendBroken, BackendIncompatible, BackendUnavailable)}


class Contained:
    """Asks in children. in_process: who is not; None: nobody is. plugins_file: of `--plugins-file`, which children read as well. say: gets
    what children have to tell. waiting: gets a line at once about a child that takes long."""

    def __init__(
        self, in_process: Callable[[Entry], bool] | None, plugins_file: str | os.PathLike[str] | None, env: Mapping[str, str],
        say: Callable[[str], None], waiting: Callable[[str], None] | None = None,
    ):  # fmt: skip
        self._in_process = None if env.get(CONTAIN) == "0" else in_process
        self._plugins_file, self._env, self._say, self._waiting = plugins_file, env, say, waiting

    @property
    def on(self) -> bool:
        """Whether anybody is asked in a child."""
        return self._in_process is not None

    def holds(self, entry: Entry) -> bool:
        """Whether a question to this backend goes to a child: its module is not, and need not be, in this process."""
        return self._in_process is not None and not self._in_process(entry) and entry.plugin is None and entry.blocked is None

    def located(self, entry: Entry) -> list[str]:
        """The arguments that make a child find this backend, and run the code of no other file: one that crashes would be this one's fault there."""
        return located(self._plugins_file, entry.files)

    def open_questions(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those that a child is to be asked for, and that were not probed or found broken yet."""
        return [e for e in entries if self.holds(e) and e.probed is None and not isinstance(e.loaded, FastLLMError)]

    def ask(self, entries: list[Entry], timeout_s: float, *arguments: str) -> None:
        """Asks backends at the same time, and fills their entries."""
        questions = [(e.name, (*self.located(e), *arguments, "--", e.name)) for e in entries]
        for entry, answer in zip(entries, ask_children(questions, timeout_s, self._env, told=self._told()), strict=True):
            _keep(entry, answer)
            for line in answer.state.get("messages", ()):
                self._say(line)

    def attempt(self, entry: Entry, module: str, arguments: list[str], timeout_s: float, without: str = "") -> dict[str, Any]:
        """Lets `module` do something with a backend in a child; its answer. without: what a user writes who does not want that; "": nothing can be
        written. Raises BackendBroken if it crashes or hangs."""
        told = self._told("; drivers compile kernels the first time" + (f"  |  without this trial: {without}" if without else ""))
        answer = ask_children([(entry.name, [*self.located(entry), *arguments])], timeout_s, self._env, module, told)[0]
        if answer.outcome != "answered":
            raise _ended(entry.candidate, answer)
        return answer.state

    def rehearse(self, entry: Entry, hooks: Iterable[str]) -> None:
        """Calls optional hooks of a backend in a child, whatever they answer. Raises BackendBroken if one crashes or hangs."""
        question = (entry.name, [*self.located(entry), "--load", *(f"--hook={hook}" for hook in hooks), "--", entry.name])
        answer = ask_children([question], NAMED_S, self._env, told=self._told())[0]
        if answer.outcome != "answered":
            raise _ended(entry.candidate, answer)

    def _told(self, more: str = "") -> Callable[[str, str, float], None] | None:
        """Says who has not answered, what it was asked, how long that may take, and how to go on without it."""
        waiting = self._waiting
        if waiting is None:
            return None

        def tell(name: str, stage: str, limit_s: float) -> None:
            skip = f"skip it: FASTLLM_DISABLE_PLUGINS={name}" if NAME_PATTERN.fullmatch(name) else "leave its --plugin out"
            waiting(f"waiting for '{name}' to {_doing(stage)}, in a process of its own, for up to {limit_s:g} s{more}  |  {skip}")

        return tell

    def names_in(self, path: Path, source: Source) -> list[str]:
        """The backends that a file of `--plugin` has. Raises BackendBroken."""
        answer = ask_children([(str(path), ("--plugin", str(path), "--names"))], NAMED_S, self._env, told=self._told())[0]
        if answer.outcome != "answered":
            raise _ended(Candidate("", source), answer)
        if answer.state.get("error"):
            raise _error(answer.state["error"])
        return list(answer.state["names"])


def _keep(entry: Entry, answer: ChildProbe) -> None:
    """Fills an entry's loaded and, where it was asked, probed. A crash or a hang while it was probed leaves it broken as a whole, as nothing
    is known of its spec then."""
    if answer.outcome != "answered":
        entry.loaded = _ended(entry.candidate, answer)
        return
    said = answer.state
    entry.import_s, entry.probe_s = float(said.get("import_s", 0.0)), float(said.get("probe_s", 0.0))
    if said.get("api"):
        major, _, minor = said["api"].partition(".")
        entry.api = int(major), int(minor)
    error = _error(said["error"]) if said.get("error") else None
    if said.get("opset") is None or entry.api is None:  # no valid spec: it was not loaded
        entry.loaded = error or broken(entry.candidate, "load", "it gave no description of itself")
        return
    options = {k: Option(_TYPES[o["type"]], o["default"], tuple(o["choices"]), o["help"]) for k, o in said["options"].items()}
    priority = said["spec_priority"]
    entry.loaded = BackendSpec(entry.name, entry.api, said["opset"], said["vendor"], said["summary"], priority, options, said["homepage"])
    if error is not None:
        entry.probed = error
    elif said["state"] == "ready":
        entry.probed = Ready(tuple(DeviceInfo(**device) for device in said["devices"]))
        entry.environment = said.get("environment", entry.environment)
    if said.get("environment_error"):
        entry.environment = broken(entry.candidate, "answer fastllm_environment", said["environment_error"])


def _ended(candidate: Candidate, answer: ChildProbe) -> BackendBroken:
    error = broken(candidate, _doing(answer.stage), f"{answer.detail}, in a process of its own")
    error.fields["outcome"] = answer.outcome
    return error


def _doing(stage: str) -> str:
    """What a stage of a child is, behind "to": a hook answers, all else is a verb."""
    return f"answer {stage}" if stage.startswith(PREFIX) else stage


def _error(said: dict[str, Any]) -> FastLLMError:
    """The error of an answer's `error`; of a kind that a load does not raise: BackendBroken."""
    fields = {k: v for k, v in said.items() if k not in ("code", "message", "who", "why", "fix", "exit_code")}
    return _ERRORS.get(said["code"], BackendBroken)(said["message"], who=said["who"], why=said["why"], fix=said["fix"], **fields)
