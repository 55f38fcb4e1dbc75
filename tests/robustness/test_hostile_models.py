"""Whole models from strangers, through `LLM`: one field of a valid file is changed at a time, and the result runs or is one typed error.

The rooms test their own part; here a file goes through all of them, in a process of its own, because what one room lets through
another may trust. The oracles (no signal, no hang, 5 s, memory, a printable message) are in `Box.run`.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import random
import struct

import numpy as np
import pytest

from fastllm import LLM, SamplingParams
from fastllm.core.errors import FastLLMError, ModelFileError, OutOfMemory, UsageError
from fastllm.core.request import Request
from fastllm.formats.gguf import GGML_LAYOUTS

BF16, F32 = 30, 0
REFUSALS = {"ModelFileError", "UnsupportedError", "TokenizerError", "TemplateError", "OutOfMemory", "NotFinite", "ContextOverflow"}
INTEGERS = [(5, -1), (4, 0), (4, 3), (4, 2**31 - 1), (4, 2**31), (10, 2**64 - 1), (11, -(2**63)), (6, 4.0), (8, "4"), (9, (4, []))]
NUMBERS = [(6, math.nan), (6, math.inf), (6, -1.0), (6, 0.0), (6, 1e-40), (12, 1e308), (8, "x")]


def names(model, prefix):
    return [key for key in model.pairs if key.startswith(prefix)]


@pytest.mark.parametrize(("name", "backend"), [("llama", "cpu_avx"), ("gemma3", "ref")])
def test_every_number_of_the_configuration_at_its_ends(box, tiny_gguf, name, backend):
    base = tiny_gguf(name)
    assert box.run(base, backend=backend)["kind"] == "ok"
    refused = 0
    for key in names(base, name + "."):
        values = NUMBERS if base.pairs[key][0] == 6 else INTEGERS
        for kind, value in values:
            model = tiny_gguf(name)
            model.pairs[key] = (kind, value)
            result = box.run(model, backend=backend)
            assert result["kind"] == "ok" or result["kind"] in REFUSALS, (key, value, result)
            refused += result["kind"] != "ok"
    assert refused > 60


CHANGES = {
    "a row more": lambda t: t["shape"].__setitem__(0, t["shape"][0] + 1),
    "a row less": lambda t: t["shape"].__setitem__(0, t["shape"][0] - 1),
    "no rows": lambda t: t["shape"].__setitem__(0, 0),
    "2^63 rows": lambda t: t["shape"].__setitem__(0, 2**63),
    "half a row": lambda t: t["shape"].__setitem__(-1, t["shape"][-1] // 2),
    "a dimension more": lambda t: t["shape"].insert(0, 1),
    "no dimension": lambda t: t.__setitem__("shape", []),
    "another name": lambda t: t.__setitem__("name", t["name"] + "x"),
    "an offset behind the end": lambda t: t.__setitem__("offset", 1 << 62),
    "an odd offset": lambda t: t.__setitem__("offset", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_is_not_what_the_configuration_asks_for(box, tiny_gguf, change):
    for index in (0, 1, 2, 11, 15):
        model = tiny_gguf("llama")
        CHANGES[change](model.tensors[index])
        result = box.run(model)
        assert result["kind"] in REFUSALS, (model.tensors[index]["name"], result)


@pytest.mark.parametrize("index", [0, 2, 11])
def test_every_tensor_type_and_rows_that_are_no_whole_blocks(box, tiny_gguf, index):
    """Blocks of random bytes hold any scale there is, NaN and infinity included; ffn_down's 48 columns are no blocks of 32."""
    rng = np.random.default_rng(5)
    for number, (_, block, nbytes) in GGML_LAYOUTS.items():
        model = tiny_gguf("llama")
        tensor = model.tensors[index]
        tensor["type"] = number
        whole = not tensor["shape"][-1] % block
        if whole:
            tensor["data"] = rng.bytes(math.prod(tensor["shape"]) // block * nbytes)
        result = box.run(model)
        assert result["kind"] in REFUSALS or (whole and result["kind"] == "ok"), (number, result)


def test_counts_types_and_cuts_of_the_file(box, tiny_gguf):
    raw = tiny_gguf("llama").build()
    rng = random.Random(3)
    for at in (8, 16):
        for count in (0, 1, 2**31, 2**63, 2**64 - 1):
            assert box.run(raw[:at] + struct.pack("<Q", count) + raw[at + 8 :])["kind"] in REFUSALS
    for _ in range(10):
        assert box.run(raw[: rng.randrange(1, len(raw) - 64)])["kind"] in REFUSALS
    header = len(raw) - sum(len(t["data"]) + -len(t["data"]) % 32 for t in tiny_gguf("llama").tensors)
    for _ in range(40):
        flipped = bytearray(raw)
        flipped[rng.randrange(header)] ^= 1 << rng.randrange(8)
        result = box.run(bytes(flipped))
        assert result["kind"] == "ok" or result["kind"] in REFUSALS


@pytest.mark.parametrize("text", ["llama\0", "\u202ellama", "\x1b[31m", "a\nb", "x" * 100_000, ""])
def test_text_of_a_file_is_escaped_in_messages(box, tiny_gguf, text):
    """Box.run looks at the message: no line end, terminal escape or mark that turns the direction of writing."""
    for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "llama.rope.scaling.type"):
        model = tiny_gguf("llama")
        model.pairs[key] = (8, text)
        box.run(model)
    model = tiny_gguf("llama")
    model.tensors[3]["name"] = text[:64] + "blk.0.x"
    assert box.run(model)["kind"] in REFUSALS


def test_what_a_message_quotes_is_escaped_once_and_for_all():
    error = ModelFileError("a\n\x1b[31m\u202e\ud800é×", who="b\r", why="c\0", fix="d\x7f")
    assert error.message == str(error) == "a\\n\\x1b[31m\\u202e\\ud800é×"
    assert (error.who, error.why, error.fix) == ("b\\r", "c\\x00", "d\\x7f")
    assert len(error.render().splitlines()) == 4
    assert UsageError(error.message).message == error.message


TOKENIZERS = {
    "a token less": lambda t: {"tokens": (9, (8, t[:-1]))},
    "a token more": lambda t: {"tokens": (9, (8, [*t, "zz"]))},
    "no tokens": lambda t: {"tokens": (9, (8, []))},
    "numbers as tokens": lambda t: {"tokens": (9, (5, list(range(256))))},
    "types that are NaN": lambda t: {"token_type": (9, (6, [math.nan] * 256))},
    "types out of range": lambda t: {"token_type": (9, (5, [2**31 - 1] * 256))},
    "merges of what is not there": lambda t: {"merges": (9, (8, ["zz yy"]))},
    "merges of one": lambda t: {"merges": (9, (8, ["ab"]))},
    "scores that are NaN": lambda t: {"model": (8, "llama"), "scores": (9, (6, [math.nan] * 256))},
    "an end behind the table": lambda t: {"eos_token_id": (4, 256)},
    "an end of 2^64 − 1": lambda t: {"eos_token_id": (10, 2**64 - 1)},
    "another kind": lambda t: {"model": (8, "t5")},
}


@pytest.mark.parametrize("change", TOKENIZERS)
def test_a_tokenizer_that_does_not_hold_together_is_never_replaced(box, tiny_gguf, change):
    model = tiny_gguf("llama")
    tokens = model.pairs["tokenizer.ggml.tokens"][1][1]
    model.pairs |= {f"tokenizer.ggml.{key}": value for key, value in TOKENIZERS[change](tokens).items()}
    assert box.run(model)["kind"] in REFUSALS


@pytest.mark.parametrize("backend", ["ref", "cpu_avx"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_fail_the_requests_that_meet_them_only(tiny_gguf, tmp_path, backend, value):
    """Row 9 of the embedding is bad: the prompt with token 9 fails, its neighbours in the same steps get their own answers."""
    model = tiny_gguf("llama")
    row = np.frombuffer(model.tensors[0]["data"], np.uint16).reshape(256, 32).copy()
    model.tensors[0]["data"] = row.tobytes()
    path = tmp_path / "good.gguf"
    path.write_bytes(model.build())
    few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    good = [[5, 6, 7], [8, 5], [11] * 20]
    with LLM(path, backend=backend, offline=True) as llm:
        want = [c.output_ids for c in llm.generate(good, few)]
    assert all(9 not in ids for ids in want)
    row[9, 3] = np.array([value], np.float32).view(np.uint32)[0] >> 16
    model.tensors[0]["data"] = row.tobytes()
    path.write_bytes(model.build())
    with LLM(path, backend=backend, offline=True) as llm:
        submit = llm.loaded.engine.submit
        for _ in range(2):  # the second round must not find a poisoned cache
            handles = [submit(Request(p, few)) for p in (good[0], [5, 9, 7], good[1], [9], good[2])]
            for handle, ids in zip((handles[0], handles[2], handles[4]), want, strict=True):
                assert handle.result(60).choices[0].token_ids == ids
            for handle in (handles[1], handles[3]):
                with pytest.raises(FastLLMError, match="no finite logit"):
                    handle.result(60)
        assert llm.loaded.engine.healthy
        assert llm.loaded.engine.stats().blocks_used == 0


@pytest.mark.parametrize("backend", ["ref", "cpu_avx"])
def test_a_file_that_is_cut_or_replaced_after_loading_changes_no_answer(tiny_gguf, tmp_path, backend):
    """Weights are copied or packed while loading: nothing of a step reads the map, so there is nothing to fault on."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf("llama").build())
    few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(path, backend=backend, offline=True) as llm:
        before = llm.generate([5, 6, 7], few)[0].output_ids
        os.truncate(path, 64)
        assert llm.generate([5, 6, 7], few)[0].output_ids == before
        assert llm.generate("ab c", few)[0].output_ids
    with pytest.raises(ModelFileError):
        LLM(path, backend=backend, offline=True)


def test_a_file_for_which_there_is_no_address_space_is_out_of_memory(tiny_gguf, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf("llama").build())
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OutOfMemory, match=f"{path.stat().st_size:,} bytes"):
        LLM(path, backend="ref", offline=True)
