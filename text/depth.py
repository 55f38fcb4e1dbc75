"""How deep rules of a grammar may lie in one another, how many names its schemas have, and the room that the library needs for it.

The library follows rules and references by recursion, and the properties of an object, too: three thousand rules in a chain, fifty kilobytes of a request,
end a thread's stack, and with it the process. So the levels that a source can have are counted before it is read, in a way that only ever counts too many,
and a source is read by a thread whose stack is large enough for all of them: that of the thread that asks is no larger than a system or `ulimit -s` says.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from fastllm.core.errors import OutOfMemory

__all__ = ["MAX_LEVELS", "MAX_NAMES", "PATTERN_NAMES", "levels", "names", "with_room"]

T = TypeVar("T")

MAX_LEVELS: Final = 20_000
MAX_NAMES: Final = 5_000  # of properties, in all schemas of a source: those of one object cost the library their square, 10,000 of them five seconds
PATTERN_NAMES: Final = 50  # that a pattern of patternProperties counts as: those of one object cost about their fourth power, 300 of them five seconds
JSON_LEVELS: Final = 128  # of JSON without references
LEVEL_BYTES: Final = 16 << 10  # of stack; seen were up to 9 KiB
STACK_BYTES: Final = 2 << 20  # besides: for the levels of what is a fixed small number

_SCHEMA: Final = re.compile(r"%json\s*")
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


def names(kind: str, text: str) -> int:
    """At most so many properties have the objects of all schemas in this source (as of `levels`) together: those that have schemas, and others that are
    required. A pattern of them counts as PATTERN_NAMES."""
    if kind == "json_schema":
        return _of_schema(json.loads(text))
    if kind == "grammar":
        return _of_lark(text)
    if kind == "bundle":
        return sum(_of_lark(grammar["lark_grammar"]) for grammar in json.loads(text)["grammars"])
    return 0


def _of_lark(text: str) -> int:
    count, at = 0, 0
    while (found := _SCHEMA.search(text, at)) is not None:
        try:
            schema, at = json.JSONDecoder().raw_decode(text, found.end())
            count += _of_schema(schema)
        except (ValueError, RecursionError):  # the library cannot read it either, or it stands in a comment
            at, count = found.end(), count + PATTERN_NAMES
            if count > MAX_NAMES:  # each failure costs the length of the text
                break
    return count


def _of_schema(schema: Any) -> int:
    """Not recursive: the depth is a stranger's."""
    count, waiting = 0, [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            named, required, patterns = (part.get(key) for key in ("properties", "required", "patternProperties"))
            known = named if isinstance(named, dict) else {}
            count += len(known) + PATTERN_NAMES * (len(patterns) if isinstance(patterns, dict) else 0)
            count += sum(not isinstance(name, str) or name not in known for name in required) if isinstance(required, list) else 0
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return count


def with_room(count: int, call: Callable[[], T]) -> T:
    """What `call` returns or raises, called with a stack for so many levels. Raises OutOfMemory where no thread can be started.

    Whoever waits may be interrupted; the interpreter then ends after the thread, which would crash the process if it came back from the library later.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # raised again by whoever waits
            failure.append(error)

    thread = threading.Thread(target=run, name="fastllm-grammar", daemon=False)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES + count * LEVEL_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            why = f"a stack of {STACK_BYTES + count * LEVEL_BYTES >> 20:,} MiB: {error}"
            raise OutOfMemory("there is no room to read a grammar", why=why, fix="free memory, or raise the limit of memory or threads", kind="host") from None
        finally:
            threading.stack_size(before)
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
