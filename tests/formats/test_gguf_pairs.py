"""Pairs of GGUF metadata inside an FLM file: what goes in comes out, damaged ones are refused, and the older form is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fastllm.core.errors import ModelFileError
from fastllm.formats import GGUFFile, open_model
from fastllm.formats._strings import read_strings
from fastllm.formats.flm_files import tokenizer_fields
from fastllm.formats.gguf_pairs import pairs_from, pairs_to_bytes

PAIRS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "é", "", "日本", "\0"],
    "tokenizer.ggml.token_type": np.array([1, 3, 6, 1, 1], np.int32),
    "tokenizer.ggml.scores": np.array([0.5, -1e30, 3, 0, 1], np.float32),
    "tokenizer.ggml.bos_token_id": 7,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.least": -(2**63),
    "tokenizer.ggml.most": 2**64 - 1,
    "tokenizer.ggml.share": 0.1,
    "tokenizer.ggml.flags": np.array([True, False]),
    "tokenizer.ggml.nested": [[["x"], []], np.array([1, 2], np.uint8)],
    "tokenizer.ggml.none": [],
}


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_pairs_come_back_with_their_types() -> None:
    found = pairs_from(pairs_to_bytes(PAIRS), "model.flm")
    assert found.keys() == PAIRS.keys()
    assert [key for key in PAIRS if not same(PAIRS[key], found[key])] == []


def test_pairs_that_are_cut_anywhere_or_lie_are_refused_by_the_name_of_the_whole_file() -> None:
    raw = pairs_to_bytes(PAIRS)
    for length in range(len(raw)):
        with pytest.raises(ModelFileError, match=r"model\.flm"):
            pairs_from(raw[:length], "model.flm")
    huge = raw.replace(
        (5).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"a",
        (1 << 62).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"a",
    )
    assert huge != raw
    with pytest.raises(ModelFileError, match="hold at most"):
        pairs_from(huge, "model.flm")
    with pytest.raises(ModelFileError, match="UTF-8"):
        pairs_from(raw.replace("é".encode(), b"\xff\xfe"), "model.flm")


def test_the_tokenizer_of_an_older_file_is_that_of_a_new_one() -> None:
    pairs = {key: value for key, value in PAIRS.items() if key not in ("tokenizer.ggml.nested", "tokenizer.ggml.flags")}
    typed = {key: {"dtype": v.dtype.str, "values": v.tolist()} if isinstance(v, np.ndarray) else v for key, v in pairs.items()}
    older = tokenizer_fields({"tokenizer_gguf.json": json.dumps(typed).encode()}, Path("model.flm"))
    newer = tokenizer_fields({"tokenizer.gguf": pairs_to_bytes(pairs)}, Path("model.flm"))
    assert older is not None
    assert newer is not None
    assert older["kind"] == newer["kind"] == "gguf"
    assert [key for key in pairs if not same(older["gguf"][key], newer["gguf"][key])] == []


def test_strings_outside_of_the_data_are_refused() -> None:
    data = np.frombuffer((1).to_bytes(8, "little") + b"x", np.uint8)
    for end, count, texts, behind in ((9, 1, ["x"], 9), (9, 2, ["x"], 9), (8, 1, [], 0), (9, 0, [], 0)):
        found, pos = read_strings(data, 0, end, count)
        assert (list(found), pos) == (texts, behind)
    for pos, end in ((-1, 9), (0, 10), (9, 8)):
        with pytest.raises(ValueError, match="bytes"):
            read_strings(data, pos, end, 1)


def test_texts_are_made_when_they_are_asked_for() -> None:
    texts = ["a", "", "é日", "\0", "last"]
    data = b"".join(len(raw := text.encode()).to_bytes(8, "little") + raw for text in texts)
    strings, pos = read_strings(np.frombuffer(data, np.uint8), 0, len(data), len(texts))
    assert isinstance(strings, Sequence)
    assert (pos, len(strings), list(strings)) == (len(data), len(texts), texts)
    assert (strings[2], strings[-1], strings[1:3]) == (texts[2], texts[-1], texts[1:3])
    with pytest.raises(IndexError):
        strings[len(texts)]
    block, ends = strings.utf8()
    assert (block, np.frombuffer(ends, np.int64).tolist()) == ("".join(texts).encode(), [0, 1, 1, 6, 7, 11])
    for bad in (b"\xff", b"ok" * 5 + b"\xed\xa0\x80", b"\xc0\x80"):
        found, pos = read_strings(np.frombuffer(data + len(bad).to_bytes(8, "little") + bad, np.uint8), 0, len(data) + 8 + len(bad), 6)
        assert (list(found), pos) == (texts, len(data))
    assert (strings.index("last"), strings.count("é日"), "none" in strings) == (4, 1, False)
    assert list(reversed(strings)) == texts[::-1]
    assert next(iter(strings)) == "a"


CHANGING = """
import mmap, os, signal, struct, sys, time
import numpy as np
from fastllm.formats._strings import read_strings
count, item = 100_000, struct.pack("<Q", 8) + b"abcdefgh"
data = mmap.mmap(-1, count * 16)
data[:] = item * count
at = 16 * (count * 3 // 4)
writer = os.fork()
if writer == 0:
    parent = os.getppid()
    while os.getppid() == parent:
        data[at : at + 8] = struct.pack("<Q", 1 << 33)
        data[at : at + 8] = struct.pack("<Q", 8)
    os._exit(0)
begin, seen = time.monotonic(), set()
while time.monotonic() - begin < 2 and len(seen) < 2 or time.monotonic() - begin < 0.7:
    found, pos = read_strings(np.frombuffer(data, np.uint8), 0, len(data), count)
    assert (len(found), pos) in ((count, len(data)), (count * 3 // 4, at)), (len(found), pos)
    seen.add(len(found))
    assert found[len(found) - 1] == "abcdefgh"
os.kill(writer, signal.SIGKILL)
print("read")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a second process with the same memory")
def test_lengths_that_another_process_writes_meanwhile_are_read_once() -> None:
    done = subprocess.run([sys.executable, "-c", CHANGING], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")


def test_many_texts_outside_of_a_vocabulary_are_a_list_that_can_be_written_as_json(tmp_path: Path) -> None:
    labels = [f"label {i}" for i in range(2000)]
    pairs = {"general.architecture": "llama", "general.labels": labels, "general.nested": [labels, ["x"]], "tokenizer.ggml.tokens": labels}
    path = tmp_path / "model.gguf"
    path.write_bytes(pairs_to_bytes(pairs))
    with open_model(path) as files:
        assert json.loads(json.dumps(files.config)) == {key: value for key, value in pairs.items() if not key.startswith("tokenizer.")}
    tokens = pairs_from(path.read_bytes(), "model.gguf")["tokenizer.ggml.tokens"]
    assert not isinstance(tokens, list)
    assert list(tokens) == labels


def test_a_model_whose_tokenizer_is_made_forgets_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(pairs_to_bytes({"general.architecture": "llama", **PAIRS}))
    with open_model(path) as files:
        assert files.tokenizer is not None
        assert files.tokenizer.gguf.keys() == PAIRS.keys()
        files.drop_vocabulary()
        assert files.tokenizer.gguf == {}
        assert isinstance(files.source, GGUFFile)
        assert files.source.metadata == {"general.architecture": "llama"}
