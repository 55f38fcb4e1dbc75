"""The table of GGUF pre-tokenizer names: how a byte-level BPE vocabulary splits text before merging.

A GGUF file holds vocabulary and merges but only a *name* (`tokenizer.ggml.pre`) for the split rule, because the rule is code
elsewhere. A wrong rule gives plausible but wrong ids, so an unknown name is an error that lists the known ones and never a
default. The patterns are those of the models' own tokenizer files (Oniguruma syntax, which the `tokenizers` library runs);
facts checked against llama.cpp `src/llama-vocab.cpp`. Called by `vocabulary.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, pre_tokenizers

from fastllm.core.errors import UnsupportedError

__all__ = ["PRE_TOKENIZERS", "PreRule", "build_pre_tokenizer", "find_rule"]


@dataclass(frozen=True)
class PreRule:
    """Splits to apply one after the other (matches and the stretches between them both stay pieces), and what goes with them.

    whole_words: a piece that is a vocabulary entry is taken whole, without merging. add_bos: the default when the file does
    not say. nfc: text is brought to Unicode normal form C first, as the model's own tokenizer does.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCT = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}{_PUNCT}{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{_PUNCT}{_TAIL}"
_UP, _LOW = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_1, _CASED_2 = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UP}]*[{_LOW}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{_UP}]+[{_LOW}]*"
_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = rf"{_CASED_1}{_CONTRACTION}?|{_CASED_2}{_CONTRACTION}?|\p{{N}}{{1,3}}{_SLASH}{_TAIL}"
_TEKKEN = rf"{_CASED_1}|{_CASED_2}|\p{{N}}{_SLASH}{_TAIL}"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK_LETTERS = (  # code points in hex: several of them change under normalisation, so they are not written as text
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 "
    "1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe "
    "1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 "
    "2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a "
    "10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_CASED_LETTERS = "".join("-".join(chr(int(x, 16)) for x in part.split("-")) for part in _DEEPSEEK_LETTERS.split())
_HAN_FREE = r"&&[^\p{Han}]"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UP}{_HAN_FREE}]*[{_LOW}{_HAN_FREE}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UP}{_HAN_FREE}]+[{_LOW}{_HAN_FREE}]*{_CONTRACTION}?|\p{{N}}{{1,3}}{_PUNCT}{_TAIL}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_DIGITS_GPT2 = PreRule((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreRule((_GPT2,))
_DEEPSEEK3 = PreRule((r"\p{N}{1,3}", _CJK, _DEEPSEEK3_WORDS))
_RULES: Final[tuple[tuple[PreRule, str], ...]] = (
    (PreRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), "default"),
    (_PLAIN_GPT2, "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4"),
    (_DIGITS_GPT2, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (PreRule((_LLAMA3,), whole_words=True, add_bos=True), "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (PreRule((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe glm4"),
    (PreRule((_QWEN2,), nfc=True), "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan kormo"),
    (PreRule((_QWEN2,)), "solar-open grok-2"),
    (
        PreRule(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_TAIL}",
            ),
            nfc=True,
        ),
        "qwen35",
    ),
    (
        PreRule((r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}+")),
        "deepseek-llm",
    ),
    (PreRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")), "deepseek-coder"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (PreRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (PreRule((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreRule((_BLOOM, r"\p{N}")), "viking"),
    (PreRule((_TEKKEN,), whole_words=True, add_bos=True), "tekken"),
    (PreRule((_GPT4O,)), "gpt-4o llama4 kanana2 minimax-m2 talkie"),
    (PreRule((_KIMI,)), "kimi-k2"),
    (PreRule((rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}{_PUNCT}|\s*[\r\n]|\s+(?!\S)|\s+",)), "bailingmoe bailingmoe2 llada-moe"),
    (PreRule((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_TAIL}",)), "seed-coder"),
    (
        PreRule(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "exaone-moe",
    ),
    (PreRule((r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+{_PUNCT}{_TAIL}"), whole_words=True), "minicpm5"),
    (PreRule((rf"{_WORD}|\p{{N}}{_PUNCT}{_TAIL}",)), "ufakzeka"),
)
PRE_TOKENIZERS: Final[Mapping[str, PreRule]] = {name: rule for rule, names in _RULES for name in names.split()}


def find_rule(name: object) -> PreRule:
    """The rule of a `tokenizer.ggml.pre` value. Raises UnsupportedError for an unknown or missing name, listing those known."""
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    found = "missing" if name is None else f"{name!r}"
    raise UnsupportedError(
        f"tokenizer.ggml.pre is {found[:80]}; known: {', '.join(sorted(PRE_TOKENIZERS))}.",
        who="tokenizer.ggml.pre",
        why="the name selects how text is split before merging; another rule would give wrong token ids",
        fix="convert the model again with a current converter, or use the model's Hugging Face folder with tokenizer.json",
    )


def build_pre_tokenizer(rule: PreRule) -> pre_tokenizers.PreTokenizer:
    """The library object for a rule: its splits, then the mapping of bytes to the printable byte-level alphabet."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.splits]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
