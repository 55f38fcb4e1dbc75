"""The child of `ask_children`: loads and probes one backend and prints its state as a line of JSON, after a line for each stage.

    python -m fastllm.core.plugins [--timeout SECONDS] [--plugins-file F] [--plugin F]… [--least PRIORITY | --load | --environment] NAME
    python -m fastllm.core.plugins --plugin F --names
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
from typing import Any

from ..errors import FastLLMError
from .registry import BackendRegistry


def main() -> int:
    """Prints the answer; the exit status is 0 whenever there is one."""
    parser = argparse.ArgumentParser(prog="python -m fastllm.core.plugins")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds until the parent gives up")
    parser.add_argument("--plugins-file")
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--names", action="store_true", help="only which backends the files of --plugin have")
    parser.add_argument("--load", action="store_true", help="import it and ask for no device")
    parser.add_argument("--least", type=int, help="ask for devices from this priority on")
    parser.add_argument("--environment", action="store_true", help="with the versions of its driver")
    parser.add_argument("name", nargs="?")
    options = parser.parse_args()
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")  # what a plug-in or its driver prints goes to stderr
    os.dup2(2, 1)
    faulthandler.dump_traceback_later(0.8 * options.timeout)  # where a hanging probe is, before the parent kills it

    def stage(name: str) -> None:
        answer.write(f"{name}\n")
        answer.flush()

    try:
        registry = BackendRegistry(options.plugins_file, options.plugin)
        state: dict[str, Any] = {"names": registry.from_files()} if options.names else _state(registry, options, stage)
        state["messages"] = registry.messages
    except FastLLMError as exc:
        state = {"name": options.name, "state": "broken", "reason": exc.why or exc.message, "hint": exc.fix, **exc.as_dict()}
        state["exit_code"] = exc.exit_code
    faulthandler.cancel_dump_traceback_later()
    answer.write(json.dumps(state, default=str) + "\n")
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # exit handlers and threads of a driver have no say any more


def _state(registry: BackendRegistry, options: argparse.Namespace, stage: Any) -> dict[str, Any]:
    found = registry.state(options.name, probe=False)
    if not options.load and not found.error and (options.least is None or (found.priority or 0) >= options.least):
        stage("probe")
        found = registry.state(options.name)
    state = found.as_dict() | {"spec_priority": found.spec.priority if found.spec else None}
    if options.environment and found.state == "ready":
        state["environment"] = registry.environment(options.name)
    return state


if __name__ == "__main__":
    main()
