"""Vocabularies that cannot write everything: a grammar is refused when it is compiled, or no answer comes to a point where no token goes on."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers as hf

from fastllm.core.errors import EngineError, InvalidRequest, InvalidSchema
from fastllm.text import Tokenizer
from fastllm.text._matcher import Matcher
from fastllm.text.grammar import GrammarCompiler
from fastllm.text.spelling import Alphabet, is_whole, unspelled
from tests.interface.conftest import byte_tokenizer
from tests.text.test_grammar import panic, tokenizer_with_a_blank_first

SETTINGS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
ENDS = {"const": "日本"}


def letters_and_words():
    """Characters and words as pieces: 日本 is one, 日 is none."""
    pieces = ["<unk>", "<|im_start|>", "<|im_end|>", "▁", *map(chr, range(33, 127)), "é", "日本", "本"]
    library = hf.Tokenizer(hf.models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    library.decoder = hf.decoders.Replace("▁", " ")
    library.add_special_tokens([hf.AddedToken(s, special=True, normalized=False) for s in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer.from_tokenizer_json(library.to_str().encode(), SETTINGS)


def few_bytes():
    """Of a byte-level vocabulary that was made of English text: other bytes are in one merged piece each, and half of a character is a token."""
    library = byte_tokenizer()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    ascii_ = [letter for letter in alphabet if letter in map(chr, range(33, 127)) or letter == "Ġ"]
    spelled = lambda text: library.pre_tokenizer.pre_tokenize_str(text)[0][0].removeprefix("Ġ")  # noqa: E731
    half = spelled("日")[:2]
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "<|im_start|>", "<|im_end|>", *ascii_, half])}
    made = hf.Tokenizer(hf.models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    made.add_special_tokens([hf.AddedToken(s, special=True, normalized=False) for s in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer.from_tokenizer_json(made.to_str().encode(), SETTINGS)


def all_bytes(but=()):
    """A token for each byte, but for these."""
    table = dict(zip([*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173], range(256), strict=True))
    shown = {byte: chr(byte) if i < 188 else chr(256 + i - 188) for byte, i in table.items()}
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "<|im_start|>", "<|im_end|>", *(shown[b] for b in range(256) if b not in but)])}
    made = hf.Tokenizer(hf.models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    made.add_special_tokens([hf.AddedToken(s, special=True, normalized=False) for s in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer.from_tokenizer_json(made.to_str().encode(), SETTINGS)


VOCABULARIES = {"ascii": lambda: tokenizer_with_a_blank_first("metaspace_first"), "words": letters_and_words, "few bytes": few_bytes}


def walk(tokenizer, matcher, seed, limit=300):
    """Random tokens that the grammar allows; every mask has one."""
    rng, ids = np.random.default_rng(seed), []
    for _ in range(limit):
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        assert len(allowed), "no token goes on"
        token = int(rng.choice(allowed))
        if token in tokenizer.end_ids:
            break
        ids.append(token)
        if matcher.accept(token):
            break
    return b"".join(tokenizer.decode_bytes(i, skip_special=False) for i in ids)


def nested(inner):
    """A schema whose end comes after more tokens than a grammar is tried for."""
    first = {"type": "string", "minLength": 100, "maxLength": 120, "pattern": "^[a-z]+$"}
    return {"type": "object", "properties": {"a": first, "b": inner}, "required": ["a", "b"], "additionalProperties": False}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "[a-z]{100}語"),
        ("regex", r"[a-z]{100}\u8a9e"),
        ("regex", r"[a-z]{100}\p{Cyrillic}"),
        ("regex", r"[a-z]{100}\n"),
        ("regex", "[a-z]{100}[語ß]"),
        ("regex", "[a-z]{100}[^ -~é日本]"),
        ("regex", "[a-z]{100}[^]\\x00-\\x5c\\x5e-\\x7fé日本]"),
        ("regex", r"[a-z]{100}[\p{Han}--[日本]]"),
        ("regex", r"[a-z]{100}[\x{8a9e}]"),
        ("regex", "[a-z]{100}[[:cntrl:]]"),
        ("choice", ["x" * 100 + "語"]),
        ("grammar", 'start: A "語"\nA: /[a-z]{100}/'),
        ("grammar", 'root ::= [a-z]{100} "\\u8a9e"'),
        ("json_schema", nested({"const": "語"})),
        ("json_schema", nested({"enum": ["語"]})),
        ("json_schema", nested({"type": "object", "properties": {"語": {"type": "null"}}, "required": ["語"]})),
        ("json_schema", nested({"type": "string", "pattern": "^語$"})),
        ("json_schema", nested({"$ref": "#/$defs/x"}) | {"$defs": {"x": {"const": "語"}}}),
        ("bundle", '{"grammars": [{"name": "x", "lark_grammar": "start: A %json {\\"const\\": \\"語\\"}\\nA: /[a-z]{100}/"}]}'),
    ],
)
def test_what_cannot_be_written_is_refused_however_late_it_comes(vocabulary, kind, source):
    tokenizer = VOCABULARIES[vocabulary]()
    with pytest.raises(InvalidSchema, match="no tokens that write") as caught:
        getattr(GrammarCompiler(tokenizer, tokenizer.vocab_size), kind)(source, "grammar_of_test")
    assert caught.value.fields["param"] == "grammar_of_test"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_object", None),
        ("json_schema", nested({"type": "string", "description": "語", "title": "語", "minLength": 30})),
        ("json_schema", nested({"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 5})),
        ("json_schema", nested({"type": "object", "properties": {"description": {"enum": ["a b", "\n"]}}, "required": ["description"]})),
        ("json_schema", nested({"type": "string", "format": "date-time"})),
        ("regex", r"[^x]{100}\d+[\w.]{3}(?:a|b)?\.\{\}"),
        ("grammar", 'start: (A "-")+ // 語\nA: /[^-]{1,9}/'),
    ],
)
def test_and_what_can_be_is_written(vocabulary, kind, source, seed):
    tokenizer = VOCABULARIES[vocabulary]()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = compiler.json_object() if source is None else getattr(compiler, kind)(source)
    assert is_whole(walk(tokenizer, grammar(), seed))


def test_a_piece_may_hold_letters_that_cannot_be_written_alone():
    tokenizer = letters_and_words()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    assert walk(tokenizer, compiler.regex("本é")(), 0).decode() == "本é"
    with pytest.raises(InvalidSchema, match="'日'"):
        compiler.regex("日本")


@pytest.mark.parametrize("missing", [b"\0", b"\x7f"])
def test_a_missing_control_character_takes_no_other_letter(missing):
    tokens = [bytes([b]) for b in range(256) if bytes([b]) != missing]
    alphabet = Alphabet([*tokens, "é".encode()])
    assert not alphabet.complete
    assert not alphabet.whole
    assert all(map(alphabet.has, "aé語😀\n"))
    assert not alphabet.has(missing.decode())
    assert unspelled('start: "語" /é+/', alphabet) is None
    assert "x00" in (unspelled(r'start: "\x00"', Alphabet([bytes([b]) for b in range(1, 256)])) or "")


@pytest.mark.parametrize("pattern", ["[一-龥]+", r"\p{Han}", r"\pL+\P{L}", r"[^ -~]", r"[\x00-\x05]x", "😀|é", r"\s\W."])
def test_bytes_that_spell_nearly_everything_take_no_class_away(pattern):
    """SmolLM2 has no tokens for some control characters, and for the first bytes of planes that are not assigned."""
    alphabet = Alphabet(bytes([b]) for b in range(256) if b not in (4, 6, 0x13, 0xF1, 0xF2))
    assert not alphabet.complete
    assert unspelled(f"start: /{pattern}/", alphabet) is None
    for lost in (r"[\x04\x06]", r"[\x{4}]", r"[[:cntrl:]--[\x00-\x03\x05\x07-\x12\x14-\x1f\x7f-\x{9f}]]"):
        assert unspelled(f"start: /{lost}/", alphabet) is not None
    assert unspelled(r"start: /a\x04?/", alphabet) is not None


CLASSES_OF_THE_LIBRARY = [
    r"[\p{L} ]", r"[\pL]", r"[^\P{L}]", "[^]]", "[]a]", "[[:alpha:]]", "[[:^cntrl:]]", "[a-z&&[^aeiou]]", "[a-z--[aeiou]]", "[a-z~~[a-f]]",
    r"[\x{41}-\x{5a}]", r"[\u{41}]", "[[a-z]0-9]", "[^[a]b]", "[]a]b]", "[a-z&&[^]aeiou]]", "[[]]b]", "[/]", r"[\/]", r"\p{Latin}", r"\pL",
]  # fmt: skip
WAYS = {
    "regex": lambda pattern: ("regex", f"{pattern}{{2}}"),
    "schema": lambda pattern: ("json_schema", {"type": "string", "pattern": f"^{pattern}{{2}}$"}),
    "names": lambda pattern: ("json_schema", {"type": "object", "patternProperties": {f"^{pattern}{{2}}$": {"type": "null"}}, "additionalProperties": False}),
    "lark": lambda pattern: ("grammar", f"start: A\nA: /{pattern.replace('[/', '[' + chr(92) + '/')}{{2}}/"),
}
BYTES = {"few bytes": few_bytes, "most bytes": lambda: all_bytes((4, 6, 0x13, 0xF1, 0xF2)), "all bytes": all_bytes}


@pytest.fixture(scope="module", params=BYTES)
def with_bytes(request):
    tokenizer = BYTES[request.param]()
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", CLASSES_OF_THE_LIBRARY)
def test_a_class_of_characters_is_what_the_library_reads(with_bytes, way, pattern):
    """Sets in sets, properties, named classes, a `]` in front: Python knows none, or reads them otherwise."""
    tokenizer, compiler = with_bytes
    kind, source = WAYS[way](pattern)
    assert is_whole(walk(tokenizer, getattr(compiler, kind)(source)(), 0))


@pytest.mark.parametrize("pattern", [r"[\]a]", r"[^\]\[]", r"[\x41-\x5a]"])
def test_so_is_one_of_gbnf(with_bytes, pattern):
    tokenizer, compiler = with_bytes
    assert walk(tokenizer, compiler.grammar(f'root ::= {pattern} {pattern} "."')(), 0).endswith(b".")


@pytest.mark.parametrize(("pattern", "written"), [(r"\p{L}", True), (r"\p{Nd}+", True), (r"\pN", True), (r"\p{Latin}", True), (r"\p{Han}", True), (r"\p{Cyrillic}", False), (r"\p{Lt}", False), (r"\P{L}", True), (r"[\p{L}--[a本]]", False), ("[日本]", True), ("[日旣]", False)])
def test_a_class_has_one_of_few_letters_or_none(pattern, written):
    assert (unspelled(f"start: /{pattern}/", Alphabet([b"a", b"1", "本".encode()])) is None) is written


def test_a_vocabulary_with_all_bytes_of_utf8_writes_everything():
    assert Alphabet([bytes([b]) for b in range(256) if b not in (0xC0, 0xC1, *range(0xF5, 256))]).complete


@pytest.fixture
def compiler():
    return GrammarCompiler(Tokenizer.from_tokenizer_json(byte_tokenizer().to_str().encode(), SETTINGS), 400)


@pytest.mark.parametrize("where", ["mask", "accept", "forced"])
def test_a_panic_while_a_grammar_is_tried_refuses_it(compiler, monkeypatch, where):
    monkeypatch.setattr("fastllm.text.grammar.Matcher", type("Panics", (Matcher,), {where: panic}))
    with pytest.raises(InvalidRequest, match="PanicException: index out of bounds") as caught:
        compiler.regex("[ab]{9}", "field")
    assert caught.value.fields["param"] == "field"
    monkeypatch.undo()
    assert compiler.regex("[ab]{9}")().mask().any()  # what was refused is not kept


def test_a_panic_over_a_vocabulary_refuses_the_grammar(compiler, monkeypatch):
    monkeypatch.setattr("fastllm.text.grammar.llguidance.LLTokenizer", panic)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        compiler.regex("[ab]{9}")
    monkeypatch.undo()
    assert compiler.regex("[ab]{9}")().mask().any()


def test_a_panic_of_a_new_answer_is_an_error_of_it(compiler, monkeypatch):
    grammar = compiler.regex("[ab]{9}")
    monkeypatch.setattr("fastllm.text.grammar.Matcher", panic)
    with pytest.raises(EngineError, match="cannot be followed"):
        grammar()


def test_a_grammar_that_grows_beyond_the_limits_is_its_requests_fault(compiler):
    """What its beginning does not show: an answer of it ends with the request's error, and not with the server's."""
    matcher = compiler.regex("[ab]{9}")()
    matcher.mask()

    class Grown:
        def unsafe_compute_mask_ptr(self, *_):
            pass

        def is_error(self):
            return True

        def get_error(self):
            return "too many items\nline 2"

    matcher._matcher, matcher._ready = Grown(), None
    with pytest.raises(InvalidSchema, match="cannot be followed") as caught:
        matcher.mask()
    assert caught.value.http_status == 400
    assert "too many items" in caught.value.why
