"""A tiny model as a folder and as a GGUF file that can be changed field by field, and a process to run hostile ones in."""

from __future__ import annotations

import copy
import json
import os
import select
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
SPECIALS = ["<unk>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
SECONDS = 20  # a case that takes longer hangs; the bar for a refusal is 5 s and is looked at apart


def alphabet() -> list[str]:
    """The characters that stand for bytes (those that UTF-8 never uses are left out)."""
    never = {chr(c) for c in range(0xF8, 0x100)}
    return [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in never]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder: two layers, random weights, byte tokenizer, template, context 64."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURES / "llama" / name, folder / name)
    pieces = [*SPECIALS, *alphabet()][:256]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == 7:
        return bytes([value])
    if kind == 8:
        return _text(value)
    if kind == 9:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack("<" + SCALARS[kind], value)


class Model:
    """A GGUF file in pieces. pairs: key -> (value type, value); tensors: dicts of name, shape (outermost first), type, data, and
    offset (None: where it comes to lie)."""

    def __init__(self) -> None:
        self.pairs: dict[str, tuple[int, Any]] = {}
        self.tensors: list[dict[str, Any]] = []
        self.alignment = 32

    def copy(self) -> Model:
        """A model of its own."""
        return copy.deepcopy(self)

    def build(self) -> bytes:
        """The file."""
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.pairs))
        head += b"".join(_text(k) + struct.pack("<I", kind) + _value(kind, v) for k, (kind, v) in self.pairs.items())
        data = b""
        for t in self.tensors:
            dims = b"".join(struct.pack("<Q", d) for d in reversed(t["shape"]))
            at = len(data) if t["offset"] is None else t["offset"]
            head += _text(t["name"]) + struct.pack("<I", len(t["shape"])) + dims + struct.pack("<IQ", t["type"], at)
            data += t["data"] + bytes(-len(t["data"]) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data


def read_fixture(name: str) -> Model:
    """A fixture's GGUF file, with a tokenizer of bytes."""
    from fastllm.formats.gguf import GGML_LAYOUTS, read_gguf

    numbers = {layout: i for i, (layout, _, _) in GGML_LAYOUTS.items()}
    gguf, model = read_gguf(FIXTURES / name / "model.gguf"), Model()
    kinds = {bool: 7, int: 4, float: 6, str: 8}
    model.pairs = {k: (kinds[type(v)], v) for k, v in gguf.metadata.items() if type(v) in kinds}
    for info in gguf.infos:
        data = bytes(gguf.tensors[info.name].data)
        model.tensors.append({"name": info.name, "shape": list(info.shape), "type": numbers[info.dtype], "data": data, "offset": None})
    gguf.close()
    pieces = [*SPECIALS, "ab", "cd", *alphabet()]
    pieces += [f"<{i}>" for i in range(len(pieces), 256)]
    model.pairs |= {
        "tokenizer.ggml.model": (8, "gpt2"),
        "tokenizer.ggml.pre": (8, "gpt-2"),
        "tokenizer.ggml.tokens": (9, (8, pieces)),
        "tokenizer.ggml.token_type": (9, (5, [3] * 3 + [1] * 253)),
        "tokenizer.ggml.merges": (9, (8, ["a b", "c d"])),
        "tokenizer.ggml.bos_token_id": (4, 1),
        "tokenizer.ggml.eos_token_id": (4, 2),
        "tokenizer.chat_template": (8, TEMPLATE),
    }
    return model


@pytest.fixture(scope="session")
def tiny_gguf() -> Callable[[str], Model]:
    """name of a fixture -> its model, to be changed freely."""
    kept: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in kept:
            kept[name] = read_fixture(name)
        return kept[name].copy()

    return get


_SERVER = r"""
import json, os, resource, sys, time, warnings
import fastllm.core.engine, fastllm.core.executor, fastllm.core.plugins, fastllm.formats, fastllm.models, fastllm.text
import fastllm.backends.cpu_avx.backend, fastllm.backends.ref.backend, fastllm.core._kernels
from fastllm import LLM, SamplingParams
from fastllm.core.errors import FastLLMError
warnings.simplefilter("error")
FEW = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
def case(path, options):
    start = time.monotonic()
    try:
        with LLM(path, offline=True, **options) as llm:
            llm.generate([[5, 6, 7, 8], [9]], FEW)
            done = {"kind": "ok", "ids": llm.generate("ab c", FEW)[0].output_ids}
    except FastLLMError as error:
        done = {"kind": type(error).__name__, "message": error.message}
    return {**done, "seconds": time.monotonic() - start, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}
for line in sys.stdin:
    path, options = json.loads(line)
    child = os.fork()
    if child == 0:
        os.write(1, (json.dumps(case(path, options)) + "\n").encode())
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        os.write(1, (json.dumps({"kind": f"died {code}"}) + "\n").encode())
"""


class Box:
    """A process that loads and runs each model in a child of its own, so that a crash is seen and not shared."""

    def __init__(self, folder: Path):
        import subprocess

        self.path = folder / "model.gguf"
        self.errors = (folder / "stderr").open("w+")
        command = [sys.executable, "-X", "faulthandler", "-c", _SERVER]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, bufsize=1, start_new_session=True)

    def run(self, content: Model | bytes, **options: Any) -> dict[str, Any]:
        """Loads the model and generates a few tokens: {kind: "ok", ids} or {kind: class of the error, message}; fails the test if the
        process died, hung, raised what is no FastLLMError, took more than 5 s or more than twice the file and 200 MB."""
        raw = content if isinstance(content, bytes) else content.build()
        self.path.write_bytes(raw)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(self.path), {"backend": "cpu_avx", **options}]) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:
            os.killpg(self.process.pid, signal.SIGABRT)
            pytest.fail(f"hangs: {self.said()}")
        result: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert not result["kind"].startswith("died"), f"{result['kind']}: {self.said()}"
        assert result["seconds"] < 5
        assert result["peak"] < 2 * len(raw) + (200 << 20)
        message = result.get("message", "x")
        assert message
        assert message.isprintable()
        return result

    def said(self) -> str:
        """What the process wrote to stderr."""
        self.errors.flush()
        return Path(self.errors.name).read_text()[-3000:]

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    """box.run(model, **options)."""
    box = Box(tmp_path_factory.mktemp("box"))
    try:
        yield box
    finally:
        box.close()
