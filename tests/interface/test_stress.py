"""The stress of a model under random schedules, for seconds instead of minutes; and planted faults, which it must name."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from fastllm.api import No
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.core.kv_cache import BlockManager
from fastllm.core.sampling import SamplerState

from .conftest import with_tokenizer

_spec = importlib.util.spec_from_file_location("stress_engine", Path(__file__).parents[2] / "scripts" / "stress_engine.py")
stress_engine = importlib.util.module_from_spec(_spec)
sys.modules["stress_engine"] = stress_engine  # its dataclasses look it up
_spec.loader.exec_module(stress_engine)


@pytest.fixture(scope="module")
def stressed(tmp_path_factory):
    """stressed(enough, seed, family="llama", **options): tiny models with a context of 1,024, until it is enough, or for a minute."""

    def stress(enough, seed, family="llama", **options):
        folder = with_tokenizer(tmp_path_factory.mktemp("stressed") / family, family)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
        return stress_engine.stress_model(str(folder), 60, seed, enough=enough, count=21, ctx=384, threads=2, **options)

    return stress


@pytest.mark.parametrize(("seed", "family", "kv_dtype"), [(1, "llama", None), (2, "llama", "int8"), (3, "qwen3_next", None)])
def test_what_a_request_gets_does_not_depend_on_what_else_happens(stressed, seed, family, kv_dtype):
    least = {"compared": 100, "cancelled": 20, "preempted": 5, "found": 100}
    stress = stressed(lambda s: s.seen() >= Counter(least), seed, family, kv_dtype=kv_dtype)
    assert stress.faults == []
    assert stress.counts >= Counter(least), stress.counts


def test_so_it_is_where_a_cache_takes_the_place_of_the_state_of_a_convolution(stressed, monkeypatch):
    supports = CpuBackend.supports
    monkeypatch.setattr(CpuBackend, "supports", lambda self, q: No("not here") if q.op == "short_conv" else supports(self, q))
    least = {"compared": 40, "cancelled": 8, "preempted": 2, "found": 40}
    stress = stressed(lambda s: s.seen() >= Counter(least), 5, "qwen3_next")
    assert stress.faults == []
    assert stress.counts >= Counter(least), stress.counts


def test_a_block_that_is_given_away_too_early_is_named(stressed, monkeypatch):
    close, count = BlockManager.close, [0]

    def early(self, sequence):
        """Now and then the blocks of somebody else go, too, but for their count."""
        close(self, sequence)
        count[0] += 1
        if count[0] % 5 == 0 and self.num_used:
            block = next(b for b, refs in enumerate(self._refs) if refs)
            if not self._nodes[block] and block not in self._free:
                self._free.append(block)

    monkeypatch.setattr(BlockManager, "close", early)
    assert stressed(lambda s: s.faults, 3).faults


def test_a_sampler_that_draws_once_too_often_is_named(stressed, monkeypatch):
    draw, count = SamplerState.draw, [0]

    def twice(self):
        count[0] += 1
        found = draw(self)
        if count[0] % 300 == 0:
            self._uniforms = [*self._uniforms[1:], 0.5]
        return found

    monkeypatch.setattr(SamplerState, "draw", twice)
    faults = stressed(lambda s: s.faults, 4).faults
    assert faults[0].startswith("seed 4, round ")
