"""Writes docs/api.txt: every name of `fastllm.api` with its signature. A change of the interface is a change of this file, for all to see.

    python scripts/make_api_text.py            # after a change of the interface; CI compares
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastllm import api

TARGET = Path(__file__).resolve().parent.parent / "docs" / "api.txt"
INTERNAL = ("Engine", "Executor", "Graph", "GraphBuilder", "ModelInput", "Placement", "Plan", "PluginFacts", "RefBackend", "Request", "SamplingParams", "StepBatch", "StepLimits")
"""Classes that the interface lends to the conformance suite, or that have methods of their own room: their constructors only."""


GROWING = ("PRIMITIVE_OPS", "ACTIVATIONS", "MASKS")
"""Tables that may grow within a version; what is in them is in docs/operator-interface.md."""


def signature(function: Any) -> str:
    """`(a, b=1)`: names, kinds and defaults, without annotations, which differ in spelling from version to version of Python."""
    parts = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parts if p.name != "self"]
    return str(inspect.Signature(bare))


def lines() -> Iterator[str]:
    """One line per name, field and method."""
    yield f"version {api.API_VERSION[0]}.{api.API_VERSION[1]}, opset {api.OPSET}"
    for name in api.__all__:
        thing = getattr(api, name)
        if inspect.isclass(thing):
            yield from _class(name, thing)
        elif callable(thing) and not isinstance(thing, enum.Enum):
            yield f"def {name}{signature(thing)}" if inspect.isfunction(thing) else f"callable {name}"
        elif name in GROWING or isinstance(thing, dict):
            yield f"table {name}"
        else:
            yield f"value {name} = {thing!r}"


def _class(name: str, thing: type) -> Iterator[str]:
    bases = [b.__name__ for b in thing.__bases__ if b is not object]
    yield f"class {name}({', '.join(bases)})"
    if dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            yield f"    field {field.name}{default}"
    elif "__init__" in vars(thing):
        yield f"    def __init__{signature(thing.__init__)}"  # type: ignore[misc]
    if name in INTERNAL:
        return
    for method, member in sorted(vars(thing).items()):
        if inspect.isfunction(member) and not method.startswith("_"):
            must = "abstract " if getattr(member, "__isabstractmethod__", False) else ""
            yield f"    {must}def {method}{signature(member)}"


def text() -> str:
    """The whole file."""
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    print(f"written: {TARGET}")
