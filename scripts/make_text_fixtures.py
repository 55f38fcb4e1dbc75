"""Reference vectors for the tests of `text/`: tiny vocabularies, ids and rendered templates, made by other people's code.

Run in a development environment with transformers, tokenizers, sentencepiece and gguf (none of them is needed by the tests):

    python scripts/make_text_fixtures.py [--real DIR]

Writes tests/text/data: `tiny_*.json` and `tiny_*.model` (seeded vocabularies), `tokenizer_ids.json` (texts and ids by
sentencepiece and by tokenizers' own pre-tokenizers), `templates.json` (renderings by transformers). With --real, a folder
holding smollm2.gguf and gemma3-270m.gguf, also `real_ids.json`: SmolLM2 by transformers' GGUF reader, Gemma 3 by
sentencepiece on a model file rebuilt from the GGUF metadata.
Made with tokenizers 0.23.3, sentencepiece 0.2.3, transformers 5.24.0, gguf 0.19.0.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import struct
import sys
from pathlib import Path

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "text" / "data"

WORDS = (
    "the a river town bridge water stone people bank year light morning road they built it's don't we'll I'm quick brown fox "
    "jumps over lazy dog caf\u00e9 na\u00efve \u00fcber stra\u00dfe \u4f60\u597d \u4e16\u754c \u65e5\u672c\u8a9e \u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 1984 2024 3.14 100 42 def return "
    "over under water waterfall bridges townsfolk standing understanding lightest mornings roads building builders house "
    "houses window windows garden gardener letters letter written writing story stories mountain mountains valley valleys "
    "print(x) for i in range(10): \U0001f600 \U0001f680 HTTP JSON userName"
).split()

TEXTS = [
    "",
    "Hello world",
    " leading blank",
    "  two  blanks   inside \n\n\n and lines\r\n\ttabs\t\t",
    "The quick brown fox jumps over the lazy dog.",
    "it's DON'T We'Ll i'M",
    "1 12 123 1234 12345 3.14159 1,000,000",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\uff01\ud55c\uad6d\uc5b4",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f x",
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 na\u00efve cafe\u0301",
    "def f(x):\n    return {'a': [1, 2]}\n",
    "\u2581already\u2581marked \u2581",
    "<|im_start|>user\n</s> <s> [INST]",
    "\x00\x01\x1f\x7f \u0085\u00a0\u2028\ufeff\ufffd",
    "\U0010ffff\ue000 z\u0351\u036b a" * 2,
    "aaaaaaaaaaaaaaaaaaaaaaaa      ",
    "\n",
    " ",
    "\u1e69 \ufb01 \u00c5 A\u030a",
]


def corpus(seed: int = 7, lines: int = 1500) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 12))) + rng.choice([".", "!", "\n", ""]) for _ in range(lines)]


def byte_level(name: str) -> tuple[Tokenizer, str]:
    """A trained byte-level BPE with the pre-tokenizer of its family, built from the library's own parts."""
    contraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    word, tail = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {
        "llama-bpe": contraction + "|" + word + r"|\p{N}{1,3}" + tail,
        "qwen2": contraction + "|" + word + r"|\p{N}" + tail,
    }
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if name in split:
        steps = [pre_tokenizers.Split(Regex(split[name]), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif name == "gpt-2":
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif name == "falcon":
        steps = [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus(), trainer)
    if name == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
        )
    return tokenizer, name


def sentencepiece_model(kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=out, model_type=kind, vocab_size=640 if kind == "bpe" else 380, byte_fallback=True,
        user_defined_symbols=["<table>", *(["\u2581\u2581"] if kind == "bpe" else [])], control_symbols=["<ctl>"], character_coverage=0.995, num_threads=1,
        minloglevel=2, **options,
    )  # fmt: skip
    return out.getvalue()


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, wire: int, body: bytes) -> bytes:
    return varint(number << 3 | wire) + (varint(len(body)) if wire == 2 else b"") + body


def rebuild_sentencepiece(tokens: list[str], scores: list[float], types: list[int]) -> bytes:
    """A SentencePiece BPE model file of a GGUF vocabulary, without prefix blank."""
    out = bytearray()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        piece = token.replace(" ", "\u2581") if kind == 4 else token
        kind = 2 if piece == "<unk>" else kind
        body = field(1, 2, piece.encode()) + field(2, 5, struct.pack("<f", score)) + field(3, 0, varint(kind))
        out += field(1, 2, body)
    trainer = field(3, 0, varint(2)) + field(35, 0, varint(1))
    trainer += b"".join(field(n, 0, varint(tokens.index(t))) for n, t in ((40, "<unk>"), (41, "<bos>"), (42, "<eos>"), (43, "<pad>")))
    normalizer = field(1, 2, b"identity") + field(3, 0, varint(0)) + field(4, 0, varint(0)) + field(5, 0, varint(1))
    return bytes(out + field(2, 2, trainer) + field(3, 2, normalizer))


def random_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    alphabet = "  \n\t'\".,!?-_<>|/0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJ\u00e9\u00fc\u00df\u4f60\u597d\u4e16\u754c\u65e5\u672c\u043f\u0440\u0438\U0001f600\u0301\u00a0"
    pieces = [*alphabet, *WORDS, *WORDS]
    return ["".join(rng.choice(pieces) + rng.choice(["", " ", ""]) for _ in range(rng.randint(1, 40))) for _ in range(count)]


def gguf_metadata(path: Path) -> dict[str, object]:
    from gguf import GGUFReader

    return {name: part.contents() for name, part in GGUFReader(path).fields.items() if name.startswith("tokenizer.")}


def real_ids(folder: Path) -> dict[str, list[list[object]]]:
    from transformers import AutoTokenizer

    texts = [*TEXTS, *random_texts(60, 3)]
    smol = AutoTokenizer.from_pretrained(str(folder), gguf_file="smollm2.gguf")
    metadata = gguf_metadata(folder / "gemma3-270m.gguf")
    model = rebuild_sentencepiece(*(metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")))
    gemma = sentencepiece.SentencePieceProcessor(model_proto=model)
    plain = [text for text in texts if "<|im" not in text]
    return {
        "smollm2": [[text, smol.encode(text, add_special_tokens=False)] for text in plain],
        "gemma3-270m": [[text, gemma.encode(text)] for text in texts],
    }


# Small templates with the idioms of public ones; written here.
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "header": "{{- bos_token }}{% for m in messages %}{% set c = '<|start|>' ~ m.role ~ '<|end|>\\n\\n' ~ m.content | trim ~ eos_token %}"
    "{% if loop.first %}{% set c = '[' ~ loop.length ~ ']' ~ c %}{% endif %}{{- c }}{% endfor %}",
    "turns": "{%- if messages[0].role == 'system' -%}{%- set sys = messages[0].content -%}{%- set rest = messages[1:] -%}"
    "{%- else -%}{%- set sys = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for m in rest -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "[INST] {{ (sys ~ '\\n' if loop.first and sys else '') + m['content'].strip() }} [/INST]{%- endfor -%}",
    "reason": "{%- macro body(m) %}{%- set c = m.content or '' %}{%- if '</think>' in c %}{%- set c = c.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}{{- c }}{%- endmacro %}{%- set ns = namespace(n=0) %}{%- for m in messages %}{%- if m.content is string and "
    "m.content.startswith('skip') %}{%- continue %}{%- endif %}{%- set ns.n = ns.n + 1 %}<|{{ m.role }}|>{{ body(m) }}"
    "{% generation %}<|end|>{% endgeneration %}\n{%- endfor %}{{ ns.n }}",
    "tools": "{% if tools %}<tools>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{{ tools | tojson(indent=2) }}</tools>\n{% endif %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}:{{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{{ m.content }}|{{ m.content | replace('a', '<b>') | upper | length }}|"
    "{{ ['x', m.role] | join(', ') }}|{{ m.keys() | list | sort | join }}{% endfor %}",
}
CHATS = [
    [{"role": "user", "content": " Hello & <b>you</b> \n"}],
    [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
        {"role": "user", "content": "\u4f60\u597d \U0001f600 it's"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w", "arguments": {"city": "K\u00f6ln"}}}]},
        {"role": "tool", "content": "{\"t\": 20}"},
        {"role": "user", "content": "skip this"},
    ],
    [{"role": "assistant", "content": "first"}, {"role": "user", "content": "b"}],
]
TOOLS = [{"type": "function", "function": {"name": "w", "description": "<now> \u00e9", "parameters": {"type": "object", "properties": {}}}}]


def renderings() -> dict[str, object]:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    cases = []
    for name, source in TEMPLATES.items():
        for chat in range(len(CHATS)):
            for tools in (False, True):
                try:
                    text = _compile_jinja_template(source).render(
                        messages=CHATS[chat], tools=TOOLS if tools else None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
                    )
                except TemplateError:
                    text = None
                cases.append([name, chat, tools, text])
    return {"templates": TEMPLATES, "chats": CHATS, "tools": TOOLS, "cases": cases}


def write(name: str, value: object) -> None:
    (DATA / name).write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--real", type=Path)
    options = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    ids: dict[str, object] = {"texts": TEXTS}
    texts = [*TEXTS, *random_texts(25, 5)]
    ids["texts"] = texts
    for name in ("gpt-2", "smollm", "qwen2", "llama-bpe", "falcon"):
        tokenizer, _ = byte_level(name)
        write(f"tiny_{name}.json", json.loads(tokenizer.to_str()))
        tokenizer.encode_special_tokens = True
        ids[name] = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    for name, options_ in (
        ("bpe", {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}),
        ("unigram", {"normalization_rule_name": "nmt_nfkc"}),
    ):
        data = sentencepiece_model(name, **options_)
        (DATA / f"tiny_{name}.model").write_bytes(data)
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        ids[f"sentencepiece-{name}"] = [processor.encode(text) for text in texts]
    write("tokenizer_ids.json", ids)
    write("templates.json", renderings())
    if options.real:
        write("real_ids.json", real_ids(options.real))
    print(*(f"{path.name}: {path.stat().st_size:,}" for path in sorted(DATA.iterdir())), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
