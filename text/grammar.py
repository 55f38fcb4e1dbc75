"""Structured output: JSON schema, regex, choice, Lark and GBNF as a mask over the vocabulary for every token.

The work is done by the `llguidance` library: a grammar is compiled once and each answer gets a matcher of its own, so that nothing
of one answer reaches another. This file decides what is let in (sizes, depth, references), what JSON may look like (at most eight blanks
between two tokens: without a bound some models never stop), and that a grammar that cannot be held is refused, never loosened.

Called by interface, in the thread that asks; a `Matcher` is then used by the engine's thread alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import llguidance
import numpy as np

from fastllm.core.errors import EngineError, FastLLMError, InvalidRequest

from ._matcher import CANNOT, Matcher, Sort, first_lines, told
from .depth import MAX_LEVELS, MAX_NAMES, PATTERN_NAMES, levels, names, with_room
from .json_schema import check_schema, refused
from .lazy import After, Banned, BannedTexts, Budget, CallGrammar, Held, Lazy
from .spelling import Alphabet, is_whole, unspelled
from .tokenizer import Tokenizer
from .worker import Worker

__all__ = ["Grammar", "GrammarCompiler"]

MAX_SOURCE: Final = 1 << 20  # bytes of a schema, pattern or grammar
MAX_GBNF: Final = 20_000_000  # rules times characters: a grammar is read again for each of its rules, by Python
MAX_KEPT: Final = 256  # compiled grammars
MAX_KEPT_BYTES: Final = 4 << 20  # of their sources; what is compiled of one is some dozen times as large
WHITE_SPACE: Final = r"[ \t\n\r]{0,8}"
JSON_OPTIONS: Final[Any] = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
LIMITS: Final[Any] = {"max_items_in_row": 20_000, "step_max_items": 200_000, "step_lexer_fuel": 1_000_000, "verbose_errors": False}
"""Of the library, for one token; a step that needs more fails its request. Alternatives of a rule are items of a row."""

KNOWN_TEXTS, KNOWN_BYTES = 4096, 64  # whose ids are kept, and the longest of them
PROBE_TOKENS: Final = 64  # of an answer that is tried before a grammar is accepted
PROBE_S: Final = 0.5
PROBE_FIRST: Final = (",", '"', ":", "{", "[", "1", "]", "}")  # tokens that lead on through JSON


class Grammar:
    """A compiled grammar. Calling it makes a matcher, one for each answer. kind: what it was made of; source_bytes: of how many bytes."""

    def __init__(self, kind: str, compiled: llguidance.LLMatcher, sort: Sort, source_bytes: int):
        self.kind, self.source_bytes, self._compiled, self._sort = kind, source_bytes, compiled, sort
        self._lock = threading.Lock()
        self._first: Matcher | None = None  # has the mask of every answer's first token

    def __call__(self) -> Matcher:
        """A fresh matcher. May be called from any thread. Raises InvalidSchema, EngineError."""
        try:
            with self._lock:
                if self._first is None:
                    self._first = Matcher(self._compiled.deep_copy(), self._sort)
                return Matcher(self._compiled.deep_copy(), self._sort, self._first)
        except (FastLLMError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library, which is no Exception
            raise EngineError(CANNOT, why=told(error)) from None


def _read(made: str, library: llguidance.LLTokenizer) -> tuple[str, llguidance.LLMatcher]:
    return made, llguidance.LLMatcher(library, made, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))


class _Wrapped:
    """Our tokenizer as the library asks for it: ids that spell exactly the bytes of a grammar.

    A tokenizer that normalises its input (NFC, NFKC, lower case, …) reads another text than the grammar's: then, and for bytes that end inside of a
    character, the longest tokens are taken one after the other. Bytes that no token begins with end the list: the library goes on from there.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else min(tokenizer.end_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.decode_bytes(i, skip_special=False) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        special = set(self.special_token_ids)
        self.alphabet = Alphabet(raw for i, raw in enumerate(self.tokens) if i not in special)
        if self.alphabet.whole and not self.alphabet.complete:
            self.tokens = [raw if i in special or is_whole(raw) else b"" for i, raw in enumerate(self.tokens)]
        self._by_bytes = {raw: i for i, raw in reversed(list(enumerate(self.tokens))) if raw and i not in special}  # the lowest id of equal ones
        self._longest = max(map(len, self._by_bytes), default=1)
        self._known: dict[bytes, list[int]] = {}

    def __call__(self, text: bytes) -> list[int]:
        found = self._known.get(text)
        if found is None:
            found = self._ids(text)
            if len(text) <= KNOWN_BYTES:  # a grammar forces the same few texts again and again, and their beginnings
                if len(self._known) >= KNOWN_TEXTS:
                    self._known.clear()
                self._known[text] = found
        return found

    def _ids(self, text: bytes) -> list[int]:
        try:
            ids = self._tokenizer.encode_continued(text.decode())  # of a grammar's forced bytes: not one blank more
        except (UnicodeDecodeError, InvalidRequest):
            return self._greedy(text)
        return ids if b"".join(self.tokens[i] for i in ids) == text else self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        ids, at = list[int](), 0
        while at < len(text):
            lengths = range(min(self._longest, len(text) - at), 0, -1)
            found = next((n for n in lengths if text[at : at + n] in self._by_bytes), 0)
            if not found:
                break
            ids.append(self._by_bytes[text[at : at + found]])
            at += found
        return ids


class _Bytes:
    """A vocabulary of the same size and with the same special tokens, in which only single bytes are spelled: its tables are made in no time. A grammar
    takes about as long to read with it."""

    alphabet = None

    def __init__(self, tokenizer: Tokenizer):
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else min(tokenizer.end_ids)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [b""] * tokenizer.vocab_size
        for i in self.special_token_ids:
            self.tokens[i] = tokenizer.decode_bytes(i, skip_special=False)
        plain = (i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids)
        self._ids = dict(zip(range(256), plain, strict=False))  # byte -> id
        for byte, i in self._ids.items():
            self.tokens[i] = bytes([byte])

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text if byte in self._ids]


class GrammarCompiler:
    """Compiles grammars for one model and keeps the latest, by content. Safe to share between threads.

    tokenizer: the model's. vocab_size: rows of its logits, at least the tokenizer's. timing_only: only how long a source takes to read is wanted, and whether it
    can be followed (`_Bytes`); nothing is kept.
    Every method raises InvalidRequest, which names the field `param`, for a source that is too large, not valid, or outside of what can be enforced.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, timing_only: bool = False):
        if not tokenizer.end_ids:
            raise InvalidRequest("this model's tokenizer has no token that ends an answer, so no grammar can end one")
        self._timing_only = timing_only
        self._tokenizer, self._vocab_size, self._words = tokenizer, vocab_size, (vocab_size + 31) // 32
        self._library: llguidance.LLTokenizer | None = None
        self._alphabet: Alphabet | None = None
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._kept_bytes = 0
        self._banned: dict[tuple[bytes, ...], BannedTexts] = {}
        self._lock = threading.Lock()
        self._worker = Worker()
        self._odd: dict[int, bool | None] = {}  # as of `Sort`, of the library's tokenizer

    def json_schema(self, schema: Any, param: str = "response_format") -> Grammar:
        """JSON that fits a schema (a dict, or a bool). References must be local (`#/…`)."""
        try:
            source = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise refused("the schema is not JSON", str(error), param) from None
        check_schema(schema, param)
        if schema is False:
            raise refused("the schema is false", "nothing fits it", param)
        source = "{}" if schema is True else source  # the library's options have their place in an object
        return self._compiled("json_schema", source, lambda: llguidance.LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS), param)

    def json_object(self, param: str = "response_format") -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"}, param)

    def regex(self, pattern: str, param: str = "regex") -> Grammar:
        """Text that a regular expression matches as a whole (Rust's syntax: no look-around, no back references)."""
        return self._compiled("regex", pattern, lambda: llguidance.LLMatcher.grammar_from_regex(pattern), param)

    def choice(self, choices: Sequence[str], param: str = "choice") -> Grammar:
        """One of these texts."""
        if not choices or not all(isinstance(c, str) and c for c in choices):
            raise refused("a choice needs at least one text, and none may be empty", "", param)
        texts = " | ".join(json.dumps(c, ensure_ascii=False) for c in dict.fromkeys(choices))
        lark = f"start: CHOICE\nCHOICE: {texts}"  # one lexeme: as quick for thousands as for two
        return self._compiled("choice", lark, lambda: llguidance.LLMatcher.grammar_from_lark(lark), param)

    def grammar(self, text: str, param: str = "grammar") -> Grammar:
        """A grammar in Lark's notation, or in GBNF (rules are written with `::=`)."""
        rules = text.count("::=") if isinstance(text, str) else 0
        if rules * len(text) > MAX_GBNF:
            raise refused(f"it has {rules:,} rules in {len(text):,} characters", f"their product may be {MAX_GBNF:,} in GBNF; Lark has no such limit", param)

        def source() -> str:
            lark = llguidance.gbnf_to_lark.gbnf_to_lark(text) if "::=" in text else text
            return str(llguidance.LLMatcher.grammar_from_lark(lark))

        return self._compiled("grammar", text, source, param)

    def bundle(self, text: str, param: str = "tools") -> Grammar:
        """Grammars in the library's own JSON, as `output.call_grammars` makes them; schemas, patterns and grammars in them are a client's, so what was
        said of limits goes for the whole."""
        return self._compiled("bundle", text, lambda: text, param)

    def after(self, grammar: Grammar, text: str, opening: int | None = None) -> Callable[[], After]:
        """The grammar, from behind a text on that the answer writes first; opening: it may also begin at once, instead of with this token."""
        return lambda: After(grammar(), text.encode(), self._bytes_of, opening)

    def budget(
        self, inner: Callable[[], Held] | None, limit: int, reasoning: tuple[str, str], in_reasoning: bool
    ) -> Callable[[], Budget]:
        """At most so many tokens of reasoning. inner: what else holds the answer."""
        markers = (reasoning[0].encode(), reasoning[1].encode())
        closing = self._tokenizer.encode(reasoning[1], add_special=False, parse_special=True)
        return lambda: Budget(inner and inner(), limit, markers, closing, in_reasoning, self._bytes_of, self._words)

    def banned(self, inner: Callable[[], Held] | None, texts: Sequence[str]) -> Callable[[], Banned]:
        """Free text without these texts, in whatever tokens they are written. inner: what else holds the answer."""
        key = tuple(text.encode() for text in texts)
        with self._lock:
            if key not in self._banned:  # a model has one or two sets of markers
                tokens = [self._bytes_of(i) for i in range(self._tokenizer.vocab_size)]
                self._banned[key] = BannedTexts(key, tokens, self._vocab_size)
            made = self._banned[key]
        return lambda: Banned(made, inner and inner(), self._bytes_of)

    def calls(
        self,
        triggers: Sequence[dict[str, Any]],
        param: str = "tools",
        *,
        reasoning: tuple[str, str] | None = None,
        in_reasoning: bool = False,
        one: bool = False,
    ) -> Callable[[], Lazy]:
        """Free text in which tool calls are held: `output.call_grammars.lazy` as plain data, for `Lazy`."""
        made = [
            CallGrammar(
                trigger["marker"].encode(),
                trigger["keep"],
                re.compile(trigger["head"].encode()) if trigger["head"] else None,
                trigger["at_start"],
                self.bundle(trigger["source"], param),
            )
            for trigger in triggers
        ]
        markers = None if reasoning is None else (reasoning[0].encode(), reasoning[1].encode())
        return lambda: Lazy(made, markers, in_reasoning, one, self._bytes_of, self._encode)

    def _bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.decode_bytes(token_id, skip_special=False) if token_id < self._tokenizer.vocab_size else b""

    def _encode(self, text: bytes) -> list[int]:
        assert self._library is not None
        return list(self._library.tokenize_bytes(text))

    def _compiled(self, kind: str, text: str, source: Callable[[], str], param: str) -> Grammar:
        if not isinstance(text, str):
            raise refused(f"it is a {type(text).__name__}", "it must be a string", param)
        try:
            raw = text.encode()
        except UnicodeEncodeError:
            raise refused("it holds half of a character (a lone surrogate)", "", param) from None
        if len(raw) > MAX_SOURCE:
            raise refused(f"it has {len(raw):,} bytes", f"the limit is {MAX_SOURCE:,}", param)
        key = hashlib.sha256(f"{kind}:".encode() + raw).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            if self._library is None:
                self._library = self._open_library(param)
        lost = None
        deep, wide, library = levels(kind, text), names(kind, text), self._library
        if deep > MAX_LEVELS:
            raise refused(f"it may have {deep:,} rules, references and brackets in one another", f"the limit is {MAX_LEVELS:,}", param)
        if wide > MAX_NAMES:
            raise refused(f"its objects have {wide:,} properties together", f"the limit is {MAX_NAMES:,}; a pattern counts as {PATTERN_NAMES}", param)
        try:
            made, matcher = with_room(deep + wide, lambda: _read(source(), library))
            if self._alphabet is not None and not matcher.is_error():
                lost = unspelled(made, self._alphabet)
        except (FastLLMError, KeyboardInterrupt, SystemExit):
            raise
        except RecursionError:
            raise refused("it cannot be read", "its brackets and rules are nested too deeply", param) from None
        except BaseException as error:  # the library raises its own classes, some that are no class of its own, and panics, which are no Exception
            raise refused("it cannot be read", str(error).partition("\n")[0], param) from None
        if matcher.is_error():
            raise refused("it cannot be enforced", first_lines(matcher.get_error()), param)
        if lost is not None:
            raise refused("it cannot be enforced", f"this model has no tokens that write {lost}", param)
        grammar = Grammar(kind, matcher, self._sort(kind), len(raw))
        try:
            self._probe(grammar())  # a grammar that is too large to follow is refused here, and not in the middle of an answer
        except FastLLMError as error:
            raise refused("it cannot be enforced", first_lines(error.why), param) from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library panics over it, which is no Exception; whoever asked is told, and nobody else is touched
            raise refused("it cannot be enforced", told(error), param) from None
        if self._timing_only:
            return grammar
        with self._lock:
            self._kept[key] = grammar
            self._kept_bytes += len(raw)
            while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1].source_bytes
        return grammar

    def _probe(self, matcher: Matcher) -> None:
        """Follows the grammar for some tokens, through as much of it as those reach. Raises InvalidSchema, EngineError."""
        limit = time.monotonic() + PROBE_S
        first = [i for text in PROBE_FIRST for i in self._tokenizer.encode(text, add_special=False, parse_special=False)[-1:]]
        random = np.random.default_rng(0)
        for _ in range(PROBE_TOKENS):
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            forced = matcher.forced()
            token = forced[0] if forced else next((i for i in first if i in allowed), None)
            if token is None and len(allowed):
                token = int(random.choice(allowed))
            if token is None or token in self._tokenizer.end_ids or matcher.accept(token) or time.monotonic() > limit:
                return

    def _sort(self, kind: str) -> Sort:
        tokenizer, plain = self._tokenizer, kind in ("json_schema", "regex", "choice")  # else special tokens may be in the grammar
        ends = frozenset(i for i in tokenizer.end_ids if i < tokenizer.vocab_size)
        return Sort(self._words, tokenizer.vocab_size, ends, plain, self._odd if plain else dict.fromkeys(self._odd), self._worker)

    def _open_library(self, param: str) -> llguidance.LLTokenizer:
        ours = (_Bytes if self._timing_only else _Wrapped)(self._tokenizer)
        self._alphabet = None if ours.alphabet is None or ours.alphabet.complete else ours.alphabet
        special = set(ours.special_token_ids)
        marked: dict[int, bool | None] = {i: None for i, raw in enumerate(ours.tokens) if b"\xff" in raw}  # the library marks special tokens so
        self._odd = {**marked, **{i: False for i, raw in enumerate(ours.tokens) if not raw or i in special}}
        ends = [i for i in sorted(self._tokenizer.end_ids) if i < self._tokenizer.vocab_size]
        try:
            return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ours), n_vocab=self._tokenizer.vocab_size, eos_token=ends)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as above
            raise refused("no grammar can be enforced with this model's vocabulary", told(error), param) from None
