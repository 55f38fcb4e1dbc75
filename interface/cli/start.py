"""The first of fastllm that a console script runs: Ctrl-C is under control before anything else is imported.

Until a command runs, Ctrl-C ends the process with 130, without a word. What comes before this module is Python's own start: nothing of
fastllm can answer there, and Python shows its traceback. So nothing is imported here but what every interpreter has loaded already: `_signal`
is what `signal` is made of, without the enumerations that take longer to make than all of this.
"""

import _signal  # type: ignore[import-not-found]
import os

__all__ = ["main"]

INTERRUPTED = 130


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


def main() -> None:
    """Entry point of the console script and of `python -m fastllm`. What is ignored (nohup, a background job) stays ignored."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _leave)
    from .main import main as command

    command()
