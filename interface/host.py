"""What the conformance suite needs of the engine, as plain functions that `fastllm.api` exports: backends by name, models from files,
and the host's sampler. Nothing here knows a backend; `fastllm.api` loads this module when one of its names is first used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .core.backend import Backend, BackendSpec
    from .core.model import ModelDef
    from .core.weights import TensorSource
    from .formats import ModelFiles

__all__ = ["ModelInput", "PluginFacts", "host_sample", "open_backend", "plugin_cases", "plugin_facts", "plugin_folder", "read_model"]


def _registry(plugins_file: str | os.PathLike[str] | None, plugin_paths: Sequence[str | os.PathLike[str]]) -> Any:
    from .core.plugins import BackendRegistry

    return BackendRegistry(None if plugins_file is None else Path(plugins_file), tuple(Path(p) for p in plugin_paths))


def open_backend(
    name: str, options: Mapping[str, str] | None = None, *, plugins_file: str | os.PathLike[str] | None = None,
    plugin_paths: Sequence[str | os.PathLike[str]] = (),
) -> tuple[Backend, BackendSpec]:  # fmt: skip
    """Opens NAME[:DEVICE] by the same door as every run. options: `key=value` pairs. Raises the loader's errors; the caller closes."""
    registry = _registry(plugins_file, plugin_paths)
    selection = registry.select(name)
    return registry.open(selection, options or {}), selection.spec


@dataclass(frozen=True)
class PluginFacts:
    """What a plug-in says about itself, for reports: its distribution and version, device, execution (the device's kind), environment,
    requirements and own cases; files: those of `plugin_paths` that it comes from."""

    name: str
    distribution: str
    version: str
    device: str
    execution: str
    environment: Mapping[str, str]
    requirements: Any
    cases: Sequence[Any]
    package_folder: Path | None
    files: Sequence[str] = ()


def plugin_facts(
    name: str, *, plugins_file: str | os.PathLike[str] | None = None, plugin_paths: Sequence[str | os.PathLike[str]] = ()
) -> PluginFacts:
    """Facts about the plug-in of NAME[:DEVICE]. Hooks that are called here were called in a child process first, as a crash would end the caller;
    `fastllm_environment` is called there alone. Raises the loader's errors."""
    registry = _registry(plugins_file, plugin_paths)
    selection = registry.select(name)
    state = registry.state(selection.name)
    device = next((d for d in state.devices if d.id == selection.device), None)
    environment, fault = registry.environment_or_fault(selection.name)  # a child is asked as long as the module is not in this process
    if fault:
        environment = {"fastllm_environment": fault}
    registry.rehearse(selection.name, "fastllm_requirements", "fastllm_conformance_cases")
    requirements, cases = registry.requirements(selection.name), _cases(registry, selection.name)
    from .conformance.case import Requirements

    if not isinstance(requirements, Requirements | NoneType):
        raise registry.fault(selection.name, "answer fastllm_requirements", f"{type(requirements).__name__} is no fastllm.conformance.Requirements")
    label = f"{device.name} ({device.detail})" if device and device.detail else device.name if device else selection.device
    return PluginFacts(
        selection.name, state.distribution, state.version, label, device.kind if device else "device", environment, requirements, cases, plugin_folder(state.module),
        registry.files_of(selection.name),
    )


def plugin_cases(
    name: str, *, plugins_file: str | os.PathLike[str] | None = None, plugin_paths: Sequence[str | os.PathLike[str]] = ()
) -> Sequence[Any]:
    """The own cases of the plug-in of NAME[:DEVICE], as in its facts. No other optional hook is called: who computes cases needs no facts, and may not be able
    to ask for them. Raises the loader's errors."""
    registry = _registry(plugins_file, plugin_paths)
    selection = registry.select(name)
    registry.rehearse(selection.name, "fastllm_conformance_cases")
    return _cases(registry, selection.name)


def _cases(registry: Any, name: str) -> list[Any]:
    """The cases of a backend, which is loaded here. Raises BackendBroken for what is no case."""
    from .conformance.case import Case

    cases: list[Any] = registry.conformance_cases(name)
    for case in cases:
        if not isinstance(case, Case):
            raise registry.fault(name, "answer fastllm_conformance_cases", f"{type(case).__name__} is no fastllm.conformance.Case")
    return cases


def plugin_folder(module: str) -> Path | None:
    """The folder of a plug-in's package; None for a file of `--plugin`, or a module that is not found. Imports nothing: a package's own code may
    do anything, and this is asked of those that nobody chose."""
    name, path, found = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        found = next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, path)) is not None), None)
        if found is None or (path is None and name != part):  # nothing is below a module that is no package
            return None
        path = found.submodule_search_locations
    return Path(found.origin).parent if found is not None and found.origin else None


@dataclass
class ModelInput:
    """A model from files, not yet planned: definition (graph, weight references), tensors by name. `close` unmaps the files."""

    definition: ModelDef
    tensors: Mapping[str, TensorSource]
    files: ModelFiles

    def close(self) -> None:
        """Closes the files."""
        self.files.close()


def read_model(path: str | os.PathLike[str], context: int | None = None) -> ModelInput:
    """Opens a model's files and builds its graph. Raises ModelFileError or UnsupportedError."""
    from . import models
    from .formats import open_model

    files = open_model(Path(path))
    try:
        definition = models.build(files.kind, files.architecture, files.config, files.tensors, context_limit=context, ready=files.ready)
    except BaseException:
        files.close()
        raise
    return ModelInput(definition, files.tensors, files)


def host_sample(logits: np.ndarray, **arrays: Any) -> np.ndarray:
    """The engine's sampler: i32 [R] from logits f32 [R, V] and the step's sampler arrays."""
    from .core import _kernels

    return _kernels.sample(np.ascontiguousarray(logits, np.float32), **arrays)
