"""The arithmetic of measurements, and every cell of our engine on a tiny model. No test looks at how long anything took."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import engine, results
from fastllm.bench import Bench, Spread, alternate
from fastllm.core.errors import UsageError
from fastllm.loading import LoadOptions, load_model


def test_a_spread_is_median_and_inclusive_quartiles():
    spread = Spread.of([4, 1, 2, 3, 5])
    assert (spread.q1, spread.median, spread.q3, spread.samples) == (2, 3, 4, (4, 1, 2, 3, 5))
    assert Spread.of([7]) == Spread(7, 7, 7, (7,))
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_each_value_stands_between_two_limits():
    values, numbers = iter([1.0, 2.0, 3.0]), iter([10.0, 20.0, 40.0, 80.0])
    assert alternate(3, lambda: next(values), lambda: next(numbers)) == ([1.0, 2.0, 3.0], [15.0, 30.0, 60.0])


def test_a_limit_that_cannot_be_measured_leaves_the_values():
    assert alternate(2, lambda: 1.0, lambda: None) == ([1.0, 1.0], [])
    assert alternate(1, lambda: 1.0) == ([1.0], [])


def test_masks_can_be_measured_in_few_rounds(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("measure_masks", Path(__file__).parents[2] / "scripts" / "measure_masks.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.dearer([[3.0, 3.0]], [[2.0, 2.0]]) == [50.0]
    assert script.dearer([[3.0], [4.0]], [[2.0], [2.0]]) == [50.0, 100.0]
    assert script.dearer([[9.0], [4.0], [5.0], [3.0], [8.0]], [[2.0]] * 5) == [50.0, 100.0, 150.0], "the quickest of each third"
    monkeypatch.setattr(sys, "argv", ["measure_masks.py", "--rounds", "0"])
    with pytest.raises(SystemExit):
        script.main()
    assert "--rounds must be at least 1" in capsys.readouterr().err


def test_a_text_with_too_few_windows_is_not_measured_in_silence(monkeypatch):
    folder = Path(__file__).parents[2] / "scripts"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "measure_accuracy", raising=False)
    spec = importlib.util.spec_from_file_location("measure_rounding", folder / "measure_rounding.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert list(script.whole_windows(1024, 512, 2)) == [0, 512]
    with pytest.raises(SystemExit, match="has 1 windows of 512 tokens with this tokenizer; 2 are wanted"):
        script.whole_windows(1023, 512, 2)


@pytest.fixture(scope="module")
def bench(tiny):
    loaded = load_model(tiny, LoadOptions(threads=1, ctx=256, max_batch_size=4, kv_cache_tokens=2048))
    yield Bench(loaded)
    loaded.close()


def test_bytes_and_operations_are_those_of_the_model(bench, tiny):
    config = json.loads((tiny / "config.json").read_text())
    c, f, h, k = (config[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    d = config.get("head_dim", c // h)
    layer = c * h * d * 2 + c * k * d * 2 + 3 * c * f
    assert bench.linear_ops("T") == 2 * config["num_hidden_layers"] * layer
    assert bench.linear_ops("R") == 2 * c * config["vocab_size"]
    assert bench.kv_bytes >= config["num_hidden_layers"] * 2 * k * d * 2
    assert bench.multiply_type in ("bf16", "f32")


def test_weights_that_are_used_where_the_file_is_mapped_count_for_the_type(tiny, tmp_path):
    subprocess.run([sys.executable, "-m", "fastllm", "convert", str(tiny), "-o", str(tmp_path / "m.flm"), "--dtype", "int8", "--backend", "cpu_avx"], check=True)
    loaded = load_model(tmp_path / "m.flm", LoadOptions(backend="cpu_avx", threads=1, ctx=256))
    try:
        assert any(place.arena == "mapped" for place in Bench(loaded).plan.places.values())
        assert Bench(loaded).multiply_type == "int8"
    finally:
        loaded.close()


def test_limits_use_the_type_that_is_multiplied(bench, monkeypatch):
    monkeypatch.setattr(bench.backend, "peak_ops", {"bf16": None, "f32": 5.0}.get)
    assert bench.peak() == ("f32", 5.0)


def test_ratios_are_values_over_limits(bench, monkeypatch):
    monkeypatch.setattr(bench.backend, "read_bandwidth", lambda nbytes: 1e9)
    row = bench.decode_row(16, 4, 3)
    nbytes = bench.weight_bytes + bench.kv_bytes * 18
    assert row.limit == pytest.approx(1e9 / nbytes)
    assert row.ratio.samples == pytest.approx([v / row.limit for v in row.value.samples])
    assert bench.batch_row(2, 16, 1).limit == pytest.approx(2e9 / (bench.weight_bytes + bench.kv_bytes * 2 * 24))


def test_a_prompt_that_does_not_fit_is_refused(bench):
    with pytest.raises(UsageError, match="do not fit in the context of 256"):
        bench.prefill(256)


def test_overhead_adds_up_and_leaves_the_engine_as_it_was(bench):
    programs = list(bench.engine._runner._programs)
    found = bench.overhead(8)
    assert bench.engine._runner._programs == programs
    assert all(value > 0 for value in found.values())
    assert found["native_s"] < found["step_s"]


def test_attention_is_a_part_of_the_prompt_and_is_not_timed_afterwards(bench):
    found = bench.attention(200)
    assert 0 < found["attention_s"] < found["whole_s"]
    bench.prefill(200)
    assert [sum(p.profile(False).values()) for p in bench.engine._runner._programs] == [0.0]


def test_attention_of_a_backend_without_native_programs_is_refused(bench, monkeypatch):
    monkeypatch.setattr(bench.engine._runner, "_programs", [None])
    with pytest.raises(UsageError, match="says what its time goes to"):
        bench.attention(8)


def test_mixed_load_reports_the_longest_gap_while_the_prompt_is_read(bench):
    found = bench.mixed(2, 200, 40)
    assert found["ratio"] == found["max_gap_s"] / found["median_gap_s"]
    assert found["prompt_s"] > 0


def test_what_cells_need():
    assert engine.needs(["prefill:512", "decode:2048", "batch:8"]) == (2240, 8)
    assert engine.needs(["idle"]) == (512, 1)
    assert engine.needs(["attention:8128"]) == (8192, 1)
    assert engine.needs(["mixed"]) == (2064, 8)


def test_every_cell_gives_rows_that_fit_the_schema(tiny, monkeypatch):
    monkeypatch.setattr(engine, "MIXED_PROMPT", 300)
    cells = ["prefill:8", "attention:8", "decode:0", "batch:2", *engine.SINGLE]
    rows = list(engine.engine_rows(str(tiny), {"isa": "avx2"}, 1, cells, 1))
    records = [results.record("engine", "tiny", "fastllm", {"threads": 1}, row) for row in rows]
    assert results.check({"schema": 1, "machine": {}, "rows": records}) == []
    assert [r["reason"] for r in records if r["reason"]] == []
    assert {r["cell"] for r in records} >= {"prefill", "decode", "batch", "load", "peak memory", "idle CPU", "sampling", "import fastllm"}


def test_a_cell_that_fails_is_a_row_with_the_reason(monkeypatch):
    def fail(repeat):
        raise RuntimeError("no luck")

    monkeypatch.setattr(engine, "import_rows", fail)
    first, second = list(engine.engine_rows("none", {}, 1, ["import", "sampling"], 1))[:2]
    assert (first.cell, first.value, first.reason) == ("import", None, "RuntimeError: no luck")
    assert second.value is not None


def test_a_model_that_does_not_load_is_a_row_with_the_reason(tiny):
    [row] = engine.engine_rows(str(tiny), {}, 1, ["prefill:4096", "decode:0"], 1)
    assert "4,288" in row.reason


@pytest.mark.parametrize("cell", ["decode", "decode:x", "batch:0", "mixed:1", "sleep"])
def test_a_cell_that_is_none_is_refused(cell):
    with pytest.raises(UsageError, match=cell):
        list(engine.engine_rows("none", {}, 1, [cell], 1))
