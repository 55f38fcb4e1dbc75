"""Whether a vocabulary can write every text that a grammar asks for.

Most vocabularies have a token for each byte, and write anything; some lack a few control characters; some write only what they have characters for. A grammar
that asks for something else would come to a point where no token goes on, in the middle of an answer. So its parts are looked at when it is compiled:
each text must be spelled character by character, and each class of characters (`[^…]`, `\\d`) must leave one. That may refuse a grammar
whose other branches could be written; it lets none through that only such parts would stop. Called by `grammar`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Final

import llguidance

__all__ = ["Alphabet", "is_whole", "unspelled"]

_UTF8: Final = frozenset([*range(0xC0), *range(0xC2, 0xF5)])  # bytes that occur in UTF-8
_TAILS: Final = frozenset(range(0x80, 0xC0))  # those that follow the first of a character
_UNFORCED: Final = '%llguidance {"no_forcing": true}\n'  # where there is one way on, the mask still comes from the tokens
_END: Final = 1  # a mask that allows token 0 alone, the end
_SHORT, _MAX_KNOWN = 64, 4096  # classes that are remembered: their characters, how many
_JSON: Final = '{}[]":,-.0123456789truefalsn'  # what every JSON may need; white space, signs and exponents are optional
_ASCII: Final = "".join(map(chr, range(32, 127)))
_ANNOTATIONS: Final = frozenset(("title", "description", "default", "examples", "$comment", "$schema", "$id", "$anchor", "deprecated", "readOnly", "writeOnly", "x-guidance"))
_NAMED: Final = frozenset(("properties", "dependentSchemas", "$defs", "definitions"))  # name -> schema
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_CODE: Final = re.compile(r"x\{([0-9A-Fa-f]+)\}|x([0-9A-Fa-f]{2})|u\{([0-9A-Fa-f]+)\}|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_PROPERTY: Final = re.compile(r"[pP](?:\{[^}]*\}|.)")
_SLASH: Final = re.compile(r"\\.|/", re.DOTALL)
_BRACKET: Final = re.compile(r"\\.|\[\^?\]?|\]", re.DOTALL)
_QUANTIFIER: Final = re.compile(r"\{\d*,?\d*\}")
_GROUP: Final = re.compile(r"\(\?(?:P?<\w+>|[a-zA-Z-]*:|[a-zA-Z-]*\))")
_LARK: Final = re.compile(r'//[^\n]*|%json\s*|"((?:\\.|[^"\\\n])*)"i?|/((?:\\.|[^/\\\n])+)/[imslux]*', re.DOTALL)


class Alphabet:
    """tokens: the bytes of every token that text is made of. complete: each byte has a token, so any text can be written. letters: characters that can be,
    one after the other. whole: tokens that end inside of a character lead nowhere, since the bytes that would go on are no tokens."""

    def __init__(self, tokens: Iterable[bytes]):
        spelled = set(tokens)
        single = {raw[0] for raw in spelled if len(raw) == 1}
        self.complete = single >= _UTF8
        self.whole = not single >= _TAILS
        self.letters: frozenset[str] = frozenset()
        self._known: dict[str, bool] = {}  # class -> a character of it can be written
        if not self.complete:
            texts = (_text(raw) for raw in spelled if len(raw) <= 4)
            self.letters = frozenset(text for text in texts if len(text) == 1)
            self._bytes = frozenset[int]() if self.whole else frozenset(single)

    def has(self, letter: str) -> bool:
        """This character can be written."""
        return letter in self.letters or (bool(self._bytes) and self._bytes.issuperset(letter.encode("utf-8", "replace")))

    @cached_property
    def _library(self) -> llguidance.LLTokenizer:
        """A vocabulary of the letters, and of the bytes where each start of a character can be gone on with; its first token ends."""
        words = _Words([b"", *sorted({*map(str.encode, self.letters), *(bytes([b]) for b in self._bytes)})])
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=[0])

    def has_of(self, pattern: str) -> bool:
        """A character of this class (`[^a]`, `\\d`, `\\p{Han}`) can be written, as the library reads it. True also for what it cannot read alone:
        it has read the whole."""
        known = self._known.get(pattern)
        if known is None:
            part = _SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], pattern)
            matcher = llguidance.LLMatcher(self._library, f"{_UNFORCED}start: /{part}/", log_level=0)
            known = matcher.is_error() or int.from_bytes(matcher.compute_bitmask(), "little") > _END
            if len(pattern) <= _SHORT and len(self._known) < _MAX_KNOWN:
                self._known[pattern] = known
        return known


class _Words:
    """Tokens, as the library asks for them."""

    bos_token_id, eos_token_id = None, 0
    special_token_ids = (0,)

    def __init__(self, tokens: list[bytes]):
        self.tokens = tokens

    def __call__(self, text: bytes) -> list[int]:
        """Nothing is written with these tokens, so no text is cut into them."""
        return []


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


def is_whole(raw: bytes) -> bool:
    """These bytes are characters, none of which is cut."""
    return not raw or bool(_text(raw))


def unspelled(grammar: str, alphabet: Alphabet) -> str | None:
    """What of a compiled grammar's source (the library's JSON, or Lark) cannot be written; None: all can."""
    try:
        parts = json.loads(grammar)["grammars"]
    except (ValueError, TypeError, KeyError):
        parts = [{"lark_grammar": grammar}]
    for part in parts:
        lark = part.get("lark_grammar")
        lost = next(_of_lark(lark, alphabet) if lark else _of_schema(part.get("json_schema"), alphabet), None)
        if lost is not None:
            return lost
    return None


def _of_text(text: str, alphabet: Alphabet) -> Iterator[str]:
    for letter in text:
        if not alphabet.has(letter):
            yield f"{letter!r} in {text!r:.60}"


def _of_schema(schema: Any, alphabet: Alphabet) -> Iterator[str]:
    yield from _of_text(_JSON, alphabet)
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            if key in _ANNOTATIONS:
                continue
            if key in ("enum", "const"):
                yield from _of_text(json.dumps(value, ensure_ascii=False), alphabet)
            elif key in _NAMED and isinstance(value, dict):
                for name in value:
                    yield from _of_text(json.dumps(name, ensure_ascii=False), alphabet)
                waiting += value.values()
            elif key == "patternProperties" and isinstance(value, dict):
                for pattern in value:
                    yield from _of_pattern(pattern, alphabet)
                waiting += value.values()
            elif key == "pattern" and isinstance(value, str):
                yield from _of_pattern(value, alphabet)
            elif key == "format":
                yield from _of_text(_ASCII, alphabet)
            elif key in ("required", "dependentRequired"):
                yield from _of_text(json.dumps(value, ensure_ascii=False), alphabet)
            else:
                waiting.append(value)


def _of_lark(grammar: str, alphabet: Alphabet) -> Iterator[str]:
    at = 0
    while (found := _LARK.search(grammar, at)) is not None:
        at = found.end()
        if found[0].startswith("%json"):
            schema, at = json.JSONDecoder().raw_decode(grammar, at)
            yield from _of_schema(schema, alphabet)
        elif found[1] is not None:
            yield from _of_text(_unquoted(found[1]), alphabet)
        elif found[2] is not None:
            yield from _of_pattern(found[2], alphabet)


def _unquoted(text: str) -> str:
    """What a quoted text of Lark means."""

    def meant(found: re.Match[str]) -> str:
        code = _CODE.match(found[0], 1)
        return _letter(code) if code else _ESCAPES.get(found[0][1], found[0][1])

    return re.sub(r"\\(?:x\{[^}]*\}|x..|u\{[^}]*\}|u....|U........|.)", meant, text, flags=re.DOTALL)


def _letter(code: re.Match[str]) -> str:
    number = int(next(filter(None, code.groups())), 16)
    return chr(number) if number < 0x110000 else "\ufffd"


def _of_pattern(pattern: str, alphabet: Alphabet) -> Iterator[str]:
    """What of a regular expression cannot be written: a literal character, or every character of a class."""
    where, at = f"in /{pattern:.60}/", 0
    while at < len(pattern):
        letter, end = pattern[at], at + 1
        if letter == "\\":
            code, kind = _CODE.match(pattern, end), _PROPERTY.match(pattern, end)
            follows = pattern[end : end + 1]
            end = code.end() if code else kind.end() if kind else end + 1
            part = pattern[at:end]
            if code or follows in _ESCAPES:
                written = alphabet.has(_letter(code) if code else _ESCAPES[follows])
            elif follows in "dwsDWS" or kind:
                written = alphabet.has_of(part)
            else:  # anchors, and marks that stand for themselves
                written = follows in "bBAz" or alphabet.has(follows)
            if not written:
                yield f"{part:.40} {where}"
        elif letter == "[":
            end = _class_end(pattern, at)
            if not alphabet.has_of(pattern[at:end]):
                yield f"{pattern[at:end]:.40} {where}"
        elif (found := _GROUP.match(pattern, at) or _QUANTIFIER.match(pattern, at)) is not None:
            end = found.end()
        elif letter not in ".()|*+?^$" and not alphabet.has(letter):
            yield f"{letter!r} {where}"
        at = end


def _class_end(pattern: str, at: int) -> int:
    """Where a class ends that begins here; classes may lie in each other. The `]` that is first in one is a letter of it."""
    depth = 0
    for found in _BRACKET.finditer(pattern, at):
        if found[0].startswith("["):
            depth += 1
        elif found[0] == "]":
            depth -= 1
            if not depth:
                return found.end()
    return len(pattern)
