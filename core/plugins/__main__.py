"""The child of `probe_in_child`: loads and probes one backend and prints its state, and
its environment if it is ready, as a line of JSON.

    python -m fastllm.core.plugins [--timeout SECONDS] [--plugins-file F] [--plugin F]… NAME
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys

from ..errors import FastLLMError
from .registry import BackendRegistry


def main() -> int:
    """Prints the answer; the exit status is 0 whenever there is one."""
    parser = argparse.ArgumentParser(prog="python -m fastllm.core.plugins")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds until the parent gives up")
    parser.add_argument("--plugins-file")
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("name")
    options = parser.parse_args()
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")  # what a plug-in or its driver prints goes to stderr
    os.dup2(2, 1)
    faulthandler.dump_traceback_later(0.8 * options.timeout)  # where a hanging probe is, before the parent kills it
    try:
        registry = BackendRegistry(options.plugins_file, options.plugin)
        state = registry.state(options.name).as_dict()
        if state["state"] == "ready":
            state["environment"] = registry.environment(options.name)
    except FastLLMError as exc:
        state = {"name": options.name, "state": "broken", "reason": exc.why or exc.message, "hint": exc.fix, **exc.as_dict()}
        state["exit_code"] = exc.exit_code
    faulthandler.cancel_dump_traceback_later()
    answer.write(json.dumps(state, default=str) + "\n")
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # exit handlers and threads of a driver have no say any more


if __name__ == "__main__":
    main()
