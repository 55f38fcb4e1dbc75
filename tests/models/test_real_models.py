"""The two real models: what their graphs say next is what transformers says on the decoded weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastllm.formats import open_model
from fastllm.models import build

REFERENCE = json.loads((Path(__file__).parent / "real_models.json").read_text())


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_next_tokens_are_those_of_transformers(name, real_model_path, oracle):
    files = open_model(real_model_path(name))
    model = build(files.kind, files.architecture, files.config, files.tensors)
    assert model.notes == ()
    weights = oracle.load_weights(model, files.tensors, np.float32)
    for case in REFERENCE[name]:
        ids = case["prompt_ids"]
        logits = oracle.evaluate(model.graph, weights, ids, rows=[len(ids) - 1], dtype=np.float32)[0]
        expected = [token for token, _ in case["next_top5"]]
        assert np.argsort(-logits, kind="stable")[:5].tolist() == expected
        assert logits[expected] == pytest.approx([value for _, value in case["next_top5"]], abs=2e-3)
