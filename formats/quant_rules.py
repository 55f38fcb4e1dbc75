"""Which format each weight of a model gets when it is converted: defaults by kind of weight, and rules of the user.

Names are those of the graph, which are Hugging Face's whatever file they come from. Nothing here touches data: `plan_formats` answers
with names of formats, `core/quantise.py` computes. Used by `fastllm convert`, and by loading with another dtype.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, UsageError
from ..core.graph import Graph, Value
from ..core.quant import FORMATS
from ..core.quantise import ENCODED
from ..core.weights import TensorSource, WeightRef
from .json_text import parse_json
from .reader import MappedFile, file_of, shown

__all__ = ["DTYPES", "GROUP_SIZES", "QuantPlan", "QuantRules", "listed_rules", "plan_formats", "read_rules"]

GROUP_SIZES = (32, 64, 128, 256)
DTYPES = ("int4", "int8", "bf16", "f16", "f32", *(name for name in ENCODED if not FORMATS[name].plain))
"""What messages list: everything that a weight can be converted to. `_resolve` takes a few more spellings."""

SMALL_INPUTS = 256
"""A 4-bit row with fewer inputs than this is kept in 8 bits: it is a small part of the model and a large part of its error."""

EXPERTS = r"\.experts\."
"""Names of the weights of routed experts; the shared ones are called otherwise."""

MAX_RULES_BYTES = 1 << 20

_SPELLINGS = {"float32": "f32", "fp32": "f32", "float": "f32", "float16": "f16", "fp16": "f16", "half": "f16", "bfloat16": "bf16"}
_KEPT = re.compile(r"(^|\.)(router|gate|gate_inp|shared_expert_gate)\.weight$|(^|\.)(conv1d|short_conv|conv)\.|norm|\.bias$|A_log|sinks")
_CAREFUL = re.compile(r"shared_expert|kv_b_proj|kv_b")
_TABLES = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(frozen=True)
class QuantRules:
    """What the user asked for.

    dtype: the aim, None = as stored; group_size: of `int4` and `int8` without a number; no_quant_layer: regular expression of names
    that keep their source format; rules: (regular expression, dtype), the last match wins over everything; allow_requantize: a
    source that is quantised already may be quantised again; method: search or minmax.
    """

    dtype: str | None = None
    group_size: int = 128
    no_quant_layer: str | None = None
    rules: tuple[tuple[str, str], ...] = ()
    allow_requantize: bool = False
    method: str = "search"

    @property
    def changes_anything(self) -> bool:
        """False if every weight stays as it is stored."""
        return self.dtype is not None or bool(self.rules)

    def check(self) -> None:
        """Raises UsageError for an unknown dtype, group size or method, or a regular expression that is none."""
        if self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise UsageError(f"group_size is {self.group_size!r}; it must be one of {sizes}", fix="--group-size 128")
        if self.method not in ("search", "minmax"):
            raise UsageError(f"method is {self.method!r}; it must be search or minmax", fix="--method search")
        if self.dtype is not None:
            _resolve(self.dtype, self.group_size)
        for dtype in (dtype for _, dtype in self.rules):
            _resolve(dtype, self.group_size)
        for pattern in (self.no_quant_layer, *(pattern for pattern, _ in self.rules)):
            if pattern is not None:
                _compiled(pattern)
        if self.dtype is None and self.no_quant_layer is not None and not self.rules:
            raise UsageError("--no-quant-layer needs something to be quantised", fix="give --dtype int4 too")


@dataclass
class QuantPlan:
    """formats: graph weight -> format it is converted to (those that stay are absent). notes: lines for the user."""

    formats: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def refs(self, weights: Mapping[str, WeightRef], method: str) -> dict[str, WeightRef]:
        """The references with their conversions."""
        change = self.formats
        return {name: replace(ref, convert_to=change[name], method=method) if name in change else ref for name, ref in weights.items()}


def read_rules(path: Path) -> tuple[tuple[str, str], ...]:
    """A `--dtype-config` file: a JSON list of {"key": regular expression, "dtype": name}; other keys are comments.

    Raises UsageError for a file that cannot be read or is no JSON, ConfigError for one that is something else than such a list.
    """
    with file_of("--dtype-config"):
        listed = _read_list(path)
    fix = 'write [{"key": "mlp", "dtype": "int4g64"}]'
    if not isinstance(listed, list):
        raise ConfigError(f"{path.name} is no list of rules", who=str(path), fix=fix)
    for index, rule in enumerate(listed):
        if not isinstance(rule, dict) or not isinstance(rule.get("key"), str) or not isinstance(rule.get("dtype"), str):
            raise ConfigError(f"{path.name}: rule {index} has no 'key' and 'dtype' that are texts", who=str(path), fix=fix)
    return tuple((rule["key"], rule["dtype"]) for rule in listed)


def _read_list(path: Path) -> Any:
    file = MappedFile(path)
    try:
        if file.size > MAX_RULES_BYTES:
            raise file.error(f"the file has {file.size} bytes; a list of rules has {MAX_RULES_BYTES} at most", fix="name another file")
        return parse_json(bytes(file.data), path.name, str(path))
    finally:
        file.close()


def listed_rules(path: str | os.PathLike[str] | None, moe_dtype: str | None) -> tuple[tuple[str, str], ...]:
    """The rules of `--moe-dtype` and of a `--dtype-config` file, which wins. Raises as `read_rules`."""
    return (*(() if moe_dtype is None else ((EXPERTS, moe_dtype),)), *(() if path is None else read_rules(Path(path))))


def plan_formats(graph: Graph, weights: Mapping[str, WeightRef], sources: Mapping[str, TensorSource], rules: QuantRules) -> QuantPlan:
    """The format of every weight under the rules. Raises UsageError for rules that cannot be followed."""
    rules.check()
    plan, again = QuantPlan(), list[str]()
    used: Counter[int] = Counter()
    shrunk: Counter[tuple[str, str]] = Counter()
    kept: Counter[str] = Counter()
    for value in graph.of_kind("weight"):
        if value.dtype != "any" or value.view is not None or len(value.shape) < 2:
            continue
        source = weights[value.name].format(sources)
        wanted, matches = _wanted(value, rules)
        used.update(matches)
        if wanted is None or wanted == source:
            continue
        fitting = _fitting(wanted, int(value.shape[-1]))
        if fitting is None:
            kept[f"{wanted}: rows of {value.shape[-1]} are no multiple of 32"] += 1
            continue
        if fitting != wanted:
            shrunk[(wanted, fitting)] += 1
        if fitting == source:
            continue
        if not FORMATS[source].plain and not FORMATS[fitting].plain:
            again.append(f"{value.name} ({source})")
        plan.formats[value.name] = fitting
    if again and not rules.allow_requantize:
        raise UsageError(
            f"{_weights(len(again))} {'is' if len(again) == 1 else 'are'} quantised already, the first is {again[0]}",
            why="quantising twice adds the errors of both",
            fix="convert the original model, or accept it with --allow-requantize",
        )
    plan.notes += [f"{_weights(count)} in {new}: rows are no multiple of the group of {old}" for (old, new), count in shrunk.items()]
    plan.notes += [f"{_weights(count)} not converted to {why}" for why, count in kept.items()]
    unused = [pattern for i, (pattern, _) in enumerate(rules.rules) if not used[i]]
    plan.notes += ["--moe-dtype has no effect: this model has no routed experts" if p == EXPERTS else f"the rule {shown(p)} matches no weight" for p in unused]
    return plan


def _wanted(value: Value, rules: QuantRules) -> tuple[str | None, list[int]]:
    """The format that rules and defaults give a weight (None: as stored), and the indices of the rules that match."""
    name = value.name
    matches = [i for i, (pattern, _) in enumerate(rules.rules) if _compiled(pattern).search(name)]
    if matches:
        return _resolve(rules.rules[matches[-1]][1], rules.group_size), matches
    if rules.dtype is None or (rules.no_quant_layer is not None and _compiled(rules.no_quant_layer).search(name)):
        return None, matches
    aim = _resolve(rules.dtype, rules.group_size)
    if FORMATS[aim].plain:
        return aim, matches
    if _KEPT.search(name):
        return None, matches
    if FORMATS[aim].code_bits == 4 and (name in _TABLES or _CAREFUL.search(name) or int(value.shape[-1]) < SMALL_INPUTS):
        return _resolve("int8", rules.group_size), matches
    return aim, matches


def _weights(count: int) -> str:
    return f"{count} weight{'s' * (count != 1)}"


def _resolve(dtype: str, group_size: int) -> str:
    """The key of FORMATS behind a name that people use. Raises UsageError listing what there is."""
    name = dtype.lower().strip()
    name = _SPELLINGS.get(name, name.removeprefix("ggml_"))
    match = re.fullmatch(r"int([48])(?:g(\d*)(s?))?", name)
    if match is not None:
        bits, size, symmetric = match[1], int(match[2]) if match[2] else group_size, match[3] or ""
        size = min(size, 128) if bits == "8" and not match[2] else size
        name = f"int{bits}g{size}{symmetric}"
        name = {"int4g32s": "q4_0", "int8g32": "q8_0"}.get(name, name)  # the same bytes
    if name not in ENCODED:
        raise UsageError(f"no dtype {shown(dtype)} to convert to", why=f"known: {', '.join(DTYPES)}", fix="--dtype int4")
    return name


def _fitting(format: str, row: int) -> str | None:
    """The format itself, or the same with the largest smaller groups that divide a row; None if none does."""
    if row % FORMATS[format].block == 0:
        return format
    match = re.fullmatch(r"(int[48]g)(\d+)(s?)", format)
    sizes: Sequence[int] = () if match is None else [s for s in reversed(GROUP_SIZES) if s < int(match[2]) and row % s == 0]
    return _resolve(f"{match[1]}{sizes[0]}{match[3]}", 128) if match is not None and sizes else None


def _compiled(pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise UsageError(f"{shown(pattern)} is no regular expression: {error}", fix="escape special characters with \\") from None
