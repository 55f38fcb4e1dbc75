"""Every family against transformers: the tiny models' logits, from Hugging Face files and from their GGUF twins."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastllm.api import No, OpQuery, RefBackend, Yes
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.convert import convert_model
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.step import StepBatch
from fastllm.formats import open_model
from fastllm.formats.quant_rules import QuantRules
from fastllm.loading import LoadOptions
from fastllm.models import FAMILIES, build, supported

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(p.name for p in FIXTURES.iterdir())
CASES = [(name, "huggingface") for name in NAMES] + [(n, "gguf") for n in NAMES if (FIXTURES / n / "model.gguf").exists()]
HARD = ["deepseek_v3", "deepseek_v3_fp8", "deepseek_v3_fp8_128", "gpt_oss", "gpt_oss_mxfp4", "qwen3_next", "gemma3", "mixtral"]
SHORT = [(name, source) for name, source in CASES if (FIXTURES / name / "short_logits.npy").exists()]
EXPERTS = ["deepseek_v2", "deepseek_v3", "deepseek_v3_fp8", "deepseek_v3_fp8_128", "gpt_oss", "gpt_oss_mxfp4", "granite_moe", "kimi_k2", "mixtral", "olmoe", "qwen2_moe", "qwen2_moe_all", "qwen3_moe", "qwen3_next"]
COPIES = ["deepseek_v2", "deepseek_v3", "deepseek_v3_fp8", "deepseek_v3_fp8_128", "kimi_k2", "qwen3_next"]
TOLERANCE = 1e-4  # in standard deviations of the logits
PROMPT = 24


@pytest.mark.parametrize(("name", "source"), CASES)
def test_logits_are_those_of_transformers(name, source, tiny, oracle):
    case = tiny(name, source)
    weights = oracle.load_weights(case.model, case.files.tensors)
    assert case.error(oracle.evaluate(case.model.graph, weights, case.ids)) <= TOLERANCE


@pytest.mark.parametrize(("name", "source"), SHORT)
def test_length_dependent_rope_takes_the_short_form_within_the_original_length(name, source, tiny, oracle):
    case = tiny(name, source, limit=16)
    weights = oracle.load_weights(case.model, case.files.tensors)
    assert case.error(oracle.evaluate(case.model.graph, weights, case.ids)) <= TOLERANCE
    assert tiny(name, source).error(oracle.evaluate(case.model.graph, weights, tiny(name, source).ids)) > 10 * TOLERANCE
    assert any("16" in note for note in case.model.notes)


@pytest.mark.parametrize(("name", "source"), CASES)
def test_prefill_and_decode_on_ref_give_the_same_logits(name, source, tiny):
    case = tiny(name, source)
    assert case.error(_in_steps(case, "ref", RefBackend(), [0, PROMPT])) <= TOLERANCE


@pytest.mark.parametrize("backend", ["ref", "cpu_avx"])
@pytest.mark.parametrize("name", HARD)
def test_prefill_in_chunks_and_16_decode_steps_give_the_same_logits(name, backend, tiny):
    case = tiny(name)
    with RefBackend() if backend == "ref" else CpuBackend(threads=2, act="f32", kv_dtype="f32") as device:
        assert case.error(_in_steps(case, backend, device, [0, 1, 8, 19, PROMPT])) <= TOLERANCE


class WithoutMoe(RefBackend):
    """`ref`, whose experts are core ops."""

    def supports(self, q: OpQuery) -> Yes | No:
        return No("no moe here") if q.op == "moe" else super().supports(q)


@pytest.mark.parametrize(("name", "source"), [(n, s) for n, s in CASES if n in EXPERTS])
def test_experts_as_core_ops_give_the_bits_of_the_op(name, source, tiny):
    case = tiny(name, source)
    whole, parts = (_in_steps(case, "ref", backend, [0, PROMPT]) for backend in (RefBackend(), WithoutMoe()))
    assert parts.tobytes() == whole.tobytes()


class WithoutCopies(RefBackend):
    """`ref` without the ops that products by 1 and 0, and a cache, can take the place of."""

    def supports(self, q: OpQuery) -> Yes | No:
        return No("not here") if q.op in ("concat", "short_conv") else super().supports(q)


class CpuWithoutCopies(CpuBackend):
    """The same of `cpu_avx`."""

    def supports(self, q: OpQuery) -> Yes | No:
        return No("not here") if q.op in ("concat", "short_conv") else super().supports(q)


@pytest.mark.parametrize(("name", "source"), [(n, s) for n, s in CASES if n in COPIES])
def test_concat_and_short_conv_as_core_ops_give_the_bits_of_the_ops(name, source, tiny):
    case = tiny(name, source)
    for ref, cpu in ((RefBackend, CpuBackend), (WithoutCopies, CpuWithoutCopies)):
        with ref() as numpy, cpu(threads=2, act="f32", kv_dtype="f32") as native:
            found = [_in_steps(case, "ref", numpy, [0, 1, 8, 19, PROMPT]), _in_steps(case, "cpu_avx", native, [0, 5, PROMPT])]
        if ref is RefBackend:
            whole = found
    assert [a.tobytes() == b.tobytes() for a, b in zip(found, whole, strict=True)] == [True, True]


@pytest.mark.parametrize("name", ["gpt_oss", "granite_moe", "mixtral"])
def test_experts_as_core_ops_are_read_from_packed_stacks(name, tiny, tmp_path):
    out = tmp_path / "packed.flm"
    with open_model(FIXTURES / name) as files:
        convert_model(files, out, QuantRules(dtype="int8"), LoadOptions(threads=1), backend="cpu_avx", memory_bytes=1 << 28)
    with open_model(out) as files, CpuBackend(threads=1) as cpu:
        sources = {n: t if t.packed is None else replace(t, unpack=cpu.unpack_weight) for n, t in files.stored.items()}
        assert any(t.packed is not None and len(t.shape) == 3 for t in sources.values())
        model = build(files.kind, files.architecture, files.config, files.tensors, context_limit=40, ready=files.ready)
        case = SimpleNamespace(files=SimpleNamespace(tensors=sources), model=model, ids=tiny(name).ids)
        whole, parts = (_in_steps(case, "ref", backend, [0, PROMPT]) for backend in (RefBackend(), WithoutMoe()))
        assert parts.tobytes() == whole.tobytes()


def test_every_fixture_with_an_extended_op_is_run_as_core_ops(tiny):
    assert [name for name in NAMES if any(n.op == "moe" for n in tiny(name).model.graph.nodes)] == EXPERTS
    assert [name for name in NAMES if any(n.op in ("concat", "short_conv") for n in tiny(name).model.graph.nodes)] == COPIES


def test_fixtures_of_hard_models_have_every_kind_of_layer_in_its_pattern(tiny):
    kinds = {name: ["delta_rule" if n.op == "delta_rule" else n.attrs["window"] for n in tiny(name).model.graph.nodes if n.op in ("delta_rule", "attention")] for name in HARD}
    assert kinds["qwen3_next"] == ["delta_rule", "delta_rule", "delta_rule", 0] * 2
    assert kinds["gpt_oss_mxfp4"] == [8, 0, 8]
    assert kinds["gemma3"] == [8, 8, 0]
    gemma = tiny("gemma3").model
    assert len({n.inputs[2] for n in gemma.graph.nodes if n.op == "rope"}) == 2  # frequencies of local and of global layers
    assert sum(n.op == "rms_norm" and n.tags.get("layer") == 2 for n in gemma.graph.nodes) == 4 + 2  # two before, two behind the branches; q and k
    for name in ("deepseek_v3", "deepseek_v3_fp8", "deepseek_v3_fp8_128"):
        graph = tiny(name).model.graph
        routes = [n.attrs for n in graph.nodes if n.op == "route_topk"]
        assert [(r["score"], r["group_score"]) for r in routes] == [("sigmoid", "top2sum")]
        assert routes[0]["keep_groups"] < routes[0]["groups"]
        assert [n.op for n in graph.nodes if n.tags["role"] == "shared_expert"].count("linear") == 3
        assert all(v.spec.num_kv_heads == 1 and not v.spec.value_dim for v in graph.of_kind("state"))  # one latent row a token


def _in_steps(case, name, backend, cuts):
    """Logits of all tokens, [40, V]: a prompt cut at `cuts`, then a token a step."""
    limits = StepLimits(max_tokens=PROMPT, max_sequences=1, max_rows=PROMPT, context=48, block_size=16, num_blocks=4)
    backends = {name: backend}
    plan = make_plan(case.model.graph, case.model.weights, case.files.tensors, backends, Placement.on(name), limits, fallback="error")
    executor = Executor(plan, case.model.weights, case.files.tensors, backends)
    try:
        return np.concatenate([executor.run(_step(case.ids, a, b)).logits.copy() for a, b in pairwise([*cuts, *range(PROMPT + 1, len(case.ids) + 1)])])
    finally:
        executor.close()


def _step(ids, start, stop):
    table = np.array([[2, 0, 3]], np.int32)
    positions = np.arange(start, stop, dtype=np.int32)
    slots = (table[0, positions // 16] * 16 + positions % 16).astype(np.int32)
    starts, lengths = np.array([0, stop - start], np.int32), np.array([stop], np.int32)
    rows = np.arange(stop - start, dtype=np.int32)
    return StepBatch(np.asarray(ids[start:stop], np.int32), positions, slots, starts, lengths, table, rows)


def test_every_name_that_is_supported_has_a_fixture(tiny):
    types, architectures = set(), set()
    for name, source in CASES:
        (types if source == "huggingface" else architectures).add(tiny(name, source).files.architecture)
    assert types == {t for f in FAMILIES for t in f.model_types}
    assert architectures == {a for f in FAMILIES for a in f.architectures}
    assert [row["family"] for row in supported()] == [f.name for f in FAMILIES]


def test_every_rope_scaling_has_a_fixture(tiny):
    seen = {rope.scaling for n in NAMES for rope in (tiny(n).model.details["config"].rope,)}
    assert seen == {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}


def test_a_tied_head_is_one_weight(tiny):
    model = tiny("llama_linear").model
    users = [n.op for n in model.graph.nodes if "model.embed_tokens.weight" in n.inputs]
    assert users == ["embed", "linear"]
    assert "lm_head.weight" not in model.weights


def test_of_fused_tensors_only_the_rows_that_are_needed_are_read(tiny):
    case = tiny("phi3")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    fused, asked = case.files.tensors[name], []

    def read(start, nbytes):
        asked.append((start, nbytes))
        return fused.read(start, nbytes)

    k = case.model.weights["model.layers.0.self_attn.k_proj.weight"].resolve({name: replace(fused, read=read)}, "k", (16, 32))
    assert asked == [(32 * 32 * 2, 16 * 32 * 2)]
    assert k.data.tobytes() == fused.data[32 * 32 * 2 :][: 16 * 32 * 2].tobytes()


def test_nodes_carry_layer_and_role(tiny):
    tags = {(n.tags.get("layer"), n.tags["role"]) for n in tiny("llama").model.graph.nodes}
    assert tags == {(None, "embed"), (0, "attn"), (0, "mlp"), (1, "attn"), (1, "mlp"), (None, "head")}


def test_only_sampled_rows_reach_the_head(tiny):
    graph = tiny("gemma2").model.graph
    head = [n for n in graph.nodes if n.tags["role"] == "head"]
    assert head[0].op == "embed"
    assert head[0].inputs[0] == "sample_rows"
    assert graph.values[graph.outputs[0]].shape == ("R", 256)


def test_fixtures_are_small_and_say_how_they_were_made():
    for name in NAMES:
        about = json.loads((FIXTURES / name / "fixture.json").read_text())
        assert about["transformers"]
        assert about["torch"]
        assert len(about["ids"]) == 40
        assert sum(p.stat().st_size for p in (FIXTURES / name).iterdir()) < 220_000
