"""The bounds-checked reader: what it refuses to open, and every getter at the end of the file."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fastllm.core.errors import ModelFileError
from fastllm.formats.reader import Cursor, MappedFile, shown


def test_a_missing_file_is_named(tmp_path, refusal):
    with refusal("no such file"):
        MappedFile(tmp_path / "absent.gguf")


def test_an_empty_file_is_named(write, refusal):
    with refusal("empty"):
        MappedFile(write("a.gguf", b""))


def test_a_directory_is_named(tmp_path, refusal):
    with refusal("a directory"):
        MappedFile(tmp_path)


def test_a_fifo_is_named_and_not_opened(tmp_path, refusal):
    os.mkfifo(tmp_path / "a.gguf")
    with refusal("FIFO"):  # opening it would block for ever
        MappedFile(tmp_path / "a.gguf")


def test_devices_are_named(refusal):
    with refusal("character device"):
        MappedFile("/dev/zero")


def test_a_socket_is_named(tmp_path, refusal, monkeypatch):
    monkeypatch.chdir(tmp_path)  # socket paths are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.gguf")
        with refusal("a socket"):
            MappedFile("s.gguf")


def test_a_symlink_loop_is_named(tmp_path, refusal):
    (tmp_path / "a.gguf").symlink_to(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").symlink_to(tmp_path / "a.gguf")
    with refusal("loop of symlinks"):
        MappedFile(tmp_path / "a.gguf")


def test_a_dangling_symlink_names_its_target(tmp_path, refusal):
    (tmp_path / "a.gguf").symlink_to("blob-1234")
    with refusal("symlink to 'blob-1234'"):
        MappedFile(tmp_path / "a.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(write, refusal):
    path = write("a.gguf", b"GGUF")
    path.chmod(0)
    with refusal("no permission"):
        MappedFile(path)


def test_a_name_with_nul_is_refused():
    with pytest.raises(ModelFileError):
        MappedFile("a\0b.gguf")


def zip_bytes(tmp_path) -> bytes:
    with zipfile.ZipFile(tmp_path / "z", "w") as archive:
        archive.writestr("a", "b")
    return (tmp_path / "z").read_bytes()


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-lfs pointer"),
        (b"  \n<!DOCTYPE html><html>", "web page"),
        (b"<html><body>404", "web page"),
        (b'<?xml version="1.0"?><Error>', "web page"),
        (pickle.dumps({"a": 1}), "pickle"),
        (b"\x1f\x8b\x08" + bytes(40), "compressed"),
        (b"tjgg" + bytes(60), "before GGUF"),
        (b'{"error": "not found"}', "JSON"),
        (bytes(64), "zero bytes"),
        (b"\x7fELF" + bytes(60), "starts with 7f 45"),
    ],
)
def test_other_kinds_under_our_suffix_are_named(write, refusal, raw, named):
    with refusal(f"(?i){named}"):
        raise MappedFile(write("a.gguf", raw)).wrong_magic("a GGUF file")


def test_a_zip_is_named(tmp_path, write, refusal):
    with refusal("zip archive"):
        raise MappedFile(write("a.gguf", zip_bytes(tmp_path))).wrong_magic("a GGUF file")


GETTERS = [("u8", 1), ("u16", 2), ("u32", 4), ("u64", 8), ("f32", 4), ("f64", 8)]


@pytest.mark.parametrize(("getter", "size"), GETTERS)
def test_getters_read_to_the_last_byte_and_not_beyond(write, refusal, getter, size):
    cursor = Cursor(MappedFile(write("a", bytes(16))), 16 - size)
    assert getattr(cursor, getter)("x") == 0
    assert cursor.left == 0
    cursor.pos = 16 - size + 1
    with refusal(f"byte {17 - size}.*x needs {size} bytes, but only {size - 1} are left"):
        getattr(cursor, getter)("x")


@pytest.mark.parametrize("length", [9, 2**31, 2**32, 2**60, 2**63, 2**64 - 1])
def test_a_string_longer_than_the_file_allocates_nothing(write, refusal, length):
    cursor = Cursor(MappedFile(write("a", struct.pack("<Q", length) + b"12345678")))
    with refusal(f"{length}, but the 8 bytes left", peak=100_000):
        cursor.string("a key")


def test_invalid_utf8_names_the_byte(write, refusal):
    cursor = Cursor(MappedFile(write("a", struct.pack("<Q", 4) + b"ab\xff\xfe")))
    with refusal("byte 10.*UTF-8"):
        cursor.string("a key")


@pytest.mark.parametrize("raw", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_invalid_utf8_in_a_list_names_the_item(write, refusal, raw):
    cursor = Cursor(MappedFile(write("a", struct.pack("<Q", 1) + b"a" + struct.pack("<Q", len(raw)) + raw)))
    with refusal(r"tokens\[1\] is not valid UTF-8"):
        cursor.strings(2, "tokens")


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 17), (17, 0), (16, 1), (2**63, 1), (1, 2**63), (-1, 1), (1, -1), (2**64, 2**64)])
def test_an_extent_outside_the_file_is_refused(write, refusal, offset, nbytes):
    file = MappedFile(write("a", bytes(16)))
    with refusal(f"tensor t needs {nbytes} bytes at offset {offset}, but the file has 16 bytes"):
        file.extent("tensor t", offset, nbytes)


def test_an_extent_is_a_read_only_view(write):
    file = MappedFile(write("a", bytes(range(16))))
    view = file.extent("t", 4, 12)
    assert view.tolist() == list(range(4, 16))
    assert not view.flags.writeable
    assert file.extent("t", 16, 0).size == 0


def test_views_outlive_close(write):
    file = MappedFile(write("a", bytes(range(16))))
    view = file.extent("t", 4, 4)
    file.close()
    file.close()
    assert view.tolist() == [4, 5, 6, 7]
    with pytest.raises(ModelFileError, match="closed"):
        file.check_unchanged()


def test_a_replaced_file_is_harmless_and_a_changed_one_is_noticed(write, tmp_path, refusal):
    path = write("a", bytes(64))
    file = MappedFile(path)
    write("new", b"1" * 64).replace(path)
    file.check_unchanged()
    assert not file.data.any()

    file = MappedFile(path)
    file.check_unchanged()
    with path.open("ab") as out:
        out.write(b"x")
    with refusal("64 bytes when opened, 65 now"):
        file.check_unchanged()


def test_a_touched_file_is_noticed(write, refusal):
    path = write("a", bytes(64))
    file = MappedFile(path)
    os.utime(path, ns=(1, 1))
    with refusal("changed while it was in use"):
        file.check_unchanged()


def test_bytes_are_read_into_memory_of_our_own(write, refusal):
    file = MappedFile(write("a", bytes(range(200))))
    part = file.read(10, 5, 4)
    assert part.tolist() == [15, 16, 17, 18]
    assert not np.shares_memory(part, file.data)
    with refusal("needs 4 bytes at offset 198"):
        file.read(190, 8, 4)
    file.close()
    with refusal("closed|needs"):
        file.read(10, 5, 4)


def test_reading_a_file_that_was_cut_is_an_error(write, refusal):
    path = write("a", bytes(100_000))
    file = MappedFile(path)
    os.truncate(path, 50_000)
    assert not file.read(0, 40_000, 5_000).any()
    with refusal("was cut while it was in use: 100000 bytes when opened, 50000 now"):
        file.read(0, 40_000, 20_000)


def test_names_are_escaped_and_cut_in_messages():
    assert shown("a\x1b[31m\n\u202e") == "'a\\x1b[31m\\n\\u202e'"
    assert shown("\ud800") == "'\\ud800'"
    assert len(shown("x" * 10_000)) < 100


def test_pages_that_were_read_leave_memory_and_come_back(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)) * 4096)

    def resident() -> int:
        lines, ours = Path("/proc/self/smaps").read_text().splitlines(), False
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                ours = line.endswith(str(path))
            elif ours and line.startswith("Rss:"):
                return int(line.split()[1])
        raise AssertionError(path)

    file = MappedFile(path)
    assert int(file.data.sum()) == 4096 * sum(range(256))
    assert resident() >= 1024
    file.drop_pages()
    assert resident() == 0
    assert int(file.data.sum()) == 4096 * sum(range(256))
    file.close()
