"""Weights that a file holds packed for a backend (FLM): used as they are where that backend runs, undone for every other.

The backend that packed them is asked to undo; where it is not among the open ones, it is opened the first time that it is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .core.errors import UnsupportedError
from .opening import open_helper

if TYPE_CHECKING:
    from .core.backend import Backend
    from .core.plan import Plan
    from .core.plugins import BackendRegistry
    from .core.weights import PackedLayout
    from .formats import ModelFiles
    from .load_options import LoadOptions

__all__ = ["Unpacker", "repacked_note"]


class Unpacker:
    """Undoes packed layouts. Close it with the backends."""

    def __init__(self, files: ModelFiles, backends: Mapping[str, Backend], registry: BackendRegistry, options: LoadOptions):
        """Gives every packed tensor of the files a way back to its format."""
        self.backends, self.registry, self.options = backends, registry, options
        self.owner, self.file = packed_for(files), files.path
        self.opened: Backend | None = None
        if files.ready is not None:
            files.ready = {n: t if t.packed is None else replace(t, unpack=self.unpack) for n, t in files.ready.items()}

    def unpack(self, data: np.ndarray, layout: PackedLayout) -> np.ndarray:
        """The bytes of `layout.format`. Raises UnsupportedError if no backend knows the layout."""
        for backend in self.backends.values():
            with contextlib.suppress(UnsupportedError):
                return backend.unpack_weight(data, layout)
        if self.opened is None:
            if self.owner is None:
                raise UnsupportedError(f"weights are packed as {layout.id}, and the file does not say for which backend", fix="convert the original model again")
            self.opened = open_helper(self.registry, self.owner, f"{self.file}, whose weights are packed for it", self.options, threads="1")
        return self.opened.unpack_weight(data, layout)

    def close(self) -> None:
        """Closes the backend that was opened for it; may be called twice."""
        if self.opened is not None:
            self.opened.close()


def packed_for(files: ModelFiles) -> str | None:
    """The backend that the weights of a file are packed for; None if they are not."""
    manifest = getattr(files.source, "manifest", {})
    owner = manifest.get("packed_for")
    return owner if isinstance(owner, str) else None


def repacked_note(files: ModelFiles, plan: Plan) -> str:
    """A line on packed weights that are not used as they are; "" if there are none."""
    ready = files.ready or {}
    again = [name for (_, name), p in plan.places.items() if name in ready and ready[name].packed not in (None, p.layout)]
    if not again:
        return ""
    return f"{len(again)} weights are packed for {packed_for(files)} and are converted back: `fastllm convert` for this backend starts faster"
