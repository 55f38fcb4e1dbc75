"""The hooks of a plug-in, and which version of the interface a plug-in may speak.

A plug-in module marks plain functions with `fastllm.api.hookimpl`. An implementation may take fewer arguments than the hook has
(so that arguments can be added), but none with a default: some versions of pluggy pass those and some do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pluggy

from ..backend import API_VERSION, Backend, BackendSpec, Ready, Unavailable
from ..graph import Graph

__all__ = ["MANDATORY", "PREFIX", "PROJECT", "BackendHooks", "FrozenHooks", "check_api", "hook_names", "is_version"]

PROJECT: Final = "fastllm"
PREFIX: Final = "fastllm_"
MANDATORY: Final = ("fastllm_backends", "fastllm_probe", "fastllm_open_backend")

hookspec = pluggy.HookspecMarker(PROJECT)


class FrozenHooks:
    """The one hook whose shape never changes: it is asked before anything else is checked, so that a plug-in for another version
    of the interface is called incompatible, and not broken for a hook that this version does not know."""

    @hookspec(firstresult=True)
    def fastllm_backends(self) -> list[BackendSpec]:
        """The backends of this module. Called once per load, after registration."""
        raise NotImplementedError


class BackendHooks:
    """Every other hook. Each is called on the owner of `name` or `target` alone."""

    @hookspec(firstresult=True)
    def fastllm_probe(self, name: str) -> Ready | Unavailable:
        """What can be opened now: the devices, or why there are none. At most one second; loads as little as it can."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def fastllm_open_backend(self, name: str, device: str, options: Mapping[str, Any]) -> Backend:
        """Opens a device. device: an id that the probe gave. options: every option of the spec, checked, defaults filled in. The
        driver is loaded here, not before. Raises BackendUnavailable, OutOfMemory, UsageError or UnsupportedError with a fix."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def fastllm_transform_graph(self, graph: Graph, target: Any) -> Graph | None:
        """A rewritten graph for the nodes placed on `target` (name, device, spec), or None. The result is verified again."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def fastllm_environment(self, name: str) -> dict[str, str]:
        """Driver, firmware and library versions, for reports."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def fastllm_requirements(self, name: str) -> Any:
        """What the conformance suite may assume and must skip (`fastllm.conformance.Requirements`)."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def fastllm_conformance_cases(self, name: str) -> list[Any]:
        """The vendor's own conformance cases."""
        raise NotImplementedError


def hook_names() -> tuple[str, ...]:
    """All hooks, sorted."""
    return tuple(sorted(n for cls in (FrozenHooks, BackendHooks) for n in vars(cls) if n.startswith(PREFIX)))


def check_api(theirs: tuple[int, int], ours: tuple[int, int] = API_VERSION) -> str:
    """"" if a plug-in written for `theirs` runs here; otherwise which side to upgrade: "plugin" or "host".

    Major 0 is not frozen: versions must be equal. From 1 on a plug-in runs on its own major with a minor up to the host's.
    """
    if theirs == ours or (theirs[0] == ours[0] and ours[0] > 0 and theirs[1] <= ours[1]):
        return ""
    return "host" if theirs > ours else "plugin"


def is_version(value: Any) -> bool:
    """Whether a plug-in's word for its version of the interface is one: (major, minor)."""
    return isinstance(value, tuple) and len(value) == 2 and all(type(v) is int and v >= 0 for v in value)
