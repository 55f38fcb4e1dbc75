"""Hostile GGUF files: every field at its ends, cut everywhere, flipped anywhere – one typed error, never a large allocation."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastllm.core.errors import ModelFileError, UnsupportedError
from fastllm.formats.gguf import read_gguf

HUGE = [2**31 - 1, 2**31, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def valid(builder):
    """A file with something of everything."""
    out = builder().text("general.architecture", "llama").pair("n", 4, b"\1\0\0\0").pair("b", 7, b"\1")
    out.pair("list", 9, struct.pack("<IQ", 8, 2) + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 2) + b"bc")
    out.pair("numbers", 9, struct.pack("<IQ", 5, 2) + bytes(8))
    out.pair("nested", 9, struct.pack("<IQIQ", 9, 1, 0, 2) + bytes(2))
    return out.tensor("a.weight", (4, 8)).tensor("b.weight", (32, 2), 8, nbytes=68)


@pytest.mark.parametrize("magic", [b"GGUG", b"gguf", b"FUGG", b"\0\0\0\0", b"GGML"])
def test_a_wrong_magic_is_refused(write, builder, refusal, magic):
    with refusal("not a GGUF file", ModelFileError):
        read_gguf(write("a.gguf", builder(magic=magic).build()))


@pytest.mark.parametrize(
    ("version", "text", "kind"),
    [
        (0, "version is 0", ModelFileError),
        (1, "version 1", UnsupportedError),
        (4, "version 4", UnsupportedError),
        (2**32 - 1, "version 4294967295", UnsupportedError),
        (3 << 24, "big-endian", UnsupportedError),
        (2 << 24, "big-endian", UnsupportedError),
        (1 << 24, "big-endian", UnsupportedError),
    ],
)
def test_other_versions_are_refused_by_name(write, builder, refusal, version, text, kind):
    with refusal(text, kind):
        read_gguf(write("a.gguf", builder(version).build()))


def test_a_file_cut_at_any_byte_is_refused(write, builder, refusal):
    raw = valid(builder).build()
    last = raw.rstrip(b"\0")  # padding behind the last tensor may be missing
    end = len(raw) - (-68 % 32)
    assert len(last) <= end
    for length in range(1, end):
        with refusal(r"byte|needs|not a GGUF|should start", ModelFileError):
            read_gguf(write("cut.gguf", raw[:length]))
    assert len(read_gguf(write("whole.gguf", raw[:end])).tensors) == 2


@pytest.mark.parametrize("count", HUGE)
def test_huge_counts_allocate_nothing(write, builder, refusal, count):
    for field in ("num_tensors", "num_pairs"):
        wrong = valid(builder)
        setattr(wrong, field, count)
        with refusal(f"is {count}, but the .* bytes left hold at most", ModelFileError, peak=200_000):
            read_gguf(write("a.gguf", wrong.build()))


@pytest.mark.parametrize("more", [-1, 1])
def test_counts_off_by_one_are_refused(write, builder, refusal, more):
    wrong = valid(builder)
    wrong.num_pairs = len(wrong.pairs) + more
    with refusal("."):
        read_gguf(write("a.gguf", wrong.build()))


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("kind", [0, 5, 7, 8, 9, 12])
def test_huge_arrays_allocate_nothing(write, builder, refusal, kind, count):
    with refusal(f"is {count}, but the", ModelFileError, peak=200_000):
        read_gguf(write("a.gguf", builder().pair("k", 9, struct.pack("<IQ", kind, count) + bytes(64)).build()))


@pytest.mark.parametrize("length", HUGE)
def test_huge_strings_allocate_nothing(write, builder, refusal, length):
    with refusal(f"is {length}, but the", ModelFileError, peak=200_000):
        read_gguf(write("a.gguf", builder().pair("k", 8, struct.pack("<Q", length) + b"x").build()))
    inside = struct.pack("<IQQ", 8, 1, length) + b"xyz"
    with refusal(r"\[0\] of 1 strings reaches past", ModelFileError, peak=200_000):
        read_gguf(write("b.gguf", builder().pair("k", 9, inside).build()))


@pytest.mark.parametrize("kind", [13, 255, 2**31, 2**32 - 1])
def test_unknown_value_types_are_refused(write, builder, refusal, kind):
    with refusal(f"unknown type {kind}", ModelFileError):
        read_gguf(write("a.gguf", builder().pair("k", kind, bytes(8)).build()))
    with refusal(f"unknown type {kind}", ModelFileError):
        read_gguf(write("a.gguf", builder().pair("k", 9, struct.pack("<IQ", kind, 1) + bytes(8)).build()))


def test_bools_other_than_0_and_1_are_refused(write, builder, refusal):
    with refusal("bool of value 2", ModelFileError):
        read_gguf(write("a.gguf", builder().pair("k", 7, b"\2").build()))
    with refusal("bools with the value 9", ModelFileError):
        read_gguf(write("a.gguf", builder().pair("k", 9, struct.pack("<IQ", 7, 2) + b"\1\x09").build()))


def test_arrays_nested_too_deep_are_refused(write, builder, refusal):
    for depth in (5, 10_000):
        with refusal("nested more than 4 deep", ModelFileError):
            read_gguf(write("a.gguf", builder().pair("k", 9, struct.pack("<IQ", 9, 1) * depth + bytes(12)).build()))


def test_wide_nested_arrays_share_one_budget(write, builder, refusal, monkeypatch):
    monkeypatch.setattr("fastllm.formats.gguf.MAX_ITEMS", 100)
    inner = struct.pack("<IQ", 9, 30) + (struct.pack("<IQ", 0, 0) * 30)
    with refusal("the limit is", ModelFileError):
        read_gguf(write("a.gguf", builder().pair("k", 9, struct.pack("<IQ", 9, 5) + inner * 5).build()))


def test_duplicate_keys_and_tensors_are_refused(write, builder, refusal):
    with refusal("key 'k' appears twice", ModelFileError):
        read_gguf(write("a.gguf", builder().text("k", "1").text("k", "2").build()))
    with refusal("'w' appears 2 times", ModelFileError):
        read_gguf(write("a.gguf", builder().tensor("w", (8,)).tensor("w", (8,)).build()))


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"\xed\xa0\x80", b"a\x80"])
def test_keys_that_are_not_utf8_are_refused(write, builder, refusal, raw):
    with refusal("UTF-8", ModelFileError):
        read_gguf(write("a.gguf", builder().pair(raw, 4, bytes(4)).build()))


@pytest.mark.parametrize("alignment", [0, 1, 3, 4, 33, 2**21, 2**31, 2**32 - 1])
def test_alignments_that_are_no_sensible_power_of_two_are_refused(write, builder, refusal, alignment):
    with refusal(f"general.alignment is {alignment}", ModelFileError):
        read_gguf(write("a.gguf", builder().pair("general.alignment", 4, struct.pack("<I", alignment)).tensor("w", (8,)).build()))


def test_metadata_of_another_type_is_refused(write, builder, refusal):
    with refusal("'general.alignment' is a str, not a int", ModelFileError):
        read_gguf(write("a.gguf", builder().text("general.alignment", "32").build()))
    with refusal("'general.alignment' is a bool", ModelFileError):
        read_gguf(write("a.gguf", builder().pair("general.alignment", 7, b"\1").build()))
    with refusal("'split.count' is a float", ModelFileError):
        read_gguf(write("a.gguf", builder().pair("split.count", 6, bytes(4)).build()))


@pytest.mark.parametrize("rank", [0, 5, 2**31, 2**32 - 1])
def test_other_ranks_are_refused(write, builder, refusal, rank):
    raw = bytearray(builder().tensor("w", (8,)).build())
    struct.pack_into("<I", raw, 24 + 9, rank)
    with refusal(f"{rank} dimensions", ModelFileError, peak=200_000):
        read_gguf(write("a.gguf", bytes(raw)))


@pytest.mark.parametrize("dims", [(2**63, 2), (2**64 - 1,) * 4, (2**32, 2**32), (2**31, 2**31, 4), (2**62, 4), (2**40,)])
def test_dimensions_that_overflow_are_refused(write, builder, refusal, dims):
    with refusal("needs \\d+ bytes at offset 0", ModelFileError, peak=200_000):
        read_gguf(write("a.gguf", builder().tensor("w", dims, nbytes=64).build()))


def test_a_dimension_of_zero_is_refused(write, builder, refusal):
    with refusal("dimension of 0", ModelFileError):
        read_gguf(write("a.gguf", builder().tensor("w", (8, 0)).build()))


def test_rows_of_partial_blocks_are_refused(write, builder, refusal):
    with refusal("no whole blocks of 32", ModelFileError):
        read_gguf(write("a.gguf", builder().tensor("w", (33, 32), 8, nbytes=4096).build()))


@pytest.mark.parametrize("offset", [32, 64, 2**31, 2**60, 2**63, 2**64 - 32])
def test_offsets_outside_are_refused(write, builder, refusal, offset):
    with refusal(f"at offset {offset}, but the data section has 32 bytes", ModelFileError):
        read_gguf(write("a.gguf", builder().tensor("w", (8,), offset=offset).build()))


@pytest.mark.parametrize("offset", [1, 31, 2**64 - 1])
def test_misaligned_offsets_are_refused(write, builder, refusal, offset):
    with refusal("no multiple of the alignment 32", ModelFileError):
        read_gguf(write("a.gguf", builder().tensor("w", (8,), offset=offset).build()))


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 32), (32, 0)])
def test_overlapping_tensors_are_refused(write, builder, refusal, first, second):
    with refusal("overlaps", ModelFileError):
        read_gguf(write("a.gguf", builder().tensor("a", (16,), offset=first).tensor("b", (16,), offset=second).build()))


@pytest.mark.parametrize(("kind", "text"), [(4, "Q4_2, removed"), (38, "removed"), (43, r"43 \(unknown\)"), (2**32 - 1, "unknown")])
def test_unknown_and_removed_tensor_types_are_listed(write, builder, refusal, kind, text):
    with refusal(text, UnsupportedError):
        read_gguf(write("a.gguf", builder().tensor("w", (256,), kind).build()))


def test_control_characters_in_names_do_not_reach_the_terminal(write, builder, refusal):
    with refusal(r"\\x1b\[2J", ModelFileError):
        read_gguf(write("a.gguf", builder().tensor("\x1b[2J\n", (8, 0)).build()))


def test_a_long_tensor_name_is_refused(write, builder, refusal):
    with refusal("the limit is 1024", ModelFileError):
        read_gguf(write("a.gguf", builder().tensor("w" * 1025, (8,)).build()))


def check(path, size):
    """Opens or refuses with a typed error, and allocates little more than Python objects for what the file really holds."""
    refused = None
    tracemalloc.start()
    try:
        gguf = read_gguf(path)
        for tensor in gguf.tensors.values():
            assert tensor.nbytes <= size
            tensor.data.sum()
    except (ModelFileError, UnsupportedError) as exc:
        refused = exc
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 400_000
    assert refused is None or (refused.message.isprintable() and refused.fix)


BOUNDARY = st.sampled_from([0, 1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 255, 256, *HUGE])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_field_at_a_boundary_value(write, builder, data):
    made = valid(builder)
    raw = bytearray(made.build())
    width = data.draw(st.sampled_from([1, 2, 4, 8]))
    at = data.draw(st.one_of(st.sampled_from(made.marks), st.integers(0, made.marks[-1])))
    value = data.draw(BOUNDARY) & (2 ** (8 * width) - 1)
    at = min(at, len(raw) - width)
    raw[at : at + width] = value.to_bytes(width, "little")
    check(write("fuzz.gguf", bytes(raw)), len(raw))


def test_random_flips_and_cuts(write, builder):
    made = valid(builder)
    raw = made.build()
    rng = random.Random(20)
    for _ in range(600):
        wrong = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            wrong[rng.randrange(made.marks[-1])] = rng.randrange(256)
        cut = bytes(wrong[: rng.choice([len(wrong), rng.randint(1, len(wrong))])])
        check(write("fuzz.gguf", cut), len(cut))
