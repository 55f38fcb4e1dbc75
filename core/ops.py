"""The operator catalogue (opset 1): what each op means, what it takes, and the shapes it gives.

A backend implements these; `backends/ref` defines them in numpy. *Core* ops must be there (natively or inherited from `ref`);
*extended* ops are asked for first. What a device lacks of them becomes core ops where the op has a decomposition, and runs on the
next device (`cpu_avx`, `ref`) where it has none: `indivisible` says why core ops cannot give what it gives. An op never changes
meaning: a change is a new op, or a new attribute with a neutral default.

All activations are f32 unless a rule says otherwise. Every op obeys one law: **a row of the result depends on that row of the
operands only**, whatever else is in the batch, and its bits do not change with T, S or R.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from . import rules
from .errors import ShapeError

if TYPE_CHECKING:
    from .graph import GraphBuilder, Value

__all__ = [
    "ACTIVATIONS",
    "CATALOGUE",
    "CORE_OPS",
    "MASKS",
    "OPSET",
    "PRIMITIVE_OPS",
    "STEP_INPUTS",
    "Attr",
    "Dim",
    "OpSpec",
    "Shape",
]

OPSET: Final = 1

Dim = int | str
Shape = tuple[Dim, ...]
Operand = tuple[Shape, str] | None
"""(shape, dtype) of an input, None where an optional one is absent."""

STEP_INPUTS: Final[dict[str, tuple[Shape, str]]] = {
    "ids": (("T",), "i32"),  # token ids of this step
    "positions": (("T",), "i32"),  # position of each token in its sequence
    "slots": (("T",), "i32"),  # where each token's keys and values go: block * block_size + offset
    "query_start": (("S+1",), "i32"),  # tokens query_start[s] … query_start[s+1] belong to sequence s
    "context_len": (("S",), "i32"),  # tokens of the sequence that are in the cache after this step's kv_write
    "block_table": (("S", "B"), "i32"),  # cache blocks of each sequence, in order
    "state_slot": (("S",), "i32"),  # slot of fixed-size state
    "prefix_len": (("S",), "i32"),  # length of the part that attends both ways (mask "prefix")
    "sample_rows": (("R",), "i32"),  # rows of T whose logits are needed
    "u": (("R",), "f64"),  # uniform numbers in [0, 1)
    "temperature": (("R",), "f32"),
    "top_k": (("R",), "i32"),
    "top_p": (("R",), "f32"),
    "min_p": (("R",), "f32"),
    "adjust_start": (("R+1",), "i32"),  # entries adjust_start[r] … adjust_start[r+1] change row r's logits
    "adjust_ids": (("A",), "i32"),
    "adjust_bias": (("A",), "f32"),
    "adjust_repeat": (("A",), "f32"),
    "adjust_sub": (("A",), "f32"),
}
"""Arrays that the engine fills for every step: name -> (shape, dtype)."""

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu", "swiglu_oai")
MAX_F32: Final = 3.4028234663852886e38
MASKS: Final = ("causal", "full", "prefix", "chunk")
SCORES: Final = ("softmax", "sigmoid", "softmax_of_chosen")


@dataclass(frozen=True)
class Attr:
    """An attribute: its default (None: it must be given) and, where only some values exist, which. Without choices it is a finite f32
    number or, with `low`, an integer in low…2³¹ − 1: native code keeps it in 32 bits."""

    default: Any = None
    choices: tuple[Any, ...] = ()
    low: int | None = None

    def checked(self, op: str, name: str, value: Any) -> Any:
        """The value as str, int or float. Raises ShapeError for one that no backend can use."""
        if self.choices:
            if value not in self.choices:
                raise ShapeError(f"op '{op}': {name}={value!r} is not one of {', '.join(map(str, self.choices))}")
            return value
        if self.low is not None:
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or not self.low <= value < 1 << 31:
                raise ShapeError(f"op '{op}': {name}={value!r} is not an integer from {self.low} to 2,147,483,647")
            return int(value)
        if not isinstance(value, int | float | np.floating | np.integer) or isinstance(value, bool) or not -MAX_F32 <= value <= MAX_F32:
            raise ShapeError(f"op '{op}': {name}={value!r} is not a finite number of 32 bits")
        return float(value)


@dataclass(frozen=True)
class OpSpec:
    """One op. inputs: argument names, those ending in "?" may be absent. attrs: name -> Attr. infer: shapes and dtypes of the
    outputs from those of the inputs. decompose: builds the same outputs from core ops (`rules.py`); indivisible: why there is no
    decomposition of an op that a backend may lack all the same, "" for others."""

    name: str
    inputs: tuple[str, ...]
    infer: Callable[[Sequence[Operand], Sequence[Any], Mapping[str, Any]], list[tuple[Shape, str]]]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    decompose: Callable[[GraphBuilder, Sequence[Value | None], Mapping[str, Any]], Sequence[Value]] | None = None
    indivisible: str = ""
    since: int = 1
    doc: str = ""

    @property
    def core(self) -> bool:
        """True if every backend must have it."""
        return self.decompose is None and not self.indivisible

    def complete_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """attrs with defaults filled in. Raises ShapeError for unknown, missing or impossible ones."""
        unknown = set(attrs) - set(self.attrs)
        if unknown:
            raise ShapeError(f"op '{self.name}' has no attribute {', '.join(sorted(unknown))}; it has {', '.join(self.attrs) or 'none'}")
        full = {}
        for name, attr in self.attrs.items():
            value = attrs.get(name, attr.default)
            if value is None:
                raise ShapeError(f"op '{self.name}' needs the attribute '{name}'")
            full[name] = attr.checked(self.name, name, value)
        return full


def _require(condition: bool, op: str, rule: str, *operands: Operand) -> None:
    if not condition:
        shapes = ", ".join("absent" if o is None else f"{o[1]}{list(o[0])}" for o in operands)
        raise ShapeError(f"op '{op}' needs {rule}; got {shapes}")


def _present(op: str, operand: Operand, name: str) -> tuple[Shape, str]:
    if operand is None:
        raise ShapeError(f"op '{op}' needs the operand '{name}'")
    return operand


def _cache(op: str, operand: Operand, spec: Any) -> Any:
    fits = hasattr(spec, "num_kv_heads") and spec.num_kv_heads > 0 and spec.key_dim > 0 and spec.value_dim >= 0
    _require(fits, op, "a key/value cache with heads and keys", operand)
    return spec


# shape rules ----------------------------------------------------------------------------------------------------------


def _embed(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    (ids, kind), (table, _) = _present("embed", o[0], "ids"), _present("embed", o[1], "table")
    _require(len(ids) == 1 and len(table) == 2 and kind == "i32", "embed", "ids i32[n] and table [V, C]", *o)
    return [((ids[0], table[1]), "f32")]


def _linear(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    (x, _), (w, _) = _present("linear", o[0], "x"), _present("linear", o[1], "weight")
    fits = len(x) == 2 and len(w) == 2 and x[1] == w[1] and (o[2] is None or o[2][0] == (w[0],))
    _require(fits, "linear", "x [n, K], weight [N, K], bias [N]", *o)
    return [((x[0], w[0]), "f32")]


def _matmul(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    (x, _), (w, _) = _present("matmul", o[0], "a"), _present("matmul", o[1], "b")
    fits = len(x) == 3 and len(w) == 3 and x[1] == w[0] and x[2] == w[2]
    _require(fits, "matmul", "a [T, H, K] and b [H, N, K]", *o)
    return [((x[0], x[1], w[1]), "f32")]


def _norm(op: str) -> Callable[[Sequence[Operand], Sequence[Any], Mapping[str, Any]], list[tuple[Shape, str]]]:
    def infer(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
        x, _ = _present(op, o[0], "x")
        _require(all(p is None or p[0] == (x[-1],) for p in o[1:]), op, "weight and bias of the last axis", *o)
        return [(x, "f32")]

    return infer


def _rope(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    x, _ = _present("rope", o[0], "x")
    (pos, _), (freq, _) = _present("rope", o[1], "positions"), _present("rope", o[2], "inv_freq")
    fits = len(x) == 3 and pos == (x[0],) and len(freq) == 1 and 2 * int(freq[0]) <= int(x[2])
    _require(fits, "rope", "x [T, H, D], positions [T], inv_freq [r] with 2r ≤ D", *o)
    return [(x, "f32")]


def _kv_write(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    spec = _cache("kv_write", o[0], specs[0])
    k, _ = _present("kv_write", o[1], "key")
    value = None if o[2] is None else o[2][0]
    fits = len(k) == 3 and k[1:] == (spec.num_kv_heads, spec.key_dim)
    fits = fits and value == ((k[0], spec.num_kv_heads, spec.value_dim) if spec.value_dim else None)
    _require(fits, "kv_write", f"key and value of {spec}", *o)
    return []


def _attention(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    q, _ = _present("attention", o[0], "query")
    spec = _cache("attention", o[1], specs[1])
    _require(len(q) == 3 and q[2] == spec.key_dim and int(q[1]) % spec.num_kv_heads == 0, "attention", f"query for {spec}", *o)
    value_dim = spec.value_dim or a["value_dim"]
    fits = a["value_dim"] == 0 if spec.value_dim else 0 < value_dim <= spec.key_dim
    _require(fits, "attention", "value_dim ≤ key_dim, and only where the cache holds no values", *o)
    _require(all(p is None or p[0] == (q[1],) for p in o[6:8]), "attention", "sinks and slopes [H]", *o)
    _require(a["mask"] != "chunk" or a["chunk"] > 0, "attention", "chunk > 0 with mask 'chunk'", *o)
    _require(a["mask"] != "prefix" or o[8] is not None, "attention", "prefix_len with mask 'prefix'", *o)
    return [((q[0], q[1], value_dim), "f32")]


def _act_mul(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    x, _ = _present("act_mul", o[0], "gate")
    _require(o[1] is None or o[1][0] == x, "act_mul", "gate and up of one shape", *o)
    return [(x, "f32")]


def _binary(op: str) -> Callable[[Sequence[Operand], Sequence[Any], Mapping[str, Any]], list[tuple[Shape, str]]]:
    def infer(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
        (x, _), (y, _) = _present(op, o[0], "x"), _present(op, o[1], "y")
        rows = op == "mul" and y == (x[0], 1)
        _require(y in (x, (x[-1],), (1,)) or rows, op, "y of x's shape, of its last axis, [1], or (mul) [T, 1]", *o)
        return [(x, "f32")]

    return infer


def _same(op: str) -> Callable[[Sequence[Operand], Sequence[Any], Mapping[str, Any]], list[tuple[Shape, str]]]:
    def infer(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
        return [(_present(op, o[0], "x")[0], "f32")]

    return infer


def _quantize(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    x, _ = _present("quantize", o[0], "x")
    _require(len(x) == 2 and int(x[1]) % a["group"] == 0, "quantize", f"x [n, K] with K a multiple of {a['group']}", *o)
    return [(x, "i8"), ((x[0], int(x[1]) // a["group"]), "f32")]


def _dequantize(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    (codes, kind), (scales, _) = _present("dequantize", o[0], "codes"), _present("dequantize", o[1], "scales")
    fits = kind == "i8" and len(codes) == 2 and scales == (codes[0], int(codes[1]) // a["group"])
    _require(fits, "dequantize", "codes i8[n, K] and scales [n, K/group]", *o)
    return [(codes, "f32")]


def _sample(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    logits, _ = _present("sample", o[0], "logits")
    _require(len(logits) == 2, "sample", "logits [R, V]", o[0])
    return [((logits[0],), "i32")]


def _route_topk(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    logits, _ = _present("route_topk", o[0], "logits")
    fits = len(logits) == 2 and (o[1] is None or o[1][0] == (logits[1],)) and int(logits[1]) % a["groups"] == 0
    _require(fits, "route_topk", f"logits [T, E], choose_bias [E], and E a multiple of {a['groups']} groups", *o)
    size = int(logits[1]) // a["groups"]
    fits = a["keep_groups"] <= a["groups"] and a["k"] <= a["keep_groups"] * size
    fits = fits and (a["group_score"] != "top2sum" or a["groups"] == 1 or size > 1)
    _require(fits, "route_topk", f"k={a['k']} experts in the {a['keep_groups']} of {a['groups']} groups that are kept", *o)
    return [((logits[0], a["k"]), "i32"), ((logits[0], a["k"]), "f32")]


def _moe(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    (x, _), (ids, kind) = _present("moe", o[0], "x"), _present("moe", o[1], "ids")
    (weights, _), (gate, _), (down, _) = (_present("moe", o[i], name) for i, name in ((2, "weights"), (3, "gate"), (5, "down")))
    fits = len(x) == 2 and len(ids) == 2 and kind == "i32" and ids[0] == x[0] and weights == ids
    _require(fits, "moe", "x [T, C], ids i32[T, k] and weights [T, k]", *o)
    fits = len(gate) == 3 and gate[2] == x[1] and down == (gate[0], x[1], gate[1]) and (o[4] is None or o[4][0] == gate)
    fits = fits and all(b is None or b[0] == gate[:2] for b in o[6:8]) and (o[8] is None or o[8][0] == down[:2])
    _require(fits, "moe", "gate and up [E, F, C], down [E, C, F], biases [E, F], [E, F] and [E, C]", *o)
    _require(o[7] is None or o[4] is not None, "moe", "no up_bias without up", *o)
    return [((x[0], x[1]), "f32")]


def _concat(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    (x, _), (y, _) = _present("concat", o[0], "x"), _present("concat", o[1], "y")
    _require(len(x) in (2, 3) and x[:-1] == y[:-1], "concat", "x and y that differ in their last axis only", *o)
    return [((*x[:-1], int(x[-1]) + int(y[-1])), "f32")]


def _slot(op: str, operand: Operand, spec: Any, shape: tuple[int, ...]) -> None:
    _require(getattr(spec, "shape", None) == shape and spec.dtype == "f32", op, f"a state of f32{list(shape)} per sequence", operand)


def _short_conv(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    (x, _), (w, _) = _present("short_conv", o[1], "x"), _present("short_conv", o[2], "weight")
    _require(len(x) == 2 and len(w) == 2 and x[1] == w[0] and int(w[1]) > 1, "short_conv", "x [T, C] and weight [C, L] with L > 1", *o)
    _slot("short_conv", o[0], specs[0], (int(w[1]) - 1, int(w[0])))
    return [(x, "f32")]


def _delta_rule(o: Sequence[Operand], specs: Sequence[Any], a: Mapping[str, Any]) -> list[tuple[Shape, str]]:
    (q, _), (k, _), (v, _) = (_present("delta_rule", o[i], n) for i, n in ((1, "query"), (2, "key"), (3, "value")))
    fits = len(q) == 3 and k == q and len(v) == 3 and v[0] == q[0] and int(v[1]) % int(q[1]) == 0
    fits = fits and all(o[i] is not None and o[i][0] == v[:2] for i in (4, 5))  # type: ignore[index]
    fits = fits and all(o[i] is not None and o[i][0] == v[1:2] for i in (6, 7))  # type: ignore[index]
    _require(fits, "delta_rule", "query and key [T, J, Dk], value [T, H, Dv], a and b [T, H], a_log and dt_bias [H], J dividing H", *o)
    _slot("delta_rule", o[0], specs[0], (int(v[1]), int(q[2]), int(v[2])))
    return [(v, "f32")]


# the catalogue --------------------------------------------------------------------------------------------------------

_SPECS = (
    OpSpec("embed", ("ids", "table"), _embed, doc="""
        out[i] = table[ids[i]], decoded to f32. ids: [n] i32 in 0…V−1; table: [V, C] of any format, or an f32 activation."""),
    OpSpec("linear", ("x", "weight", "bias?"), _linear, doc="""
        out[i, n] = Σ_k x[i, k] · weight[n, k] + bias[n]. Sums in f32 (or exact integers per group), in an order that does not
        depend on the number of rows."""),
    OpSpec("matmul", ("a", "b"), _matmul, doc="""
        out[t, h, n] = Σ_k a[t, h, k] · b[h, n, k]: one small matrix per head (absorbed latent attention)."""),
    OpSpec("rms_norm", ("x", "weight?"), _norm("rms_norm"), {"eps": Attr()}, doc="""
        out = x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang & Sennrich 2019, eq. 4)."""),
    OpSpec("layer_norm", ("x", "weight?", "bias?"), _norm("layer_norm"), {"eps": Attr()}, doc="""
        out = (x − mean) / sqrt(var + eps) · weight + bias over the last axis, var with 1/n, in two passes (Ba et al. 2016)."""),
    OpSpec("rope", ("x", "positions", "inv_freq"), _rope,
           {"style": Attr("half", ("half", "pairs")), "factor": Attr(1.0)}, doc="""
        Rotary embedding (Su et al. 2021): pair i of a head turns by positions[t] · inv_freq[i]; cos and sin are multiplied by
        `factor`. style half: the pair is (i, i + r); pairs: (2i, 2i + 1); r = len(inv_freq). Elements from 2r on are copied.
        The angle is computed in f64 and rounded once after cos and sin."""),
    OpSpec("kv_write", ("cache", "key", "value?", "slots"), _kv_write, doc="""
        Stores key[t] and value[t] at slot slots[t] = block · block_size + offset of the cache. A negative slot stores nothing."""),
    OpSpec("attention",
           ("query", "cache", "positions", "query_start", "context_len", "block_table", "sinks?", "alibi_slopes?", "prefix_len?"),
           _attention,
           {"scale": Attr(), "mask": Attr("causal", MASKS), "chunk": Attr(0, low=0), "window": Attr(0, low=0), "softcap": Attr(0.0),
            "value_dim": Attr(0, low=0)}, doc="""
        Row t of sequence s sees key j of the same sequence, 0 ≤ j < context_len[s], where the mask allows it at p = positions[t]:
        causal j ≤ p; full: all; prefix: j ≤ p or both j and p < prefix_len[s]; chunk: j ≤ p and ⌊j/chunk⌋ = ⌊p/chunk⌋; and, with a
        window W > 0, p − j < W (the token itself counts). score = scale · q·k (softcap c > 0: c·tanh(score/c)) + slope[h]·(j − p);
        weights = softmax over the visible keys, with exp(sinks[h]) added to the denominator. Query head h uses kv head
        h // (H / K). A row that sees no key is zeros. Key j is at block_table[s, j // block_size], offset j % block_size."""),
    OpSpec("act_mul", ("gate", "up?"), _act_mul, {"kind": Attr("silu", ACTIVATIONS)}, doc="""
        act(gate) · up (or act(gate) alone). silu z·σ(z); gelu z·Φ(z); gelu_tanh ½z(1 + tanh(√(2/π)(z + 0.044715 z³))); sigmoid;
        tanh; relu; swiglu_oai: g = min(gate, 7), u = clip(up, ±7): g·σ(1.702 g)·(u + 1)."""),
    OpSpec("add", ("x", "y"), _binary("add"), doc="""out = x + y; y has x's shape, or that of its last axis, or [1]."""),
    OpSpec("mul", ("x", "y"), _binary("mul"), doc="""out = x · y; y as in `add`, or [T, 1]: one factor a row."""),
    OpSpec("softmax", ("x",), _same("softmax"), doc="""out = exp(x − max) / Σ exp(x − max) over the last axis."""),
    OpSpec("quantize", ("x",), _quantize, {"group": Attr(32, low=1)}, doc="""
        Symmetric int8 per group of the last axis: scale = max|x| / 127, code = round half to even (x / scale); zeros for a group of
        zeros."""),
    OpSpec("dequantize", ("codes", "scales"), _dequantize, {"group": Attr(32, low=1)}, doc="""out = code · scale of its group."""),
    OpSpec("sample",
           ("logits", "u", "temperature", "top_k", "top_p", "min_p", "adjust_start", "adjust_ids", "adjust_bias", "adjust_repeat",
            "adjust_sub"), _sample, doc="""
        One id per row, a pure function of the row's logits, its parameters and u (see `core/sampling.py` for the order). A row
        without a finite logit gives −1, which the engine turns into an error."""),
    OpSpec("route_topk", ("logits", "choose_bias?"), _route_topk,
           {"k": Attr(low=1), "score": Attr("softmax", SCORES), "groups": Attr(1, low=1), "keep_groups": Attr(1, low=1),
            "group_score": Attr("max", ("max", "top2sum")), "renorm": Attr(0, (0, 1)), "scale": Attr(1.0)}, indivisible="its ids are i32, and of the core ops only `sample` makes such: one for each of R sampled rows, by parameters that the step has for these rows alone. Which expert comes next could be found with softmax and products by 1 and 0, in about ten ops for each of k; to copy E logits to the next device costs less", doc="""
        ids i32[T, k] and weights f32[T, k] of the experts of each row. s = softmax(logits), σ(logits), or (softmax_of_chosen) the
        logits; c = s + choose_bias. The E experts are `groups` runs of equal length; a group counts with its largest c, or (top2sum)
        the sum of its two largest; only the `keep_groups` best take part. Chosen are the k largest c, in descending order; ties go to
        the lower id, also among groups. weights = s of the chosen (softmax_of_chosen: softmax over the k chosen logits); with
        renorm: w / (Σw + 1e-20); then · scale (DeepSeek-V3, arXiv 2412.19437, eq. 12–16)."""),
    OpSpec("moe", ("x", "ids", "weights", "gate", "up?", "down", "gate_bias?", "up_bias?", "down_bias?"), _moe,
           {"kind": Attr("silu", ACTIVATIONS)}, decompose=rules.moe, doc="""
        out[t] = Σ_j weights[t, j] · y_e with e = ids[t, j] and y_e = down_e · act_mul(gate_e · x[t], up_e · x[t]), each product with
        its bias. gate, up: [E, F, C]; down: [E, C, F], of any format; ids: distinct in a row, in 0…E−1. The sum begins with 0 and
        takes the experts in ascending order of their ids (Shazeer et al. 2017, eq. 1)."""),
    OpSpec("concat", ("x", "y"), _concat, decompose=rules.concat, doc="""
        out[..., :A] = x, out[..., A:] = y; A: length of x's last axis (latent attention: a row of the cache is [latent | rotated key])."""),
    OpSpec("short_conv", ("state", "x", "weight", "positions", "query_start", "state_slot"), _short_conv,
           {"kind": Attr("silu", ACTIVATIONS)}, decompose=rules.short_conv, doc="""
        Causal convolution of each channel over its last L inputs: out[t] = act(Σ_l weight[:, l] · x[t − L + 1 + l]), l ascending. The
        L − 1 inputs before a step's first row of sequence s are the state of slot state_slot[s], [L − 1, C], oldest first; they are
        zeros where that row's position is 0. Afterwards the state holds the last L − 1 inputs."""),
    OpSpec("delta_rule",
           ("state", "query", "key", "value", "a", "b", "a_log", "dt_bias", "positions", "query_start", "state_slot"),
           _delta_rule, {"eps": Attr(1e-6)}, indivisible="each row needs the state that the row before it left. No core op carries a value from one row of a step to the next, but attention, which can only give means of what is in a cache; and token by token it cannot be written either, as a graph does not know how many rows a step has", doc="""
        Gated delta rule (Yang et al. 2024, arXiv 2412.06464, eq. 10), row by row of a sequence in ascending order. Value head h uses
        query and key of head h // (H / J); q = query / sqrt(Σ query² + eps) / sqrt(Dk), k = key / sqrt(Σ key² + eps). With
        S [Dk, Dv] of (sequence, h): S ← exp(−exp(a_log) · softplus(a + dt_bias)) · S; S ← S + k ⊗ σ(b) · (value − Sᵀk); out = Sᵀq.
        S is the state of slot state_slot[s], [H, Dk, Dv], and zeros before a row of position 0."""),
    OpSpec("softcap", ("x",), _same("softcap"), {"cap": Attr()}, rules.softcap, doc="""out = cap · tanh(x / cap)."""),
)  # fmt: skip

CATALOGUE: Final[dict[str, OpSpec]] = {spec.name: spec for spec in _SPECS}
"""name -> OpSpec."""

CORE_OPS: Final = tuple(spec.name for spec in _SPECS if spec.core)
"""Names of the core ops of this opset, in catalogue order."""

PRIMITIVE_OPS: Final = tuple(spec.name for spec in _SPECS if spec.decompose is None or spec.name in rules.DEARER)
"""Names of the ops that `RefBackend` defines: those without a decomposition, and those whose decomposition does more work than the op."""
