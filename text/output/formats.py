"""How model families write tool calls: the markers where a call region begins, and who reads it.

The readers are in `forms`, the grammars that hold a model to its form in `call_grammars`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .forms import (
    DEEPSEEK,
    KIMI,
    read_deepseek,
    read_glm,
    read_harmony,
    read_hermes,
    read_kimi,
    read_list,
    read_llama3,
    read_minimax,
    read_mistral,
    read_phi,
    read_pythonic,
    read_qwen3_coder,
)
from .region import Reader

__all__ = ["FORMATS", "CallFormat", "detect_format"]


@dataclass(frozen=True)
class CallFormat:
    """name: of `--tool-parser`. markers: texts that begin a call region, read: its reader (ValueError: no call). A marker of one character is one only
    at an answer's start (at_start). in_template: texts of a chat template that tell this format. inner: markup inside of a region, which
    may be special tokens. dropped: markers around content, which are nobody's text."""

    name: str
    markers: tuple[str, ...]
    read: Reader
    at_start: bool = False
    in_template: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


_GLM_INNER: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")

FORMATS: Final[dict[str, CallFormat]] = {
    f.name: f
    for f in (
        CallFormat("hermes", ("<tool_call>",), read_hermes, in_template=("<tool_call>",), inner=("</tool_call>",)),
        CallFormat("qwen3-coder", ("<tool_call>",), read_qwen3_coder, in_template=("<function=",), inner=("</tool_call>",)),
        CallFormat("llama3-json", ("<|python_tag|>", "{"), read_llama3, at_start=True, in_template=('"parameters"', "<|python_tag|>")),
        CallFormat(
            "llama-pythonic",
            ("<|python_start|>", "["),
            read_pythonic,
            at_start=True,
            in_template=("<|python_start|>", "[func_name1("),
            inner=("<|python_end|>",),
        ),
        CallFormat("mistral", ("[TOOL_CALLS]",), read_mistral, in_template=("[TOOL_CALLS]",), inner=("[ARGS]", "[CALL_ID]")),
        CallFormat("deepseek-v3", DEEPSEEK[:1], read_deepseek, in_template=("```json",), inner=DEEPSEEK[1:]),
        CallFormat("deepseek-v3.1", DEEPSEEK[:1], read_deepseek, in_template=DEEPSEEK[:1], inner=DEEPSEEK[1:]),
        CallFormat("glm4.5", ("<tool_call>",), read_glm, in_template=("<arg_key>",), inner=_GLM_INNER),
        CallFormat("kimi-k2", KIMI[:1], read_kimi, in_template=KIMI[:1], inner=KIMI[1:]),
        CallFormat(
            "minimax",
            ("<minimax:tool_call>", "<tool_calls>"),
            read_minimax,
            in_template=("<minimax:tool_call>", "<tool_calls>"),
            inner=("</minimax:tool_call>", "</tool_calls>"),
        ),
        CallFormat("phi", ("functools[", "<|tool_call|>"), read_phi, in_template=("functools[", "<|/tool_call|>"), inner=("<|/tool_call|>",)),
        CallFormat("granite", ("<|tool_call|>",), read_list("<|tool_call|>"), in_template=("<|tool_call|>",)),
        CallFormat(
            "gpt-oss",
            ("<|start|>assistant<|channel|>commentary to=functions.", "<|channel|>commentary to=functions."),
            read_harmony,
            in_template=("to=functions.",),
            inner=("<|constrain|>", "<|message|>"),
            dropped=("<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|start|>assistant", "<|return|>", "<|end|>", "<|call|>"),
        ),
    )
}
"""Name -> format, in the order of the documents."""

_ORDER: Final = (
    "gpt-oss", "minimax", "kimi-k2", "deepseek-v3.1", "mistral", "glm4.5", "qwen3-coder", "phi", "granite", "llama-pythonic", "hermes", "llama3-json",
)  # fmt: skip


def detect_format(template: str | None) -> str | None:
    """The format that a chat template speaks of: the most special texts first; None: it knows no tools."""
    if template is None:
        return None
    for name in _ORDER:
        if any(text in template for text in FORMATS[name].in_template):
            fenced = name == "deepseek-v3.1" and all(text in template for text in FORMATS["deepseek-v3"].in_template)
            return "deepseek-v3" if fenced else name
    return None
