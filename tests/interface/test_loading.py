"""Loading: every stage may fail, and then nothing stays; options are checked; what a model keeps decides about the engine."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastllm import LLM, SamplingParams, loading
from fastllm.core import loader
from fastllm.core.errors import FastLLMError, InvalidRequest, OutOfMemory, UnsupportedError, UsageError
from fastllm.core.executor import Executor
from fastllm.loading import LoadOptions, close_all, load_model, plan_model


class Broken(Exception):
    """What a stage raises here."""


def stages():
    """(where, name) of the call that fails: each stage of loading once, in order."""
    from fastllm import models, text
    from fastllm.core import engine, executor
    from fastllm.core.plugins import BackendRegistry
    from fastllm.formats import ModelFiles

    return {
        "build": (models, "build"),
        "open": (BackendRegistry, "open"),
        "plan": (loading, "make_plan"),
        "report": (loading, "_report"),
        "tokenizer": (text.Tokenizer, "from_tokenizer_json"),
        "template": (text, "ChatTemplate"),
        "defaults": (loading, "_generation_defaults"),
        "unchanged": (ModelFiles, "check_unchanged"),
        "weights": (executor, "load_weights"),
        "engine": (engine, "Engine"),
        "programs": (executor.Executor, "_find_logits"),
    }


def maps_of(folder: Path) -> int:
    """Mapped files of a folder in this process."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("backend", ["ref", "cpu_avx"])
@pytest.mark.parametrize("stage", list(stages()))
def test_a_stage_that_fails_leaves_nothing_open(tiny_model, monkeypatch, stage, backend):
    from fastllm.core.plugins import BackendRegistry

    opened, real = [], BackendRegistry.open
    if stage != "open":
        monkeypatch.setattr(BackendRegistry, "open", lambda *args: opened.append(real(*args)) or opened[-1])
    where, name = stages()[stage]

    def fail(*args, **kwargs):
        raise Broken(stage)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, fail)
        before = threading.active_count()
        with pytest.raises(Broken):
            load_model(tiny_model, LoadOptions(backend=backend))
    gc.collect()
    assert threading.active_count() <= before, "a thread of an earlier test may end meanwhile"
    assert maps_of(tiny_model) == 0
    assert [instance.memory().used for instance in opened] == [0] * len(opened)


def test_the_second_open_failing_closes_the_first(tiny_model, monkeypatch):
    from fastllm.core.plugins import BackendRegistry

    real, opened, closed = BackendRegistry.open, [], []

    def second_fails(self, selection, options=None):
        if opened:
            raise Broken("second")
        opened.append(real(self, selection, options))
        monkeypatch.setattr(opened[0], "close", lambda: closed.append(True), raising=False)
        return opened[0]

    monkeypatch.setattr(BackendRegistry, "open", second_fails)
    with pytest.raises(Broken):
        plan_model(tiny_model, LoadOptions(backend="cpu_avx"))
    assert closed == [True]


def test_closing_returns_everything_and_may_be_repeated(tiny_model):
    before = threading.active_count()
    llm = LLM(tiny_model, backend="ref")
    assert maps_of(tiny_model) == 1
    assert threading.active_count() == before + 1
    llm.close()
    llm.close()
    gc.collect()
    assert maps_of(tiny_model) == 0
    assert threading.active_count() == before
    with pytest.raises(FastLLMError):
        llm.generate("x")


def test_close_all_goes_on_after_a_failure():
    calls = []

    def fail():
        calls.append("fail")
        raise Broken("first")

    with pytest.raises(Broken):
        close_all(lambda: calls.append("a"), fail, lambda: calls.append("b"))
    assert calls == ["a", "fail", "b"]


def test_a_planned_model_closes_its_files_although_a_backend_fails(tiny_model, monkeypatch):
    planned = plan_model(tiny_model, LoadOptions(backend="ref"))
    backend = planned.backends["ref"]
    monkeypatch.setattr(backend, "close", lambda: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        planned.close()
    gc.collect()
    assert maps_of(tiny_model) == 0
    planned.close()


def test_a_model_with_recurrent_state_finds_prompts_again_within_bounded_memory(recurrent_model, tiny_model, monkeypatch):
    prompt, found = "a prompt of more than two blocks of the cache", []
    state = 6 * 4 * (3 * 40 + 4 * 4 * 6)  # 3 inputs of a convolution of 40 channels and 4 heads of [4, 6], in six layers
    monkeypatch.setattr(loading, "SNAPSHOT_BYTES", 7 * state)
    for prefix_cache in (True, False):
        with LLM(recurrent_model, backend="ref", block_size=16, prefix_cache=prefix_cache) as llm:
            plan = llm.loaded.planned.plan
            assert llm.loaded.engine.stateful
            assert plan.limits.num_snapshots == (7 if prefix_cache else 0)
            slots = plan.limits.max_sequences + plan.limits.num_snapshots
            assert 0 <= plan.total_bytes("state") - state * slots < 12 * 64  # each of 12 states begins at a multiple of 64
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            found += [llm.generate(prompt, params)[0].text for _ in range(2)]
            assert (llm.loaded.engine.stats().prefix_hit_tokens > 0) is prefix_cache
    assert len(found) == 4
    assert len(set(found)) == 1
    with LLM(tiny_model, backend="ref") as llm:
        assert not llm.loaded.engine.stateful
        assert llm.loaded.planned.plan.limits.num_snapshots == 0


@pytest.mark.parametrize("when", ["before", "while"])
def test_files_that_change_are_refused(tiny_model, tmp_path, monkeypatch, when):
    from fastllm.core import executor

    folder = shutil.copytree(tiny_model, tmp_path / "model")
    path = folder / "model.safetensors"
    if when == "before":
        text = loading.open_text
        monkeypatch.setattr(loading, "open_text", lambda *args: (os.utime(path, ns=(1, 1)), text(*args))[1])
        monkeypatch.setattr(executor, "load_weights", lambda *args: pytest.fail("weights were read"))
    else:
        load = executor.load_weights
        monkeypatch.setattr(executor, "load_weights", lambda *args: (load(*args), os.utime(path, ns=(1, 1))))
    before = threading.active_count()
    with pytest.raises(FastLLMError, match=r"model\.safetensors"):
        load_model(folder, LoadOptions(backend="ref"))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "options",
    [
        {"threads": -1},
        {"threads": 1.5},
        {"ctx": 0},
        {"ctx": "64"},
        {"ctx": True},
        {"max_batch_size": 0},
        {"block_size": 4},
        {"prefill_chunk": 0},
        {"kv_cache_tokens": 1},
        {"fallback": "maybe"},
        {"backend": 5},
        {"backend_options": [("a", "b")]},
        {"plugin_paths": "plugin.py"},
        {"offline": "yes"},
        {"prefix_cache": None},
        {"strict": 1},
        {"nosuch": 1},
    ],
    ids=str,
)
def test_options_are_checked_and_named(tiny_model, options):
    with pytest.raises(UsageError, match=next(iter(options))) as caught:
        LLM(tiny_model, **{"backend": "ref", **options})
    assert caught.value.fix


def test_a_model_that_fits_is_planned_once(tiny_model, monkeypatch):
    plans, make = [], loading.make_plan

    def counted(*args, **kwargs):
        plans.append(args[5].num_blocks)
        return make(*args, **kwargs)

    monkeypatch.setattr(loading, "make_plan", counted)
    plan_model(tiny_model, LoadOptions(backend="ref", ctx=64, max_batch_size=2)).close()
    assert plans == [2]
    plan_model(tiny_model, LoadOptions(backend="ref", ctx=64, max_batch_size=2, kv_cache_bytes=1 << 20)).close()
    assert len(plans) == 3, "how many blocks so many bytes are is known from a plan"


@pytest.mark.parametrize("asked", [{"kv_cache_tokens": 1 << 24}, {"kv_cache_bytes": 1 << 40}])
def test_a_cache_that_was_asked_for_and_does_not_fit_is_refused_and_never_cut(tiny_model, monkeypatch, asked):
    monkeypatch.setattr(loading, "available_memory", lambda: 400 << 20)
    with pytest.raises(OutOfMemory, match="does not fit") as caught:
        plan_model(tiny_model, LoadOptions(backend="ref", ctx=64, max_batch_size=2, **asked))
    error = caught.value
    fits = int(re.search(r"--kv-cache-size (\d+)tok", error.fix)[1])
    assert error.fields["kind"] == "cache"
    planned = plan_model(tiny_model, LoadOptions(backend="ref", ctx=64, max_batch_size=2, kv_cache_tokens=fits))
    assert planned.plan.limits.num_blocks == fits // 64, "what the error names is had, whole"
    planned.close()
    unasked = plan_model(tiny_model, LoadOptions(backend="ref", ctx=64, max_batch_size=4096))
    assert unasked.plan.limits.num_blocks <= 4096, "what nobody asked for is as large as memory allows"
    unasked.close()


def test_what_activations_are_kept_in_is_told_to_a_backend_that_leaves_the_choice(tiny_model):
    with LLM(tiny_model, backend="cpu_avx", compute_dtype="f32") as exact, LLM(tiny_model, backend="cpu_avx", backend_options={"act": "f32"}) as same:
        assert exact.loaded.planned.backends["cpu_avx"]._exact
        params = SamplingParams(max_tokens=8, temperature=0, logprobs=3)
        assert [c.logprobs for c in exact.generate(["hello"], params)] == [c.logprobs for c in same.generate(["hello"], params)]
    with pytest.raises(UnsupportedError, match="leaves no choice") as caught:
        plan_model(tiny_model, LoadOptions(backend="ref", compute_dtype="f32"))
    assert caught.value.fix
    with pytest.raises(UsageError, match="differ"):
        plan_model(tiny_model, LoadOptions(backend="cpu_avx", compute_dtype="f32", backend_options={"act": "int8"}))
    with pytest.raises(UsageError, match="compute_dtype is 'f16'"):
        plan_model(tiny_model, LoadOptions(compute_dtype="f16"))


CUT = """
import os, sys
from pathlib import Path
from fastllm import loading
from fastllm.core import executor
from fastllm.core.errors import ModelFileError

path = Path(sys.argv[1]) / "model.safetensors"
whole = executor.load_weights

def cut_first(*arguments, **keywords):
    os.truncate(path, path.stat().st_size // 3)
    return whole(*arguments, **keywords)

executor.load_weights = cut_first
try:
    loading.load_model(path.parent, loading.LoadOptions(backend="cpu_avx", ctx=64, max_batch_size=1, offline=True))
except ModelFileError as error:
    print("refused:", error.message)
"""


def test_a_file_that_is_cut_while_it_is_loaded_is_an_error_and_not_the_end_of_the_process(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    done = subprocess.run([sys.executable, "-c", CUT, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "was cut while it was in use" in done.stdout


def test_the_model_must_be_a_name():
    for wrong in (5, None, ["x"]):
        with pytest.raises(UsageError, match="the model is"):
            LLM(wrong)


def test_prompts_may_be_arrays_and_are_checked(tiny_model):
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(tiny_model, backend="ref") as llm:
        plain = llm.generate([70, 71], greedy)[0].output_ids
        assert llm.generate(np.array([70, 71]), greedy)[0].output_ids == plain
        assert llm.generate([np.array([70, 71])], greedy)[0].output_ids == plain
        for wrong in ([[70, 256]], [[-1]], [[1.5]], [[True]], [None], ["x", None]):
            with pytest.raises(InvalidRequest):
                llm.generate(wrong, greedy)


def test_more_prompts_than_the_queue_holds_are_all_answered_in_order(tiny_model):
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(tiny_model, backend="ref", max_batch_size=4) as llm:
        llm.loaded.engine.max_queue = 3
        prompts = [[70 + i % 9, 71] for i in range(40)]
        done = llm.generate(prompts, greedy)
        assert [c.prompt_ids for c in done] == prompts
        assert [c.output_ids for c in done[:9]] == [llm.generate(p, greedy)[0].output_ids for p in prompts[:9]]
        pairs = llm.generate(prompts[:12], SamplingParams(temperature=1, max_tokens=2, n=2, seed=1, ignore_eos=True))
        assert [c.prompt_ids for c in pairs] == [p for p in prompts[:12] for _ in range(2)]


@pytest.mark.parametrize(
    "options",
    [{"backend_options": {1: 3}}, {"plugin_paths": (3,)}, {"plugins_file": 3}, {"progress": 3}, {"message": 3}, {"licence": 3}],
)
def test_options_of_a_wrong_kind_are_named(tiny_model, options):
    with pytest.raises(UsageError, match=f"{next(iter(options))} is .*; it must be"):
        load_model(tiny_model, LoadOptions(**options))


def test_memory_that_is_missing_while_a_model_is_opened_is_an_error_of_ours(tiny_model, monkeypatch):
    def fail(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(loading, "open_text", fail)
    with pytest.raises(OutOfMemory, match="no memory left"):
        load_model(tiny_model, LoadOptions(backend="ref"))


def weights_of(model):
    """The packed weights as they are in memory, and how many times something was packed."""
    planned = plan_model(model, LoadOptions(backend="cpu_avx", ctx=64, max_batch_size=1))
    packed = 0
    try:
        backend = planned.backends["cpu_avx"]
        pack = backend.pack_weight

        def counted(*args):
            nonlocal packed
            packed += 1
            pack(*args)

        backend.pack_weight = counted
        executor = Executor(planned.plan, planned.definition.weights, planned.files.stored, planned.backends)
        try:
            found = {}
            for key, buffer in executor._arenas.items():
                if key[1] == "weights":
                    data = bytearray(buffer.nbytes)
                    backend.download(memoryview(data), buffer, 0, backend.new_stream())
                    found[key] = bytes(data)
            return found, packed
        finally:
            executor.close()
    finally:
        planned.close()


@pytest.mark.parametrize("family", ["llama", "internlm2", "mixtral"])
@pytest.mark.parametrize("kind", ["gguf", "hf"])
def test_weights_that_are_packed_in_blocks_of_rows_are_those_packed_whole(family, kind, monkeypatch):
    folder = Path(__file__).parents[1] / "models" / "fixtures" / family
    model = folder / "model.gguf" if kind == "gguf" else folder
    whole, times = weights_of(model)
    monkeypatch.setattr(loader, "PACK_BYTES", 1)
    blocks, more = weights_of(model)
    assert more > times > 0
    assert blocks == whole


@pytest.fixture(scope="module")
def packed_file(tiny_model, tmp_path_factory) -> Path:
    """Weights as cpu_avx wants them, so that it uses them from the file."""
    from fastllm.convert import convert_model
    from fastllm.formats.quant_rules import QuantRules

    out, options = tmp_path_factory.mktemp("packed") / "packed.flm", LoadOptions()
    files = loading.open_files(tiny_model, options)
    try:
        convert_model(files, out, QuantRules("int8"), options, backend="cpu_avx")
    finally:
        files.close()
    return out


TAKEN = """
import re, sys
from fastllm import LLM, SamplingParams, loading
def resident(what):
    return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
plan = loading.plan_model
def planned(*args):
    made = plan(*args)
    global before
    before = resident("VmRSS")
    return made
loading.plan_model = planned
with LLM(sys.argv[1], backend="cpu_avx", ctx=64, max_batch_size=4, offline=True) as llm:
    llm.generate(["a b c d"] * 4, SamplingParams(max_tokens=40, ignore_eos=True))
    plan = llm.loaded.planned
    print(resident("VmHWM") - before, plan.plan.total_bytes("weights"), loading.reserve_bytes(plan.definition.vocab_size))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what is resident is read from /proc")
def test_what_no_plan_has_fits_into_the_reserve(tiny_model):
    """All that becomes resident after planning, but the weights: cache and activations, too, which are a few pages here."""
    done = subprocess.run([sys.executable, "-c", TAKEN, os.fspath(tiny_model)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    grown, weights, reserve = map(int, done.stdout.split())
    assert 0 < grown - weights < reserve


@pytest.mark.parametrize(("free", "fits"), [(130 << 20, True), (70 << 20, False)])
def test_the_reserve_is_no_larger_than_what_is_left_for(tiny_model, monkeypatch, free, fits):
    monkeypatch.setattr(loading, "available_memory", lambda: free)
    if fits:
        plan_model(tiny_model, LoadOptions(backend="ref", ctx=64, max_batch_size=1)).close()
        return
    with pytest.raises(OutOfMemory, match="does not fit in memory") as caught:
        plan_model(tiny_model, LoadOptions(backend="ref", ctx=64, max_batch_size=1))
    assert "reserve 64 MiB > 80% of 70 MiB available" in caught.value.why
    assert "raise the limit of the container" in caught.value.fix


def test_the_processes_of_a_server_have_their_part_of_the_reserve(tiny_model, monkeypatch):
    monkeypatch.setattr(loading, "available_memory", lambda: 200 << 20)
    asked = LoadOptions(backend="ref", ctx=64, max_batch_size=1)
    plan_model(tiny_model, asked).close()
    with pytest.raises(OutOfMemory, match="does not fit in memory") as caught:
        plan_model(tiny_model, replace(asked, helpers=3))
    assert "reserve 256 MiB > 80% of 200 MiB available" in caught.value.why


@pytest.mark.parametrize("limit", ["addresses", "memory"])
def test_weights_in_a_mapped_file_need_memory_and_no_more_addresses(packed_file, monkeypatch, limit):
    """A limit of addresses has taken them off when the file was opened."""
    asked = LoadOptions(backend="cpu_avx", kv_cache_tokens=1 << 16)
    monkeypatch.setattr(loading, "address_space", lambda: None)
    monkeypatch.setattr(loading, "available_memory", lambda: None)
    with contextlib.closing(plan_model(packed_file, asked)) as planned:
        mapped, most = planned.plan.total_bytes("mapped"), planned.plan.limits.num_blocks
        reserve = loading.reserve_bytes(planned.definition.vocab_size)
        allocated = sum(sum(sizes) for (_, arena), sizes in planned.plan.arenas.items() if arena != "mapped")
    assert mapped > 0
    if limit == "addresses":
        monkeypatch.setattr(loading, "address_space", lambda: loading.ADDRESS_BYTES + allocated + spare)
    else:
        monkeypatch.setattr(loading, "MEMORY_SHARE", 1)
        monkeypatch.setattr(loading, "available_memory", lambda: reserve + allocated + mapped + spare)
    spare = 0
    with contextlib.closing(plan_model(packed_file, asked)) as planned:
        assert planned.plan.limits.num_blocks == most
    spare = -1
    with pytest.raises(OutOfMemory, match="does not fit") as caught:
        plan_model(packed_file, asked)
    assert caught.value.fields["kind"] == "cache"
    assert caught.value.fields["weights_fit"]
