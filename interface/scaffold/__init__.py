"""`fastllm backend new`: writes a backend package that installs, registers and passes Bronze before a single op is written.

Templates are plain files below `templates/`: `common/` for every style, and one folder per style with what differs (the device's
memory, the build). `$name` in a template is replaced; `$$` is a dollar sign.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from ..core.errors import FastLLMError, UsageError
from ..core.ops import CORE_OPS

__all__ = ["STYLES", "extras", "write_backend"]

STYLES = {
    "numpy": "Python and numpy",
    "cython": "C memory and kernels through Cython",
    "cupy": "CUDA or ROCm through CuPy",
    "opencl": "OpenCL through pyopencl",
}
"""Style -> what its kernels will be written in."""

NAME = re.compile(r"[a-z][a-z0-9_]{1,31}")
SETTINGS = {  # style -> (build requirements, runtime requirements)
    "numpy": ('"setuptools>=77"', ""),
    "cython": ('"setuptools>=77", "Cython>=3.1"', ""),
    "cupy": ('"setuptools>=77"', '"cupy-cuda12x>=13"'),
    "opencl": ('"setuptools>=77"', '"pyopencl>=2024.1"'),
}
FILES = {  # template -> target; PACKAGE and VENDOR are replaced in targets
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "CHANGELOG.md.in": "CHANGELOG.md",
    "ci.yml.in": ".github/workflows/ci.yml",
    "gitignore.in": ".gitignore",
    "package.py.in": "src/PACKAGE/__init__.py",
    "plugin.py.in": "src/PACKAGE/plugin.py",
    "backend.py.in": "src/PACKAGE/backend.py",
    "ops.py.in": "src/PACKAGE/ops.py",
    "conformance.toml.in": "src/PACKAGE/conformance.toml",
    "typed.in": "src/PACKAGE/py.typed",
    "test_conformance.py.in": "tests/test_conformance.py",
    "test_vendor.py.in": "tests/test_VENDOR.py",
    "device.py.in": "src/PACKAGE/device.py",
    "memory.pyx.in": "src/PACKAGE/_memory.pyx",
    "memory.pyi.in": "src/PACKAGE/_memory.pyi",
    "setup.py.in": "setup.py",
}


def write_backend(vendor: str, style: str = "numpy", folder: Path = Path()) -> list[Path]:
    """Writes `folder`/fastllm-backend-VENDOR and returns its files, sorted.

    Raises UsageError for a name that cannot be a backend's, an unknown style, or a target that exists; FastLLMError if the files
    cannot be written. Then nothing stays.
    """
    _check_name(vendor)
    if style not in STYLES:
        raise UsageError(f"no style '{style}'", fix=f"--style {'|'.join(STYLES)}")
    target = folder / f"fastllm-backend-{vendor.replace('_', '-')}"
    if target.exists():
        raise UsageError(f"'{target}' exists", fix="choose another name or --dir, or remove it")
    written = []
    try:
        for template in _templates(style):
            name = FILES[template.name].replace("PACKAGE", f"fastllm_backend_{vendor}").replace("VENDOR", vendor)
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(template.read_text(encoding="utf-8")).substitute(_values(vendor, style)), encoding="utf-8")
            written.append(path)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise FastLLMError(f"cannot write '{target}': {error.strerror or error}", fix="choose another --dir") from None
    return sorted(written)


def extras(style: str) -> str:
    """What stands behind the package's name for `pip install`: for its tests, and for the device's library where the style has one."""
    return "[runtime,test]" if SETTINGS[style][1] else "[test]"


def _check_name(vendor: str) -> None:
    if not NAME.fullmatch(vendor):
        raise UsageError(
            f"'{vendor}' cannot be the name of a backend",
            why="a name is 2 to 32 of a–z, 0–9 and _, and starts with a letter",
            fix="for example: fastllm backend new acme_npu",
        )
    if vendor.endswith("_"):
        raise UsageError(f"'{vendor}' cannot be the name of a backend", why="the name of a distribution ends with a letter or a digit", fix=f"for example: {vendor.rstrip('_')}")
    if "__" in vendor:
        single = re.sub("__+", "_", vendor)
        raise UsageError(f"'{vendor}' cannot be the name of a backend", why=f"for pip its distribution would be that of '{single}'", fix=f"for example: fastllm backend new {single}")
    if keyword.iskeyword(vendor) or vendor in sys.builtin_module_names:
        raise UsageError(f"'{vendor}' is a word of Python and cannot be the name of a backend")
    taken = {p.name: p.dist.name for p in metadata.entry_points(group="fastllm.backends") if p.dist is not None}
    if vendor in taken or vendor == "auto":
        raise UsageError(f"a backend '{vendor}' exists already", why=f"it comes from {taken.get(vendor, 'fastllm-engine')}", fix="choose another name")
    if _is_own(vendor):
        raise UsageError(f"'{vendor}' is a name of fastllm itself and cannot be the name of a backend", fix="for example the vendor's name: fastllm backend new acme_npu")


def _is_own(vendor: str) -> bool:
    """Whether fastllm, one of its modules or the folder of one of its backends is called so: an error or a report that names it could mean either."""
    return vendor in ("fastllm", "engine") or any(importlib.util.find_spec(f"{package}.{vendor}") for package in ("fastllm", "fastllm.backends"))


def _templates(style: str) -> list[Traversable]:
    """Template files of a style; a file of the style's folder takes the place of the common one."""
    root = resources.files(__name__) / "templates"
    found = {f.name: f for folder in ("common", style) for f in (root / folder).iterdir() if f.name.endswith(".in")}
    return [found[name] for name in sorted(found)]


def _values(vendor: str, style: str) -> dict[str, str]:
    build, runtime = SETTINGS[style]
    version = metadata.version("fastllm-engine")
    major, minor = (int(part) for part in version.split(".")[:2])
    return {
        "vendor": vendor,
        "package": f"fastllm_backend_{vendor}",
        "dashed": vendor.replace("_", "-"),
        "class_name": "".join(part.capitalize() for part in vendor.split("_")) + "Backend",
        "style": style,
        "kernels": STYLES[style],
        "engine": version,
        "below": f"0.{minor + 1}" if major == 0 else str(major + 1),
        "build_requires": build,
        "runtime_requires": runtime,
        "num_ops": str(len(CORE_OPS) - 1),  # without `sample`, which the engine does itself
        "extra": extras(style),
    }
