"""What an answer must look like: from the fields of a body to a compiled grammar.

The preparation process finds out what is wanted (`wanted_constraint`, plain data in `Prepared.constraint`); the server compiles it in a
worker thread (`Compilation`), before the first byte of an answer, so that what cannot be enforced is a 400. What would take too long, or cannot be
followed, is found out before, in a process for that alone (`read_limit`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from ..core.errors import InvalidRequest, InvalidSchema, Unavailable
from ..text.json_schema import refused

if TYPE_CHECKING:
    from ..core.request import TokenConstraint
    from ..text.grammar import GrammarCompiler
    from ..text.lazy import Held
    from .prepare import Prepared
    from .schemas import Sampling

__all__ = ["Compilation", "compile_constraint", "refuse", "wanted_constraint"]

MAX_WAITING: Final = 64

_DIRECT = {  # field -> kind
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
}


def wanted_constraint(body: Sampling) -> dict[str, Any] | None:
    """{"kind", "source", "param"} of what the body asks for, or None. Raises InvalidRequest for two of them, or an unknown kind."""
    found = []
    for name, kind in _DIRECT.items():
        if getattr(body, name) is not None:
            found.append({"kind": kind, "source": getattr(body, name), "param": name})
    if body.structured_outputs is not None:
        for name, kind in (("json", "json_schema"), ("regex", "regex"), ("choice", "choice"), ("grammar", "grammar")):
            value = getattr(body.structured_outputs, "json_" if name == "json" else name)
            if value is not None:
                found.append({"kind": kind, "source": value, "param": f"structured_outputs.{name}"})
        if not any(str(f["param"]).startswith("structured_outputs.") for f in found):
            param = "structured_outputs"
            raise InvalidRequest(f"{param} says nothing about the form", who=param, fix="send json, regex, choice or grammar", param=param)
    if (format := _response_format(body.response_format)) is not None:
        found.append(format)
    if len(found) > 1:
        first, second = (str(f["param"]) for f in found[:2])
        raise InvalidRequest(f"{first} and {second} both say what the answer looks like", who=second, fix="send one", param=second)
    return found[0] if found else None


def _response_format(format: dict[str, Any] | None) -> dict[str, Any] | None:
    if format is None or format.get("type") == "text":
        return None
    param = "response_format"
    if format.get("type") == "json_object":
        schema = format.get("schema")  # as llama.cpp takes it
        return {"kind": "json_schema", "source": {"type": "object"} if schema is None else schema, "param": param}
    if format.get("type") == "json_schema":
        wrapped = format.get("json_schema")
        if not isinstance(wrapped, dict) or wrapped.get("schema") is None:
            raise InvalidRequest("response_format.json_schema.schema is missing", who=param, fix="send a schema", param=f"{param}.json_schema")
        return {"kind": "json_schema", "source": wrapped["schema"], "param": f"{param}.json_schema.schema"}
    kind = str(format.get("type"))[:60]
    raise InvalidRequest(
        f"response_format of type {kind!r} is not known", who=param, fix='{"type": "json_schema" | "json_object" | "text"}', param=f"{param}.type"
    )


class Compilation:
    """Compiles beside the event loop, two grammars at a time; more than MAX_WAITING are not waited for. compiler: makes the compiler, whose
    tables are built when the first grammar is compiled."""

    def __init__(self, compiler: Callable[[], GrammarCompiler]):
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(2, "fastllm-grammar")
        self._waiting = 0

    async def __call__(self, ready: Prepared) -> Callable[[], TokenConstraint] | None:
        """What holds the answers of a request; None: nothing. Tool calls that need not be held and cannot be are free, with a warning. Raises
        InvalidRequest, Unavailable."""
        if ready.constraint is None and ready.thinking.get("budget") is None and not ready.banned:
            return None
        if self._waiting >= MAX_WAITING:
            raise Unavailable("too many grammars are being compiled", fix="try again later", retry_after_s=1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: compile_constraint(self._compiler(), ready))
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Ends the threads, once they have done what they do."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def compile_constraint(compiler: GrammarCompiler, ready: Prepared) -> Callable[[], TokenConstraint] | None:
    """What holds the answers of a request; None: nothing. Raises InvalidRequest, InvalidSchema."""
    thinking = ready.thinking
    made: Callable[[], Held] | None = None
    if ready.constraint is not None:
        try:
            made = _held(compiler, ready.constraint, ready)
        except InvalidSchema as error:
            if not ready.constraint.get("optional"):
                raise
            _free(ready, error)
    if ready.banned:
        made = compiler.banned(made, ready.banned)
    if thinking.get("budget") is not None:
        markers = (thinking["opening"], thinking["closing"])
        made = compiler.budget(made, thinking["budget"], markers, thinking["inside"])
    return made


def _free(ready: Prepared, error: InvalidSchema) -> None:
    """Its tool calls are not held, which may be so."""
    ready.constraint = None
    ready.warnings.append(f"tool calls are not held to their schemas: {error.why or error.message}")
    if ready.output is not None:
        ready.output["held"] = False


def refuse(ready: Prepared, why: str) -> None:
    """Its grammar cannot be read or followed. Tool calls that need not be held are free then, with a warning. Raises InvalidSchema."""
    wanted = ready.constraint
    assert wanted is not None
    error = refused(why, "", wanted["param"], "simplify it")
    if not wanted.get("optional"):
        raise error
    _free(ready, error)


def _held(compiler: GrammarCompiler, wanted: dict[str, Any], ready: Prepared) -> Callable[[], Held]:
    thinking, param = ready.thinking, wanted["param"]
    markers = (thinking["opening"], thinking["closing"]) if thinking else None
    if wanted["kind"] == "calls":
        one = bool(ready.output and ready.output["one"])
        inside = bool(thinking and thinking["inside"])
        return compiler.calls(wanted["source"], param, reasoning=markers, in_reasoning=inside, one=one)
    grammar = getattr(compiler, wanted["kind"])(wanted["source"], param=param)
    return compiler.after(grammar, thinking["closing"], thinking["opening_id"]) if thinking.get("after") else grammar
