"""Whether a grammar can be read in time, and followed: found out in a process for that alone, before the server compiles it.

A thread inside of the library that compiles grammars cannot be ended, a process can; so this is asked of one (`preparer`), and what goes well there is
compiled once more for the model (`constraints.Compilation`), which then takes about as long.
"""

from __future__ import annotations

import string
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..core.errors import FastLLMError, InvalidSchema, OutOfMemory

if TYPE_CHECKING:
    from ..text.grammar import Grammar, GrammarCompiler

__all__ = ["ReadLimit"]

FOLLOWED: Final = 400  # bytes of a text that is written by a grammar
STAYED: Final = 64  # of them in one place that may be left
ANYTHING: Final = 64  # characters among which there is nothing to learn: a string without a pattern is left at once
_ENDS: Final = '",]}'  # lead on through JSON
_BLANKS: Final = " \n"
_LETTERS: Final = string.ascii_letters + string.digits + "".join(c for c in string.punctuation if c not in _ENDS)
_TEXT: Final = _LETTERS + _ENDS + _BLANKS


class ReadLimit:
    """Finds out whether a grammar can be read in a time, and whether its texts stay within the library's limits. compiler: makes one that keeps nothing
    (`timing_only`).

    spent: something is still being read, and this process is good for nothing else.
    """

    def __init__(self, compiler: Callable[[], GrammarCompiler]):
        self._make = compiler
        self._compiler: GrammarCompiler | None = None
        self.spent = False

    def __call__(self, constraint: dict[str, Any], limit_s: float) -> str:
        """Why a grammar is refused: it took more than limit_s of the processor to read, or grows beyond the limits; "" if not. Other faults are found when it is
        compiled. Raises OutOfMemory where no thread can be started."""
        if self._compiler is None:
            try:
                self._compiler = self._make()
            except FastLLMError:  # whoever compiles it will say so
                return ""
        done, started, found = threading.Event(), time.process_time(), list[str]()
        args = (self._compiler, constraint, started + limit_s / 2, found, done)
        thread = threading.Thread(target=_read, args=args, name="fastllm-read", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OutOfMemory("there is no room to read a grammar", why=str(error), fix="free memory, or raise the limit of memory or threads", kind="host") from None
        while not self.spent and not done.wait(0.05):
            self.spent = time.process_time() - started > limit_s
        return f"it takes more than {limit_s:g} s to read" if self.spent else "".join(found)


def _read(compiler: GrammarCompiler, constraint: dict[str, Any], until: float, found: list[str], done: threading.Event) -> None:
    try:
        for grammar in _grammars(compiler, constraint):
            if why := _beyond(grammar, compiler, until):
                found.append(why)
                break
    except BaseException:  # whatever it is, who compiles it will say so
        pass
    finally:
        done.set()


def _grammars(compiler: GrammarCompiler, constraint: dict[str, Any]) -> list[Grammar]:
    source, param = constraint["source"], constraint["param"]
    if constraint["kind"] == "calls":
        return [compiler.bundle(trigger["source"], param) for trigger in source]
    return [getattr(compiler, constraint["kind"])(source, param=param)]


def _beyond(grammar: Grammar, compiler: GrammarCompiler, until: float) -> str:
    """Writes a text of a grammar that goes on where it may, as counted repetitions inside of others can be told apart in ever more ways. What the library says
    where its limits end; "" if they did not. until: `time.process_time` at which it is enough."""
    ids = dict(zip(_TEXT, compiler.choice([_TEXT])().forced(), strict=True))
    letters, ends, blanks = ([ids[c] for c in some] for some in (_LETTERS, _ENDS, _BLANKS))
    matcher, last, stayed, seen = grammar(), -1, 0, dict[int, None]()
    for _ in range(FOLLOWED):
        if time.process_time() > until:
            break
        try:
            allowed = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
            forced = matcher.forced()
            stays = stayed < STAYED and sum(allowed[i] for i in letters) < ANYTHING
            order = [*([last, *letters, *ends] if stays else [*ends, *letters]), *blanks, *seen]
            token = forced[0] if forced else next((i for i in order if i >= 0 and allowed[i]), None)
            if token is None or matcher.accept(token):
                break
        except InvalidSchema as error:
            return f"a text of it needs more work than one token may take ({error.why})"
        stayed = 0 if forced or token in ends else stayed + 1
        last = token if token in letters else -1
        seen[token] = None
    return ""
