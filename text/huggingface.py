"""Reader of Hugging Face tokenizer.json (with tokenizer_config.json, special_tokens_map.json and generation_config.json).

The `tokenizers` library runs the file as it is, so ids are those of the reference by construction. What this reader adds is
what the library does not say: which ids exist, which texts are markers that only a template may write, which ids end an
answer, and what is put before a prompt. Called by `Tokenizer.from_tokenizer_json`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import tokenizers

from fastllm.core.errors import TokenizerError, UnsupportedError

from .vocabulary import BYTE_PIECE, MAX_PIECE_CHARS, MAX_TOKENS, Added, Vocabulary, bad, end_ids, get_bool, get_id, guarded

__all__ = ["read_tokenizer_json"]

MAX_JSON_BYTES: Final = 256 << 20

# Role and tool markers are often added tokens that are not flagged special (DeepSeek's <｜User｜>, Qwen's <tool_call>). In
# client text they are text all the same.
_MARKER: Final = re.compile(
    r"<[|｜].*[|｜]>|<[|｜].*>|<.*[|｜]>|\[/?[A-Z_]{3,}\]|</?(?:start_of_turn|end_of_turn|think|thinking|tool_call|tool_calls|tool_response"
    r"|tools|function|function_calls|arg_key|arg_value|s|bos|eos|pad|unk|mask|answer|minimax:tool_call)>|◁.*▷",
    re.DOTALL,
)


def read_tokenizer_json(
    data: bytes,
    config: Mapping[str, Any] | None = None,
    special_tokens_map: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Vocabulary:
    """Build the vocabulary of a tokenizer.json. Raises TokenizerError naming the key, UnsupportedError for other model kinds."""
    config, special_tokens_map, generation_config = config or {}, special_tokens_map or {}, generation_config or {}
    document = _parse(data)
    model = document.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind not in ("BPE", "Unigram"):
        raise UnsupportedError(
            f"tokenizer.json has model type {kind!r}; known: BPE, Unigram.",
            who="model.type",
            why="WordPiece and word-level vocabularies are not supported",
        )
    table = _model_table(model, kind)
    added = _added_tokens(document)
    pieces, ids = _number(table, added)
    library = guarded(lambda: tokenizers.Tokenizer.from_str(data.decode("utf-8")), "tokenizer.json cannot be used")
    markers = [entry for entry in added if entry["special"] or _MARKER.fullmatch(entry["content"])]
    _prepare(library, markers)

    byte_level = _is_byte_level(document)
    vocabulary = Vocabulary(
        pieces=pieces,
        library=library,
        byte_level=byte_level,
        added=[Added(e["content"], e["id"], True, e["lstrip"], e["rstrip"]) for e in markers],
        special_ids=frozenset(e["id"] for e in added if e["special"]),
        byte_ids={} if byte_level else {i: int(m[1], 16) for i, p in enumerate(pieces) if (m := BYTE_PIECE.match(p))},
        strips_space=_strips_space(document.get("decoder")),
        tail=_tail_builder(document, markers),
        continued=_continued_builder(document, markers),
    )
    _name_ids(vocabulary, ids, document, config, special_tokens_map, generation_config)
    return vocabulary


def _parse(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_JSON_BYTES:
        raise bad("tokenizer.json", f"{len(data):,} bytes", f"at most {MAX_JSON_BYTES:,} are read")
    if data.startswith(b"version https://git-lfs"):
        raise bad("tokenizer.json", "a Git-LFS pointer", "the file itself is needed", "run `git lfs pull`")
    try:
        document = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise bad("tokenizer.json", f"byte {error.start:,}", "it must be UTF-8") from None
    except json.JSONDecodeError as error:
        raise bad("tokenizer.json", f"{error.msg} at character {error.pos:,}", "it must be JSON") from None
    except (RecursionError, ValueError) as error:
        raise bad("tokenizer.json", str(error)[:80], "it must be JSON of sane depth and numbers") from None
    if not isinstance(document, dict):
        raise bad("tokenizer.json", type(document).__name__, "it must be an object")
    return document


def _model_table(model: Mapping[str, Any], kind: str) -> dict[str, int]:
    vocab = model.get("vocab")
    if kind == "BPE":
        if not isinstance(vocab, dict) or not vocab:
            raise bad("model.vocab", type(vocab).__name__, "it must be a non-empty object of token ids")
        if len(vocab) > MAX_TOKENS:
            raise bad("model.vocab", len(vocab), f"at most {MAX_TOKENS:,} tokens are read")
        for piece, index in vocab.items():
            if type(index) is not int or not 0 <= index < MAX_TOKENS or len(piece) > MAX_PIECE_CHARS:
                raise bad(f"model.vocab[{piece[:40]!r}]", index, f"ids run from 0 to {MAX_TOKENS - 1:,}")
        return vocab
    if not isinstance(vocab, list) or not 0 < len(vocab) <= MAX_TOKENS:
        raise bad("model.vocab", type(vocab).__name__, f"it must be a list of 1 to {MAX_TOKENS:,} pieces")
    for index, entry in enumerate(vocab):
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str) or len(entry[0]) > MAX_PIECE_CHARS:
            raise bad(f"model.vocab[{index}]", entry, "each piece is [text, score]")
    return {entry[0]: index for index, entry in enumerate(vocab)}


def _added_tokens(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = document.get("added_tokens") or []
    if not isinstance(entries, list) or len(entries) > MAX_TOKENS:
        raise bad("added_tokens", type(entries).__name__, "it must be a list")
    result = []
    for index, entry in enumerate(entries):
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text or type(entry.get("id")) is not int or not 0 <= entry["id"] < MAX_TOKENS:
            raise bad(f"added_tokens[{index}]", entry, f"it needs a content and an id from 0 to {MAX_TOKENS - 1:,}")
        flags = {name: entry.get(name, False) is True for name in ("special", "lstrip", "rstrip")}
        result.append({"content": text, "id": entry["id"], **flags})
    return result


def _number(table: Mapping[str, int], added: list[dict[str, Any]]) -> tuple[list[str], dict[str, int]]:
    """pieces by id (an added token's text wins over the model's) and ids by piece; raises on gaps and on a doubled id."""
    ids = dict(table) | {entry["content"]: entry["id"] for entry in added}
    size = max(ids.values()) + 1
    slots: list[str | None] = [None] * size
    for piece, index in table.items():
        if slots[index] is not None:
            raise bad(f"model.vocab[{piece[:40]!r}]", index, f"the id is that of {slots[index]!r} as well")
        slots[index] = piece
    for entry in added:
        slots[entry["id"]] = entry["content"]
    pieces = [piece for piece in slots if piece is not None]
    if len(pieces) != size:
        raise bad("model.vocab", slots.index(None), f"no token has this id, though ids run to {size - 1:,}")
    return pieces, ids


def _prepare(library: tokenizers.Tokenizer, markers: list[dict[str, Any]]) -> None:
    library.no_truncation()
    library.no_padding()
    # Tokens marked special here are not looked for by the library any more; Tokenizer finds them, in trusted text only.
    library.add_special_tokens([tokenizers.AddedToken(entry["content"], special=True, normalized=False) for entry in markers])
    library.encode_special_tokens = True


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The members of a normalizer, pre-tokenizer, decoder or post-processor, sequences opened."""
    if not isinstance(part, dict):
        return
    members = next((part[key] for key in ("pretokenizers", "normalizers", "decoders", "processors") if key in part), None)
    if isinstance(members, list):
        for member in members:
            yield from _steps(member)
    else:
        yield part


def _is_byte_level(document: Mapping[str, Any]) -> bool:
    decoder = [step.get("type") for step in _steps(document.get("decoder"))]
    splitter = [step.get("type") for step in _steps(document.get("pre_tokenizer"))]
    if "ByteLevel" in decoder or (not decoder and "ByteLevel" in splitter):
        return True
    if {"Metaspace", "ByteFallback", "Replace"} & set(decoder) or (not decoder and "Metaspace" in splitter):
        return False
    raise UnsupportedError(
        f"tokenizer.json has decoder {decoder}; known: ByteLevel, Metaspace, Replace with ByteFallback.",
        who="decoder",
        why="it decides which bytes a token stands for",
    )


def _strips_space(decoder: Any) -> bool:
    for step in _steps(decoder):
        if step.get("type") == "Metaspace":
            return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space") is not False
        if step.get("type") == "Strip" and step.get("content") == " " and step.get("start"):
            return True
    return False


def _tail_builder(document: dict[str, Any], markers: list[dict[str, Any]]) -> Callable[[], tokenizers.Tokenizer] | None:
    """For `prepend_scheme: first`: a second object without the blank, for text behind a marker (it is not at the start)."""
    return _builder(document, markers, lambda step: step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first")


def _continued_builder(document: dict[str, Any], markers: list[dict[str, Any]]) -> Callable[[], tokenizers.Tokenizer] | None:
    """Where the library puts a blank in front of text: a second object that never does."""
    return _builder(document, markers, _puts_blank)


def _puts_blank(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space") is not False
    return kind == "Prepend" or (kind == "ByteLevel" and step.get("add_prefix_space", True) is True)


def _builder(
    document: dict[str, Any], markers: list[dict[str, Any]], wanted: Callable[[Mapping[str, Any]], bool]
) -> Callable[[], tokenizers.Tokenizer] | None:
    """Makes the library object of a document whose wanted steps put no blank in front; None if there are none."""
    copied = {key: copy.deepcopy(document[key]) for key in ("normalizer", "pre_tokenizer") if key in document}
    found = [step for part in copied.values() for step in _steps(part) if wanted(step)]
    if not found:
        return None
    for step in found:
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        if step["type"] == "Prepend":
            step["prepend"] = ""
        elif step["type"] == "ByteLevel" or "add_prefix_space" in step:
            step["add_prefix_space"] = False

    def build() -> tokenizers.Tokenizer:
        text = json.dumps({**document, **copied})
        library = guarded(lambda: tokenizers.Tokenizer.from_str(text), "tokenizer.json cannot be used")
        _prepare(library, markers)
        return library

    return build


def _text_of(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _name_ids(
    vocabulary: Vocabulary,
    ids: Mapping[str, int],
    document: Mapping[str, Any],
    config: Mapping[str, Any],
    special_tokens_map: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> None:
    size = len(vocabulary.pieces)
    named: dict[str, int | None] = {}
    for name in ("bos", "eos", "unk"):
        text = _text_of(config.get(f"{name}_token")) or _text_of(special_tokens_map.get(f"{name}_token"))
        if text is not None and text not in ids:
            raise bad(f"{name}_token", text, "it is not in the vocabulary")
        named[name] = None if text is None else ids[text]
    model = document["model"]
    unknown = model.get("unk_token") if model.get("type") != "Unigram" else None
    vocabulary.unk_id = ids.get(unknown, named["unk"]) if isinstance(unknown, str) else named["unk"]
    if model.get("type") == "Unigram":
        vocabulary.unk_id = get_id(model, "unk_id", size)
    given = generation_config.get("eos_token_id")
    given = given if isinstance(given, list) else [given]
    ends = [get_id({"eos_token_id": value}, "eos_token_id", size) for value in given]
    bos = named["bos"] if named["bos"] is not None else get_id(generation_config, "bos_token_id", size)
    vocabulary.bos_id = bos
    vocabulary.eos_id = named["eos"] if named["eos"] is not None else next((value for value in ends if value is not None), None)
    vocabulary.end_ids = end_ids(vocabulary.pieces, ids, (vocabulary.eos_id, *ends))
    prefix, suffix = _around(document.get("post_processor"), size)
    add_bos = get_bool(config, "add_bos_token", bos is not None and bos in prefix)
    if add_bos and bos is None:
        raise TokenizerError("add_bos_token is true but bos_token is missing.", who="bos_token", fix="complete tokenizer_config.json")
    if add_bos and bos is not None and bos not in prefix:
        prefix = (bos, *prefix)
    elif not add_bos:
        prefix = tuple(value for value in prefix if value != bos)
    eos = vocabulary.eos_id
    if eos is not None and "add_eos_token" in config:
        suffix = tuple(v for v in suffix if v != eos) + ((eos,) if get_bool(config, "add_eos_token", False) else ())
    vocabulary.prefix_ids, vocabulary.suffix_ids = prefix, suffix


def _around(part: Any, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids a post-processor puts before and after one text."""
    before: list[int] = []
    after: list[int] = []
    for step in _steps(part):
        if step.get("type") == "TemplateProcessing":
            target = before
            table = step.get("special_tokens")
            for item in step.get("single") or []:
                if isinstance(item, dict) and "Sequence" in item:
                    target = after
                elif isinstance(item, dict) and isinstance(item.get("SpecialToken"), dict) and isinstance(table, dict):
                    entry = table.get(item["SpecialToken"].get("id"))
                    values = entry.get("ids") if isinstance(entry, dict) else None
                    for value in values if isinstance(values, list) else []:
                        target.append(get_id({"id": value}, "id", size) or 0)
        elif step.get("type") in ("BertProcessing", "RobertaProcessing"):
            for name, target in (("cls", before), ("sep", after)):
                pair = step.get(name)
                if isinstance(pair, list) and len(pair) == 2:
                    target.append(get_id({name: pair[1]}, name, size) or 0)
    return tuple(before), tuple(after)
