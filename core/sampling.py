"""Sampling: the parameters of a request, the state of a sequence, and the rule by which a token is chosen.

The rule, once for the whole house (`_kernels.sample` computes it, the op `sample` means it, tests/core restates it in
numpy). Given a row of logits z (f32 [V]), parameters and u in [0, 1), all arithmetic in f32 unless said:

 0. A row with NaN or +inf gives -1, and so does a row of which steps 1 to 3 leave only -inf, or make a +inf.
 1. mask: z = -inf where the bit is 0.
 2. adjustments, in list order: z += bias; if repeat != 1: z = z / repeat where z > 0, else z * repeat; z -= sub. `bias` is
    the logit bias (-inf for bans and for end tokens below min_tokens), `repeat` the repetition penalty of tokens in prompt
    or output, `sub` = presence + frequency * count of tokens in the output.
 3. If only -inf is left and some bias was -inf, steps 1 and 2 are done again without the biases of -inf: a grammar wins
    over bans.
 4. Tokens are ordered by descending z, ties by ascending id (minus zero equals zero).
 5. temperature <= 1e-5: the first token. Else t = (z - max z) * (1 / temperature), and the weight of a token is the integer
    w = round(exp(t) * 2^40), ties to even. exp is defined by its operations, so that all machines agree: t = max(t, -60);
    k = rint(t * 0x1.715476p0); r = (t - k * 0x1.62e4p-1) - k * 0x1.7f7d1cp-20; p = 1/5040, then p = p * r + c for
    c = 1/720, 1/120, 1/24, 1/6, 1/2, 1, 1; exp = p * 2^k. Integers make every sum below exact, whatever its order.
 6. top_k (0 < k < V): the first k tokens stay.
 7. top_p (< 1): of those, the shortest prefix whose weights reach ceil(top_p * sum), at least one token. (f64 product)
 8. min_p (> 0): of those, the tokens with w >= min_p * 2^40.
 9. draw: the first of those whose cumulative weight exceeds floor(u * sum), at most sum - 1. (f64 product)

u = `_kernels.uniform(seed, stream, position)`: nothing but the request decides, neither its neighbours nor how it was
scheduled. Log-probabilities are those of the raw row. Called by the engine and by interface, which merges layers of defaults.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

import numpy as np

from ._kernels import uniform
from .errors import InvalidRequest
from .step import SamplerRows

__all__ = ["BUILT_IN", "SamplerState", "SamplingParams", "build_rows", "effective_seed", "move_rows", "stream_id"]

MAX_INT: Final = 2**31 - 1
BAN: Final = -100.0  # a logit bias of this value or -inf leaves the token no chance
ALL: Final = 0xFFFFFFFF  # a word of a mask that bans nothing
MAX_STOPS, MAX_STOP_LENGTH, MAX_CHOICES, MAX_LOGPROBS = 16, 256, 16, 20


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the sampler. None means unset: the next layer of defaults decides (`merged_with`).

    max_tokens: most new tokens (None: to the context limit). temperature 0-5 (up to 1e-5: always the likeliest token). top_k:
    0 and -1 are off. top_p 0-1: 1 is off, 0 keeps one token. min_p 0-1. presence_penalty, frequency_penalty: -2 to 2, over the
    output. repetition_penalty: 0.01-10, over prompt and output, of which it sees the last repeat_last_n tokens (-1: all, 0:
    none). seed: any 64-bit integer, negative ones count modulo 2^64. stop: up to 16 strings of 1-256 characters.
    stop_token_ids: ids that end the answer. ignore_eos: the model's end tokens do not end it. min_tokens: no end token before.
    logit_bias: id -> -100 to 100 (-100 bans). logprobs: how many likeliest tokens to report, 0-20. prompt_logprobs: report the
    prompt's. n: answers per prompt, 1-16.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: bool | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        """One string is a list of one; lists become tuples, so that the object cannot change under the engine."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def merged_with(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with the fields that are unset here taken from `defaults`."""
        set_here = {name: value for name, value in vars(self).items() if value is not None}
        return SamplingParams(**{**vars(defaults), **set_here})

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field that has a wrong type or lies outside its range, and that range.

        vocab_size: ids are 0 to vocab_size - 1. Unset fields are valid.
        """
        for name, low, high in _INTEGERS:
            _check(name, getattr(self, name), Integral, low, high)
        for name, least, most in _NUMBERS:
            _check(name, getattr(self, name), Real, least, most)
        for name in ("ignore_eos", "prompt_logprobs"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise _invalid(name, getattr(self, name), "true or false")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"0 to max_tokens ({self.max_tokens})")
        self._validate_lists(vocab_size)

    def _validate_lists(self, vocab_size: int) -> None:
        if self.stop is not None:
            if not isinstance(self.stop, tuple) or len(self.stop) > MAX_STOPS:
                raise _invalid("stop", self.stop, f"at most {MAX_STOPS} strings")
            for text in self.stop:
                if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                    raise _invalid("stop", text, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        if self.stop_token_ids is not None:
            if not isinstance(self.stop_token_ids, tuple):
                raise _invalid("stop_token_ids", self.stop_token_ids, "a list of token ids")
            for token in self.stop_token_ids:
                _check("stop_token_ids", token, Integral, 0, vocab_size - 1)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _invalid("logit_bias", self.logit_bias, "an object of token ids and numbers")
            for token, bias in self.logit_bias.items():
                _check("logit_bias", token, Integral, 0, vocab_size - 1)
                _check("logit_bias", bias, Real, -100, 100)


_INTEGERS: Final = (
    ("max_tokens", 0, MAX_INT),
    ("top_k", -1, MAX_INT),
    ("repeat_last_n", -1, MAX_INT),
    ("seed", -(2**63), 2**64 - 1),
    ("min_tokens", 0, MAX_INT),
    ("logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_CHOICES),
)
_NUMBERS: Final = (
    ("temperature", 0, 5),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 10),
)

BUILT_IN: Final = SamplingParams(
    temperature=0.7, top_k=40, top_p=0.95, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
    repeat_last_n=-1, stop=(), stop_token_ids=(), ignore_eos=False, min_tokens=0, logit_bias={}, prompt_logprobs=False, n=1,
)  # fmt: skip
"""The lowest layer of defaults: below generation_config.json, configuration, flags and the request."""


def _invalid(name: str, value: Any, limits: str) -> InvalidRequest:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequest(f"{name} is {shown}; it must be {limits}", who=name, fix=f"set {name} to {limits}", param=name)


def _check(name: str, value: Any, kind: type, low: float, high: float) -> None:
    """None, or a number of the kind in low…high; a bool is no number, and NaN fails both comparisons."""
    if value is None or (type(value) is int and low <= value <= high):
        return
    what = "an integer" if kind is Integral else "a number"
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
        raise _invalid(name, value, f"{what} from {low} to {high}")


def effective_seed(params: SamplingParams) -> int:
    """The seed of a request as a 64-bit integer: the one given, modulo 2^64, or a new one of 53 bits (exact in JSON)."""
    return secrets.randbits(53) if params.seed is None else params.seed % 2**64


def stream_id(prompt: int, choice: int) -> int:
    """The random stream of choice `choice` of prompt `prompt` of a request: both below 2^32."""
    if not (0 <= prompt < 2**32 and 0 <= choice < 2**32):
        raise InvalidRequest(f"prompt {prompt}, choice {choice}: both must be from 0 to {2**32 - 1}", who="n")
    return prompt << 32 | choice


class SamplerState:
    """What the sampler remembers of one sequence: counts, adjustments and the place in its random stream.

    params: merged and validated; unset fields take `BUILT_IN`'s values. prompt_ids: the prompt, for the repetition penalty.
    seed, stream: see `effective_seed`, `stream_id`. end_ids: every id that ends the answer of this request (the model's,
    unless ignore_eos), banned while fewer than min_tokens are out; stop_token_ids are added to them.

    One entry per adjusted token is kept in arrays that grow: a new token changes one entry, a step copies slices. Without
    penalties, biases and min_tokens there are no entries and nothing is counted.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] | np.ndarray, seed: int, stream: int = 0,
                 end_ids: Sequence[int] = ()):  # fmt: skip
        self.params = p = params.merged_with(BUILT_IN)
        self.position = len(prompt_ids)
        self.produced = 0
        self._seed, self._stream = seed, stream
        self._uniforms: list[float] = []
        self._uniforms_at = 0
        self._slots: dict[int, int] = {}  # token id -> entry
        self._ids = np.empty(0, np.int32)
        self._numbers = np.empty((3, 0), np.float32)  # bias, repeat, sub
        self._biases = {t: -np.inf if b <= BAN else float(b) for t, b in (p.logit_bias or {}).items()}
        self._min_tokens = p.min_tokens or 0
        self._ends = tuple({*end_ids, *(p.stop_token_ids or ())}) if self._min_tokens else ()
        self._presence, self._frequency = p.presence_penalty or 0.0, p.frequency_penalty or 0.0
        self._outputs: dict[int, int] = {}  # counts, for presence and frequency
        window = -1 if p.repeat_last_n is None else p.repeat_last_n
        self._repeat = 1.0 if p.repetition_penalty is None or window == 0 else p.repetition_penalty
        self._window = window
        self.counts = bool(self._ends) or self._repeat != 1.0 or self._presence != 0.0 or self._frequency != 0.0  # else `append` only counts positions
        self._recent: deque[int] = deque()  # the tokens the repetition penalty sees, if it sees the last few only
        self._seen: dict[int, int] = {}  # their counts
        for token, bias in self._biases.items():
            self._set(0, token, bias)
        for token in self._ends:
            self._set(0, token, -np.inf)
        if self._repeat != 1.0:
            first = 0 if window < 0 else max(0, len(prompt_ids) - window)
            for token in prompt_ids[first:]:
                self._see(int(token))

    def append(self, token: int) -> None:
        """Counts a token of the output. O(1)."""
        self.produced += 1
        self.position += 1
        if self._ends and self.produced == self._min_tokens:
            for end in self._ends:
                self._set(0, end, self._biases.get(end, 0.0))
            self._ends = ()
        if self._repeat != 1.0:
            self._see(token)
        if self._presence != 0.0 or self._frequency != 0.0:
            count = self._outputs[token] = self._outputs.get(token, 0) + 1
            self._set(2, token, self._presence + self._frequency * count)

    def draw(self) -> float:
        """The uniform number that decides the next token; the same however often it is asked for."""
        at = self.position - self._uniforms_at
        if not 0 <= at < len(self._uniforms):
            self._uniforms = uniform(self._seed, self._stream, np.arange(self.position, self.position + 64, dtype=np.uint64)).tolist()
            self._uniforms_at, at = self.position, 0
        return self._uniforms[at]

    @property
    def adjusted(self) -> int:
        """How many tokens have an adjustment."""
        return len(self._slots)

    @property
    def adjustments(self) -> tuple[np.ndarray, np.ndarray]:
        """ids i32 [a] and (bias, repeat, sub) f32 [3, a]: views, valid until the next `append`."""
        count = len(self._slots)
        return self._ids[:count], self._numbers[:, :count]

    def _set(self, which: int, token: int, value: float) -> None:
        """Sets bias (0), repeat (1) or sub (2) of a token, whose entry is made if it has none."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                room = max(16, slot)
                self._ids = np.concatenate([self._ids, np.zeros(room, np.int32)])
                neutral = np.repeat(np.array([[0.0], [1.0], [0.0]], np.float32), room, axis=1)
                self._numbers = np.concatenate([self._numbers, neutral], axis=1)
            self._ids[slot] = token
        self._numbers[which, slot] = value

    def _see(self, token: int) -> None:
        count = self._seen[token] = self._seen.get(token, 0) + 1
        if count == 1:
            self._set(1, token, self._repeat)
        if self._window < 0:
            return
        self._recent.append(token)
        if len(self._recent) > self._window:
            gone = self._recent.popleft()
            self._seen[gone] -= 1
            if self._seen[gone] == 0:
                self._set(1, gone, 1.0)


def build_rows(
    states: Sequence[SamplerState], vocab_size: int, masks: Sequence[np.ndarray | None] | None = None
) -> SamplerRows:
    """The sampler's arrays for one step: row r is the next token of states[r].

    masks: per row u32 [ceil(vocab_size / 32)] with bit 0 = banned, or None for a row without a grammar, which wins: where every token it
    allows is banned, the row's adjustments are left out. Copies everything it returns. Raises InvalidRequest for a mask of another length.
    """
    params = [s.params for s in states]
    start = np.zeros(len(states) + 1, np.int32)
    ids, bias = np.empty(0, np.int32), np.empty(0, np.float32)
    repeat = sub = bias
    stacked = _stacked(masks, len(states), (vocab_size + 31) // 32)
    if any(s.adjusted for s in states):
        entries = [s.adjustments for s in states]
        if stacked is not None:
            entries = [_within(mask, *entry) for mask, entry in zip(stacked, entries, strict=True)]
        np.cumsum([len(own) for own, _ in entries], out=start[1:])
        ids = np.concatenate([own for own, _ in entries])
        bias, repeat, sub = np.concatenate([numbers for _, numbers in entries], axis=1)
    return SamplerRows(
        u=np.array([s.draw() for s in states], np.float64),
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        adjust_start=start, adjust_ids=ids, adjust_bias=bias, adjust_repeat=repeat, adjust_sub=sub,
        mask=stacked,
    )  # fmt: skip


def move_rows(rows: SamplerRows, states: Sequence[SamplerState], masks: Sequence[np.ndarray | None] | None = None) -> bool:
    """Turns the arrays of a step into those of the next step of the same states. False, with nothing of use in them, where more than the
    uniform numbers and the masks (as of `build_rows`) changes: a row has adjustments, or there were no masks."""
    if (rows.mask is None) != (masks is None) or len(rows.adjust_ids):
        return False
    u = rows.u
    for r, state in enumerate(states):
        if state._slots:
            return False
        u[r] = state.draw()
    if masks is not None and rows.mask is not None:
        for row, mask in zip(rows.mask, masks, strict=True):
            if mask is not None and mask.shape != row.shape:
                return False  # `build_rows` says so
            row[:] = ALL if mask is None else mask
    return True


def _within(mask: np.ndarray, ids: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The adjustments of a row, or none if they ban everything that its mask (u32 [words]) allows."""
    banned = ids[np.isneginf(numbers[0])]
    if len(banned):
        left = mask.copy()
        np.bitwise_and.at(left, banned // 32, ~(np.uint32(1) << (banned % 32).astype(np.uint32)))
        if not left.any():
            return ids[:0], numbers[:, :0]
    return ids, numbers


def _stacked(masks: Sequence[np.ndarray | None] | None, rows: int, words: int) -> np.ndarray | None:
    if masks is None or all(mask is None for mask in masks):
        return None
    if len(masks) != rows:
        raise InvalidRequest(f"{len(masks)} masks for {rows} rows", who="masks")
    stacked = np.full((rows, words), ALL, np.uint32)
    for row, mask in zip(stacked, masks, strict=True):
        if mask is None:
            continue
        if mask.shape != (words,):
            raise InvalidRequest(f"a mask has shape {mask.shape}; it must be {(words,)}", who="masks")
        row[:] = mask
    return stacked
