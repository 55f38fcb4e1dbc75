"""How deep rules of a grammar may lie in one another, and the room that the library needs for it.

The library follows rules and references by recursion: three thousand of them in a chain, fifty kilobytes of a request, end a thread's stack, and with it
the process. So the levels that a source can have are counted before it is read, in a way that only ever counts too many, and a source with many is read
by a thread whose stack is large enough for all of them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["MAX_LEVELS", "levels", "with_room"]

T = TypeVar("T")

MAX_LEVELS: Final = 20_000
PLAIN_LEVELS: Final = 250  # that any thread has room for
JSON_LEVELS: Final = 128  # of JSON without references
LEVEL_BYTES: Final = 16 << 10  # of stack; seen were up to 9 KiB
STACK_BYTES: Final = 2 << 20  # besides

_stack_size = threading.Lock()  # Python has one size of stacks, for the threads that start next


def levels(kind: str, text: str) -> int:
    """At most so many rules, references and brackets lie in one another in what this source (as of `GrammarCompiler`) says. 0: a fixed small number."""
    if kind == "json_schema":
        return text.count("{") if _refers(text) else 0
    if kind == "grammar":
        return sum(map(_of_line, text.splitlines()))
    if kind == "bundle":
        return sum(levels("grammar", grammar["lark_grammar"]) for grammar in json.loads(text)["grammars"])
    return 0  # the library bounds what a pattern nests, and a choice has one level


def _refers(text: str) -> bool:
    """There may be a reference in this JSON; else its own depth, which is bounded, is all."""
    return re.search(r"ref\b|\\u", text, re.IGNORECASE) is not None


def _of_line(line: str) -> int:
    """Of Lark or GBNF: each rule has a colon, and what else nests has a bracket. Those in texts are counted, too."""
    rules, json_, schema = line.partition("%json")
    return sum(map(rules.count, ":([{")) + (sum(map(schema.count, ":([{")) if _refers(schema) or "%json" in schema else JSON_LEVELS if json_ else 0)


def with_room(count: int, call: Callable[[], T]) -> T:
    """What `call` returns or raises, called with a stack for so many levels, at most MAX_LEVELS. Raises RuntimeError where no thread can be started."""
    if count <= PLAIN_LEVELS:
        return call()
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # raised again by whoever waits
            failure.append(error)

    thread = threading.Thread(target=run, name="fastllm-grammar-deep", daemon=True)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES + count * LEVEL_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
