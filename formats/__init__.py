"""Files and tensors: what turns a name the user typed into the bytes of a model.

    "smollm2", "ORG/NAME", a path  --sources.resolve-->  Path  --open_model-->  ModelFiles(config, tensors, tokenizer, …)

`reader.py` is the one bounds-checked reader, `json_text.py` the one strict JSON parser, `gguf.py` and `safetensors_file.py`
the two file formats, `model_files.py` what they have in common. Everything here treats its input as hostile: sizes are
checked before they are used, nothing of a model is ever run, and every failure is a `ModelFileError` that names the file,
the byte or key, the value found and the limit.
"""

from __future__ import annotations

from .cache import CachedModel
from .gguf import GGUFFile, TensorInfo, read_gguf
from .model_files import ModelFiles, TokenizerFiles, open_model
from .safetensors_file import SafetensorsFile, read_safetensors
from .sources import ALIASES, Alias, list_cached, resolve

__all__ = [
    "ALIASES",
    "Alias",
    "CachedModel",
    "GGUFFile",
    "ModelFiles",
    "SafetensorsFile",
    "TensorInfo",
    "TokenizerFiles",
    "list_cached",
    "open_model",
    "read_gguf",
    "read_safetensors",
    "resolve",
]
