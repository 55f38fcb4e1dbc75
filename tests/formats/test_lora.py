"""LoRA adapters: merged as the formula says, for every way an adapter may say it; what cannot be merged is refused by its key."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastllm.core.errors import ModelFileError, UnsupportedError, UsageError
from fastllm.core.weights import HostTensor
from fastllm.formats import open_model
from fastllm.formats.lora import PATTERN, _fits, merge_adapters
from fastllm.formats.safetensors_file import read_safetensors
from tests.interface.conftest import byte_tokenizer

FIXTURE = Path(__file__).parents[1] / "models" / "fixtures" / "llama"
Q, DOWN, EMBED = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens"


@pytest.fixture
def files():
    with open_model(FIXTURE) as opened:
        yield opened


def values(files, name):
    source = files.tensors[name]
    return HostTensor(name, source.shape, source.format, np.array(source.data)).decode()


@pytest.fixture
def adapter(tmp_path, files):
    """adapter(modules, config, extra) -> a folder with an adapter of rank 4 and α 8, and its halves: module -> (A, B)."""
    rng = np.random.default_rng(5)

    def make(modules=(Q,), extra=None, rank=4, drop=(), **config):
        halves, tensors = {}, dict(extra or {})
        for module in modules:
            out, inner = files.tensors[f"{module}.weight"].shape
            out, inner = (inner, out) if module == EMBED or config.get("fan_in_fan_out") else (out, inner)
            a, b = rng.standard_normal((rank, inner), np.float32), rng.standard_normal((out, rank), np.float32)
            halves[module] = (a, b)
            ends = ("lora_embedding_A", "lora_embedding_B") if module == EMBED else ("lora_A.weight", "lora_B.weight")
            tensors |= {f"base_model.model.{module}.{end}": half for end, half in zip(ends, (a, b), strict=True)}
        folder = tmp_path / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file({k: v for k, v in tensors.items() if not k.endswith(tuple(drop) or "\0")}, folder / "adapter_model.safetensors")
        said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", "lora_dropout": 0.1, **config}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        return folder, halves

    return make


def bf16(x):
    """Rounded to bf16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32) << 16).view(np.float32)


def expected(before, a, b, factor):
    return bf16(before + np.float32(factor) * (b @ a))


@pytest.mark.parametrize(
    ("config", "factor"),
    [({}, 2.0), ({"use_rslora": True}, 4.0), ({"alpha_pattern": {"q_proj": 2}}, 0.5), ({"alpha_pattern": {r"layers\.1\..*": 2}}, 2.0)],
)
def test_a_weight_gets_the_product_of_its_halves(files, adapter, config, factor):
    folder, halves = adapter(**config)
    before, other = values(files, f"{Q}.weight"), files.tensors[f"{DOWN}.weight"]
    merge_adapters(files, [folder])
    np.testing.assert_array_equal(values(files, f"{Q}.weight"), expected(before, *halves[Q], factor))
    assert files.tensors[f"{DOWN}.weight"] is other
    assert "adapter" in files.tensors[f"{Q}.weight"].file


def test_ranks_may_differ_and_adapters_add_up(files, adapter):
    folder, halves = adapter(modules=(DOWN,), rank=2, rank_pattern={"down_proj": 2})
    first = values(files, f"{DOWN}.weight")
    merge_adapters(files, [folder, folder])
    once = expected(first, *halves[DOWN], 4.0)
    np.testing.assert_array_equal(values(files, f"{DOWN}.weight"), expected(once, *halves[DOWN], 4.0))


def test_embeddings_transposed_weights_and_whole_modules(files, adapter):
    folder, halves = adapter(modules=(EMBED,))
    before = values(files, f"{EMBED}.weight")
    merge_adapters(files, [folder])
    a, b = halves[EMBED]
    np.testing.assert_array_equal(values(files, f"{EMBED}.weight"), bf16(before + np.float32(2) * (b @ a).T))
    folder, halves = adapter(fan_in_fan_out=True)
    before = values(files, f"{Q}.weight")
    merge_adapters(files, [folder])
    a, b = halves[Q]
    np.testing.assert_array_equal(values(files, f"{Q}.weight"), bf16(before + np.float32(2) * (b @ a).T))
    head = np.full(files.tensors["lm_head.weight"].shape, 0.5, np.float32)
    folder, _ = adapter(extra={"base_model.model.lm_head.weight": head}, modules_to_save=["lm_head"])
    merge_adapters(files, [folder])
    np.testing.assert_array_equal(values(files, "lm_head.weight"), head)


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal"])
def test_adapters_that_began_with_the_models_own_weights_are_merged(files, adapter, start):
    folder, halves = adapter(init_lora_weights=start, eva_config={"rho": 2.0} if start == "eva" else None)
    before = values(files, f"{Q}.weight")
    merge_adapters(files, [folder])
    np.testing.assert_array_equal(values(files, f"{Q}.weight"), expected(before, *halves[Q], 2.0))


PATTERNS = [
    "q_proj", "proj", "layers.1.mlp", r"layers\.1\..*", r"model\.layers\.\d+\.mlp.down_proj", "^model.layers.0.self_attn.q_proj", "^q_proj", r".*\.(0|1|22)\..*", "(k|q|down)_proj$", "q_proj$|down_proj",
    "a|", "|q_proj", "$", "^$", r"layers\.\d", r"\d+", r".*", ".*.*q.*_.*j", "(q|qq)(q|qq)_proj", "mlp.*down", "x.y-z", "q$j", "q^", r"\d\d\..*",
]  # fmt: skip
NAMES = [Q, DOWN, EMBED, "q_proj", "xq_proj", "model.layers.22.mlp.down_proj", "layers.1", "qqq_proj", "qqqq_proj", "a.x.y-z", "1", "12.3", "a."]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_fits_as_it_does_in_peft(pattern):
    assert PATTERN.fullmatch(pattern)
    for name in NAMES:
        assert _fits(pattern, name) is (re.fullmatch(rf"(.*\.)?({pattern})", name) is not None), name


def test_a_pattern_costs_no_more_than_its_length():
    assert not _fits(".*a" * 85, "a" * 84 + "b")  # `re` would go back for longer than anybody waits
    assert _fits("(a|aa)" * 42, "a" * 60)


def test_one_tensor_at_a_time_is_there_in_f32(tmp_path):
    side, count = 256, 48
    names = [f"model.layers.{i}.q_proj" for i in range(count)]
    save_file({f"{n}.weight": np.ones((side, side), np.float16) for n in names}, tmp_path / "base.safetensors")
    halves = {f"base_model.model.{n}.lora_{h}.weight": np.ones((1, side) if h == "A" else (side, 1), np.float32) for n in names for h in "AB"}
    save_file(halves, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    base = read_safetensors(tmp_path / "base.safetensors")
    files = SimpleNamespace(kind="huggingface", ready=None, path=tmp_path, tensors=dict(base.tensors))
    tracemalloc.start()
    try:
        merge_adapters(files, [tmp_path])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        base.close()
    assert (values(files, f"{names[-1]}.weight") == 2).all()
    assert peak < (4 * count + 4 * 12) * side * side, "what is kept in f16 with what its memory takes, and twelve temporary tensors in f32"


HOSTILE = ["(", "(" * 2000, "a{99999999999}", "([a-z_.0-9]+)+!", "(a+)+b", ".*.*" * 65, "", "a" * 257, "[a-z]", "(?:a)", "(a(b))", "a**", r"(a)\1", "(a|b)*"]


@pytest.mark.parametrize(
    ("config", "error", "what"),
    [
        ({"use_dora": True}, UnsupportedError, "use_dora"),
        ({"peft_type": "IA3"}, UnsupportedError, "IA3"),
        ({"bias": "all"}, UnsupportedError, "bias"),
        ({"something_new": 1}, UnsupportedError, "something_new"),
        ({"r": 0}, ModelFileError, "no numbers in range"),
        ({"r": True}, ModelFileError, "no numbers in range"),
        ({"lora_alpha": float("inf")}, ModelFileError, "Infinity"),
        ({"r": 8}, ModelFileError, "the rank is 8"),
        ({"rank_pattern": {"q_proj": -1}}, ModelFileError, "no numbers in range"),
        *(({kind: {pattern: 1}}, UnsupportedError, "pattern .* cannot be read") for kind in ("rank_pattern", "alpha_pattern") for pattern in HOSTILE),
        *(({"init_lora_weights": start}, UnsupportedError, "init_lora_weights") for start in ("pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga", 3, [])),
        ({"drop": ["lora_B.weight"]}, ModelFileError, "one half"),
        ({"extra": {"base_model.model.model.nosuch.lora_A.weight": np.ones((4, 2), np.float32), "base_model.model.model.nosuch.lora_B.weight": np.ones((2, 4), np.float32)}}, ModelFileError, "which the model has not"),
        ({"extra": {"other": np.ones(2, np.float32)}}, UnsupportedError, "none that can be merged"),
        ({"extra": {"base_model.model.lm_head.weight": np.ones((2, 2), np.float32)}}, ModelFileError, "shape"),
        ({"extra": {"base_model.model.lm_head.weight": np.full((256, 32), np.nan, np.float32)}}, ModelFileError, "NaN"),
    ],
)
def test_what_cannot_be_merged_is_refused_and_changes_nothing(files, adapter, config, error, what):
    folder, _ = adapter(**config)
    before = dict(files.tensors)
    with pytest.raises(error, match=what):
        merge_adapters(files, [folder])
    assert files.tensors == before


def test_a_folder_without_an_adapter_and_a_gguf_model_are_refused(tmp_path, files):
    with pytest.raises(UsageError, match="adapter_config"):
        merge_adapters(files, [tmp_path])
    (tmp_path / "adapter_config.json").write_text("{}")
    with open_model(FIXTURE / "model.gguf") as gguf, pytest.raises(UnsupportedError, match=r"cannot be merged into model\.gguf"):
        merge_adapters(gguf, [tmp_path])


def test_a_merged_model_runs_and_is_converted(files, adapter, tmp_path):
    from fastllm import LLM, SamplingParams

    folder, halves = adapter(modules=(Q, DOWN))
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copy(FIXTURE / "config.json", whole)
    merged = {n: values(files, n) for n in files.tensors}
    for module, (a, b) in halves.items():
        merged[f"{module}.weight"] = expected(merged[f"{module}.weight"], a, b, 2.0)
    save_file(merged, whole / "model.safetensors")
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURE / name, model / name)
    for place in (model, whole):
        (place / "tokenizer.json").write_text(byte_tokenizer().to_str())
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    ids = []
    for place, options in ((whole, {}), (model, {"lora": (folder,)}), (model, {})):
        with LLM(place, backend="ref", **options) as llm:
            ids.append(llm.generate([[5, 6, 7, 8]], params)[0].output_ids)
    assert ids[0] == ids[1] != ids[2]

    from fastllm.cli.main import run_command

    assert run_command(["convert", str(model), "--lora", str(folder), "-o", str(tmp_path / "m.flm"), "-q"]) == 0
    with LLM(tmp_path / "m.flm", backend="ref") as llm:
        assert llm.generate([[5, 6, 7, 8]], params)[0].output_ids == ids[1]
