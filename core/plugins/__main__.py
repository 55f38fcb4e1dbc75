"""The child of `ask_children`: loads and probes one backend and prints its state as a line of JSON, after a line for each stage.

    python -m fastllm.core.plugins [--timeout SECONDS] [--plugins-file F] [--plugin F]… [--least PRIORITY | --load | --environment] [--hook H]… NAME
    python -m fastllm.core.plugins --plugin F --names
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any, NoReturn

from ..errors import FastLLMError
from .child import Answer
from .registry import BackendRegistry


def main() -> NoReturn:
    """Prints the answer; the exit status is 0 whenever there is one."""
    parser = argparse.ArgumentParser(prog="python -m fastllm.core.plugins")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds until the parent gives up")
    parser.add_argument("--plugins-file")
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--names", action="store_true", help="only which backends the files of --plugin have")
    parser.add_argument("--load", action="store_true", help="import it and ask for no device")
    parser.add_argument("--least", type=int, help="ask for devices from this priority on")
    parser.add_argument("--environment", action="store_true", help="with the versions of its driver")
    parser.add_argument("--hook", action="append", default=[], help="then call this optional hook, whatever it answers")
    parser.add_argument("name", nargs="?")
    options = parser.parse_args()
    answer = Answer(options.timeout)
    try:
        registry = BackendRegistry(options.plugins_file, options.plugin)
        if registry.failed and (options.names or options.name not in registry.names()):  # the parent knows the name: the file loaded before
            raise registry.failed[0]
        state: dict[str, Any] = {"names": registry.from_files()} if options.names else _state(registry, options, answer)
        state["messages"] = registry.messages
    except FastLLMError as exc:
        state = {"name": options.name, "state": "broken", "reason": exc.why or exc.message, "hint": exc.fix, "exit_code": exc.exit_code}
        state["error"] = _raw(exc)
    answer.end(state)


def _state(registry: BackendRegistry, options: argparse.Namespace, answer: Answer) -> dict[str, Any]:
    found = registry.state(options.name, probe=False)
    if not options.load and not found.error and (options.least is None or (found.priority or 0) >= options.least):
        answer.stage("probe")
        found = registry.state(options.name)
    state = found.as_dict() | {"spec_priority": found.spec.priority if found.spec else None}
    if found.error:
        state["error"] = _raw(found.error)
    if options.environment and found.state == "ready":
        answer.so_far(state | {"messages": registry.messages})
        answer.stage("fastllm_environment")
        try:
            state["environment"] = registry.environment(options.name)
        except FastLLMError as exc:
            state["environment_error"] = exc.why or exc.message
    for hook in () if found.error else options.hook:
        answer.stage(hook)
        with contextlib.suppress(FastLLMError):  # an error that can be told is told by the call in the parent
            registry.call_optional(options.name, hook)
    return state


def _raw(error: FastLLMError) -> dict[str, Any]:
    """An error with its own fix only: the usual one is for who shows it, and would pass for the plug-in's word in the parent."""
    return error.as_dict()["error"] | {"fix": error.fix}


if __name__ == "__main__":
    main()
