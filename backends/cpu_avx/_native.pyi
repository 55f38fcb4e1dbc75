"""Types of the native module: everything in it is described, with its shapes, in `_native.pyx`."""

from typing import Any

def __getattr__(name: str) -> Any: ...
