"""fastllm: runs large language models on the hardware people have.

`LLM` and `SamplingParams` are the Python interface; `fastllm.api` is all that a backend author may import. Attributes are
loaded when first used, so that `import fastllm` and `fastllm --help` stay light. Nothing is imported here, not even `typing`: the command
comes past this file before Ctrl-C is under control.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .core.sampling import SamplingParams as SamplingParams
    from .llm import LLM as LLM

__all__ = ["LLM", "SamplingParams", "__version__"]

_LAZY = {"LLM": "fastllm.llm", "SamplingParams": "fastllm.core.sampling"}


def __getattr__(name: str) -> "Any":
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("fastllm-engine")
    raise AttributeError(f"module 'fastllm' has no attribute '{name}'")
