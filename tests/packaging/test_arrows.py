"""Which room may import which, how long a file may be, and other rules of the house that are read off the source.

Imports are parsed, not searched for, wherever they stand: at the top, in a function, behind TYPE_CHECKING. Each rule is also
shown a text that breaks it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core", "models", "formats", "text", "backends", "conformance", "interface")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECLARED = {re.split(r"[^A-Za-z0-9_.-]", d)[0].replace("-", "_").lower() for d in PROJECT["dependencies"]}

# room -> (prefixes below fastllm that it may import besides itself, packages that it may import; None: any declared dependency)
ARROWS: dict[str, tuple[tuple[str, ...], set[str] | None]] = {
    "core": ((), {"numpy", "pluggy"}),
    "models": (("fastllm.core",), {"numpy"}),
    "formats": (("fastllm.core",), None),
    "text": (("fastllm.core.errors",), None),
    "backends": (("fastllm.api",), {"numpy", "pluggy"}),
    "conformance": (("fastllm.api",), {"numpy", "pytest", "hypothesis"}),
    "interface": (("fastllm",), None),
}
SHARED_BY_BACKENDS = "fastllm.backends.gpu"
DRIVER_PACKAGES = {"backends/opencl_generic/": {"pyopencl"}}
"""Folder of a backend -> the binding of its driver, an optional dependency; imported where a device is looked for."""
CYTHON = {"cython", "libc", "cpython", "posix"}
MAX_LINES = 700
LONGER: dict[str, str] = {}
"""Path -> why it may be longer."""
JINJA_FILE = "text/template.py"


def sources(*suffixes: str, folders: tuple[str, ...] = (*ROOMS, "tests", "scripts", "benchmarks")) -> list[str]:
    """Paths of the source files, relative to the root."""
    found = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in suffixes and "__pycache__" not in p.parts]
    return sorted(p.relative_to(ROOT).as_posix() for p in found)


def package_of(path: str) -> str:
    """`core/plugins/config.py` -> `fastllm.core.plugins`; `benchmarks` is a package of its own; "" outside of both."""
    room, *rest = Path(path).parent.parts
    if room == "benchmarks":
        return ".".join([room, *rest])
    if room not in ROOMS:
        return ""
    return ".".join(["fastllm", *([] if room == "interface" else [room]), *rest])


def imports(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported; `from a import b` gives `a.b`."""
    if path.endswith((".pyx", ".pxd")):
        for number, line in enumerate(text.splitlines(), 1):
            if found := re.match(r"\s*(?:from\s+(\S+)\s+c?import\s+(\w+)|c?import\s+(\S+))", line):
                module, name, plain = found.groups()
                yield number, plain or _absolute(path, len(module) - len(module.lstrip(".")), module.lstrip("."), name)
        return
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, _absolute(path, node.level, node.module or "", alias.name)) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            for name in (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)):
                yield node.lineno, _absolute(path, len(name) - len(name.lstrip(".")), name.lstrip("."), "")


def _absolute(path: str, level: int, module: str, name: str) -> str:
    base = package_of(path).split(".")
    parts = base[: len(base) - level + 1] if level else []
    return ".".join(filter(None, [*parts, module, name]))


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def arrow_violations(path: str, text: str) -> list[str]:
    """Every import of a file that its room does not allow."""
    room = path.split("/")[0]
    wrong = []
    for line, name in imports(path, text):
        top = name.split(".")[0]
        where = f"{path}:{line}: {name}"
        if top in ROOMS:
            wrong.append(f"{where}: a second copy of the package; write fastllm.{name} or a relative import")
        elif room not in ARROWS:
            continue
        elif top == "fastllm":
            allowed = ARROWS[room][0]
            own = ".".join(package_of(path).split(".")[:3]) if room == "backends" else f"fastllm.{room}"
            may = (*allowed, own, SHARED_BY_BACKENDS) if room == "backends" and len(own.split(".")) == 3 else (*allowed, own)
            if not any(below(name, prefix) for prefix in may):
                wrong.append(f"{where}: {room} may import {', '.join(may)}")
        elif top not in sys.stdlib_module_names and not (path.endswith((".pyx", ".pxd")) and top in CYTHON):
            packages = ARROWS[room][1]
            if packages is not None:
                packages = packages.union(*(extra for folder, extra in DRIVER_PACKAGES.items() if path.startswith(folder)))
            if top not in (DECLARED if packages is None else packages):
                wrong.append(f"{where}: {room} may import {', '.join(sorted(DECLARED if packages is None else packages))}")
    return wrong


def jinja_violations(path: str, text: str) -> list[str]:
    """Uses of jinja2's unsandboxed Environment: templates come with models and are hostile."""
    if path == JINJA_FILE:
        return []
    names = {"jinja2.Environment", "jinja2.environment.Environment"}
    found = [f"{path}:{line}: {name}" for line, name in imports(path, text) if name in names]
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Attribute) and node.attr == "Environment" and ast.unparse(node.value).startswith("jinja2"):
            found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return found


def length_violations(path: str, text: str) -> list[str]:
    """Files that are too long to be read in one sitting, unless a reason is written down."""
    lines = text.count("\n")
    return [f"{path}: {lines} lines; at most {MAX_LINES}"] if lines > MAX_LINES and path not in LONGER else []


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_imports_point_one_way():
    wrong = [v for path in sources(".py", ".pyx", ".pxd") for v in arrow_violations(path, read(path))]
    assert not wrong, "\n".join(wrong)


def test_only_the_template_file_uses_jinja_environments():
    wrong = [v for path in sources(".py", folders=ROOMS) for v in jinja_violations(path, read(path))]
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long_without_a_reason():
    wrong = [v for path in sources(".py", ".pyx", ".pxd", ".c", ".h") for v in length_violations(path, read(path))]
    assert not wrong, "\n".join(wrong)


def test_every_exemption_is_needed_and_has_a_reason():
    for path, reason in LONGER.items():
        assert reason
        assert read(path).count("\n") > MAX_LINES, f"{path} is short again: take it out of the table"


def test_every_folder_of_a_room_is_a_package():
    folders = {p.parent for room in ROOMS for p in (ROOT / room).rglob("*.py") if "__pycache__" not in p.parts}
    parents = {parent for folder in folders for parent in folder.parents if ROOT in parent.parents}
    bare = sorted(str(f.relative_to(ROOT)) for f in folders | parents if not (f / "__init__.py").is_file())
    assert not bare, f"no __init__.py in {bare}: setuptools leaves them out of the wheel in silence"


def test_the_rules_know_every_room():
    assert set(ARROWS) == set(ROOMS)
    assert DECLARED >= {"numpy", "pluggy", "prompt_toolkit", "huggingface_hub"}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/x.py", "from ..formats.gguf import read"),
        ("core/x.py", "def f():\n    from .. import api"),
        ("core/x.py", "import_module('fastllm.models.llama')"),
        ("core/x.py", "import jinja2"),
        ("core/plugins/x.py", "from ...backends import ref"),
        ("core/x.pyx", "from ..models cimport x"),
        ("core/x.pyx", "import torch"),
        ("models/x.py", "from ..formats import gguf"),
        ("models/x.py", "import safetensors"),
        ("text/x.py", "from ..core import graph"),
        ("text/x.py", "from ..core.quant import FORMATS"),
        ("formats/x.py", "import torch"),
        ("formats/x.py", "from ..llm import LLM"),
        ("backends/acme/x.py", "from fastllm.core.errors import UsageError"),
        ("backends/acme/x.py", "from ...core import errors"),
        ("backends/acme/x.py", "from ..ref.backend import RefBackend"),
        ("backends/acme/x.py", "if TYPE_CHECKING:\n    import torch"),
        ("backends/gpu/x.py", "import pyopencl"),
        ("conformance/x.py", "from ..core.graph import Graph"),
        ("interface/x.py", "import transformers"),
        ("interface/x.py", "from core.errors import UsageError"),
        ("tests/x.py", "import core.errors"),
        ("scripts/x.py", "import formats"),
        ("benchmarks/x.py", "from models import llama"),
        ("interface/x.py", "from benchmarks import models"),
    ],
)
def test_a_forbidden_import_is_found(path, text):
    assert len(arrow_violations(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/x.py", "from .graph import Graph\nimport numpy.typing\nfrom pluggy import HookspecMarker\nimport os.path"),
        ("core/plugins/x.py", "from ..graph import Graph\nfrom . import config"),
        ("core/x.pyx", "from libc.stdint cimport int32_t\ncimport numpy as cnp\nfrom .errors import OutOfMemory"),
        ("models/x.py", "from ..core.graph import Graph\nfrom .blocks import attention"),
        ("text/x.py", "from ..core.errors import TemplateError\nfrom ..core import errors\nimport tokenizers"),
        ("backends/acme/x.py", "from fastllm.api import Backend\nfrom fastllm import api\nfrom . import ops\nfrom ..gpu import pool"),
        ("backends/opencl_generic/x.py", "def f():\n    import pyopencl\n    from ..gpu.runtime import Caps"),
        ("interface/x.py", "from .core.plugins import BackendRegistry\nfrom prompt_toolkit import prompt\nfrom fastllm import LLM"),
        ("tests/x.py", "import pytest\nfrom fastllm.core import errors"),
        ("benchmarks/x.py", "from .models import model_path\nfrom fastllm.bench import Row\nimport click"),
    ],
)
def test_an_allowed_import_is_not_reported(path, text):
    assert arrow_violations(path, text) == []


def test_the_other_rules_can_fail():
    assert jinja_violations("text/x.py", "from jinja2 import Environment")
    assert jinja_violations("text/x.py", "import jinja2\njinja2.Environment()")
    assert not jinja_violations("text/x.py", "from jinja2 import TemplateSyntaxError")
    assert length_violations("core/x.py", "\n" * (MAX_LINES + 1))
    assert not length_violations("core/x.py", "\n" * MAX_LINES)
