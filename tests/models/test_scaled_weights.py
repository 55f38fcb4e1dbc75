"""Quantised safetensors: fp8 with a scale for each tile (DeepSeek-V3), and MXFP4 experts (gpt-oss). A quantised file and its twin, which
has the decoded values as plain numbers, are the same model."""

from __future__ import annotations

import json
import math
import struct
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fastllm.api import RefBackend
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.cli.main import run_command
from fastllm.core import _kernels
from fastllm.core.errors import ModelFileError, UnsupportedError
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.step import StepBatch
from fastllm.core.weights import TensorSource, WeightRef
from fastllm.formats import open_model
from fastllm.models import build

FIXTURES = Path(__file__).parent / "fixtures"
PROMPT = 24
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3(code):
    """The value of a code, from the definition."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    value = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 8) * Fraction(2) ** -6
    return float(sign * value)


CODES = np.array([e4m3(c) for c in range(256)])


def nearest(values):
    """Codes of e4m3, by search among all values."""
    order = np.argsort(CODES[np.isfinite(CODES)], kind="stable")
    codes, sorted_values = np.flatnonzero(np.isfinite(CODES))[order], CODES[np.isfinite(CODES)][order]
    at = np.searchsorted(sorted_values, values).clip(1, len(codes) - 1)
    left = np.abs(values - sorted_values[at - 1]) <= np.abs(sorted_values[at] - values)
    return codes[np.where(left, at - 1, at)].astype(np.uint8)


def test_all_codes_of_e4m3_and_blocks_of_them_decode_as_defined():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(_kernels.decode("f8_e4m3", codes, 256), CODES.astype(np.float32))
    assert np.signbit(_kernels.decode("f8_e4m3", np.array([128], np.uint8), 1)[0])
    assert np.nanmax(CODES) == 448
    scale = np.float32(0.7)
    block = np.concatenate([np.array([scale]).view(np.uint8), codes[:128], np.array([-scale]).view(np.uint8), codes[128:]])
    wanted = np.concatenate([scale * CODES[:128].astype(np.float32), -scale * CODES[128:].astype(np.float32)])
    np.testing.assert_array_equal(_kernels.decode("fp8g128", block, 256), wanted)
    np.testing.assert_array_equal(_kernels.decode("u8", codes, 256), codes.astype(np.float32))


def tiled(scales, tile, rows, width):
    return np.repeat(np.repeat(scales, tile[0], 0), tile[1], 1)[:rows, :width]


@pytest.mark.parametrize(("rows", "width", "tile", "format"), [(200, 384, (128, 128), "fp8g128"), (5, 256, (2, 256), "fp8g128"), (40, 48, (16, 32), "f32"), (3, 128, (4, 64), "f32")])
def test_codes_and_scales_of_tiles_are_joined_also_of_some_rows_and_turned_round(rows, width, tile, format):
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 127, (rows, width)).astype(np.uint8)
    scales = rng.standard_normal((-(-rows // tile[0]), -(-width // tile[1]))).astype(np.float32)
    wanted = CODES[codes].astype(np.float32) * tiled(scales, tile, rows, width)
    sources = {
        "w": TensorSource("w", (rows, width), "f8_e4m3", codes.reshape(-1)),
        "s": TensorSource("s", scales.shape, "f32", scales.reshape(-1).view(np.uint8)),
    }
    ref = WeightRef("w", scales="s", tile=tile)
    found = ref.resolve(sources, "x", (rows, width))
    assert found.format == format == ref.format(sources)
    np.testing.assert_array_equal(found.decode(), wanted)
    some = ref.block(1, rows - 1)
    np.testing.assert_array_equal(some.resolve(sources, "x", (rows - 2, width)).decode(), wanted[1:-1])
    turned = WeightRef("w", scales="s", tile=tile, transpose=True)
    assert turned.format(sources) == "f32"
    np.testing.assert_array_equal(turned.resolve(sources, "x", (width, rows)).decode(), wanted.T)
    picked = WeightRef("w", scales="s", tile=tile, row_index=(2, 0))
    np.testing.assert_array_equal(picked.resolve(sources, "x", (2, width)).decode(), wanted[[2, 0]])


def source(name, array, format=None, counts=None):
    """An array as a tensor of a file; counts: name -> bytes that were read of it."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def read(start, count):
        counts[name] = counts.get(name, 0) + count
        return data[start : start + count].copy()

    return TensorSource(name, array.shape, format or {"f": "f32", "u": "u8"}[array.dtype.kind], data, read=None if counts is None else read)


@pytest.mark.parametrize(("format", "dims", "scales"), [
    ("f8_e4m3", (64, 64), np.ones((2, 1), np.float32)), ("f8_e4m3", (64, 64), np.ones((1, 2), np.float32)), ("f8_e4m3", (64, 64), np.ones(4, np.float32)),
    ("f8_e4m3", (64, 64), np.ones((4, 2), np.float32)), ("f8_e4m3", (64, 64), np.ones((3, 2), np.float32)), ("f8_e4m3", (64, 64), np.ones((2, 2), np.uint8)),
    ("f16", (64, 32), np.ones((2, 2), np.float32)), ("u8", (64, 4, 16), np.ones((64, 3), np.uint8)), ("u8", (64, 4, 16), np.ones((63, 4), np.uint8)),
    ("u8", (64, 4, 16), np.ones((65, 4), np.uint8)), ("u8", (64, 4, 16), np.ones((64, 4), np.float32)), ("u8", (64, 8, 8), np.ones((64, 8), np.uint8)),
    ("u8", (64, 64), np.ones((64, 2), np.uint8)),
])  # fmt: skip
def test_codes_and_scales_that_do_not_belong_together_are_a_damaged_file(format, dims, scales):
    codes = source("w", np.zeros(dims, np.uint8 if format != "f16" else np.uint16), format)
    shape = (dims[0], math.prod(dims[1:]) * (2 if format == "u8" else 1))
    ref = WeightRef("w", scales="s", tile=(32, 32))
    for sources in ({"w": codes, "s": source("s", scales)}, {"w": stack(codes), "s": stack(source("s", scales))}):
        one = ref if len(sources["w"].shape) == len(dims) else ref.split(2)[1]
        with pytest.raises(ModelFileError, match="do not fit"):
            one.resolve(sources, "x", shape)
        with pytest.raises(ModelFileError, match="do not fit"):
            one.block(0, 32).resolve(sources, "x", (32, shape[1]))
        with pytest.raises(ModelFileError, match="do not fit"):
            one.check_scales(sources)
    with pytest.raises(ModelFileError, match="missing"):
        ref.resolve({"w": codes}, "x", shape)


def stack(one):
    """Two of a tensor."""
    return TensorSource(one.name, (2, *one.shape), one.format, np.concatenate([one.data, one.data]))


def test_of_the_scales_only_those_that_are_needed_are_read():
    counts = {}
    experts, rows, groups = 8, 12, 4
    rng = np.random.default_rng(3)
    blocks, exponents = rng.integers(0, 256, (experts, rows, groups, 16)).astype(np.uint8), rng.integers(120, 130, (experts, rows, groups)).astype(np.uint8)
    sources = {"b": source("b", blocks, counts=counts), "s": source("s", exponents, counts=counts)}
    ref = WeightRef("", parts=tuple(WeightRef("b", scales="s", expert=e) for e in range(experts)))
    found = [part.resolve(sources, "x", (rows, groups * 32)).data.reshape(rows, groups, 17) for part in ref.split(experts)]
    assert counts == {"b": blocks.nbytes, "s": exponents.nbytes}
    np.testing.assert_array_equal(np.stack(found)[..., 0], exponents)
    with pytest.raises(ModelFileError, match="experts"):
        ref.parts[0].resolve({**sources, "s": source("s", exponents[:-1])}, "x", (rows, groups * 32))

    counts.clear()
    codes, scales = rng.integers(0, 127, (256, 256)).astype(np.uint8), rng.standard_normal((8, 2)).astype(np.float32)
    sources = {"w": source("w", codes, "f8_e4m3", counts), "s": source("s", scales, counts=counts)}
    wanted = CODES[codes].astype(np.float32) * tiled(scales, (32, 128), 256, 256)
    some = WeightRef("w", scales="s", tile=(32, 128)).block(40, 100).resolve(sources, "x", (60, 256))
    np.testing.assert_array_equal(some.decode(), wanted[40:100])
    assert counts == {"w": 60 * 256, "s": 3 * 2 * 4}  # tiles of rows 32, 64 and 96 begin


# whole models -------------------------------------------------------------------------------------------------------------


def read_folder(name):
    """Tensors of a fixture: name -> f32 values, and its config."""
    files = open_model(FIXTURES / name)
    values = {n: WeightRef(n).resolve(files.tensors, n, s.shape).decode() for n, s in files.tensors.items()}
    return values, json.loads((FIXTURES / name / "config.json").read_text())


def write_folder(folder, config, tensors):
    """tensors: name -> array; u8 arrays of names that end in .weight are e4m3."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, parts, at = {}, [], 0
    for name, array in tensors.items():
        kind = "F32" if array.dtype == np.float32 else "F8_E4M3" if name.endswith(".weight") else "U8"
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return folder


def fp8_pair(tmp_path, tile):
    """(DeepSeek-V3 with fp8 weights, its plain twin)."""
    values, config = read_folder("deepseek_v3")
    codes, plain = {}, {}
    for name, w in values.items():
        plain[name] = w
        if w.ndim != 2 or "embed" in name or name.endswith("mlp.gate.weight"):
            codes[name] = w
            continue
        rows, width = w.shape
        down = [(-(-rows // tile[0])), -(-width // tile[1])]
        scales = np.array([[np.abs(w[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]).max() / 448 for j in range(down[1])] for i in range(down[0])], np.float32)
        spread = tiled(scales, tile, rows, width)
        codes[name] = nearest(w.astype(np.float64) / spread)
        codes[name + "_scale_inv"] = scales
        plain[name] = (CODES[codes[name]].astype(np.float32) * spread).astype(np.float32)
    about = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(tile)}
    return write_folder(tmp_path / "fp8", {**config, "quantization_config": about}, codes), write_folder(tmp_path / "plain", config, plain)


def mxfp4_pair(tmp_path):
    """(gpt-oss with experts in MXFP4, its plain twin): experts of 32, since a row must be whole blocks."""
    values, config = read_folder("gpt_oss")
    config["intermediate_size"] = 32
    rng = np.random.default_rng(1)
    codes, plain = {}, {}
    for name, w in values.items():
        if ".experts." not in name:
            codes[name] = plain[name] = w
        elif name.endswith("_bias"):
            width = 64 if "gate_up" in name else 32
            codes[name] = plain[name] = rng.standard_normal((4, width)).astype(np.float32) / 2
        else:
            rows = 64 if "gate_up" in name else 32
            blocks, exponents = rng.integers(0, 256, (4, rows, 1, 16)).astype(np.uint8), rng.integers(122, 126, (4, rows, 1)).astype(np.uint8)
            nibbles = np.stack([blocks & 15, blocks >> 4], -1).reshape(4, rows, 32)  # the first of two in the low half
            numbers = np.array([*E2M1, *(-v for v in E2M1)])[nibbles] * 2.0 ** (exponents.astype(np.float64) - 127)
            codes[name + "_blocks"], codes[name + "_scales"] = blocks, exponents
            plain[name] = np.ascontiguousarray(numbers.transpose(0, 2, 1)).astype(np.float32)  # [in, out]
    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return write_folder(tmp_path / "mxfp4", {**config, "quantization_config": about}, codes), write_folder(tmp_path / "plain", config, plain)


def opened(folder):
    files = open_model(folder)
    return files, build(files.kind, files.architecture, files.config, files.tensors, context_limit=40)


def logits_of(backends, place, files, model, ids, cuts):
    limits = StepLimits(max_tokens=PROMPT, max_sequences=1, max_rows=PROMPT, context=48, block_size=16, num_blocks=4)
    plan = make_plan(model.graph, model.weights, files.tensors, backends, Placement.on(place), limits)
    executor = Executor(plan, model.weights, files.tensors, backends)
    table = np.array([[2, 0, 3]], np.int32)
    rows = []
    try:
        for a, b in pairwise(cuts):
            at = np.arange(a, b, dtype=np.int32)
            slots = (table[0, at // 16] * 16 + at % 16).astype(np.int32)
            step = StepBatch(np.array(ids[a:b], np.int32), at, slots, np.array([0, b - a], np.int32), np.array([b], np.int32), table, np.arange(b - a, dtype=np.int32), None, np.zeros(1, np.int32))
            rows.append(executor.run(step).logits.copy())
    finally:
        executor.close()
    return np.concatenate(rows)


@pytest.mark.parametrize("kind", ["fp8", "fp8_128", "mxfp4"])
def test_a_quantised_model_and_its_plain_twin_give_the_same_logits_in_chunks_and_16_steps(kind, tmp_path, oracle, tiny):
    coded, plain = mxfp4_pair(tmp_path) if kind == "mxfp4" else fp8_pair(tmp_path, (128, 128) if kind == "fp8_128" else (16, 8))
    (files, model), (twin_files, twin) = opened(coded), opened(plain)
    if kind == "mxfp4":
        assert {model.weights[v.name].format(files.tensors) for v in model.graph.of_kind("weight") if ".experts." in v.name and "proj" in v.name and "bias" not in v.name} == {"mxfp4"}
    ids = tiny("deepseek_v3").ids[:40]
    wanted = oracle.evaluate(twin.graph, oracle.load_weights(twin, twin_files.tensors), ids)
    np.testing.assert_array_equal(oracle.evaluate(model.graph, oracle.load_weights(model, files.tensors), ids), wanted)
    cuts = [0, 1, 8, 19, PROMPT, *range(PROMPT + 1, 41)]
    with CpuBackend(threads=2, act="f32", kv_dtype="f32") as cpu, RefBackend() as ref:
        for backends, place in (({"ref": ref}, "ref"), ({"cpu_avx": cpu, "ref": ref}, "cpu_avx")):
            found = logits_of(backends, place, files, model, ids, cuts)
            assert np.abs(found - wanted).max() <= 1e-4 * wanted.std(), place


def test_methods_that_are_not_read_are_refused_by_name(tmp_path):
    values, config = read_folder("deepseek_v3")
    for number, (about, words) in enumerate((
        ({"quant_method": "mxfp4"}, "mxfp4"), ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [8, 8]}, "fmt"), ({"quant_method": "fp8"}, "weight_block_size"),
    )):  # fmt: skip
        folder = write_folder(tmp_path / str(number), {**config, "quantization_config": about}, values)
        with pytest.raises(UnsupportedError, match=words):
            opened(folder)
    for number, tile in enumerate(([0, 8], [8], [8.5, 8], "8")):
        folder = write_folder(tmp_path / f"tile{number}", {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": tile}}, values)
        with pytest.raises(ModelFileError, match="weight_block_size"):
            opened(folder)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_scales_of_another_shape_are_a_damaged_file_before_anything_is_loaded(kind, tmp_path):
    coded, _ = mxfp4_pair(tmp_path) if kind == "mxfp4" else fp8_pair(tmp_path, (16, 8))
    files = open_model(coded)
    name = next(n for n in files.tensors if n.endswith(("_scales", "o_proj.weight_scale_inv")))
    shape = files.tensors[name].shape
    more = (*shape[:-2], shape[-2] * 2, *shape[-1:])
    tensors = {**files.tensors, name: source(name, np.ones(more, np.uint8 if kind == "mxfp4" else np.float32))}
    with pytest.raises(ModelFileError, match="do not fit"):
        build(files.kind, files.architecture, files.config, tensors, context_limit=40)


def test_scales_that_are_left_out_of_the_file_are_missed_before_anything_is_loaded(tmp_path):
    coded, _ = fp8_pair(tmp_path, (16, 8))
    files = open_model(coded)
    tensors = {n: s for n, s in files.tensors.items() if "layers.1.self_attn.o_proj.weight_scale_inv" not in n}
    with pytest.raises(ModelFileError, match="weight_scale_inv"):
        build(files.kind, files.architecture, files.config, tensors, context_limit=40)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_quantised_folders_are_inspected_verified_and_converted(kind, tmp_path, capsys):
    coded, _ = mxfp4_pair(tmp_path) if kind == "mxfp4" else fp8_pair(tmp_path, (16, 8))
    assert run_command(["inspect", str(coded)]) == 0
    assert run_command(["verify", str(coded)]) == 0
    assert "all finite" in capsys.readouterr().out
    assert run_command(["convert", str(coded), "-o", str(tmp_path / "model.flm")]) == 0
    assert run_command(["verify", str(tmp_path / "model.flm")]) == 0


def test_a_code_that_is_no_number_is_found_by_verify(tmp_path, capsys):
    values, config = read_folder("deepseek_v3")
    name = "model.layers.0.mlp.up_proj.weight"
    codes = dict(values)
    codes[name], codes[name + "_scale_inv"] = np.zeros(values[name].shape, np.uint8), np.ones((6, 4), np.float32)
    codes[name][7, 3] = 0x7F
    about = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    folder = write_folder(tmp_path / "nan", {**config, "quantization_config": about}, codes)
    assert run_command(["verify", str(folder)]) == 1
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(("name", "format", "moved"), [("deepseek_v3_fp8_128", "fp8g128", "model.layers.0.mlp.down_proj.weight"), ("gpt_oss_mxfp4", "mxfp4", "model.layers.1.mlp.experts.down_proj")])
def test_the_fixtures_that_transformers_decoded_stay_coded_here_and_notice_a_scale_of_the_neighbour(name, format, moved, tiny, oracle):
    case = tiny(name)
    kept = {case.model.weights[v.name].format(case.files.tensors) for v in case.model.graph.of_kind("weight")}
    assert format in kept
    weights = oracle.load_weights(case.model, case.files.tensors)
    scales = moved + ("_scale_inv" if format == "fp8g128" else "_scales")
    turned = dict(case.files.tensors)
    source_of = turned[scales]
    values = source_of.data.view(np.float32 if format == "fp8g128" else np.uint8).reshape(source_of.shape)
    turned[scales] = source(scales, np.roll(values, 1, axis=-1), source_of.format)
    wrong = oracle.load_weights(case.model, turned)
    assert case.error(oracle.evaluate(case.model.graph, weights, case.ids)) <= 1e-4
    assert case.error(oracle.evaluate(case.model.graph, wrong, case.ids)) > 1e-2
