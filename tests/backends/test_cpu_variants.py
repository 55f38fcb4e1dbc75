"""Whole models under every variant of cpu_avx: the instruction set must not show in an answer.

Variants are chosen as a user chooses them, by FASTLLM_ISA.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastllm import LLM, SamplingParams, models
from fastllm.backends.cpu_avx import _native
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.plugins import BackendRegistry
from fastllm.core.step import StepBatch
from fastllm.formats import open_model

MODELS = Path(__file__).parent.parent / "models"
REFERENCE = json.loads((MODELS / "data" / "real-models.json").read_text())
RUNNABLE = [name for i, name in enumerate(_native.isa_names()) if _native.isa_missing(i) is None]
LIMITS = StepLimits(max_tokens=64, max_sequences=1, max_rows=64, context=64, block_size=64, num_blocks=1)


def tiny_logits(folder: Path) -> np.ndarray:
    """[tokens, vocabulary] of a tiny fixture, whose weights are f32 or bf16; bf16 activations would differ among variants."""
    ids = np.array(json.loads((folder / "fixture.json").read_text())["ids"], np.int32)
    registry = BackendRegistry()
    with open_model(folder) as files:
        model = models.build(files.kind, files.architecture, files.config, files.tensors)
        backend = registry.open(registry.select("cpu_avx"), {"act": "f32"})
        backends = {"cpu_avx": backend}
        plan = make_plan(model.graph, model.weights, files.tensors, backends, Placement.on("cpu_avx"), LIMITS, fallback="error")
        executor = Executor(plan, model.weights, files.tensors, backends)
        rows, n = np.arange(len(ids), dtype=np.int32), len(ids)
        ends = np.array([0, n], np.int32)
        batch = StepBatch(ids, rows, rows, ends, np.array([n], np.int32), np.zeros((1, 1), np.int32), rows)
        logits = executor.run(batch).logits.copy()
        executor.close()
        backend.close()
    return logits


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen3", "phi3"])
def test_tiny_models_give_the_same_logits_under_every_variant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = {}
    for isa in RUNNABLE:
        monkeypatch.setenv("FASTLLM_ISA", isa)
        got[isa] = tiny_logits(MODELS / "fixtures" / name)
    best = got[RUNNABLE[-1]]
    for isa, logits in got.items():
        if (
            isa == "baseline"
        ):  # rounds the products of f32 weights, and then a value of the f16 cache may fall on the other side
            assert np.abs(logits - best).max() <= 2e-3 * best.std()
            top = np.sort(best, axis=1)
            clear = top[:, -1] - top[:, -2] > 4e-3 * best.std()
            assert np.array_equal(logits.argmax(axis=1)[clear], best.argmax(axis=1)[clear])
        else:
            assert logits.tobytes() == best.tobytes(), isa


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_model_answers_the_same_under_every_variant(real_model_path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [case["prompt"] for case in REFERENCE["smollm2-135m-instruct-q4_1"]["cases"]]
    answers = {}
    for isa in RUNNABLE:
        monkeypatch.setenv("FASTLLM_ISA", isa)
        with LLM(real_model_path("smollm2"), backend="cpu_avx", ctx=512, kv_dtype="f16") as llm:
            found = llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0))
        answers[isa] = [answer.output_ids for answer in found]
    assert len(answers["baseline"]) == 5
    for isa, ids in answers.items():
        assert ids == answers["baseline"], isa
