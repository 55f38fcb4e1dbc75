"""Grammars: what they allow is checked against the json, re and jsonschema-free rules of the format itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers as hf
from tokenizers import pre_tokenizers

from fastllm.core.errors import EngineError, InvalidRequest
from fastllm.text import Tokenizer
from fastllm.text import grammar as grammar_module
from fastllm.text._matcher import Matcher, Sort
from fastllm.text.grammar import MAX_KEPT, GrammarCompiler, _Wrapped
from fastllm.text.worker import Worker
from tests.interface.conftest import byte_tokenizer

VOCAB = 300  # more rows than the tokenizer has pieces
END = 2


@pytest.fixture(scope="module")
def tokenizer():
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    return Tokenizer.from_tokenizer_json(byte_tokenizer().to_str().encode(), settings)


@pytest.fixture
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB)


def allowed(mask):
    """Ids that a mask lets through."""
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(mask) * 32])[0].tolist()


BLANK_FIRST = ["byte_level", "metaspace", "metaspace_first", "prepend", "gguf"]


def tokenizer_with_a_blank_first(kind):
    """Tokenizers that put a blank in front of every text, in every way that one may; characters are pieces."""
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    if kind == "byte_level":
        library = byte_tokenizer()
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return Tokenizer.from_tokenizer_json(library.to_str().encode(), settings)
    letters = [chr(c) for c in range(33, 127)]
    if kind == "gguf":
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *letters]
        return Tokenizer.from_gguf({
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": [0.0] * len(pieces), "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 95,
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        })  # fmt: skip
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "<|im_start|>", "<|im_end|>", "▁", *letters])}
    library = hf.Tokenizer(hf.models.BPE(vocabulary, [], unk_token="<unk>"))
    if kind == "prepend":
        library.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "metaspace_first" else "always", split=False)
    library.decoder = hf.decoders.Sequence([hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse(), hf.decoders.Strip(" ", 1, 0)])
    library.add_special_tokens([hf.AddedToken(s, special=True, normalized=False) for s in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer.from_tokenizer_json(library.to_str().encode(), settings)


@pytest.mark.parametrize("kind", BLANK_FIRST)
def test_a_tokenizer_that_puts_a_blank_first_puts_none_in_a_grammars_text(kind):
    tokenizer = tokenizer_with_a_blank_first(kind)
    start = tokenizer.encode("a b", add_special=False, parse_special=False)
    assert tokenizer.decode(start, skip_special=False) == " a b"
    assert tokenizer.encode_continued("a b") == start[1:]
    assert tokenizer.encode_continued(" a") == start[:2]
    assert tokenizer.encode_continued("") == []
    compiler = GrammarCompiler(tokenizer, 400)
    matcher = compiler.choice(["ab c"])()
    assert tokenizer.decode(matcher.forced(), skip_special=False) == "ab c"
    matcher = compiler.json_object()()
    assert not matcher.accept(tokenizer.encode_continued("{")[0])
    assert matcher.accept(tokenizer.encode_continued("}")[0])
    schema = {"type": "object", "properties": {"name": {"const": "x y"}}, "required": ["name"], "additionalProperties": False}
    text, complete = walk(tokenizer, compiler.json_schema(schema), 0)
    assert complete
    assert json.loads(text) == {"name": "x y"}


def test_nor_does_sentencepiece(piece_tokenizer):
    assert piece_tokenizer.decode(piece_tokenizer.encode("ab c", add_special=False, parse_special=False), skip_special=False) == " ab c"
    matcher = GrammarCompiler(piece_tokenizer, piece_tokenizer.vocab_size).choice(["ab c"])()
    assert piece_tokenizer.decode(matcher.forced(), skip_special=False) == "ab c"


def test_the_ids_of_texts_that_a_grammar_forces_are_kept_within_a_bound(tokenizer, monkeypatch):
    wrapped, texts = _Wrapped(tokenizer), [f"{n} is a number".encode() for n in range(50)]
    want = [tokenizer.encode_continued(text.decode()) for text in texts]
    monkeypatch.setattr(grammar_module, "KNOWN_TEXTS", 16)
    monkeypatch.setattr(tokenizer, "encode_continued", count := Counted(tokenizer.encode_continued))
    for _ in range(2):
        assert wrapped(texts[0]) == want[0]
    assert count.calls == 1
    assert [wrapped(text) for text in texts] == want
    assert len(wrapped._known) <= 16
    long = b"x" * 1000
    assert wrapped(long) == wrapped(long) == tokenizer.encode_continued(long.decode())
    assert long not in wrapped._known


class Counted:
    """A function that is counted."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


def walk(tokenizer, grammar, seed, limit=400):
    """A random text of the grammar: tokens drawn among the allowed ones until it is complete or an end token is drawn."""
    rng, matcher, ids = np.random.default_rng(seed), grammar(), []
    while len(ids) < limit:
        choices = allowed(matcher.mask())
        assert choices
        assert max(choices) < tokenizer.vocab_size
        if END in choices and rng.random() < 0.5:
            return tokenizer.decode(ids, skip_special=True), True
        token = int(rng.choice([c for c in choices if c != END] or choices))
        ids.append(token)
        if matcher.accept(token):
            return tokenizer.decode(ids, skip_special=True), True
    return tokenizer.decode(ids, skip_special=True), False


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -20, "maximum": 300},
        "s": {"type": "string", "maxLength": 4},
        "k": {"enum": ["a", 1, None, True]},
        "l": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["n", "s", "k", "l"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(12))
def test_random_walks_are_what_the_schema_says(tokenizer, compiler, seed):
    text, complete = walk(tokenizer, compiler.json_schema(SCHEMA), seed)
    assert complete
    value = json.loads(text)
    assert list(value) == ["n", "s", "k", "l"]
    assert type(value["n"]) is int
    assert -20 <= value["n"] <= 300
    assert len(value["s"]) <= 4
    assert value["k"] in ("a", 1, None, True)
    assert 1 <= len(value["l"]) <= 3
    assert all(type(item) is bool for item in value["l"])
    assert not re.search(r"[ \t\r\n]{9}", text)


def test_blanks_are_bounded(compiler, tokenizer):
    matcher = compiler.json_object()()
    blank = tokenizer.encode(" ", add_special=False, parse_special=False)[0]
    assert not matcher.accept(tokenizer.encode("{", add_special=False, parse_special=False)[0])
    for _ in range(8):
        assert blank in allowed(matcher.mask())
        matcher.accept(blank)
    assert blank not in allowed(matcher.mask())


@pytest.mark.parametrize("seed", range(6))
def test_patterns_choices_and_grammars(tokenizer, compiler, seed):
    text, complete = walk(tokenizer, compiler.regex("(ab|c){2,4}[0-9]"), seed)
    assert complete
    assert re.fullmatch("(ab|c){2,4}[0-9]", text)
    assert walk(tokenizer, compiler.choice(["yes", 'say "no"', "né"]), seed)[0] in ("yes", 'say "no"', "né")
    assert walk(tokenizer, compiler.grammar('start: "x" ("y" | "z")~2'), seed)[0] in ("xyy", "xyz", "xzy", "xzz")
    assert walk(tokenizer, compiler.grammar('root ::= "x" ("y" | "z")\n'), seed)[0] in ("xy", "xz")


def test_an_answer_may_end_only_where_the_grammar_does(tokenizer, compiler):
    matcher = compiler.regex("ab+")()
    a, b = (tokenizer.encode(c, add_special=False, parse_special=False)[0] for c in "ab")
    assert allowed(matcher.mask()) == [a]
    assert not matcher.accept(a)
    assert END not in allowed(matcher.mask())
    assert not matcher.accept(b)
    assert sorted(allowed(matcher.mask())) == sorted([b, END])
    with pytest.raises(EngineError, match="cannot be followed"):
        matcher.accept(a)
    with pytest.raises(EngineError):
        matcher.mask()


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("json_schema", {"properties": {"a": "bar"}}, "object or a boolean"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"$ref": "https://example.com/x.json"}, "local"),
        ("json_schema", {"$ref": "#/nothing"}, ""),
        ("json_schema", ["a"], "object or a boolean"),
        ("json_schema", {"enum": [float("nan")]}, "NaN|nan|JSON"),
        ("json_schema", False, ""),
        ("regex", "a(b", "unclosed"),
        ("regex", "(?=a)b", ""),
        ("regex", "a" * ((1 << 20) + 1), "limit"),
        ("regex", "\ud800", ""),
        ("regex", 3, "string"),
        ("choice", [], ""),
        ("choice", ["a", ""], ""),
        ("grammar", "start: missing", "missing"),
        ("grammar", "root ::= (", ""),
    ],
)
def test_what_cannot_be_enforced_is_refused_and_names_its_field(compiler, kind, source, why):
    with pytest.raises(InvalidRequest) as caught:
        getattr(compiler, kind)(source, param="the_field")
    assert caught.value.fields["param"] == "the_field"
    assert caught.value.message.startswith("the_field: ")
    assert re.search(why, caught.value.why)
    assert "\n" not in caught.value.why


def test_what_is_refused_is_told_without_words_of_the_libraries(compiler):
    for kind, source, why in (
        ("grammar", f'root ::= {"(" * 5000}"a"{")" * 5000}', "nested too deeply"),
        ("grammar", "start: start", "no text of it can be written"),
        ("json_schema", {"$ref": "#"}, "no text of it can be written"),
    ):
        with pytest.raises(InvalidRequest, match=why) as caught:
            getattr(compiler, kind)(source, "field")
        assert not [word for word in ("<", "Python", "recursion") if word in str(caught.value)]


def test_a_schema_as_deep_as_the_sea(compiler):
    schema = {}
    for _ in range(70):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InvalidRequest, match="64 levels"):
        compiler.json_schema(schema)
    for _ in range(100_000):
        schema = {"a": schema}
    with pytest.raises(InvalidRequest):
        compiler.json_schema(schema)


def test_matchers_share_nothing_and_the_latest_are_kept(tokenizer, compiler):
    grammar = compiler.regex("ab")
    assert compiler.regex("ab") is grammar
    one, two = grammar(), grammar()
    a = tokenizer.encode("a", add_special=False, parse_special=False)[0]
    one.accept(a)
    assert allowed(two.mask()) == [a]
    for i in range(MAX_KEPT):
        compiler.choice([f"text {i}"])
    assert compiler.regex("ab") is not grammar


def test_threads_may_share_a_compiler(tokenizer, compiler):
    results = []

    def work(seed):
        for i in range(10):
            results.append(walk(tokenizer, compiler.choice([f"one {i}", f"two {i}"]), seed)[0].split()[1] == str(i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


NORMALIZERS = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"]


@pytest.mark.parametrize("kind", NORMALIZERS)
@pytest.mark.parametrize("text", ["\ufb01n", "\uff21b", "\u2460", "\u00e9x", "e\u0301x", "A\u0308b", "\u1e9b\u0323", "x" * 80 + "\ufb03"])
def test_a_tokenizer_that_normalises_changes_no_text_of_a_grammar(kind, text):
    library = byte_tokenizer()
    library.normalizer = getattr(hf.normalizers, kind)()
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    tokenizer = Tokenizer.from_tokenizer_json(library.to_str().encode(), settings)
    compiler = GrammarCompiler(tokenizer, VOCAB)
    assert walk(tokenizer, compiler.choice([text]), 0) == (text, True)
    assert walk(tokenizer, compiler.regex(re.escape(text)), 0) == (text, True)
    said, complete = walk(tokenizer, compiler.json_schema({"type": "object", "properties": {text: {"const": text}}, "required": [text], "additionalProperties": False}), 0, 2000)
    assert complete
    assert json.loads(said) == {text: text}
    matcher = compiler.choice([text, text + "!"])()
    assert tokenizer.decode(matcher.forced(), skip_special=False) == text


def test_an_error_of_the_worker_is_the_answers_own_and_the_next_mask_is_computed(compiler):
    matcher = compiler.regex("[ab]{9}")()
    sort = matcher._sort
    matcher._sort = Sort(sort.words, 1, sort.ends, sort.ends_are_plain, sort.odd, sort.worker)  # not the memory that the library wants
    matcher._ready = None
    matcher.ahead()
    with pytest.raises(EngineError, match="cannot be followed"):
        matcher.mask()
    other = compiler.regex("[ab]{9}")()
    other._ready = None
    other.ahead()
    assert other.mask().any()


class PanicException(BaseException):
    """As the library's: no Exception."""


def panic(*_):
    raise PanicException("index out of bounds")


def test_a_panic_of_the_library_is_the_answers_own_and_the_next_mask_is_computed(compiler):
    grammar = compiler.regex("[ab]{9}")
    matcher, other = grammar(), grammar()
    matcher._matcher, matcher._ready = SimpleNamespace(compute_ff_tokens=list, unsafe_compute_mask_ptr=panic), None
    matcher.ahead()
    with pytest.raises(EngineError, match="cannot be followed") as caught:
        matcher.mask()
    assert caught.value.why == "PanicException: index out of bounds"
    other._ready = None
    other.ahead()
    assert other._done.acquire(timeout=30), "the thread of masks is gone"
    other._done.release()
    assert other.mask().any()


def test_a_panic_while_a_grammar_is_read_refuses_it(compiler, monkeypatch):
    monkeypatch.setattr("fastllm.text.grammar.llguidance.LLMatcher.grammar_from_regex", panic)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        compiler.regex("[ab]{9}")


def test_the_thread_of_masks_ends_when_nobody_has_its_worker():
    worker = Worker()
    matcher = type("Asked", (), {"work": lambda self: None})()
    worker.put(matcher)
    thread = worker._thread
    assert thread.is_alive()
    del worker
    thread.join(30)
    assert not thread.is_alive()


EXIT = """
import atexit
import threading

def last():
    print([t.name for t in threading.enumerate() if t.name == "fastllm-mask"], len(done))

atexit.register(last)  # the first to be registered is the last to be called
from fastllm.text.worker import Worker
done = []

class Asked:
    def work(self):
        threading.Event().wait(0.01)
        done.append(1)

worker = Worker()
for _ in range(20):
    worker.put(Asked())
"""


def test_the_thread_of_masks_has_ended_before_the_interpreter_does():
    """One that came back from the library after that crashed the process, now and then."""
    said = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["[]", "20"]


def test_a_mask_that_nobody_computes_ahead_is_computed_when_it_is_wanted(compiler):
    matcher = compiler.regex("[ab]{9}")()
    worker = matcher._sort.worker
    worker.put(type("Asked", (), {"work": lambda self: None})())
    worker._waiting.end(worker._thread)  # as at the end of the interpreter, while an engine still answers
    for _ in range(3):
        token = allowed(matcher.mask())[0]
        assert not matcher.accept(token)
    assert matcher.mask().any()


class Slow:
    """Of the library's matcher what ours calls; as there, nothing may be asked while a mask is computed."""

    def __init__(self):
        self.begun, self.go, self.busy = threading.Event(), threading.Event(), False

    def unsafe_compute_mask_ptr(self, address, size):
        self.busy = True
        self.begun.set()
        assert self.go.wait(30)
        self.busy = False

    def _ask(self, answer):
        if self.busy:
            raise RuntimeError("Already mutably borrowed")
        return answer

    def is_error(self):
        return False

    def is_stopped(self):
        return self._ask(False)

    def compute_ff_tokens(self):
        return self._ask([])

    def consume_token(self, token_id):
        return self._ask(True)

    def try_consume_tokens(self, token_ids):
        return self._ask(len(token_ids))


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda m: m.complete, False),
        (lambda m: m.forced(), []),
        (lambda m: m.check()([0]), [False]),
        (lambda m: m.accept(3), False),
        (lambda m: m.feed([3, 4]), True),
        (lambda m: m.mask().tolist(), [0]),
    ],
    ids=["complete", "forced", "check", "accept", "feed", "mask"],
)
def test_nothing_is_asked_of_a_matcher_while_its_mask_is_computed(ask, answer):
    library = Slow()
    matcher = Matcher(library, Sort(1, 1, frozenset(), True, {}, Worker()))
    matcher.ahead()
    assert library.begun.wait(30)
    threading.Timer(0.05, library.go.set).start()
    assert ask(matcher) == answer
