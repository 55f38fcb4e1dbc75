"""Text ↔ token ids, exactly as the model's own tokenizer does it, with one rule more: client text is text.

Merging is done by the `tokenizers` library, or for SentencePiece vocabularies by `sentence_pieces.py`; this class decides around it. It finds special tokens itself, in text the caller
trusts (a chat template) and never in text a client wrote, although both are encoded as one string, so that ids equal the
reference wherever no client writes a marker. It puts BOS once, keeps SentencePiece's leading blank where the reference
has it, and knows the exact bytes of each token, on which `detokenizer.py` builds. Used by the engine's front ends and the server.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import tokenizers

from fastllm.core.errors import InvalidRequest

from .huggingface import read_tokenizer_json
from .pieces import Pieces
from .sentence_pieces import Encoded, SentencePieces
from .vocabulary import Added, Vocabulary, guarded, read_gguf_vocabulary, read_sentencepiece_vocabulary

__all__ = ["Tokenizer"]

Merging = tokenizers.Tokenizer | SentencePieces


def _encoded(text: str, library: Merging) -> tokenizers.Encoding | Encoded:
    return guarded(lambda: library.encode(text, add_special_tokens=False), "the text cannot be encoded")


def _byte_alphabet() -> dict[str, int]:
    """The printable characters byte-level BPE writes for the 256 bytes (Radford et al. 2019): character → byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """One model's tokenizer. Immutable after set-up and safe to share between threads.

    vocab_size: number of ids. bos_id, eos_id, unk_id: int or None. end_ids: every id that ends an answer. add_bos: whether a
    prompt begins with BOS. special_ids: ids that stand for no text (`token_bytes` is empty and `decode` may skip them). special_texts: their
    pieces, with their ids.
    """

    def __init__(self, vocabulary: Vocabulary):
        """Wrap a checked vocabulary; use the `from_…` constructors."""
        self._pieces = Pieces(vocabulary.pieces)
        self._vocabulary = vocabulary = replace(vocabulary, pieces=self._pieces)
        self._library = vocabulary.library
        self._tail: Merging | None = None
        self._continued: Merging | None = None
        self._bytes: dict[int, bytes] = {}
        self._set_added(vocabulary.added)
        self.vocab_size = len(vocabulary.pieces)
        self.bos_id, self.eos_id, self.unk_id = vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id
        self.end_ids, self.special_ids = vocabulary.end_ids, vocabulary.special_ids
        self.special_texts = {self._pieces[i]: i for i in sorted(self.special_ids)}
        self.add_bos = vocabulary.bos_id is not None and vocabulary.bos_id in vocabulary.prefix_ids

    # constructors ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_tokenizer_json(
        cls,
        data: bytes,
        config: Mapping[str, Any] | None = None,
        *,
        special_tokens_map: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """From the bytes of tokenizer.json and the parsed tokenizer_config.json, special_tokens_map.json and generation_config.json.

        Raises TokenizerError for a damaged or inconsistent file, UnsupportedError for WordPiece and word-level models.
        """
        return cls(read_tokenizer_json(data, config, special_tokens_map, generation_config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From GGUF metadata: the `tokenizer.*` keys as Python values, lists or numpy arrays.

        Raises TokenizerError and UnsupportedError as `from_tokenizer_json`.
        """
        return cls(read_gguf_vocabulary(metadata))

    @classmethod
    def from_sentencepiece(cls, data: bytes, config: Mapping[str, Any] | None = None) -> Tokenizer:
        """From the bytes of a SentencePiece tokenizer.model; config: the folder's tokenizer_config.json, if any."""
        return cls(read_sentencepiece_vocabulary(data, config))

    # encoding ----------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of a text. add_special: put BOS (and what else the model wants) unless it is there already.

        parse_special: True reads special-token text as the token; False encodes it as ordinary characters.
        Raises InvalidRequest for text that is no Unicode (a lone surrogate).
        """
        return self.encode_parts([(text, parse_special)], add_special=add_special)

    def encode_parts(self, parts: Sequence[tuple[str, bool]], *, add_special: bool = True) -> list[int]:
        """Ids of a text made of (piece, trusted) parts: special tokens are read only where all of their text is trusted.

        The pieces are encoded as one text, so a border between parts changes no id by itself.
        """
        text = "".join(piece for piece, _ in parts)
        if not text.isascii():
            _check_unicode(text)
        ids = self._split(text, parts, "start", controls_only=self._vocabulary.space_prefix == "control")
        if add_special:
            prefix, suffix = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
            if prefix and tuple(ids[: len(prefix)]) != prefix:
                ids[:0] = prefix
            if suffix and tuple(ids[len(ids) - len(suffix) :]) != suffix:
                ids += suffix
        return ids

    def encode_continued(self, text: str) -> list[int]:
        """Ids of text that goes on behind other text, as an answer does: no blank is put in front, and no special token is read."""
        ids: list[int] = []
        at = 0
        for start, end, token in self._find(text, [(text, False)], self._vocabulary.space_prefix == "control"):
            if start > at:
                ids += self._run(text[at:start], self._continued_library())
            ids.append(token.id)
            at = end
        return ids + self._run(text[at:], self._continued_library()) if at < len(text) else ids

    def _split(self, text: str, parts: Sequence[tuple[str, bool]], after: str, controls_only: bool = False) -> list[int]:
        ids: list[int] = []
        at = 0
        for start, end, token in self._find(text, parts, controls_only):
            if start > at:
                ids += self._merge(text[at:start], after)
            ids.append(token.id)
            at, after = end, "control" if token.control else "added"
        return ids + self._merge(text[at:], after) if at < len(text) else ids

    def protect(self, literals: Iterable[str]) -> None:
        """Count added tokens whose text occurs in these strings (a chat template's literals) as markers, not as client text.

        For set-up, before the tokenizer is shared. Tokens flagged special or of marker shape are protected without it.
        """
        joined = "\0".join(literals)
        known = {added.text for added in self._added}
        found: list[Added] = []
        if isinstance(self._library, tokenizers.Tokenizer):
            found = [
                Added(token.content, index, True, token.lstrip, token.rstrip)
                for index, token in self._library.get_added_tokens_decoder().items()
                if token.content not in known and not token.content.isspace() and token.content in joined
            ]
            self._library.add_special_tokens([tokenizers.AddedToken(a.text, special=True, normalized=False) for a in found])
        own = [
            Added(a.text, a.id, True, a.lstrip, a.rstrip) if not a.control and not a.text.isspace() and a.text in joined else a
            for a in self._added
        ]
        self._set_added(own + found)

    def _set_added(self, added: Sequence[Added]) -> None:
        self._added = list(added)
        self._by_text = {self._escape(a.text): a for a in added}
        lengths: dict[str, set[int]] = {}
        for text in self._by_text:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {key: sorted(found, reverse=True) for key, found in lengths.items()}
        first = "".join(sorted({re.escape(text[0]) for text in self._by_text}))
        self._candidates = re.compile(f"[{first}]") if first else None
        self._control_ids = {a.id for a in added if a.control} - {self._vocabulary.unk_id}

    def _escape(self, text: str) -> str:
        return text.replace(" ", "▁") if self._vocabulary.escaped else text  # as long as before

    def _find(
        self, text: str, parts: Sequence[tuple[str, bool]], controls_only: bool = False
    ) -> Iterable[tuple[int, int, Added]]:
        """Yield (start, end, token) of the added tokens in the text, leftmost first, the longest at each place."""
        if self._candidates is None:
            return
        ends: list[int] = []  # the text in runs of equal trust: where each ends, and whether it is trusted
        trusted: list[bool] = []
        at = 0
        for piece, trust in parts:
            if not piece:
                continue
            at += len(piece)
            if trusted and trusted[-1] == trust:
                ends[-1] = at
            else:
                ends.append(at)
                trusted.append(trust)
        text = self._escape(text)
        blank = " \t\r\n\v\f▁" if self._vocabulary.escaped else None
        done = position = 0
        while match := self._candidates.search(text, position):
            start = match.start()
            run = bisect_right(ends, start)
            token = self._longest(text, start, ends[run] if trusted[run] else start)
            if token is None or (controls_only and not token.control):
                position = start + 1
                continue
            position = start + len(token.text)
            left, right = start, position
            if token.lstrip:
                left = max(done, len(text[:left].rstrip(blank)))
            if token.rstrip:
                right = len(text) - len(text[right:].lstrip(blank))
            yield left, right, token
            done = position = right

    def _longest(self, text: str, start: int, trusted_to: int) -> Added | None:
        for key in (text[start : start + 2], text[start]):
            for length in self._lengths.get(key, ()):
                token = self._by_text.get(text[start : start + length])
                if token is not None and (not token.control or start + length <= trusted_to):
                    return token
        return None

    def _merge(self, text: str, after: str) -> list[int]:
        """Ids of text without added tokens. after: what stands before it: `start`, a `control` or another `added` token, or `prefixed`."""
        where = self._vocabulary.space_prefix
        if where == "control" and after in ("start", "control"):
            # SentencePiece itself: the blank comes first, then user-defined pieces are looked for
            text = " " + text
            return self._split(text, [(text, False)], "prefixed")
        if where == "added" and after in ("start", "control", "added"):
            text = " " + text
        return self._run(text, self._library if after == "start" else self._tail_library())

    def _run(self, text: str, library: Merging) -> list[int]:
        if isinstance(library, SentencePieces):  # parts of a text that is normalized are not normalized again
            return self._without_markers(guarded(lambda: library.normalize(text), "the text cannot be encoded"), library, lambda: library)
        return self._without_markers(text, library, self._tail_library)

    def _without_markers(self, text: str, first: Merging, tail: Callable[[], Merging]) -> list[int]:
        """Ids of which none is a special token, where a vocabulary has merges that spell one: the text is cut inside each such token, so that it
        stays text, until no part has any. first: encodes what the text begins with; tail: gives what encodes the parts behind a cut."""
        ids: list[int] = []
        parts = [(text, first)]  # to be encoded, the next one last
        while parts:
            part, library = parts.pop()
            encoding = _encoded(part, library)
            found: list[int] = encoding.ids
            if self._control_ids.isdisjoint(found):
                ids += found
                continue
            cuts = []
            for index, (start, end) in zip(found, encoding.offsets, strict=True):
                if index in self._control_ids:
                    if end - start < 2:
                        raise InvalidRequest(
                            f"the tokenizer reads {part[start:end]!r} as the special token {self._pieces[index]!r}.",
                            who="prompt",
                            fix="remove the character",
                        )
                    cuts.append(start + 1)
            behind = tail()
            edges = [*sorted(set(cuts)), len(part)]
            parts += [(part[a:b], behind) for a, b in reversed([*pairwise(edges)])]
            parts.append((part[: edges[0]], library))
        return ids

    def _tail_library(self) -> Merging:
        if self._vocabulary.tail is None:
            return self._library
        if self._tail is None:
            self._tail = self._vocabulary.tail()
        return self._tail

    def _continued_library(self) -> Merging:
        if self._vocabulary.continued is None:
            return self._tail_library()
        if self._continued is None:
            self._continued = self._vocabulary.continued()
        return self._continued

    # decoding ----------------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special: bool, continued: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD.

        continued: True reads the ids as the continuation of a prompt (every blank is kept); False as a whole text, whose
        leading blank SentencePiece has put there and takes away again. Raises InvalidRequest for ids outside the vocabulary.
        """
        text = b"".join(self.decode_bytes(index, skip_special=skip_special) for index in ids).decode("utf-8", "replace")
        if not continued and self._vocabulary.strips_space and text.startswith(" "):
            return text[1:]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; empty for special tokens."""
        return self.decode_bytes(token_id, skip_special=True)

    def decode_bytes(self, token_id: int, *, skip_special: bool) -> bytes:
        """As `token_bytes`; without skip_special a special token gives its own text."""
        if skip_special and token_id in self.special_ids:
            return b""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        piece = self.id_to_piece(token_id)
        if token_id in self._vocabulary.byte_ids:
            return bytes([self._vocabulary.byte_ids[token_id]])
        if not self._vocabulary.byte_level:
            return piece.replace("▁", " ").encode("utf-8", "replace")
        added = self._by_text.get(piece)
        if (added is None or added.id != token_id) and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        return piece.encode("utf-8", "replace")

    def id_to_piece(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token (`Ġthe`, `▁the`, `<|im_end|>`). Raises InvalidRequest outside the vocabulary."""
        if isinstance(token_id, bool) or not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside the vocabulary; ids run from 0 to {self.vocab_size - 1:,}.", who="token ids"
            )
        return self._pieces[token_id]

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a vocabulary entry, or None. Searches all of them: for special tokens there is `special_texts`."""
        return self._pieces.number(piece)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start:,}.",
            who="text",
            why="it is half of a character, so no UTF-8 exists for it",
            fix="send complete characters",
        ) from None
