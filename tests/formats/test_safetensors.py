"""safetensors: equal to the library on good files, refusing what it refuses on bad ones; shards and their index."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from fastllm.core.errors import ModelFileError, UnsupportedError
from fastllm.formats.safetensors_file import read_safetensors, read_sharded

INDEX = "model.safetensors.index.json"
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int64": "i64", "int8": "i8"}


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_tensors_equal_the_reference_package(data, expected):
    file = read_safetensors(data / "tiny.safetensors")
    want = expected["tiny.safetensors"]
    assert set(file.tensors) == set(want)
    for name, tensor in file.tensors.items():
        assert list(tensor.shape) == want[name]["shape"]
        assert tensor.format == DTYPES[want[name]["dtype"]]
        assert hashlib.sha256(tensor.data.tobytes()).hexdigest() == want[name]["sha256"]
        assert not tensor.data.flags.writeable
    assert file.metadata == {"format": "pt"}
    file.check_unchanged()
    file.close()


def test_values_equal_the_library(data):
    ours = read_safetensors(data / "tiny.safetensors").tensors
    with safetensors.safe_open(data / "tiny.safetensors", framework="np") as theirs:
        for name in ("f32", "f16", "f64", "i64", "i8", "scalar", "empty"):
            values = theirs.get_tensor(name)
            assert np.array_equal(ours[name].data.view(values.dtype).reshape(values.shape), values)


def test_header_only_lists_dtypes_that_cannot_be_read(write, st_bytes, refusal):
    path = write("a.safetensors", st_bytes({"w": entry("F8_E5M2", (8,), 0, 8)}, bytes(8)))
    assert read_safetensors(path, header_only=True).infos[0].dtype == "F8_E5M2"
    with refusal("1 of dtype F8_E5M2", UnsupportedError):
        read_safetensors(path)


def test_padding_behind_the_header_is_allowed(write, st_bytes):
    raw = json.dumps({"w": entry()}).encode()
    assert read_safetensors(write("a.safetensors", st_bytes(raw + b" " * 5, bytes(8)))).tensors["w"].nbytes == 8


BAD = {
    "shape and offsets disagree": ({"w": entry(shape=(3,))}, 8, r"takes 12 bytes, but its data_offsets hold 8"),
    "gap": ({"a": entry(), "b": entry(begin=12, end=20)}, 20, "'b' at data offset 12 leaves a gap after tensor 'a'"),
    "gap at the start": ({"a": entry(begin=4, end=12)}, 12, "leaves a gap after the header"),
    "overlap": ({"a": entry(), "b": entry(begin=4, end=12)}, 12, "overlaps tensor 'a'"),
    "same place": ({"a": entry(), "b": entry()}, 8, "overlaps"),
    "cut": ({"a": entry()}, 7, "ends at data offset 8, but the file has 7"),
    "trailing": ({"a": entry()}, 9, "1 bytes follow the last tensor"),
    "no data at all": ({}, 3, "3 bytes follow"),
    "negative dimension": ({"a": entry(shape=(-2,))}, 8, "shape"),
    "bool dimension": ({"a": entry(shape=(True, 2))}, 8, "shape"),
    "float dimension": ({"a": entry(shape=(2.0,))}, 8, "shape"),
    "huge dimensions": ({"a": entry(shape=(2**63, 2**63))}, 8, "takes"),
    "huge offsets": ({"a": entry(shape=(2**61,), end=2**63)}, 8, "ends at data offset 9223372036854775808"),
    "rank 17": ({"a": entry(shape=(1,) * 17, end=4)}, 4, "up to 16"),
    "offsets reversed": ({"a": entry(begin=8, end=0)}, 8, "data_offsets"),
    "offsets negative": ({"a": entry(begin=-8, end=0)}, 8, "data_offsets"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, 8, "data_offsets"),
    "missing key": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "exactly dtype"),
    "extra key": ({"a": {**entry(), "x": 1}}, 8, "exactly dtype"),
    "entry is a list": ({"a": [1]}, 8, "exactly dtype"),
    "dtype is a number": ({"a": entry(3)}, 8, "no string"),
    "half a byte": ({"a": entry("F4", (3,), 0, 2)}, 2, "takes 2 bytes"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry()}, 8, "__metadata__"),
    "metadata is a list": ({"__metadata__": [], "a": entry()}, 8, "__metadata__"),
    "header is a list": (b"[1, 2]", 0, "not a safetensors file|no JSON object"),
    "duplicate": (b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8, "twice"),
    "deep": (b'{"a":' * 2000, 0, "nested|JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "byte 10.*UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_headers_are_refused_by_us_and_by_the_library(write, st_bytes, refusal, name):
    header, size, text = BAD[name]
    path = write("a.safetensors", st_bytes(header, bytes(size)))
    with refusal(text, ModelFileError, peak=400_000):
        read_safetensors(path)
    if name not in ("duplicate", "rank 17", "extra key"):  # there we are stricter
        with pytest.raises((safetensors.SafetensorError, TypeError)):
            safetensors.numpy.load_file(path)


@pytest.mark.parametrize("length", [1, 41, 2**31, 100_000_001, 2**60, 2**63, 2**64 - 1])
def test_a_wrong_header_length_is_refused(write, st_bytes, refusal, length):
    with refusal("header length|JSON", ModelFileError, peak=200_000):
        read_safetensors(write("a.safetensors", st_bytes({}, b"", length)))


@pytest.mark.parametrize(("dtype", "kind"), [("F33", "unknown dtype 'F33'"), ("fastllm", "another program"), ("f32", "unknown dtype")])
def test_unknown_dtypes_list_the_known(write, st_bytes, refusal, dtype, kind):
    with refusal(kind, UnsupportedError):
        read_safetensors(write("a.safetensors", st_bytes({"w": entry(dtype)}, bytes(8))))


def test_a_file_cut_at_any_byte_is_refused(write, data, refusal):
    raw = (data / "tiny.safetensors").read_bytes()
    for length in range(1, len(raw)):
        with refusal(".", ModelFileError):
            read_safetensors(write("a.safetensors", raw[:length]))


def test_random_flips_end_in_the_same_verdict_as_the_library(write, data):
    raw = (data / "tiny.safetensors").read_bytes()
    rng = random.Random(7)
    header = struct.unpack("<Q", raw[:8])[0]
    stricter = 0
    for _ in range(500):
        wrong = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            wrong[rng.randrange(8 + header)] = rng.choice([rng.randrange(256), *b'0123456789[]{},:" '])
        path = write("a.safetensors", bytes(wrong))
        try:
            ours = read_safetensors(path, header_only=True)
        except (ModelFileError, UnsupportedError):
            ours = None
        try:
            with safetensors.safe_open(path, framework="np") as theirs:
                keys = set(theirs.keys())
        except (safetensors.SafetensorError, OSError, ValueError):
            keys = None
        if ours is not None:
            assert keys == {i.name for i in ours.infos}
        else:
            stricter += keys is not None
    assert stricter < 25  # duplicate keys, keys beside dtype, shape and data_offsets, surrogates


# Shards ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path, write, st_bytes):
    """A folder with two shards and their index; returns a function that writes the index anew."""
    write("model-00001-of-00002.safetensors", st_bytes({"a": entry()}, b"a" * 8))
    write("model-00002-of-00002.safetensors", st_bytes({"b": entry()}, b"b" * 8))

    def index(weight_map=None):
        good = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        write(INDEX, json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map if weight_map is not None else good}).encode())
        return tmp_path

    index()
    return index


def test_shards_are_one_set_of_tensors(sharded):
    model = read_sharded(sharded())
    assert {n: bytes(t.data[:1]) for n, t in model.tensors.items()} == {"a": b"a", "b": b"b"}
    model.check_unchanged()
    model.close()


def test_all_missing_shards_are_named_at_once(sharded, refusal):
    folder = sharded({"a": "x-1.safetensors", "b": "model-00002-of-00002.safetensors", "c": "x-2.safetensors"})
    with refusal("2 of 3 shards named by .* are missing: x-1.safetensors, x-2.safetensors"):
        read_sharded(folder)


def test_an_extra_shard_is_refused(sharded, write, st_bytes, refusal):
    write("model-00003-of-00003.safetensors", st_bytes({"c": entry()}, bytes(8)))
    with refusal("does not refer to model-00003-of-00003.safetensors"):
        read_sharded(sharded())


def test_renamed_shards_are_refused(sharded, tmp_path, refusal):
    one, two = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    with refusal("the shards lack 2 tensors that the index names: 'a', 'b'"):
        read_sharded(sharded())


def test_a_tensor_that_the_index_does_not_name_is_refused(sharded, write, st_bytes, refusal):
    write("model-00002-of-00002.safetensors", st_bytes({"b": entry(), "c": entry(begin=8, end=16)}, bytes(16)))
    with refusal("the index lacks 1 tensors that the shards hold: 'c'"):
        read_sharded(sharded())


def test_a_tensor_in_two_shards_is_refused(sharded, write, st_bytes, refusal):
    write("model-00002-of-00002.safetensors", st_bytes({"a": entry(), "b": entry(begin=8, end=16)}, bytes(16)))
    with refusal("'a' is in model-00001-of-00002.safetensors and in model-00002"):
        read_sharded(sharded())


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "C:\\x", "", "\\\\server\\x", "a\0b", "/"])
def test_index_entries_that_leave_the_folder_are_refused(sharded, name, refusal):
    with refusal("leaves the model's folder"):
        read_sharded(sharded({"a": name}))


def test_a_symlink_out_of_the_folder_is_refused(sharded, tmp_path, tmp_path_factory, refusal):
    shard = tmp_path / "model-00001-of-00002.safetensors"
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "blob"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    with refusal("symlink out of the model's folder"):
        read_sharded(sharded())


def test_symlinks_into_the_hub_caches_blobs_are_followed(sharded, tmp_path):
    source = sharded()
    snapshot, blobs = tmp_path / "models--o--n" / "snapshots" / "abc", tmp_path / "models--o--n" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(source.glob("model[-.]*"))):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", str(i)))
    assert set(read_sharded(snapshot).tensors) == {"a", "b"}


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 3}}])
def test_an_index_without_a_map_is_refused(sharded, write, index, refusal):
    folder = sharded()
    write(INDEX, json.dumps(index).encode())
    with refusal("weight_map"):
        read_sharded(folder)
