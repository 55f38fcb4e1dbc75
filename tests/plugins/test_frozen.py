"""The frozen interface: within a major nothing of docs/api-frozen.txt goes away, and what is new raises the minor. Ops keep their meaning."""

from __future__ import annotations

import hashlib
import inspect
import re
from pathlib import Path

import pytest

from fastllm.api import API_VERSION, CATALOGUE, OPSET

from .test_interface_text import ROOT, load_script

FROZEN = ROOT / "docs" / "api-frozen.txt"


def places(text: str) -> dict[str, str]:
    """(class and) name of each line -> the line: `Backend/abstract def alloc(…)` stands under its class."""
    found, owner = {}, ""
    for line in text.splitlines():
        if line.startswith("    "):
            found[f"{owner}/{line.strip()}"] = line
        else:
            owner = line.partition("(")[0]
            found[line] = line
    return found


LENT = ("Engine", "Executor", "Graph", "GraphBuilder", "ModelInput", "Placement", "Plan", "PluginFacts", "Request", "SamplingParams", "StepBatch", "StepLimits")
"""What the interface lends to the conformance suite: not promised to vendors."""


def promised(text: str) -> str:
    """The text without what is only lent."""
    kept, lent = [], False
    for line in text.splitlines():
        if not line.startswith("    "):
            lent = line.removeprefix("class ").partition("(")[0] in LENT
        if not lent:
            kept.append(line)
    return "\n".join(kept) + "\n"


def version(text: str) -> tuple[int, int]:
    major, minor = re.match(r"version (\d+)\.(\d+), opset \d+\n", text).groups()
    return int(major), int(minor)


def broken(frozen: str, now: str) -> list[str]:
    """What a change breaks: lines that are gone, a mandatory one that is new, or an addition without a new minor."""
    frozen, now = promised(frozen), promised(now)
    was, then, at = version(frozen), places(frozen), version(now)
    if at[0] != was[0]:
        return []
    new = places(now)
    skip = {frozen.splitlines()[0], now.splitlines()[0]} | {k for k in (*then, *new) if k.startswith("value API_VERSION")}
    wrong = [f"gone: {k}" for k in then if k not in new and k not in skip and not _grew(k, new)]
    added = [k for k in new if k not in then and k not in skip]
    wrong += [f"mandatory and new: {k}" for k in added if "/abstract " in k or (re.search(r"/field \w+$", k) and k.partition("/")[0] in {o.partition("/")[0] for o in then})]
    if added and at <= was:
        wrong += [f"new, but the minor is still {was[1]}: {k}" for k in added]
    return wrong


def _grew(line: str, new: dict[str, str]) -> bool:
    """A tuple of names that still begins as it did: KV_DTYPES may have more, CORE_OPS of a new opset too."""
    name, _, value = line.partition(" = (")
    return bool(value) and any(k.startswith(f"{name} = ({value.rstrip(')')}") for k in new)


def test_the_interface_keeps_what_was_frozen():
    frozen = FROZEN.read_text(encoding="utf-8")
    assert version(frozen)[0] == API_VERSION[0], "a new major: freeze it anew, and keep the old one for its adapter"
    assert broken(frozen, load_script().text()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.replace("    def close()\n", "", 1), "gone: class Backend/def close()"),
        (lambda t: t.replace("def copy(dst,", "def copy(target,"), "gone: class Backend/def copy"),
        (lambda t: t.replace("    field id\n", "    field ident\n", 1), "mandatory and new: class DeviceInfo/field ident"),
        (lambda t: t.replace("class Backend(ABC)\n", "class Backend(ABC)\n    abstract def flush()\n").replace("version 1.0", "version 1.1"), "mandatory and new: class Backend/abstract def flush()"),
        (lambda t: t.replace("class Backend(ABC)\n", "class Backend(ABC)\n    def flush()\n"), "new, but the minor is still 0: class Backend/def flush()"),
    ],
)
def test_a_change_that_breaks_is_seen(change, says):
    frozen = FROZEN.read_text(encoding="utf-8")
    assert any(line.startswith(says) for line in broken(frozen, change(frozen)))


def test_additions_with_a_new_minor_are_allowed():
    frozen = FROZEN.read_text(encoding="utf-8")
    more = frozen.replace("version 1.0", "version 1.1").replace("class Backend(ABC)\n", "class Backend(ABC)\n    def flush()\n")
    assert broken(frozen, more.replace("('f16', 'bf16', 'f32', 'int8')", "('f16', 'bf16', 'f32', 'int8', 'fp8')")) == []


MEANINGS = Path(__file__).parent / "opset1.txt"


def meanings() -> str:
    """Inputs, attributes with defaults and choices, and a hash of the text that defines each op of the opset."""
    lines = []
    for name, spec in CATALOGUE.items():
        attrs = ", ".join(f"{k}={a.default!r}" for k, a in spec.attrs.items())
        digest = hashlib.sha256(" ".join(inspect.cleandoc(spec.doc).split()).encode()).hexdigest()[:12]
        lines.append(f"{name}({', '.join(spec.inputs)}; {attrs}) since {spec.since} text {digest}")
    return "\n".join(lines) + "\n"


def test_ops_of_the_frozen_opset_mean_what_they_meant():
    """A new attribute comes last, with a neutral default. A text that only became clearer is frozen anew: `python -m tests.plugins.test_frozen`."""
    now = {line.partition("(")[0]: line for line in meanings().splitlines()}
    for line in MEANINGS.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition("(")
        assert name in now, f"op '{name}' of opset {OPSET} is gone"
        operands, _, text = rest.rpartition(") since ")
        mine, _, mine_text = now[name].partition("(")[2].rpartition(") since ")
        assert mine.startswith(operands), f"op '{name}': ({operands}) became ({mine})"
        assert mine_text == text, f"op '{name}': its definition was changed; if its meaning was not, freeze the text anew"


if __name__ == "__main__":
    MEANINGS.write_text(meanings(), encoding="utf-8")
