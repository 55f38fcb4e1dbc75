"""Opens a model: a `.gguf` or `.flm` file or a Hugging Face folder becomes one `ModelFiles`, whatever is inside.

The families (`fastllm.models`) turn `architecture`, `config` and tensor names into a graph, `fastllm.text` turns `tokenizer`
and `chat_template` into a tokenizer and a renderer. Nothing here guesses: a file that is missing, ambiguous or of another
kind is an error that says what to do. No code of a model is ever run, whatever its configuration asks for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..core.errors import ModelFileError, UnsupportedError, UsageError
from ..core.weights import TensorSource
from .flm import FlmFile, read_flm
from .flm_files import object_in, text_in, tokenizer_fields
from .gguf import GGUFFile, metadata_value, read_gguf
from .json_text import read_json
from .reader import MappedFile, file_of, shown
from .safetensors_file import SafetensorsFile, file_in_folder, read_safetensors, read_sharded

__all__ = ["ModelFiles", "TokenizerFiles", "open_model", "read_template", "read_text_side"]

MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 512 << 20
MAX_CONFIG_ARRAY = 65_536  # a longer array outside `tokenizer.*` stays a numpy view
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """Where the vocabulary is.

    kind: "gguf" (everything is in `gguf`), "tokenizer.json", or "sentencepiece" (a `tokenizer.model`). path: the main file; data: its
    bytes, where it is inside of another file.
    gguf: all `tokenizer.*` metadata, numbers as numpy arrays, strings as lists. config: tokenizer_config.json.
    special_tokens: special_tokens_map.json. added_tokens: added_tokens.json (text -> id).
    """

    kind: str
    path: Path
    gguf: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    special_tokens: dict[str, Any] = field(default_factory=dict)
    added_tokens: dict[str, Any] = field(default_factory=dict)
    data: bytes | None = field(default=None, repr=False)

    def read(self) -> bytes:
        """The bytes of the main file (tokenizer.json or tokenizer.model), at most 512 MiB. Raises ModelFileError."""
        return self.data if self.data is not None else _read_bytes(self.path, MAX_TOKENIZER_BYTES)


@dataclass
class ModelFiles:
    """An open model. path: as resolved; kind: "gguf" or "huggingface"; architecture: `general.architecture` or `model_type`.

    config: GGUF metadata without `tokenizer.*` (arrays as lists), or config.json. tensors: file name -> view of the mapped
    file, outermost dimension first. tokenizer: None only if the model has none. notes: lines worth telling the user, such as
    "auto_map is ignored". ready: an FLM file has the weights of the graph by name, as they are used (`tensors` then has the shapes that
    the source had); None elsewhere. Close it, or use it with `with`; the tensors must not be used afterwards.
    """

    path: Path
    kind: Literal["gguf", "huggingface"]
    architecture: str
    config: dict[str, Any]
    tensors: dict[str, TensorSource]
    tokenizer: TokenizerFiles | None
    chat_template: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    source: GGUFFile | SafetensorsFile | FlmFile | None = field(default=None, repr=False)
    ready: dict[str, TensorSource] | None = None

    @property
    def stored(self) -> dict[str, TensorSource]:
        """The tensors that hold the weights."""
        return self.tensors if self.ready is None else self.ready

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(t.nbytes for t in self.stored.values())

    def drop_vocabulary(self) -> None:
        """Forgets the vocabulary, once a tokenizer is made of it: its lists and texts take as much memory as a small model's weights."""
        if self.tokenizer is not None:
            self.tokenizer = replace(self.tokenizer, gguf={}, data=None)
        if isinstance(self.source, GGUFFile):
            self.source.metadata = {k: v for k, v in self.source.metadata.items() if not k.startswith("tokenizer.")}
            self.source.drop_pages()
        elif isinstance(self.source, FlmFile):
            self.source.files.clear()

    def check_unchanged(self) -> None:
        """Raises ModelFileError if a mapped file was written to or cut since it was opened; one fstat per file."""
        if self.source is not None:
            self.source.check_unchanged()

    def close(self) -> None:
        """Releases the mapped files; memory returns when the last view is gone."""
        self.tensors = {}
        self.ready = None if self.ready is None else {}
        if self.source is not None:
            self.source.close()

    def __enter__(self) -> ModelFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_model(path: str | os.PathLike[str]) -> ModelFiles:
    """Opens a GGUF file (of a split set: the first), an FLM file or a Hugging Face folder. No tensor byte is read.

    Raises ModelFileError for what is damaged, missing or contradictory, UnsupportedError for kinds that are not read.
    """
    given = Path(path)
    if given.is_dir():
        return _open_folder(given)
    suffix = given.suffix.lower()
    if suffix == ".gguf":
        return _open_gguf(given)
    if suffix == ".flm":
        return _open_flm(given)
    if suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"):
        raise _pickle_error(given, [given.name])
    file = MappedFile(given)  # names what is missing, empty, no regular file, a pointer or a web page
    try:
        if suffix == ".safetensors":
            raise file.error(
                "one .safetensors file is not a whole model: config.json and the tokenizer are missing",
                fix=f"name its folder: {given.parent}",
            )
        if suffix == ".json":
            read_json(given, MAX_CONFIG_BYTES)  # what is no JSON object is told as that
            raise file.error("a configuration alone holds no weights", fix=f'name its folder: {given.parent}; a file with options names its model by a key "model"')
        raise file.wrong_magic("a model: a .gguf or .flm file or a folder with config.json and .safetensors files", fix="name a model file, a folder, or a name that `fastllm list` shows")
    finally:
        file.close()


def read_text_side(folder: Path) -> tuple[TokenizerFiles, str | None, dict[str, Any]]:
    """Tokenizer, chat template and generation_config of a Hugging Face folder, which needs no weights. Raises ModelFileError."""
    if not folder.is_dir():
        raise ModelFileError(f"{folder.name} is no folder with a tokenizer", who=str(folder), fix="name the folder of the original model")
    config = _json(folder, "tokenizer_config.json")
    tokenizer = _tokenizer(folder, config)
    if tokenizer is None:
        raise ModelFileError("the folder has no tokenizer", who=str(folder), fix="it needs tokenizer.json or tokenizer.model")
    return tokenizer, _folder_template(folder, config), _json(folder, "generation_config.json")


def read_template(path: Path) -> str:
    """A chat template in a file of its own. Raises UsageError for a file that is none, or whose text takes nothing of the messages."""
    option = "--chat-template"
    try:
        with file_of(option):
            text = _read_bytes(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(f"{option}: {path.name} at byte {exc.start}: not valid UTF-8", who=str(path), fix="save it as UTF-8", offset=exc.start) from None
    if "{{" not in text:
        raise UsageError(
            f"{option}: {path.name} is no chat template: without {{{{ … }}}} it writes nothing of the messages",
            who=str(path),
            fix="name a file with a template in Jinja, such as the model's chat_template.jinja",
        )
    return text


# GGUF ------------------------------------------------------------------------------------------------------------------


def _open_gguf(path: Path) -> ModelFiles:
    gguf = read_gguf(path)
    try:
        where = str(path)
        architecture = metadata_value(gguf.metadata, "general.architecture", str, path=where)
        if not architecture:
            raise ModelFileError(
                f"{path.name}: 'general.architecture' is missing",
                who=where,
                fix="convert the model again",
                key="general.architecture",
            )
        template = metadata_value(gguf.metadata, "tokenizer.chat_template", str, path=where)
        tokenizer = {k: v for k, v in gguf.metadata.items() if k.startswith("tokenizer.")}
        config = {k: _plain(v) for k, v in gguf.metadata.items() if not k.startswith("tokenizer.")}
        return ModelFiles(
            path=path,
            kind="gguf",
            architecture=architecture,
            config=config,
            tensors=gguf.tensors,
            tokenizer=TokenizerFiles("gguf", path, gguf=tokenizer) if "tokenizer.ggml.model" in tokenizer else None,
            chat_template=_template(template, "tokenizer.chat_template", where) if template else None,
            source=gguf,
        )
    except BaseException:
        gguf.close()
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.size <= MAX_CONFIG_ARRAY:
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, list) else value


# FLM -------------------------------------------------------------------------------------------------------------------


def _open_flm(path: Path) -> ModelFiles:
    flm = read_flm(path)
    try:
        kind, architecture, config = (flm.manifest.get(key) for key in ("kind", "architecture", "config"))
        if kind not in ("gguf", "huggingface") or not isinstance(architecture, str) or not isinstance(config, dict):
            raise ModelFileError(
                f"{path.name}: the manifest lacks a kind, an architecture or a configuration", who=str(path), fix="convert the model again"
            )
        fields = tokenizer_fields(flm.files, path)
        template = text_in(flm.files, "chat_template.jinja", path)
        return ModelFiles(
            path=path,
            kind=kind,
            architecture=architecture,
            config=config,
            tensors=flm.tensors,
            tokenizer=None if fields is None else TokenizerFiles(**fields),
            chat_template=_template(template, "chat_template.jinja", str(path)) if template else None,
            generation_config=object_in(flm.files, "generation_config.json", path),
            source=flm,
            ready=flm.ready,
        )
    except BaseException:
        flm.close()
        raise


# Hugging Face folder ---------------------------------------------------------------------------------------------------


def _open_folder(folder: Path) -> ModelFiles:
    config_path = _optional(folder, "config.json")
    if config_path is None:
        raise _no_config(folder)
    config = read_json(config_path, MAX_CONFIG_BYTES)
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or not architecture:
        raise ModelFileError(
            f"config.json: 'model_type' is {shown(architecture)}, not a name",
            who=str(config_path),
            fix="add it",
            key="model_type",
        )
    notes = []
    if "auto_map" in config:
        notes.append("config.json names Python code of its own (auto_map): ignored, code from a model is never run")
    tokenizer_config = _json(folder, "tokenizer_config.json")
    generation_config = _json(folder, "generation_config.json")
    tokenizer = _tokenizer(folder, tokenizer_config)
    template = _folder_template(folder, tokenizer_config)
    weights = _open_weights(folder)
    return ModelFiles(
        folder, "huggingface", architecture, config, weights.tensors, tokenizer, template, generation_config, notes, weights
    )


def _open_weights(folder: Path) -> SafetensorsFile:
    index, single = _optional(folder, INDEX), _optional(folder, "model.safetensors")
    if index is not None:
        return read_sharded(folder, INDEX)
    if single is not None:
        return read_safetensors(single)
    names = sorted(p.name for p in folder.iterdir())
    others = [n for n in names if n.endswith(".safetensors")]
    if others:
        raise ModelFileError(
            f"the folder has {', '.join(others[:4])}{' …' if len(others) > 4 else ''}, but neither model.safetensors nor {INDEX}",
            who=str(folder),
            fix=f"download {INDEX} too, or rename a single file to model.safetensors",
        )
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise _pickle_error(folder, pickles)
    raise ModelFileError(
        f"the folder has no weights: neither model.safetensors nor {INDEX}",
        who=str(folder),
        fix="download the model's .safetensors files",
    )


def _tokenizer(folder: Path, config: dict[str, Any]) -> TokenizerFiles | None:
    for name, kind in (("tokenizer.json", "tokenizer.json"), ("tokenizer.model", "sentencepiece")):
        path = _optional(folder, name)
        if path is not None:
            special, added = _json(folder, "special_tokens_map.json"), _json(folder, "added_tokens.json")
            return TokenizerFiles(kind, path, config=config, special_tokens=special, added_tokens=added)
    return None


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = _optional(folder, "chat_template.jinja")
    if path is not None:
        raw = _read_bytes(path, MAX_TEMPLATE_BYTES)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise ModelFileError(
                f"chat_template.jinja at byte {exc.start}: not valid UTF-8",
                who=str(path),
                fix="save it as UTF-8",
                offset=exc.start,
            ) from None
    fix = "put the template into a file chat_template.jinja in the folder"
    where, template = str(folder / "tokenizer_config.json"), config.get("chat_template")
    if isinstance(template, list):  # several named templates: the one called default
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict) and isinstance(t.get("name"), str)}
        if "default" not in named:
            raise ModelFileError(
                "tokenizer_config.json: 'chat_template' is a list without the name 'default'",
                who=where,
                fix=fix,
                key="chat_template",
            )
        template = named["default"]
    if template is None:
        return None
    if not isinstance(template, str):
        raise ModelFileError(
            f"tokenizer_config.json: 'chat_template' is a {type(template).__name__}, not a string",
            who=where,
            fix=fix,
            key="chat_template",
        )
    return _template(template, "chat_template", where)


def _template(text: str, key: str, path: str) -> str:
    if len(text) > MAX_TEMPLATE_BYTES:
        raise ModelFileError(
            f"'{key}' has {len(text)} characters; the limit is {MAX_TEMPLATE_BYTES}", who=path, fix="shorten it", key=key
        )
    return text


def _optional(folder: Path, name: str) -> Path | None:
    return file_in_folder(folder, name) if os.path.lexists(folder / name) else None


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = _optional(folder, name)
    return {} if path is None else read_json(path, MAX_CONFIG_BYTES)


def _read_bytes(path: Path, limit: int) -> bytes:
    file = MappedFile(path)
    try:
        if file.size > limit:
            raise file.error(f"the file has {file.size} bytes; the limit for this kind is {limit}", limit=limit)
        return bytes(file.data)
    finally:
        file.close()


def _pickle_error(path: Path, names: list[str]) -> UnsupportedError:
    listed = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    return UnsupportedError(
        f"pickled weights are never opened: {listed}",
        who=str(path),
        why="a pickle can run any code when it is loaded",
        fix="convert them to safetensors, or get the model in safetensors or GGUF form",
    )


def _no_config(folder: Path) -> ModelFileError:
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    if ggufs:
        listed = ", ".join(ggufs[:6]) + (" …" if len(ggufs) > 6 else "")
        return ModelFileError(
            f"the folder has no config.json, but GGUF files: {listed}",
            who=str(folder),
            fix=f"name one of them: {folder / ggufs[0]}",
        )
    return ModelFileError(
        "the folder has no config.json",
        who=str(folder),
        fix="name a folder with config.json and .safetensors files, or a .gguf file",
    )
