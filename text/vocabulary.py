"""From a model's files to one neutral `Vocabulary`: pieces, kinds of tokens, and the object that merges.

Three sources are read: GGUF metadata (`read_gguf_vocabulary`), SentencePiece models (`read_sentencepiece_vocabulary`) and
Hugging Face's tokenizer.json (in `huggingface.py`). Everything is checked here, once: hostile or inconsistent files end in a
TokenizerError that names key and value, never in another tokenizer. `tokenizer.py` holds the behaviour on top.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, Final, Literal, TypeVar

import numpy as np
import tokenizers
from tokenizers import Regex, models, normalizers

from fastllm.core.errors import FastLLMError, TokenizerError, UnsupportedError

from .pieces import Pieces
from .pretokenizers import PreRule, build_pre_tokenizer, find_rule
from .sentence_pieces import SentencePieces
from .sentencepiece import SentencePieceModel, parse_sentencepiece

__all__ = ["Added", "Vocabulary", "read_gguf_vocabulary", "read_sentencepiece_vocabulary"]

MAX_TOKENS: Final = 4_000_000
MAX_MERGES: Final = 16_000_000
MAX_PIECE_CHARS: Final = 65_536
MAX_BYTES: Final = 1 << 31  # of all pieces

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

# Texts that end a turn or an answer in public models; a token of this text stops generation whatever the metadata says.
END_TEXTS: Final = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> _<EOT> "
    "[EOT] [EOS] <|end_of_text|> <end_of_utterance> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ <|eot|> <|eom|>".split()
)

T = TypeVar("T")


@dataclass(frozen=True)
class Added:
    """A text that is one token wherever it is recognised, before any merging.

    control: recognised in trusted text only (a template's markers); otherwise in any text (white space runs, HTML tags).
    lstrip, rstrip: white space before or after belongs to the token.
    """

    text: str
    id: int
    control: bool = True
    lstrip: bool = False
    rstrip: bool = False


@dataclass
class Vocabulary:
    """What `Tokenizer` runs on. library: the object that merges plain text, of the `tokenizers` library or our own; it adds nothing. special_ids: hidden by `decode`.

    escaped: added tokens are looked for in text whose blanks are written "▁", as SentencePiece does.
    space_prefix: where "▁" is put before text: `never` (or the library does it itself), at the start and after `control`
    tokens (SentencePiece), or at the start and after every `added` token (llama.cpp). tail: builds the library object for text that does not
    start the prompt, where that differs. continued: the same for text in the middle of other text, where that differs from `tail`.
    """

    pieces: Sequence[str]
    library: tokenizers.Tokenizer | SentencePieces
    byte_level: bool
    added: list[Added]
    special_ids: frozenset[int]
    byte_ids: Mapping[int, int] = field(default_factory=dict)
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    end_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    space_prefix: Literal["never", "control", "added"] = "never"
    strips_space: bool = False
    escaped: bool = False
    tail: Callable[[], tokenizers.Tokenizer | SentencePieces] | None = None
    continued: Callable[[], tokenizers.Tokenizer | SentencePieces] | None = None


# typed getters ---------------------------------------------------------------------------------------------------------


def bad(key: str, found: object, rule: str, fix: str = "") -> TokenizerError:
    """The error for a vocabulary value: names the key, what was found (cut to 80 characters) and the rule it breaks."""
    shown = repr(found)
    shown = shown if len(shown) <= 80 else shown[:77] + "…"
    default = "download the model again, or convert it again with a current converter"
    return TokenizerError(f"{key} is {shown}; {rule}.", who=key, why="the vocabulary is inconsistent", fix=fix or default)


def guarded(action: Callable[[], T], what: str) -> T:
    """Run a call of the tokenizers library; its exceptions and Rust panics become one TokenizerError."""
    try:
        return action()
    except (KeyboardInterrupt, SystemExit, MemoryError, FastLLMError):
        raise
    except BaseException as error:  # a Rust panic arrives as PanicException, which is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"{what}: {reason}.", who="tokenizer", fix="download the tokenizer files again") from None


def get_id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    """A token id below `size`, or None where the key is absent."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise bad(key, value, "it must be an integer")
    if not 0 <= int(value) < size:
        raise bad(key, int(value), f"token ids run from 0 to {size - 1:,}")
    return int(value)


def get_bool(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean, or the default where the key is absent."""
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, (bool, np.bool_)):
        raise bad(key, value, "it must be true or false")
    return bool(value)


def get_strings(metadata: Mapping[str, Any], key: str, limit: int) -> Sequence[str]:
    """A sequence of at most `limit` strings of sane length; required."""
    value = metadata.get(key)
    if value is None:
        raise bad(key, value, "the key is required")
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or len(value) == 0:
        raise bad(key, value, "it must be a non-empty list of strings")
    if len(value) > limit:
        raise bad(key, len(value), f"at most {limit:,} entries are read")
    if hasattr(value, "utf8"):  # the reader's, which are strings; as long in bytes as in characters at least
        pieces = Pieces(value)
        for index in np.flatnonzero(np.diff(pieces.ends) > MAX_PIECE_CHARS).tolist():
            if len(pieces[index]) > MAX_PIECE_CHARS:
                raise bad(f"{key}[{index}]", pieces[index], f"it must be a string of at most {MAX_PIECE_CHARS:,} characters")
        return value
    if {*map(type, value)} != {str} or max(map(len, value)) > MAX_PIECE_CHARS:
        index, item = next((i, v) for i, v in enumerate(value) if type(v) is not str or len(v) > MAX_PIECE_CHARS)
        raise bad(f"{key}[{index}]", item, f"it must be a string of at most {MAX_PIECE_CHARS:,} characters")
    return list(value)


def get_numbers(metadata: Mapping[str, Any], key: str, size: int, kinds: str) -> np.ndarray | None:
    """A list of exactly `size` finite numbers as an array; kinds: accepted numpy dtype kinds, `iu` or `iuf`."""
    value = metadata.get(key)
    if value is None:
        return None
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        raise bad(key, value, "it must be a list of numbers") from None
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise bad(key, value, "it must be a list of numbers")
    if len(array) != size:
        raise bad(key, len(array), f"it must have one entry for each of the {size:,} tokens")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise bad(f"{key}[{int(np.flatnonzero(~np.isfinite(array))[0])}]", "not a finite number", "scores must be finite")
    return array


def index_pieces(pieces: Sequence[str], key: str) -> dict[str, int]:
    """piece → id; raises on a text that stands for two ids."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        first = next(index for index, piece in enumerate(pieces) if ids[piece] != index)
        raise _doubled(key, first, ids[pieces[first]], pieces[first])
    return ids


def _doubled(key: str, index: int, other: int, piece: str) -> TokenizerError:
    return bad(f"{key}[{index}]", piece, f"the same text is token {other} as well")


def end_ids(pieces: Sequence[str], ids: Mapping[str, int] | SentencePieces, known: Iterable[int | None]) -> frozenset[int]:
    """All ids that end an answer: those given by the metadata and those whose text is a well-known end marker."""
    found = {value for value in known if value is not None}
    given = frozenset(found)
    found |= {ids[text] for text in END_TEXTS if text in ids}
    texts = {pieces[value] for value in found}
    # harmony and solar: `<|end|>` only closes one message of an answer
    if {"<|return|>", "<|call|>"} <= texts or {"<|flush|>", "<|calls|>"} <= texts:
        found -= {ids["<|end|>"]} - given if "<|end|>" in ids else set()
    if not found:
        raise TokenizerError(
            "the tokenizer names no end token, so an answer could never end.",
            who="eos_token_id",
            why="neither its files nor any well-known text (<|im_end|>, </s>, …) gives one",
            fix="add eos_token to tokenizer_config.json or eos_token_id to generation_config.json",
        )
    return frozenset(found)


# GGUF --------------------------------------------------------------------------------------------------------------------


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a GGUF file from its `tokenizer.*` keys (plain Python values, lists or numpy arrays).

    Raises TokenizerError for damaged or inconsistent values, UnsupportedError for kinds and split rules we do not know.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise bad("tokenizer.ggml.model", None, "the key is required", "the file holds no tokenizer: use a file that was converted with its tokenizer")
    if kind not in ("llama", "gpt2"):
        raise UnsupportedError(
            f"tokenizer.ggml.model is {kind!r}; known: llama (SentencePiece BPE), gpt2 (byte-level BPE).",
            who="tokenizer.ggml.model",
            why="WordPiece (bert), Unigram (t5) and the other kinds are not read from GGUF files",
            fix="use the model's Hugging Face folder with tokenizer.json",
        )
    prefix = "tokenizer.ggml."
    pieces = get_strings(metadata, prefix + "tokens", MAX_TOKENS)
    size = len(pieces)
    types = get_numbers(metadata, prefix + "token_type", size, "iu")
    if types is None:
        types = np.ones(size, np.int32)
    if not ((types >= 0) & (types <= BYTE)).all():
        first = int(np.flatnonzero((types < 0) | (types > BYTE))[0])
        raise bad(f"{prefix}token_type[{first}]", int(types[first]), "token types run from 1 to 6")
    ids: Mapping[str, int] | SentencePieces
    if kind == "llama":
        scores = get_numbers(metadata, prefix + "scores", size, "iuf")
        if scores is None:
            raise bad(prefix + "scores", None, "the key is required for this kind")
        vocabulary, ids = _metaspace_bpe(pieces, types, scores, prefix + "tokens")
        default_ids: tuple[int | None, ...] = (1, 2, 0)
        add_space, add_bos = get_bool(metadata, prefix + "add_space_prefix", True), True
        vocabulary.space_prefix, vocabulary.strips_space = ("added" if add_space else "never"), add_space
    else:
        rule = find_rule(metadata.get(prefix + "pre"))
        ids = table = index_pieces(pieces, prefix + "tokens")
        vocabulary = _byte_level_bpe(pieces, table, get_strings(metadata, prefix + "merges", MAX_MERGES), rule, types)
        add_bos, default_ids = rule.add_bos, (None, None, None)
    named = {name: get_id(metadata, f"{prefix}{name}_token_id", size) for name in ("bos", "eos", "eot", "eom", "unknown")}
    for name, default in zip(("bos", "eos", "unknown"), default_ids, strict=True):
        if named[name] is None and default is not None and default < size and types[default] in (UNKNOWN, CONTROL):
            named[name] = default  # SentencePiece's own numbering: the converter leaves these keys out when they hold
    vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id = named["bos"], named["eos"], named["unknown"]
    vocabulary.end_ids = end_ids(pieces, ids, (named["eos"], named["eot"], named["eom"]))
    vocabulary.special_ids |= vocabulary.end_ids
    known = {added.id for added in vocabulary.added if added.control}
    vocabulary.added = [added for added in vocabulary.added if added.id not in vocabulary.end_ids or added.control]
    vocabulary.added += [Added(pieces[i], i) for i in sorted(vocabulary.end_ids - known) if pieces[i]]
    for key, value, default_on in (("bos", named["bos"], add_bos), ("eos", named["eos"], False)):
        if get_bool(metadata, f"{prefix}add_{key}_token", default_on and value is not None):
            if value is None:
                raise bad(f"{prefix}{key}_token_id", None, f"add_{key}_token is true, so the id is required")
            if key == "bos":
                vocabulary.prefix_ids = (value,)
            else:
                vocabulary.suffix_ids = (value,)
    return vocabulary


def _added_by_type(pieces: Sequence[str], types: np.ndarray) -> tuple[list[Added], frozenset[int]]:
    special = np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist()
    added = [Added(pieces[i], i) for i in special if pieces[i]]
    added += [Added(pieces[i], i, control=False) for i in np.flatnonzero(types == USER_DEFINED).tolist() if pieces[i]]
    return added, frozenset(special)


def _byte_level_bpe(pieces: Sequence[str], ids: dict[str, int], merges: Sequence[str], rule: PreRule, types: np.ndarray) -> Vocabulary:
    merges = list(merges)
    cuts = [merge.find(" ", 1) for merge in merges]  # a piece may begin with a blank, a byte-level piece never holds one inside
    lefts = [merge[:cut] for merge, cut in zip(merges, cuts, strict=True)]
    rights = [merge[cut + 1 :] for merge, cut in zip(merges, cuts, strict=True)]
    known = ids.__contains__
    if min(cuts) < 1 or not (
        all(rights) and all(map(known, lefts)) and all(map(known, rights)) and all(map(known, map(add, lefts, rights)))
    ):
        raise _bad_merge(merges, ids)
    model = guarded(
        lambda: models.BPE(ids, list(zip(lefts, rights, strict=True)), ignore_merges=rule.whole_words),
        "the merges cannot be used",
    )
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = build_pre_tokenizer(rule)
    if rule.nfc:
        library.normalizer = normalizers.NFC()
    added, special = _added_by_type(pieces, types)
    return Vocabulary(pieces, library, True, added, special)


def _bad_merge(merges: Sequence[str], ids: Mapping[str, int]) -> TokenizerError:
    """The error that names the first merge that cannot be."""
    index = next(i for i, merge in enumerate(merges) if not _is_merge(merge, ids))
    return bad(f"tokenizer.ggml.merges[{index}]", merges[index], "both parts and their union must be tokens")


def _is_merge(merge: str, ids: Mapping[str, int]) -> bool:
    head, _, right = merge[1:].partition(" ")
    left = merge[:1] + head
    return bool(right) and left in ids and right in ids and left + right in ids


# SentencePiece -------------------------------------------------------------------------------------------------------------


def _metaspace_bpe(pieces: Sequence[str], types: np.ndarray, scores: np.ndarray, key: str) -> tuple[Vocabulary, SentencePieces]:
    """SentencePiece BPE: of all neighbouring pairs whose union is a piece, the one of best score is merged first. Pieces that are no text take no
    part in it. The second result finds ids by their piece. key: what names the pieces in an error."""
    pieces = Pieces(pieces)
    if len(pieces.block) >= MAX_BYTES:
        raise bad(key, len(pieces.block), f"all pieces together have less than {MAX_BYTES:,} bytes")
    byte_ids = {}
    for index in np.flatnonzero(types == BYTE).tolist():
        match = BYTE_PIECE.match(pieces[index])
        if not match:
            raise bad(f"tokens[{index}]", pieces[index], "a byte token is written <0x00> to <0xFF>")
        byte_ids[index] = int(match[1], 16)
    byte_pieces = np.full(256, -1, np.int32)
    byte_pieces[list(byte_ids.values())] = list(byte_ids)
    if byte_ids and (len(byte_ids) != 256 or (byte_pieces < 0).any()):
        missing = ", ".join(f"<0x{byte:02X}>" for byte in np.flatnonzero(byte_pieces < 0)[:3].tolist())
        hint = f"missing: {missing}" if missing else "some are doubled"
        raise bad(f"the number of byte tokens in {key}", len(byte_ids), f"there are none, or one for each of the 256 bytes; {hint}")
    unknown = next(iter(np.flatnonzero(types == UNKNOWN).tolist()), None)
    places = np.empty(len(pieces), np.int32)
    places[np.argsort(-scores.astype(np.float64), kind="stable")] = np.arange(len(pieces), dtype=np.int32)
    places[(types != NORMAL) & (types != UNUSED) & (types != 0)] = -1
    merging = SentencePieces(pieces, places, byte_pieces, unknown)
    if merging.doubled is not None:
        raise _doubled(key, *merging.doubled, pieces[merging.doubled[0]])
    added, special = _added_by_type(pieces, types)
    return Vocabulary(pieces, merging, False, added, special, byte_ids=byte_ids, unk_id=unknown, escaped=True), merging


def read_sentencepiece_vocabulary(
    data: bytes, config: Mapping[str, Any] | None = None
) -> Vocabulary:
    """The vocabulary of a `tokenizer.model`; config: the folder's tokenizer_config.json (BOS and EOS rules, added tokens)."""
    config = config or {}
    model = parse_sentencepiece(data)
    pieces, types = list(model.pieces), np.array(model.types, np.int32)
    _add_configured(pieces, types_list := types.tolist(), model.scores, config)
    types, scores = np.array(types_list, np.int32), np.array(model.scores, np.float64)
    size = len(pieces)
    if not model.escape_whitespaces:
        raise UnsupportedError("tokenizer.model keeps blanks unescaped, which is not supported.", who="tokenizer.model")
    ids: Mapping[str, int] | SentencePieces
    if model.unigram:
        vocabulary, ids = _unigram(model, pieces, types, scores)
    else:
        vocabulary, ids = _metaspace_bpe(pieces, types, scores, "pieces")
    # SentencePiece looks for user-defined pieces in text whose blanks are escaped: one spelt with a blank never occurs.
    vocabulary.added = [added for added in vocabulary.added if added.control or " " not in added.text]
    table: list[Any] = []
    if model.charsmap:
        table.append(guarded(lambda: normalizers.Precompiled(model.charsmap), "the normalizer table is damaged"))
    steps = list(table)
    if model.remove_extra_whitespaces:
        # runs first: trimmed as runs, every blank inside of one would begin a search for the end of the text
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    steps.append(normalizers.Replace(" ", "▁"))
    library = vocabulary.library
    vocabulary.strips_space = model.add_dummy_prefix
    if model.remove_extra_whitespaces and model.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))  # after the trimming, which would remove a blank put there by us
        vocabulary.tail = lambda: _normalized(library, [*table, normalizers.Replace(" ", "▁")])  # behind a marker no blank is put in front
    elif model.add_dummy_prefix:
        vocabulary.space_prefix = "control"
    vocabulary.library = _normalized(library, steps)
    vocabulary.bos_id = model.bos_id if 0 <= model.bos_id < size else None
    vocabulary.eos_id = model.eos_id if 0 <= model.eos_id < size else None
    vocabulary.unk_id = model.unk_id
    vocabulary.end_ids = end_ids(pieces, ids, (vocabulary.eos_id,))
    vocabulary.special_ids |= vocabulary.end_ids
    if vocabulary.bos_id is not None and get_bool(config, "add_bos_token", not model.unigram):
        vocabulary.prefix_ids = (vocabulary.bos_id,)
    if vocabulary.eos_id is not None and get_bool(config, "add_eos_token", False):
        vocabulary.suffix_ids = (vocabulary.eos_id,)
    return vocabulary


def _unigram(model: SentencePieceModel, pieces: list[str], types: np.ndarray, scores: np.ndarray) -> tuple[Vocabulary, dict[str, int]]:
    """SentencePiece's unigram model, merged by the library; and ids by their piece."""
    ids = index_pieces(pieces, "pieces")
    byte_ids = {i: int(pieces[i][3:5], 16) for i in np.flatnonzero(types == BYTE).tolist() if BYTE_PIECE.match(pieces[i])}
    if not 0 <= model.unk_id < len(model.types):
        raise bad("unk_id", model.unk_id, f"token ids run from 0 to {len(pieces) - 1:,}")
    # Control pieces never come out of text: here they are spelt with a code point that is no character.
    hidden = (UNKNOWN, CONTROL)
    spelt = [f"\ufdd0{i}" if kind in hidden else piece for i, (piece, kind) in enumerate(zip(pieces, types, strict=True))]
    entries = list(zip(spelt, scores.tolist(), strict=True))
    unigram = guarded(lambda: models.Unigram(entries, model.unk_id, byte_fallback=bool(byte_ids)), "the pieces cannot be used")
    added, special = _added_by_type(pieces, types)
    return Vocabulary(pieces, tokenizers.Tokenizer(unigram), False, added, special, byte_ids=byte_ids, escaped=True), ids


def _normalized(library: tokenizers.Tokenizer | SentencePieces, steps: list[Any]) -> tokenizers.Tokenizer | SentencePieces:
    """The same pieces behind these steps, one after the other."""
    sequence = normalizers.Sequence(steps)
    if isinstance(library, SentencePieces):
        return library.normalized_by(sequence.normalize_str)
    made = tokenizers.Tokenizer(library.model)
    made.normalizer = sequence
    return made


def _add_configured(pieces: list[str], types: list[int], scores: list[float], config: Mapping[str, Any]) -> None:
    """Apply `added_tokens_decoder`: texts for ids in or just behind the model's table."""
    entries = config.get("added_tokens_decoder")
    if entries is None:
        return
    if not isinstance(entries, Mapping) or not all(isinstance(key, str) and key.isdecimal() for key in entries):
        raise bad("added_tokens_decoder", entries, "it must map ids to tokens")
    for key in sorted(entries, key=int):
        entry, index = entries[key], int(key)
        text = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(text, str) or index > len(pieces):
            raise bad(f"added_tokens_decoder[{key}]", entry, f"it must name a text, and ids must follow {len(pieces) - 1:,} without gap")
        kind = CONTROL if entry.get("special") else USER_DEFINED
        if index == len(pieces):
            pieces.append(text)
            types.append(kind)
            scores.append(0.0)
        elif pieces[index] != text or types[index] not in (UNKNOWN, CONTROL):
            pieces[index], types[index] = text, kind


