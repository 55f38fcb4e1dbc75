"""The runtime interface: all that the shared backend asks of a vendor's binding (buffers, copies, kernels, one queue).

A runtime is one open device with one in-order queue. Every call may return before its work is done; `finish` waits. Errors are those of
`fastllm.api`: OutOfMemory, DeviceLost, BackendUnavailable (a kernel that does not build, with the compiler's log).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

__all__ = ["Caps", "KernelKey", "Runtime", "kernel_source"]

KERNELS = Path(__file__).parent / "kernels"


@dataclass(frozen=True)
class Caps:
    """What a device is. is_cpu: its memory is the host's and a work-item is a thread with vector registers; memory_bytes,
    max_alloc_bytes; alignment of buffers in bytes; max_lanes: largest work-group; fp64: it computes in f64."""

    name: str
    driver: str
    is_cpu: bool
    memory_bytes: int
    max_alloc_bytes: int
    alignment: int
    max_lanes: int
    fp64: bool
    units: int = 1


@dataclass(frozen=True)
class KernelKey:
    """Which kernel: file below `kernels/`, entry point, macros (name, value), sorted."""

    source: str
    entry: str
    defines: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, source: str, entry: str, defines: Mapping[str, int]) -> KernelKey:
        """The key of these macros in any order."""
        return cls(source, entry, tuple(sorted(defines.items())))


class Runtime(Protocol):
    """One device of a vendor. Handles are opaque."""

    caps: Caps

    def alloc(self, nbytes: int, zeroed: bool) -> Any:
        """Memory. Raises OutOfMemory."""

    def free(self, handle: Any) -> None:
        """Returns it, after everything that was enqueued."""

    def write(self, handle: Any, offset: int, data: memoryview) -> None:
        """Host to device; data must stay until `finish`."""

    def read(self, data: memoryview, handle: Any, offset: int) -> None:
        """Device to host; done after `finish`."""

    def copy(self, dst: Any, dst_offset: int, src: Any, src_offset: int, nbytes: int) -> None:
        """Within the device."""

    def bind(self, key: KernelKey, args: Sequence[Any]) -> Any:
        """A kernel with its arguments: handles and numpy scalars. Builds it if it is new."""

    def set_arg(self, bound: Any, index: int, value: np.generic) -> None:
        """Changes one argument, from the next launch on."""

    def launch(self, bound: Any, groups: Sequence[int], lanes: int) -> None:
        """Enqueues groups[0] x groups[1] work-groups of `lanes` work-items."""

    def finish(self) -> None:
        """Waits for everything. Raises DeviceLost."""

    def close(self) -> None:
        """Gives the device back; may be called twice."""


@cache
def kernel_source(name: str) -> str:
    """The text of a kernel file with its headers in place: drivers compile strings, and know no folders."""
    lines = []
    for line in (KERNELS / name).read_text(encoding="utf-8").splitlines():
        head, _, rest = line.partition('#include "')
        lines.append(kernel_source(rest.split('"')[0]) if rest and not head else line)
    return "\n".join(lines)
