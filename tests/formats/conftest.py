"""Builders for small and deliberately wrong files, and the two oracles of every hostile case: the right error, little memory."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastllm.core.errors import FastLLMError, ModelFileError, UnsupportedError

DATA = Path(__file__).parent / "data"


def gguf_string(text: str | bytes) -> bytes:
    """u64 length and bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


class GGUFBuilder:
    """Writes GGUF by hand, so that every field can be wrong. `marks` lists the byte positions where a structure ends."""

    def __init__(self, version: int = 3, magic: bytes = b"GGUF", alignment: int = 32):
        self.version, self.magic, self.alignment = version, magic, alignment
        self.pairs: list[bytes] = []
        self.tensors: list[bytes] = []
        self.data = b""
        self.num_pairs: int | None = None
        self.num_tensors: int | None = None
        self.marks: list[int] = []

    def pair(self, key: str | bytes, kind: int, value: bytes) -> GGUFBuilder:
        """A metadata pair with the value's bytes as given."""
        self.pairs.append(gguf_string(key) + struct.pack("<I", kind) + value)
        return self

    def text(self, key: str, value: str) -> GGUFBuilder:
        """A string pair."""
        return self.pair(key, 8, gguf_string(value))

    def tensor(self, name: str, dims: tuple[int, ...], kind: int = 0, offset: int | None = None, nbytes: int | None = None) -> GGUFBuilder:
        """A tensor info (dims fastest first) and its data, 4 bytes per value unless `nbytes` says otherwise."""
        at = len(self.data) if offset is None else offset
        self.tensors.append(
            gguf_string(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, at)
        )
        size = 4
        for dim in dims:
            size *= dim
        size = size if nbytes is None else nbytes
        self.data += bytes(i % 251 for i in range(size)) + bytes(-size % self.alignment)
        return self

    def build(self) -> bytes:
        """The whole file."""
        out = self.magic + struct.pack("<I", self.version)
        out += struct.pack("<Q", len(self.tensors) if self.num_tensors is None else self.num_tensors)
        out += struct.pack("<Q", len(self.pairs) if self.num_pairs is None else self.num_pairs)
        self.marks = [0, 4, 8, 16, 24]
        for piece in (*self.pairs, *self.tensors):
            out += piece
            self.marks.append(len(out))
        out += bytes(-len(out) % self.alignment)
        self.marks.append(len(out))
        return out + self.data


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """u64 length, JSON (or raw bytes), data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


@contextlib.contextmanager
def expect_refusal(
    match: str, kinds: type[FastLLMError] | tuple[type[FastLLMError], ...] = (ModelFileError, UnsupportedError), peak: int = 1_000_000
) -> Iterator[None]:
    """The block must raise one of `kinds` whose text matches, say who and fix, and allocate less than `peak` bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(kinds, match=match) as caught:
            yield
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert used < peak, f"{used} bytes were allocated"
    assert caught.value.who
    assert caught.value.fix
    assert "\n" not in caught.value.message
    assert caught.value.message.isprintable()


@pytest.fixture
def builder() -> type[GGUFBuilder]:
    """The class that writes GGUF by hand."""
    return GGUFBuilder


@pytest.fixture
def refusal() -> Callable[..., contextlib.AbstractContextManager[None]]:
    """`with refusal("text"):` around what must be refused."""
    return expect_refusal


@pytest.fixture
def st_bytes() -> Callable[..., bytes]:
    """Writes safetensors by hand."""
    return safetensors_bytes


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """Writes a file below tmp_path, returns its path."""

    def write_file(name: str, raw: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        return path

    return write_file


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of committed files."""
    return DATA


@pytest.fixture(scope="session")
def expected() -> dict:
    """What the gguf and safetensors packages read from them."""
    return json.loads((DATA / "expected.json").read_text())
