"""Throw-away distributions: a folder with a module and hand-written metadata, put on the import path."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from textwrap import dedent

import pytest

HEAD = """
from fastllm.api import (
    API_VERSION, Backend, BackendSpec, BackendUnavailable, Buffer, DeviceInfo, No, Option, Ready, Unavailable, hookimpl
)

class Tiny(Backend):
    def __init__(self, name="", device="", options=None):
        self.name, self.device, self.options = name, device, options

    def supports(self, q):
        return No("nothing runs here")

    def alloc(self, nbytes, kind):
        return Buffer(nbytes, kind, bytearray(nbytes))

    def upload(self, dst, offset, src, stream):
        dst.handle[offset : offset + len(src)] = src

    def download(self, dst, src, offset, stream):
        dst[:] = src.handle[offset : offset + len(dst)]

    def ops(self):
        return {}
"""

BACKENDS = """
@hookimpl
def fastllm_backends():
    return [BackendSpec(NAME, API_VERSION, 1, priority=PRIORITY)]
"""

PROBE = """
@hookimpl
def fastllm_probe(name):
    return Ready((DeviceInfo("0", "first"), DeviceInfo("1", "second")))
"""

OPEN = """
@hookimpl
def fastllm_open_backend(name, device, options):
    return Tiny(name, device, options)
"""


def plugin_source(
    name: str = "acme_npu",
    priority: int = 90,
    backends: str = BACKENDS,
    probe: str = PROBE,
    open_: str = OPEN,
    head: str = "",
    tail: str = "",
) -> str:
    """The text of a plug-in module; every part can be replaced by a wrong one."""
    parts = [HEAD, f"NAME, PRIORITY = {name!r}, {priority}\n", *(dedent(p) for p in (head, backends, probe, open_, tail))]
    return "\n".join(parts)


class Site:
    """A folder on the import path that distributions are installed into."""

    def __init__(self, folder: Path):
        self.folder = folder

    def install(
        self,
        source: str,
        name: str = "acme_npu",
        distribution: str = "fastllm-backend-acme",
        version: str = "0.3.1",
        module: str = "fastllm_backend_acme",
        entries: str | None = None,
        metadata: str | None = None,
    ) -> Path:
        """Writes package `module` with a file `plugin.py`, and the metadata that points to it. Returns the package's folder."""
        package = self.folder / module
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "plugin.py").write_text(source)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        default = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nProvides-Extra: runtime\n"
        (info / "METADATA").write_text(metadata if metadata is not None else default)
        (info / "entry_points.txt").write_text(f"[fastllm.backends]\n{entries or f'{name} = {module}.plugin'}\n")
        return package


@pytest.fixture(autouse=True)
def _no_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plug-ins that whoever runs the tests has installed are not among those of a test."""
    everything = metadata.distributions

    def ours() -> Iterator[metadata.Distribution]:
        for found in everything():
            foreign = "fastllm.backends" in (found.read_text("entry_points.txt") or "") and str(tmp_path) not in str(found.locate_file(""))
            if not foreign or (found.read_text("METADATA") and found.metadata["Name"] == "fastllm-engine"):
                yield found

    monkeypatch.setattr(metadata, "distributions", ours)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Variables of a user without configuration. Built-in backends that a machine may or may not have are switched off. Plug-ins are asked in
    this process, which most tests look into; `contained` has the way of every command."""
    return {"HOME": str(tmp_path / "home"), "FASTLLM_DISABLE_PLUGINS": "cpu_avx,opencl_generic", "FASTLLM_CONTAIN_PLUGINS": "0"}


@pytest.fixture
def contained(env: dict[str, str]) -> dict[str, str]:
    """The same, and plug-ins are asked in child processes."""
    return {k: v for k, v in env.items() if k != "FASTLLM_CONTAIN_PLUGINS"}


@pytest.fixture
def plugin() -> Callable[..., str]:
    return plugin_source


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a plugins.toml and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "plugins.toml"
        path.write_text(dedent(text).lstrip("\n"))
        return path

    return write


def ended(pid: int, patience_s: float = 60.0) -> bool:
    """Waits until a process that is not ours ends; False if it is still there after that time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with contextlib.closing(os.fdopen(process)):
        return bool(select.select([process], [], [], patience_s)[0])
