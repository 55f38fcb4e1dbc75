"""GGUF files written by the reference package read equal; the big ones fast; split sets whole."""

from __future__ import annotations

import hashlib
import shutil
import struct
import time

import numpy as np
import pytest

from fastllm.core.errors import UnsupportedError
from fastllm.core.quant import FORMATS, GGML_TYPES
from fastllm.formats.gguf import GGML_LAYOUTS, REMOVED, metadata_value, read_gguf

NAMES = ["tiny.gguf", "aligned64.gguf", "split-00001-of-00003.gguf"]


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("name", NAMES)
def test_metadata_equals_the_reference_package(data, expected, name):
    metadata = {k: plain(v) for k, v in read_gguf(data / name).metadata.items()}
    assert metadata == expected[name]["metadata"]
    assert {k: type(v) for k, v in metadata.items()} == {k: type(v) for k, v in expected[name]["metadata"].items()}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_equal_the_reference_package(data, expected, name):
    gguf = read_gguf(data / name)
    want = expected[name]["tensors"]
    assert list(gguf.tensors) == list(want)
    for tensor in gguf.tensors.values():
        facts = want[tensor.name]
        assert list(tensor.shape) == facts["shape"]
        assert tensor.format == facts["type"].lower()
        assert tensor.nbytes == facts["nbytes"] == FORMATS[tensor.format].nbytes(int(np.prod(tensor.shape)))
        assert hashlib.sha256(tensor.data.tobytes()).hexdigest() == facts["sha256"]
        assert not tensor.data.flags.writeable


def test_number_arrays_are_views_and_strings_a_list(data):
    metadata = read_gguf(data / "tiny.gguf").metadata
    assert isinstance(metadata["tokenizer.ggml.scores"], np.ndarray)
    assert not metadata["tokenizer.ggml.scores"].flags.owndata
    assert isinstance(metadata["tokenizer.ggml.tokens"], list)
    assert metadata["t.array.bool"].dtype == np.bool_


def test_header_only_lists_what_cannot_be_run(write, builder):
    path = write("a.gguf", builder().tensor("w", (256,), 16, nbytes=66).build())
    gguf = read_gguf(path, header_only=True)
    assert (gguf.infos[0].dtype, gguf.infos[0].nbytes, gguf.tensors) == ("IQ2_XXS", 66, {})
    with pytest.raises(UnsupportedError, match="1 of type IQ2_XXS"):
        read_gguf(path)


def test_version_2_reads_like_version_3(write, builder):
    for version in (2, 3):
        gguf = read_gguf(write("a.gguf", builder(version).text("k", "v").tensor("w", (3, 2)).build()))
        assert (gguf.version, gguf.metadata, gguf.tensors["w"].shape) == (version, {"k": "v"}, (2, 3))


def test_trailing_bytes_are_tolerated_and_counted(write, builder):
    raw = builder().tensor("w", (8,)).build()
    assert read_gguf(write("a.gguf", raw)).trailing_bytes == 0
    assert read_gguf(write("b.gguf", raw + b"xyz")).trailing_bytes == 3


def test_a_last_tensor_without_padding_is_whole(write, builder):
    raw = builder().tensor("w", (3,)).build()
    assert read_gguf(write("a.gguf", raw[:-20])).tensors["w"].nbytes == 12


def test_a_vocabulary_without_tensors_opens(write, builder):
    for raw in (builder().text("k", "v").build(), builder().text("k", "v").build().rstrip(b"\0")):
        assert read_gguf(write("a.gguf", raw)).metadata == {"k": "v"}


def test_tensors_may_be_stored_out_of_order(write, builder):
    raw = builder().tensor("b", (8,), offset=32).tensor("a", (8,), offset=0).build()
    gguf = read_gguf(write("a.gguf", raw))
    assert gguf.tensors["b"].data[0] != gguf.tensors["a"].data[0] or gguf.infos[0].offset == gguf.infos[1].offset + 32


def test_nested_arrays_up_to_four_deep(write, builder):
    inner = struct.pack("<IQII", 4, 2, 7, 8)
    for _ in range(3):
        inner = struct.pack("<IQ", 9, 1) + inner
    value = read_gguf(write("a.gguf", builder().pair("k", 9, inner).build())).metadata["k"]
    assert value[0][0][0].tolist() == [7, 8]


def test_a_vocabulary_of_262144_pieces_opens_in_linear_time(write, builder):
    pieces = b"".join(struct.pack("<Q", 6) + f"{i:06d}".encode() for i in range(262_144))
    path = write("a.gguf", builder().pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 262_144) + pieces).build())
    start = time.process_time()
    tokens = read_gguf(path).metadata["tokenizer.ggml.tokens"]
    assert time.process_time() - start < 5  # about 0.1 s; only a quadratic reader would take seconds
    assert (len(tokens), tokens[0], tokens[-1]) == (262_144, "000000", "262143")


def test_the_layout_table_agrees_with_the_format_table():
    for type_id, name in GGML_TYPES.items():
        layout, block, nbytes = GGML_LAYOUTS[type_id]
        assert (layout.lower(), block, nbytes) == (name, FORMATS[name].block, FORMATS[name].block_bytes)
    assert not set(GGML_LAYOUTS) & set(REMOVED)
    assert set(GGML_LAYOUTS) | set(REMOVED) == set(range(43))


def test_metadata_values_are_typed():
    meta = {"i": 3, "b": True, "f": 0.5, "s": "x"}
    assert metadata_value(meta, "i", int) == 3
    assert metadata_value(meta, "i", float) == 3.0
    assert metadata_value(meta, "none", int, 7) == 7
    for key, kind in (("b", int), ("i", bool), ("f", int), ("s", int), ("i", str), ("b", float)):
        with pytest.raises(Exception, match=f"'{key}' is a"):
            metadata_value(meta, key, kind)


# Split sets ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path, data):
    for path in data.glob("split-*.gguf"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_all_missing_files_of_a_set_are_named_at_once(split, refusal):
    for i in (2, 3):
        (split / f"split-0000{i}-of-00003.gguf").unlink()
    with refusal("2 of 3 files of the set are missing: split-00002-of-00003.gguf, split-00003-of-00003.gguf"):
        read_gguf(split / "split-00001-of-00003.gguf")


def test_a_later_file_names_the_first(split):
    with pytest.raises(Exception, match="file 2 of a set of 3") as caught:
        read_gguf(split / "split-00002-of-00003.gguf")
    assert "split-00001-of-00003.gguf" in caught.value.fix


def test_a_renamed_set_is_refused(split, refusal):
    (split / "split-00001-of-00003.gguf").rename(split / "model.gguf")
    with refusal("its name does not end in -00001-of-00003.gguf"):
        read_gguf(split / "model.gguf")


def test_swapped_files_are_refused(split, refusal):
    shutil.copy(split / "split-00002-of-00003.gguf", split / "split-00003-of-00003.gguf")
    with refusal("split.no is 1, expected 2"):
        read_gguf(split / "split-00001-of-00003.gguf")


def test_a_name_that_contradicts_the_count_is_refused(write, refusal, builder):
    raw = builder().pair("split.no", 2, b"\0\0").pair("split.count", 2, b"\2\0").tensor("w", (8,)).build()
    with refusal("the name says 3 files, split.count says 2"):
        read_gguf(write("m-00001-of-00003.gguf", raw))


def part(builder, no: int, name: str, total: int = 2):
    out = builder().pair("split.no", 2, struct.pack("<H", no)).pair("split.count", 2, struct.pack("<H", 2))
    return out.pair("split.tensors.count", 5, struct.pack("<i", total)).tensor(name, (8,))


def test_a_tensor_in_two_files_is_refused(write, refusal, builder):
    first = write("m-00001-of-00002.gguf", part(builder, 0, "w").build())
    write("m-00002-of-00002.gguf", part(builder, 1, "w").build())
    with refusal("'w' is also in m-00001-of-00002.gguf"):
        read_gguf(first)


def test_a_wrong_total_is_refused(write, refusal, builder):
    first = write("m-00001-of-00002.gguf", part(builder, 0, "w", 3).build())
    write("m-00002-of-00002.gguf", part(builder, 1, "v", 3).build())
    with refusal("split.tensors.count is 3, but the 2 files hold 2 tensors"):
        read_gguf(first)


def test_files_of_two_architectures_are_refused(write, refusal, builder):
    first = write("m-00001-of-00002.gguf", part(builder, 0, "w").text("general.architecture", "llama").build())
    write("m-00002-of-00002.gguf", part(builder, 1, "v").text("general.architecture", "gemma3").build())
    with refusal("general.architecture is 'gemma3', but 'llama'"):
        read_gguf(first)


@pytest.mark.parametrize("count", [65_535, 3])
def test_a_count_of_files_that_are_not_there_is_refused_quickly(write, refusal, builder, count):
    raw = builder().pair("split.no", 2, b"\0\0").pair("split.count", 2, struct.pack("<H", count)).build()
    with refusal(f"{count - 1} of {count} files of the set are missing", peak=40_000_000):
        read_gguf(write(f"m-00001-of-{count:05d}.gguf", raw))
