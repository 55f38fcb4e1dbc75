"""LoRA adapters in PEFT's form, merged into the tensors of an open Hugging Face folder before anything else sees them.

    W' = W + c·B·A        c = α/r, or α/√r with `use_rslora` (Hu et al. 2021, eq. 3; Kalajdzievski 2023)

The sum is made in f32 and rounded once to the type of the tensor, so a merged model is as fast as the plain one. What an adapter asks for
beyond that is refused by its key: nothing of it is left out silently. `loading.open_files` calls `merge_adapters`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import ModelFileError, UnsupportedError, UsageError
from ..core.quantise import convert
from ..core.weights import HostTensor, TensorSource
from .json_text import read_json
from .reader import shown
from .safetensors_file import file_in_folder, read_safetensors

if TYPE_CHECKING:
    from .model_files import ModelFiles

__all__ = ["merge_adapters"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 4096
MAX_PATTERN = 256  # characters
PLAIN = ("f32", "f16", "bf16")
HALF = re.compile(r"base_model\.model\.(?P<name>.+?)\.lora_(?P<kind>embedding_)?(?P<half>[AB])(\.weight)?")
WHOLE = re.compile(r"base_model\.model\.(?P<name>.+?)(\.modules_to_save)?\.(?P<end>weight|bias)")
ANYTHING = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern fan_in_fan_out modules_to_save bias task_type base_model_name_or_path revision "
    "inference_mode lora_dropout target_modules exclude_modules layers_to_transform layers_pattern auto_mapping peft_version init_lora_weights eva_config".split()
)
"""Keys that are read, or that only matter to training. Another one may say nothing, that is: be null, false or empty."""
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Of init_lora_weights: those that leave the model's own weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ) train over changed ones, to which the halves belong."""
PIECE = re.compile(r"\(\w+(?:\|\w+)*\)|\.\*|\\d\+|\\[.d]|[\w.^$|-]")
PATTERN = re.compile(rf"(?:{PIECE.pattern}){{1,256}}")


@dataclass(frozen=True)
class _Adapter:
    """What adapter_config.json says. ranks, alphas: patterns of names -> value, which go before r and alpha."""

    r: int
    alpha: float
    root: bool
    transposed: bool
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]

    def rank(self, name: str) -> int:
        """The rank of a module."""
        return int(_matching(self.ranks, name, self.r))

    def factor(self, name: str) -> float:
        """c of a module."""
        alpha, r = float(_matching(self.alphas, name, self.alpha)), self.rank(name)
        return alpha / math.sqrt(r) if self.root else alpha / r


def merge_adapters(files: ModelFiles, folders: Iterable[Path]) -> None:
    """Merges adapters in the given order into `files.tensors`. Raises UnsupportedError for models and adapters that cannot be merged,
    ModelFileError for an adapter that is damaged or of another model."""
    for folder in folders:
        check_folder(Path(folder))
        if files.kind != "huggingface" or files.ready is not None:
            raise UnsupportedError(
                f"a LoRA adapter cannot be merged into {files.path.name}",
                who=str(folder),
                why="its names and rows are those of a Hugging Face folder",
                fix="name the original model's folder, and convert it with the adapter: fastllm convert FOLDER --lora ADAPTER -o NAME.flm",
            )
        adapter = _read_config(Path(folder))
        file = read_safetensors(file_in_folder(Path(folder), WEIGHTS))
        try:
            _merge(files.tensors, file.tensors, adapter, file.path)
        finally:
            file.close()


def check_folder(folder: Path) -> None:
    """Raises UsageError for what is no folder with an adapter."""
    if folder.is_dir() and (folder / CONFIG).exists():
        return
    found, fix = f"there is no {CONFIG} in {shown(folder, 200)}", f"name the folder that has {CONFIG} and {WEIGHTS}"
    if not os.path.lexists(folder):
        found = f"there is no folder {shown(folder, 200)}"
    elif not folder.is_dir():
        found = f"{shown(folder, 200)} is a file, and an adapter is a folder"
        fix = f"--lora {folder.parent}" if (folder.parent / CONFIG).exists() else fix
    elif (folder / WEIGHTS).exists():
        fix = f"download {CONFIG} into that folder, too"
    raise UsageError(f"--lora: {found}", who=str(folder), fix=fix)


def _read_config(folder: Path) -> _Adapter:
    path = file_in_folder(folder, CONFIG)
    config = read_json(path)
    kind = config.get("peft_type")
    if kind is None:
        raise ModelFileError(f"{CONFIG} has no 'peft_type': it describes no adapter", who=str(path), fix="name the folder that PEFT saved the adapter to", key="peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"the adapter is of the kind {shown(kind)}; only LORA can be merged", who=str(path), fix="merge the adapter with the tool that made it")
    unknown = sorted(k for k, v in config.items() if k not in ANYTHING and v not in (None, False, [], {}, ""))
    if unknown or config.get("bias", "none") != "none":
        key = unknown[0] if unknown else "bias"
        raise UnsupportedError(f"{CONFIG}: {shown(key)} is {shown(config[key])}, which cannot be merged", who=str(path), fix="merge the adapter with the tool that made it")
    start = config.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in STARTS:
        raise UnsupportedError(
            f"{CONFIG}: 'init_lora_weights' is {shown(start)}, which cannot be merged",
            who=str(path),
            why="such an adapter was trained over weights that are not the model's own",
            fix="convert it to a plain LoRA with the tool that made it (PEFT: save_pretrained with path_initial_model_for_weight_conversion)",
        )
    r, alpha = config.get("r"), config.get("lora_alpha")
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    good = type(r) is int and 0 < r <= MAX_RANK and _is_number(alpha) and isinstance(ranks, dict) and isinstance(alphas, dict)
    if not good or not all(type(v) is int and 0 < v <= MAX_RANK for v in ranks.values()) or not all(map(_is_number, alphas.values())):
        raise ModelFileError(f"{CONFIG}: r, lora_alpha or their patterns are no numbers in range", who=str(path), why=f"r is {shown(r)}, lora_alpha {shown(alpha)}")
    for pattern in (*ranks, *alphas):
        if len(pattern) > MAX_PATTERN or not PATTERN.fullmatch(pattern):
            raise UnsupportedError(
                f"{CONFIG}: the pattern {shown(pattern)} cannot be read",
                who=str(path),
                why=rf"patterns have at most {MAX_PATTERN} characters: of names, and . \. \d \d+ .* ^ $ | (a|b)",
                fix="name the modules in full, or merge the adapter with the tool that made it",
            )
    return _Adapter(int(r or 0), float(alpha or 0), bool(config.get("use_rslora")), bool(config.get("fan_in_fan_out")), ranks, alphas)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _matching(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value whose pattern fits the end of a module's name, as PEFT looks it up."""
    return next((value for pattern, value in patterns.items() if _fits(pattern, name)), default)


def _fits(pattern: str, name: str) -> bool:
    r"""As `re.fullmatch(rf"(.*\.)?({pattern})", name)`, in one pass over a pattern that PATTERN takes: `re` may go back for ever over a hostile one."""
    size = len(name)
    starts = {0, *(i + 1 for i, letter in enumerate(name) if letter == ".")}
    at = starts  # where the rest of the pattern may begin
    for piece in (*PIECE.findall(pattern), "|"):
        if piece == "|":
            if size in at:
                return True
            at = starts
        elif piece == ".*":
            at = set(range(min(at, default=size + 1), size + 1))
        elif piece == r"\d+":
            at = {end for i in at for end in range(i + 1, size + 1) if name[i:end].isdecimal()}
        elif piece[0] == "(":
            at = {i + len(word) for i in at for word in piece[1:-1].split("|") if name.startswith(word, i)}
        elif piece in "^$":
            at = at & {0 if piece == "^" else size}
        else:
            at = {i + 1 for i in at if i < size and (piece == "." or (name[i].isdecimal() if piece == r"\d" else name[i] == piece[-1]))}
    return False


def _merge(tensors: dict[str, TensorSource], given: Mapping[str, TensorSource], adapter: _Adapter, where: str) -> None:
    """Puts changed tensors in the places of those of the model: all, or none. One at a time is there in f32."""
    halves: dict[str, dict[str, TensorSource]] = {}
    embeddings: set[str] = set()
    wholes: dict[str, TensorSource] = {}
    changed: dict[str, TensorSource] = {}
    for name, source in given.items():
        if half := HALF.fullmatch(name):
            halves.setdefault(half["name"], {})[half["half"]] = source
            if half["kind"]:
                embeddings.add(half["name"])
        elif whole := WHOLE.fullmatch(name):
            target = f"{whole['name']}.{whole['end']}"
            base = _target(tensors, target, name, where)
            wholes[target] = source
            changed[target] = _stored(base, _checked(_values(source), base.shape, name, where), where)
        else:
            raise UnsupportedError(f"tensor {shown(name)} of the adapter is none that can be merged", who=where)
    for module, parts in halves.items():
        target = f"{module}.weight"
        base = _target(tensors, target, module, where)
        if set(parts) != {"A", "B"}:
            raise ModelFileError(f"the adapter has one half of {shown(module)} only", who=where, fix="download the adapter again")
        a, b = _values(parts["A"]), _values(parts["B"])
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] != adapter.rank(module):
            raise ModelFileError(f"the halves of {shown(module)} have shapes {list(a.shape)} and {list(b.shape)}; the rank is {adapter.rank(module)}", who=where)
        delta = np.float32(adapter.factor(module)) * (b @ a)  # [out, in]
        delta = delta.T if adapter.transposed or module in embeddings else delta
        before = _values(wholes.get(target, base))
        changed[target] = _stored(base, before + _checked(delta, base.shape, module, where), where)
    tensors.update(changed)


def _target(tensors: Mapping[str, TensorSource], target: str, name: str, where: str) -> TensorSource:
    """The tensor of the model that is changed. Raises if there is none, or if it is quantised."""
    base = tensors.get(target)
    if base is None:
        raise ModelFileError(f"the adapter changes {shown(target)}, which the model has not", who=where, why=f"tensor {shown(name)}", fix="it was made for another model")
    if base.format not in PLAIN:
        raise UnsupportedError(f"{shown(target)} is stored as {base.format}: an adapter is merged into f32, f16 or bf16", who=where, fix="use the original model")
    return base


def _values(source: TensorSource) -> np.ndarray:
    """All values, f32 of its shape."""
    if source.format not in PLAIN:
        raise UnsupportedError(f"tensor {shown(source.name)} of the adapter is stored as {source.format}", who=source.file)
    return HostTensor(source.name, source.shape, source.format, source.copied(source.data)).decode()


def _checked(values: np.ndarray, shape: tuple[int, ...], name: str, where: str) -> np.ndarray:
    if values.shape != tuple(shape):
        raise ModelFileError(f"{shown(name)} of the adapter gives shape {list(values.shape)}; the model has {list(shape)}", who=where, fix="it was made for another model")
    if not np.isfinite(values).all():
        raise ModelFileError(f"{shown(name)} of the adapter holds NaN or infinity", who=where, fix="download the adapter again")
    return values


def _stored(base: TensorSource, values: np.ndarray, where: str) -> TensorSource:
    """The tensor with other values, in its own format and in memory of its own."""
    merged = HostTensor(base.name, base.shape, "f32", np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8))
    data = merged.data if base.format == "f32" else convert(merged, base.format).data
    return replace(base, data=data, file=f"{base.file} with {where}", read=None)
