"""How a model is loaded: the options, their ranges, and notes about what is done differently. `loading` acts on them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType

from .core.errors import UsageError
from .core.graph import KV_DTYPES
from .core.placement import FALLBACK_POLICIES
from .core.scheduler import POLICIES

__all__ = ["LoadOptions", "say_choice", "say_note"]

COMPUTE_DTYPES = ("f32",)
"""What activations can be kept in; backends round them by themselves as they are fastest."""

LOG = logging.getLogger("fastllm")  # without a handler, Python writes warnings to stderr

Progress = Callable[[str, int, int | None], None]
"""(what: "download NAME" or "load", bytes done, bytes in all or None)."""


def _ignore_progress(what: str, done: int, total: int | None) -> None:
    """The default: nobody watches."""


def _log_message(line: str) -> None:
    """The default: a program that reads nothing learns all the same that another backend was taken, and why."""
    LOG.warning("%s", line)


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    backend: NAME[:DEVICE] or None (auto);
    backend_origin: who named it, for messages;
    backend_options: `key=value` pairs of that backend;
    threads: 0 = the backend's default;
    ctx: longest sequence in tokens, None = the model's own, as far as memory allows;
    max_batch_size: sequences that run at the same time;
    prefill_chunk: tokens per step;
    block_size: tokens per cache block;
    kv_cache_tokens: tokens the cache holds in all, None = a full context for every sequence, as far as memory allows;
    kv_cache_bytes: the same in bytes;
    kv_dtype: how keys and values are kept (f16, bf16, f32 or int8), None = what the backend takes by itself;
    embedding: for vectors of texts and not for answers;
    max_queue: requests that may wait;
    helpers: processes that will run beside this one, as a server's, for which memory is left free, too;
    schedule: who comes first, `fcfs` or `shortest-remaining`;
    fallback: policy when an op leaves its device;
    compute_dtype: f32 = activations of linear layers are not rounded, None = what the backend takes by itself;
    dtype: convert weights while loading (int4, int8, bf16, …), None = as stored;
    group_size: weights that share a scale, for int4 and int8 (32, 64, 128 or 256);
    no_quant_layer: regular expression, weights whose name matches keep their type;
    dtype_config: file with rules for single weights, as of `fastllm convert`;
    moe_dtype: the type of routed experts;
    allow_requantize: quantise weights again that are quantised already;
    chat_template: file with a template in place of the model's;
    tokenizer_from: folder or hub id whose tokenizer, template and sampling defaults are used;
    lora: folders of adapters that are merged into the weights;
    cache_dir: folder for fetched models;
    verify: check the model as `fastllm verify` before it is loaded;
    prefix_cache: keep and reuse the cache of earlier prompts;
    strict: every visible note is an error;
    self_test: False opens a backend without the test of its first opening, None asks FASTLLM_SELF_TEST;
    plugins_file: a plugins.toml with defaults for backends;
    plugin_paths: backends in Python files;
    offline: no network;
    verbose: of ops that leave their device a line each, with the reason and its bytes per token, instead of one for all;
    message: gets a line for each thing that is done differently from what was asked or expected, such as another backend;
        without it they are warnings of the logger `fastllm`.
    """

    backend: str | None = None
    backend_origin: str = "--backend"
    backend_options: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    ctx: int | None = None
    max_batch_size: int = 8
    prefill_chunk: int = 512
    block_size: int = 64
    kv_cache_tokens: int | None = None
    kv_cache_bytes: int | None = None
    embedding: bool = False
    max_queue: int = 256
    helpers: int = 0
    schedule: str = "fcfs"
    kv_dtype: str | None = None
    fallback: str | None = None
    compute_dtype: str | None = None
    dtype: str | None = None
    group_size: int = 128
    no_quant_layer: str | None = None
    dtype_config: Path | None = None
    moe_dtype: str | None = None
    chat_template: Path | None = None
    tokenizer_from: str | None = None
    lora: tuple[Path, ...] = ()
    cache_dir: Path | None = None
    verify: bool = False
    allow_requantize: bool = False
    prefix_cache: bool = True
    strict: bool = False
    self_test: bool | None = None
    plugins_file: Path | None = None
    plugin_paths: tuple[Path, ...] = ()
    offline: bool | None = None
    verbose: bool = False
    progress: Progress = _ignore_progress
    message: Callable[[str], None] = _log_message
    licence: Callable[[str, str], None] | None = None

    def check(self) -> None:
        """Raises UsageError for values that cannot be used, naming the option and its range."""
        ranges = {"threads": (0, 4096), "max_batch_size": (1, 4096), "prefill_chunk": (1, 65536), "block_size": (8, 1024)}
        ranges |= {"max_queue": (1, 1 << 20), "helpers": (0, 4096)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                fix = f"--{name.replace('_', '-')} {high if _above(value, high) else max(low, 1)}"
                fix = {"threads": "leave it out: as many as this process has cores", "helpers": "leave it out"}.get(name, fix)
                raise UsageError(f"{name} is {value!r}; it must be an integer from {low} to {high:,}", fix=fix)
        for name, fix in (("ctx", "--ctx 4096"), ("kv_cache_tokens", "--kv-cache-size 4096tok")):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 8):
                raise UsageError(f"{name} is {value!r}; it must be at least 8 tokens", fix=fix)
        if self.kv_cache_tokens is not None and self.kv_cache_bytes is not None:
            raise UsageError("kv_cache_tokens and kv_cache_bytes are two sizes of one cache", fix="give one of them")
        if self.kv_cache_bytes is not None and (type(self.kv_cache_bytes) is not int or self.kv_cache_bytes < 1):
            raise UsageError(f"kv_cache_bytes is {self.kv_cache_bytes!r}; it must be a number of bytes", fix="--kv-cache-size 1GiB")
        if self.schedule not in POLICIES:
            raise UsageError(f"schedule is {self.schedule!r}; it must be one of {', '.join(POLICIES)}", fix="--schedule fcfs")
        if self.kv_dtype not in (None, *KV_DTYPES):
            raise UsageError(f"kv_dtype is {self.kv_dtype!r}; it must be one of {', '.join(KV_DTYPES)}", fix="--kv-dtype f16")
        if self.compute_dtype not in (None, *COMPUTE_DTYPES):
            raise UsageError(f"compute_dtype is {self.compute_dtype!r}; it must be one of {', '.join(COMPUTE_DTYPES)}", fix="--compute-dtype f32")
        if self.fallback not in (None, *FALLBACK_POLICIES):
            raise UsageError(f"fallback is {self.fallback!r}; it must be one of {', '.join(FALLBACK_POLICIES)}", fix="--fallback warn")
        kinds: dict[str, tuple[type, ...]] = {"backend": (str, NoneType), "backend_options": (Mapping,), "offline": (bool, NoneType), "self_test": (bool, NoneType)}
        kinds |= {"moe_dtype": (str, NoneType), "tokenizer_from": (str, os.PathLike, NoneType), "lora": (list, tuple), "verify": (bool,)}
        kinds |= {"dtype": (str, NoneType), "no_quant_layer": (str, NoneType), "allow_requantize": (bool,)}
        kinds |= {"prefix_cache": (bool,), "strict": (bool,), "verbose": (bool,), "embedding": (bool,), "plugin_paths": (list, tuple)}
        for name, allowed in kinds.items():
            if not isinstance(getattr(self, name), allowed):
                expected = " or ".join({NoneType: "None", Mapping: "dict"}.get(t, t.__name__) for t in allowed)
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be {expected}", fix=f"leave {name} out, or give another value")
        pairs = self.backend_options.items()
        right = {
            "backend_options": all(isinstance(k, str) and isinstance(v, str) for k, v in pairs),
            "plugin_paths": all(isinstance(p, str | os.PathLike) for p in self.plugin_paths),
            "plugins_file": self.plugins_file is None or isinstance(self.plugins_file, str | os.PathLike),
            "dtype_config": self.dtype_config is None or isinstance(self.dtype_config, str | os.PathLike),
            "chat_template": self.chat_template is None or isinstance(self.chat_template, str | os.PathLike),
            "cache_dir": self.cache_dir is None or isinstance(self.cache_dir, str | os.PathLike),
            "lora": all(isinstance(p, str | os.PathLike) for p in self.lora),
            "progress": callable(self.progress),
            "message": callable(self.message),
            "licence": self.licence is None or callable(self.licence),
        }
        for name, fits in right.items():
            if not fits:
                functions = {"progress", "message", "licence"}
                lists = {"backend_options": "a dict of texts", "plugin_paths": "a list of paths", "lora": "a list of paths"}
                needed = "a function" if name in functions else lists.get(name, "a path")
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be {needed}", fix=f"leave {name} out, or give another value")


def _above(value: object, high: int) -> bool:
    return isinstance(value, int) and value > high


def say_note(line: str, options: LoadOptions, who: str, fix: str = "run without --strict to accept this") -> None:
    """Tells that something is done differently from what was asked; with `strict`, refuses it, and names the way out."""
    if options.strict:
        raise UsageError(f"--strict: {line}", who=who, fix=fix)
    options.message(line)


def say_choice(messages: Iterable[str], remarks: Container[str], options: LoadOptions) -> None:
    """Tells what a `BackendRegistry` has to say. `strict` refuses no remark: another package's fault, or a slow machine, changes nothing."""
    for line in messages:
        if line in remarks:
            options.message(line)
        else:
            say_note(line, options, "the choice of backends")
