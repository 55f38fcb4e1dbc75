"""Python's collector of cycles, at rest while a model is loaded: half a million objects are made that all stay, and looking through them
again and again takes a twentieth of a small model's start. Used by the commands, whose process is theirs; never by the library.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_at_rest"]


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """No collections inside, whatever happens there; afterwards as before."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
