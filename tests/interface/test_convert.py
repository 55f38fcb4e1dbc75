"""`fastllm convert`, loading with another dtype, FLM files and `fastllm verify`: what comes out equals what went in, and damage is named."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from fastllm.convert import convert_model, requantised
from fastllm.core import _kernels
from fastllm.core.errors import FastLLMError, ModelFileError, UnsupportedError, UsageError
from fastllm.core.executor import Executor
from fastllm.core.step import StepBatch
from fastllm.formats import open_model
from fastllm.formats.flm import MANIFEST, FlmFile, check_hashes, read_flm
from fastllm.formats.quant_rules import QuantRules, plan_formats, read_rules
from fastllm.loading import LoadOptions, plan_model
from fastllm.models import build

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
IDS = list(range(3, 27))
SOURCES = [("llama", "gguf"), ("llama_llama3", "gguf"), ("phi3", "hf"), ("phi3", "gguf"), ("internlm2", "hf"), ("gemma3", "hf"), ("qwen2", "hf"), ("mixtral", "hf")]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama folder that is wide enough for 4 bits: hidden 256, feed-forward 384, two layers, f32 weights, no tokenizer."""
    folder = tmp_path_factory.mktemp("wide")
    config = json.loads((FIXTURES / "llama" / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256}
    config |= {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    rng = np.random.default_rng(11)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / math.sqrt(shape[-1]) for name, shape in _shapes(config)}
    save_file({n: t + 1 if t.ndim == 1 else t for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    c, f, v, kv = config["hidden_size"], config["intermediate_size"], config["vocab_size"], 128
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (v, c)), ("model.norm.weight", (c,)), ("lm_head.weight", (v, c))]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        found += [(p + "input_layernorm.weight", (c,)), (p + "post_attention_layernorm.weight", (c,))]
        found += [(p + f"self_attn.{n}_proj.weight", (rows, c)) for n, rows in (("q", 256), ("k", kv), ("v", kv), ("o", c))]
        found += [(p + "mlp.gate_proj.weight", (f, c)), (p + "mlp.up_proj.weight", (f, c)), (p + "mlp.down_proj.weight", (c, f))]
    return found


def source_of(family: str, kind: str) -> Path:
    return FIXTURES / family / "model.gguf" if kind == "gguf" else FIXTURES / family


def convert(source: Path, out: Path, *, backend: str | None = "cpu_avx", memory_bytes: int = 1 << 30, threads: int = 0, strict: bool = False, **rules: Any) -> Any:
    with open_model(source) as files:
        return convert_model(files, out, QuantRules(**rules), LoadOptions(threads=threads, strict=strict), backend=backend, memory_bytes=memory_bytes)


def logits(model: Path, backend: str = "cpu_avx", **options: Any) -> tuple[np.ndarray, Any]:
    """Logits [24, V] of one prompt, and the plan (closed)."""
    planned = plan_model(model, LoadOptions(backend=backend, threads=1, ctx=32, max_batch_size=1, prefill_chunk=32, **options))
    try:
        executor = Executor(planned.plan, planned.definition.weights, planned.files.stored, planned.backends)
        try:
            rows, table = np.arange(len(IDS), dtype=np.int32), np.arange(executor.max_blocks, dtype=np.int32)[None]
            start, length = np.array([0, len(IDS)], np.int32), np.array([len(IDS)], np.int32)
            batch = StepBatch(np.array(IDS, np.int32), rows, rows, start, length, table, rows)
            return executor.run(batch).logits.copy(), planned.plan
        finally:
            executor.close()
    finally:
        planned.close()


# the same model ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), SOURCES)
def test_a_file_as_stored_gives_the_bits_of_its_source(family: str, kind: str, tmp_path: Path) -> None:
    source = source_of(family, kind)
    want, _ = logits(source)
    for backend in ("cpu_avx", None):
        out = tmp_path / f"{backend}.flm"
        convert(source, out, backend=backend)
        got, plan = logits(out)
        assert got.tobytes() == want.tobytes()
        assert (plan.total_bytes("mapped") > 0) == (backend is not None)
    lines: list[str] = []
    want, _ = logits(source, "ref")
    got, _ = logits(tmp_path / "cpu_avx.flm", "ref", message=lines.append)
    assert got.tobytes() == want.tobytes()
    assert [line for line in lines if "packed for cpu_avx and are converted back" in line]
    got, _ = logits(tmp_path / "None.flm", "ref")
    assert got.tobytes() == want.tobytes()


def test_a_packed_file_is_converted_once_more_into_the_same_bytes(tmp_path: Path) -> None:
    first, again, plain = tmp_path / "a.flm", tmp_path / "b.flm", tmp_path / "c.flm"
    convert(source_of("phi3", "gguf"), first)
    convert(first, plain, backend=None)
    convert(plain, again)
    want, got = open_model(first), open_model(again)
    assert want.ready is not None
    assert got.ready is not None
    assert {n: hashlib.sha256(t.data).digest() for n, t in want.ready.items()} == {n: hashlib.sha256(t.data).digest() for n, t in got.ready.items()}
    assert want.config == got.config
    want.close(), got.close()


def test_the_same_input_gives_the_same_bytes_for_any_threads_and_memory(wide_model: Path, tmp_path: Path) -> None:
    digests = set()
    for index, (threads, memory) in enumerate(((1, 1 << 30), (2, 1 << 30), (2, 1 << 18))):
        out = tmp_path / f"{index}.flm"
        convert(wide_model, out, dtype="int4", threads=threads, memory_bytes=memory)
        digests.add(hashlib.sha256(out.read_bytes()).hexdigest())
    assert len(digests) == 1
    assert not [p for p in tmp_path.iterdir() if ".part" in p.name]


@pytest.mark.parametrize("backend", ["cpu_avx", "ref"])
def test_loading_with_a_dtype_is_running_the_converted_file(wide_model: Path, backend: str, tmp_path: Path) -> None:
    for dtype, packed in (("int4", "cpu_avx"), ("int8", None), ("int4g32s", None), ("bf16", "cpu_avx")):
        out = tmp_path / f"{dtype}.flm"
        convert(wide_model, out, dtype=dtype, backend=packed)
        got, _ = logits(out, backend)
        want, _ = logits(wide_model, backend, dtype=dtype)
        assert got.tobytes() == want.tobytes(), dtype


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice about its page cache")
@pytest.mark.parametrize("refused", [False, True])
def test_the_writer_leaves_nothing_of_a_file_in_the_page_cache(wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """Where it would lie in small pages. That is advice: a system that refuses it loses no file."""
    forgotten: list[tuple[int, int, int]] = []
    advise = os.posix_fadvise

    def told(fd: int, *range_and_advice: int) -> None:
        forgotten.append(range_and_advice)  # type: ignore[arg-type]
        if refused:
            raise PermissionError("not on this file system")
        advise(fd, *range_and_advice)

    monkeypatch.setattr(os, "posix_fadvise", told)
    path = tmp_path / "model.flm"
    convert(wide_model, path, dtype="int8")
    assert forgotten == [(0, 0, os.POSIX_FADV_DONTNEED)]
    file = read_flm(path)
    check_hashes(file)
    file.close()


def test_the_reader_asks_for_large_pages(wide_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.flm"
    convert(wide_model, path, dtype="int8")
    smaps = Path("/proc/self/smaps")
    if not smaps.exists() or "\nVmFlags:" not in smaps.read_text():
        pytest.skip("this system does not tell the flags of maps (/proc/self/smaps)")
    file = read_flm(path)
    ours, flags = False, []
    for line in smaps.read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("VmFlags:"):
            flags.append("hg" in line.split())
    assert flags == [Path("/sys/kernel/mm/transparent_hugepage").exists()]
    file.close()


def test_safetensors_tools_open_the_file(wide_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.flm"
    convert(wide_model, out, dtype="int4")
    raw, source = out.read_bytes(), open_model(wide_model)
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    assert start % 4096 == 0
    with safetensors.safe_open(out, framework="np") as file:
        assert file.metadata()["format"] == "flm"
        manifest = json.loads(bytes(file.get_tensor(MANIFEST)))
        norm = file.get_tensor("model.layers.1.input_layernorm.weight")
        assert norm.tobytes() == source.tensors["model.layers.1.input_layernorm.weight"].data.tobytes()
        stored = file.get_tensor("model.layers.0.mlp.down_proj.weight")
    entry = manifest["weights"]["model.layers.0.mlp.down_proj.weight"]
    assert (entry["format"], entry["shape"], entry["layout"]["id"]) == ("int4g128", [256, 384], "int4g128.s32")
    assert hashlib.sha256(stored.tobytes()[: entry["bytes"]]).hexdigest() == entry["sha256"]
    header = json.loads(raw[8:start])
    u8 = [h["data_offsets"][0] for n, h in header.items() if n in manifest["weights"] and h["dtype"] == "U8"]
    assert len(u8) == 16
    assert all(offset % 64 == 0 for offset in u8)
    assert u8 == sorted(u8)
    source.close()


# which format a weight gets ---------------------------------------------------------------------------------------------------


def formats(folder: Path, **rules: Any) -> dict[str, str]:
    with open_model(folder) as files:
        definition = build(files.kind, files.architecture, files.config, files.tensors)
        return plan_formats(definition.graph, definition.weights, files.tensors, QuantRules(**rules)).formats


def test_defaults_keep_what_is_delicate(wide_model: Path) -> None:
    found = formats(wide_model, dtype="int4")
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == "int8g128"
    assert found["model.layers.0.self_attn.q_proj.weight"] == "int4g128"
    assert not [name for name in found if "norm" in name]
    assert set(formats(FIXTURES / "llama", dtype="int4").values()) == {"int8g64", "q8_0"}  # 32 or 64 inputs: too few for 4 bits
    routed = formats(FIXTURES / "mixtral", dtype="int8")
    assert not [name for name in routed if name.endswith("gate.weight")]
    assert any("experts" in name for name in routed)


def test_group_sizes_and_spellings(wide_model: Path) -> None:
    folder, name = wide_model, "model.layers.0.mlp.down_proj.weight"  # 384 inputs
    for dtype, want in {"f16": "f16", "float16": "f16", "bfloat16": "bf16", "float32": None, "int8g64": "int8g64", "int8g32": "q8_0", "ggml_q8_0": "q8_0"}.items():
        assert formats(folder, dtype=dtype).get(name) == want, dtype
    for size, want in ((32, "int4g32"), (64, "int4g64"), (256, "int4g128")):
        assert formats(folder, dtype="int4", group_size=size)[name] == want
    assert formats(folder, rules=(("down_proj", "int4g32s"),))[name] == "q4_0"
    assert formats(folder, rules=(("down_proj", "int4g256s"),))[name] == "int4g128s"
    for bad in ("int5", "int4g48", "q4_k", "int8g256", ""):
        with pytest.raises(UsageError, match="no dtype"):
            formats(folder, dtype=bad)
    with pytest.raises(UsageError, match="group_size"):
        formats(folder, dtype="int4", group_size=100)


def test_the_last_rule_that_matches_wins(wide_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text('[{"key": "mlp", "dtype": "int8"}, {"key": "down", "dtype": "int4g32", "why": "comment"}, {"key": "nothing", "dtype": "f16"}]')
    rules = read_rules(path)
    found = formats(wide_model, dtype="int4g64", rules=rules, no_quant_layer="q_proj")
    assert found["model.layers.1.mlp.up_proj.weight"] == "int8g128"
    assert found["model.layers.1.mlp.down_proj.weight"] == "int4g32"
    assert found["model.layers.1.self_attn.k_proj.weight"] == "int4g64"
    assert "model.layers.1.self_attn.q_proj.weight" not in found
    with open_model(wide_model) as files:
        definition = build(files.kind, files.architecture, files.config, files.tensors)
        _, notes = requantised(definition, files.tensors, QuantRules(rules=rules))
    assert notes == ["the rule 'nothing' matches no weight"]
    for text, error in (("{}", "no list"), ('[{"key": "a"}]', "rule 0"), ("[1]", "rule 0"), ("[", "not valid JSON")):
        path.write_text(text)
        with pytest.raises(FastLLMError, match=error):
            read_rules(path)
    with pytest.raises(UsageError, match="regular expression"):
        formats(wide_model, dtype="int4", no_quant_layer="(")


def test_quantising_twice_must_be_accepted(tmp_path: Path, wide_model: Path) -> None:
    first = tmp_path / "int8.flm"
    convert(wide_model, first, dtype="int8")
    with pytest.raises(UsageError, match=r"quantised already, the first is model.layers.0.self_attn.q_proj.weight"):
        convert(first, tmp_path / "twice.flm", dtype="int4")
    assert not (tmp_path / "twice.flm").exists()
    convert(first, tmp_path / "twice.flm", dtype="int4", allow_requantize=True)
    convert(first, tmp_path / "back.flm", dtype="f16")  # to floating point is no second quantisation
    assert logits(tmp_path / "twice.flm")[0].shape == (24, 256)


def test_the_report_is_the_error_of_what_was_written(wide_model: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    reports = {method: convert(wide_model, tmp_path / f"{method}.flm", dtype="int4", method=method) for method in ("search", "minmax")}
    with open_model(wide_model) as files:
        values = files.tensors[name].data.view(np.float32).astype(np.float64)
    data, _ = _kernels.encode_groups("int4g128", values.astype(np.float32).reshape(384, 256))
    error = np.linalg.norm(_kernels.decode("int4g128", data, values.size) - values) / np.linalg.norm(values)
    format, relative, worst = reports["search"].losses[name]
    assert format == "int4g128"
    assert relative == pytest.approx(error, rel=1e-6)
    assert relative < worst < 0.2
    assert all(reports["search"].losses[n][1] <= reports["minmax"].losses[n][1] for n in reports["search"].losses)


def test_values_that_a_format_cannot_hold_name_the_weight(wide_model: Path, tmp_path: Path) -> None:
    with open_model(wide_model) as files:
        tensors = {n: t.data.view(np.float32).reshape(t.shape).copy() for n, t in files.tensors.items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((wide_model / "config.json").read_bytes())
    with pytest.raises(ModelFileError, match=r"layers.1.mlp.up_proj.weight.*NaN"):
        convert(tmp_path, tmp_path / "a.flm", dtype="int4")
    assert [p.name for p in tmp_path.iterdir() if "flm" in p.name] == []


# the command line -------------------------------------------------------------------------------------------------------------


def test_convert_run_inspect_and_verify(run: Any, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.flm"
    done = run("convert", tiny_model, "-o", out, "--dtype", "int8", "--json")
    report = json.loads(done.out)
    assert (done.code, report["size_bytes"], report["packed_for"]) == (0, out.stat().st_size, "cpu_avx")
    assert all(0 < w["relative_error"] < 0.01 for w in report["weights"].values())
    args = ("--prompt", "Hi", "--max-tokens", 8, "--temperature", 0, "--json")
    answers = [json.loads(run("run", *model, *args).out) for model in ((out,), (tiny_model, "--dtype", "int8"))]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert answers[0]["prompt_ids"] == answers[1]["prompt_ids"]
    facts = json.loads(run("inspect", out, "--json").out)
    assert facts["kind"] == "flm from huggingface"
    assert facts["context"] == 64
    assert facts["chat_template_chars"] > 0
    plan = json.loads(run("plan", out, "--json", "--no-measure").out)
    assert plan["mapped_bytes"] > 0.9 * plan["weights_bytes"]
    checked = run("verify", out)
    assert (checked.code, "all finite" in checked.out, "hashes" in checked.out) == (0, True, True)
    assert run("verify", tiny_model).code == 0
    again = run("convert", tiny_model, "-o", out)
    assert (again.code, "--overwrite" in again.err) == (2, True)
    assert run("export", tiny_model, "-o", out, "--overwrite", "--no-pack", "--quiet").code == 0
    assert run("convert", tiny_model, "-o", tmp_path / "a.gguf").code == 2
    assert run("convert", tiny_model, "-o", tmp_path / "b.flm", "--backend", "ref").code == 2
    assert run("convert", tiny_model, "-o", tmp_path / "no" / "b.flm").code == 1
    for size in ("much", "-5", "9" * 400):
        refused = run("convert", tiny_model, "-o", tmp_path / "b.flm", f"--memory-limit={size}")
        assert (refused.code, "is no size" in refused.err) == (2, True), refused.err
    strict = run("convert", tiny_model, "-o", tmp_path / "b.flm", "--strict", "--dtype", "int8")
    assert (strict.code, "no multiple of the group" in strict.err) == (2, True)
    assert not (tmp_path / "b.flm").exists()


def test_a_gguf_tokenizer_comes_along(run: Any, package: str, tmp_path: Path) -> None:
    run("download", package)
    out = tmp_path / "a.flm"
    assert run("convert", package, "-o", out, "--offline").code == 0
    with open_model(out) as files:
        assert (files.tokenizer is None) == ("tokenizer.ggml.model" not in files.config)


# hostile files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small packed file."""
    out = tmp_path_factory.mktemp("flm") / "whole.flm"
    convert(source_of("llama", "gguf"), out)
    return out.read_bytes()


def rebuilt(raw: bytes, change: Callable[[dict[str, Any]], object], header: Callable[[dict[str, Any]], object] = lambda h: None) -> bytes:
    """The file with another manifest, whose hash and length are right, and another header."""
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8:start])
    first, last = head[MANIFEST]["data_offsets"]
    manifest = json.loads(raw[start + first : start + last])
    change(manifest)
    body = json.dumps(manifest).encode()
    head[MANIFEST] = {"dtype": "U8", "shape": [len(body)], "data_offsets": [first, first + len(body)]}
    head["__metadata__"]["manifest_sha256"] = hashlib.sha256(body).hexdigest()
    header(head)
    text = json.dumps(head).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text + raw[start : start + first] + body


NAME = "model.layers.0.mlp.up_proj.weight"
CASES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no weights": lambda m: m.pop("weights"),
    "a list of weights": lambda m: m.update(weights=[]),
    "a weight that is not there": lambda m: m["weights"].update(other=m["weights"][NAME]),
    "a weight too few": lambda m: m["weights"].pop(NAME),
    "an unknown format": lambda m: m["weights"][NAME].update(format="q9"),
    "a shape that is none": lambda m: m["weights"][NAME].update(shape="big"),
    "a huge shape": lambda m: m["weights"][NAME].update(shape=[1 << 39, 1 << 39]),
    "a negative shape": lambda m: m["weights"][NAME].update(shape=[-64, -64]),
    "another shape": lambda m: m["weights"][NAME].update(shape=[2 * m["weights"][NAME]["shape"][0], *m["weights"][NAME]["shape"][1:]]),
    "a huge length": lambda m: m["weights"][NAME].update(bytes=1 << 60),
    "a layout of another length": lambda m: m["weights"][NAME]["layout"].update(bytes=64),
    "a layout without a name": lambda m: m["weights"][NAME]["layout"].update(id=None),
    "a layout of a text": lambda m: m["weights"][NAME].update(layout="s32"),
    "no hash": lambda m: m["weights"][NAME].pop("sha256"),
    "an unknown file": lambda m: m["files"].update({"../evil": {"bytes": 1, "sha256": ""}}),
    "no source tensors": lambda m: m.pop("source_tensors"),
    "a source tensor twice": lambda m: m["source_tensors"].append(m["source_tensors"][0]),
    "a kept tensor that is not there": lambda m: m["kept"].update({m["source_tensors"][0][0]: {}}),
    "no configuration": lambda m: m.pop("config"),
    "another kind": lambda m: m.update(kind="pickle"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_manifest_that_lies_is_refused(case: str, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.flm"
    path.write_bytes(rebuilt(whole, lambda m: None))
    open_model(path).close()
    path.write_bytes(rebuilt(whole, CASES[case]))
    with pytest.raises((ModelFileError, UnsupportedError)) as error:
        open_model(path)
    assert "a.flm" in error.value.message or error.value.who == str(path)


def test_a_file_that_is_cut_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    ends = sorted(h["data_offsets"][1] + start for n, h in json.loads(whole[8:start]).items() if n != "__metadata__")
    path = tmp_path / "a.flm"
    for size in {0, 4, 8, 100, start - 1, start, *(e - 1 for e in ends), *ends[:-1]}:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError):
            open_model(path)


@pytest.mark.parametrize(
    ("metadata", "error"),
    [({"format": "pt"}, "not say that this is an FLM"), ({"flm": "9"}, "FLM version '9'"), ({"manifest_sha256": "0" * 64}, "manifest is damaged")],
)
def test_a_header_of_another_kind_is_refused(metadata: dict[str, str], error: str, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.flm"
    path.write_bytes(rebuilt(whole, lambda m: None, lambda h: h["__metadata__"].update(metadata)))
    with pytest.raises((ModelFileError, UnsupportedError), match=error):
        open_model(path)


def test_overlapping_tensors_are_refused(whole: bytes, tmp_path: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        first, second = [n for n in header if n != "__metadata__"][:2]
        size = header[second]["data_offsets"][1] - header[second]["data_offsets"][0]
        at = header[first]["data_offsets"][0]
        header[second]["data_offsets"] = [at, at + size]

    path = tmp_path / "a.flm"
    path.write_bytes(rebuilt(whole, lambda m: None, overlap))
    with pytest.raises(ModelFileError, match=r"overlaps|gap"):
        open_model(path)


def test_verify_names_the_first_damaged_tensor(run: Any, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.flm"
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    at = json.loads(whole[8:start])[NAME]["data_offsets"][0] + start
    raw = bytearray(whole)
    raw[at + 77] ^= 4
    path.write_bytes(raw)
    with open_model(path) as files:
        assert isinstance(files.source, FlmFile)  # opening does not read weights
    done = run("verify", path)
    assert done.code == 1
    assert f"'{NAME}' is damaged: bytes {at} to" in done.err


def test_verify_finds_values_that_are_not_finite(run: Any, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    raw = bytearray((folder / "model.safetensors").read_bytes())
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    at = start + json.loads(raw[8:start])["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0] + 200
    raw[at : at + 2] = b"\xc0\x7f"  # a NaN in bf16
    (folder / "model.safetensors").write_bytes(raw)
    done = run("verify", folder)
    assert done.code == 1
    assert "'model.layers.1.mlp.up_proj.weight' holds NaN in its bf16 block 100 (bytes 200 to 202" in done.err


def test_a_layout_that_nothing_knows_says_what_to_do(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.flm"

    def newer(manifest: dict[str, Any]) -> None:
        for weight in manifest["weights"].values():
            if weight["layout"]:
                weight["layout"]["version"] = 999

    path.write_bytes(rebuilt(whole, newer))
    with pytest.raises(UnsupportedError, match=r"packed layout .* version 999"):
        logits(path)
