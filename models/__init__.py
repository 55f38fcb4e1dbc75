"""Model families: from a file's configuration and tensor names to a graph and the places of its weights.

    build("gguf" | "huggingface", architecture, config, sources) -> ModelDef

One file per family, 40 to 120 lines; `config.py` reads configurations, `rope.py` rotary frequencies, `blocks.py` writes the
graph, `names.py` maps names, `registry.py` holds the table. The interface calls `build` with what `fastllm.formats` has read.
"""

from __future__ import annotations

from .registry import FAMILIES, build, supported

__all__ = ["FAMILIES", "build", "supported"]
