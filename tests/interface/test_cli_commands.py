"""Every command but `run`: what it prints for people and as JSON, and what its help says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [("run",), ("download",), ("list",), ("inspect",), ("plan",), ("doctor",), ("backends",), ("backends", "list"), ("backends", "show")]


def values(text: str) -> dict[str, str]:
    """The two columns of a report."""
    return {line[:22].strip(): line[22:].strip() for line in text.splitlines() if line.strip()}


# help --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", ["--help", "-h", "--version", "run --help"])
def test_help_and_version_import_nothing_heavy(args):
    """`fastllm --help` answers at once because of what it leaves alone."""
    script = "import sys\nfrom fastllm.cli.main import run_command\ncode = run_command(sys.argv[1:])\n"
    script += "print(code, *sorted({m.partition('.')[0] for m in sys.modules}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script, *args.split()], capture_output=True, text=True, timeout=60, check=True)
    code, *modules = done.stderr.split()
    assert code == "0"
    heavy = {"numpy", "rich", "jinja2", "tokenizers", "safetensors", "huggingface_hub", "prompt_toolkit", "pluggy", "psutil", "asyncio"}
    assert not heavy & set(modules)


def test_the_help_lists_every_command_with_a_line(run):
    result = run("--help")
    assert result.code == 0
    for command in COMMANDS:
        assert f"\n  {command[0]} " in result.out
    assert "fastllm run model.gguf --prompt Hi" in result.out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_and_option_has_a_help(command):
    import click

    from fastllm.cli.group import cli

    found, context = cli, click.Context(cli)
    for name in command:
        found = found.get_command(context, name)
    assert found.help.strip()
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert parameter.help.rstrip("]").endswith((".", "s)")) or "[default" in parameter.help, parameter.help


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_printed_and_fits_the_line(run, command):
    result = run(*command, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Usage: fastllm {' '.join(command)}")
    assert max(map(len, result.out.splitlines())) <= 80


def test_without_arguments_the_help_is_shown_with_2(run):
    result = run()
    assert result.code == 2
    assert "Commands:" in result.out


def test_version_is_that_of_the_distribution(run):
    from importlib.metadata import version

    assert run("--version").out == f"fastllm {version('fastllm-engine')}\n"


# inspect -----------------------------------------------------------------------------------------------------------------


def test_inspect_shows_what_the_header_says(run, tiny_model):
    result = run("inspect", tiny_model)
    assert result.code == 0
    assert result.err == ""
    shown = {line[:18].strip(): line[18:].strip() for line in result.out.splitlines()}
    assert shown["architecture"] == "llama"
    assert shown["parameters"] == "38,624"
    assert shown["layers"] == "2"
    assert shown["context"] == "64"
    assert shown["tokenizer"] == "tokenizer.json"
    assert shown["formats"] == "bf16 100.0 %"


def test_inspect_and_plan_count_only_the_experts_that_a_token_takes(run):
    folder = Path(__file__).parent.parent / "models" / "fixtures" / "mixtral"
    facts = json.loads(run("inspect", folder, "--json").out)
    stack = 2 * 3 * 6 * 16 * 32  # layers × matrices × experts × width × hidden
    assert facts["parameters"] - facts["active_parameters"] == stack * 4 // 6
    assert facts["active_share"].startswith(f"{100 * facts['active_parameters'] / facts['parameters']:.1f} %")
    assert "active_parameters" not in json.loads(run("inspect", folder.parent / "llama", "--json").out)
    plan = json.loads(run("plan", folder, "--backend", "ref", "--no-measure", "--json").out)
    assert plan["weights_bytes"] - plan["weight_bytes_per_token"] == stack * 4 // 6 * 4 + 256 * 32 * 4  # and the embedding's table


def test_inspect_as_json_has_every_tensor_and_is_finite(run, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    facts = json.loads(run("inspect", folder, "--json").out, parse_constant=lambda name: pytest.fail(name))
    assert len(facts["tensors"]) == facts["tensor_count"] == 35
    assert {"name": "lm_head.weight", "format": "bf16", "shape": [256, 32], "size_bytes": 16384} in facts["tensors"]
    assert facts["config"]["model_type"] == "llama"
    assert "add_generation_prompt" in facts["chat_template"]


def test_inspect_lists_tensors_and_the_template(run, tiny_model):
    out = run("inspect", tiny_model, "--tensors", "--template").out
    assert "lm_head.weight" in out
    assert "{% for m in messages %}" in out


def test_inspect_opens_what_no_family_runs(run, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nosuch\x1b[31m"}))
    result = run("inspect", folder)
    assert result.code == 0
    assert "not runnable" in result.out
    assert "\x1b" not in result.out


def test_inspect_touches_no_weight(tiny_model, tmp_path):
    """32 GiB of a sparse file: whoever reads them has them in memory, or takes a while."""
    import struct

    folder = shutil.copytree(tiny_model, tmp_path / "model")
    header = json.dumps({"big.weight": {"dtype": "BF16", "shape": [1 << 20, 1 << 14], "data_offsets": [0, 1 << 35]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (1 << 35))
    script = "import sys\nfrom fastllm.cli.main import run_command\ncode = run_command(sys.argv[1:])\n"
    script += "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]\n"
    script += "print(code, peak, file=sys.stderr)"  # not ru_maxrss, which starts at what the parent had
    done = subprocess.run([sys.executable, "-c", script, "inspect", folder], capture_output=True, text=True, timeout=60, check=True)
    code, peak_kib = map(int, done.stderr.split())
    assert code == 0
    assert "34,359,738,368" in done.stdout
    assert peak_kib < 500_000


# plan --------------------------------------------------------------------------------------------------------------------


def test_plan_says_what_a_model_takes(run, tiny_model):
    facts = json.loads(run("plan", tiny_model, "--json", "--no-measure", "--backend", "ref").out)
    assert facts["backend"] == "ref"
    assert facts["backend_origin"] == "--backend ref"
    assert facts["layers"] == [{"layers": "0–1", "device": "ref"}]
    assert facts["fallbacks"] == []
    assert facts["total_bytes"] == facts["weights_bytes"] + facts["cache_bytes"] + facts["activations_bytes"]
    assert facts["read_bytes_per_s"] is None
    people = run("plan", tiny_model, "--no-measure", "--backend", "ref")
    assert people.code == 0
    shown = values(people.out)
    assert shown["backend"] == "ref"
    assert shown["context"] == "64"
    assert shown["layers 0–1"] == "ref"


def test_plan_measures_the_bandwidth_of_a_backend_that_can(run, tiny_model):
    facts = json.loads(run("plan", tiny_model, "--json", "--backend", "cpu_avx").out)
    assert facts["tokens_per_s_limit"] == pytest.approx(facts["read_bytes_per_s"] / facts["weight_bytes_per_token"])


def test_plan_shows_the_bytes_of_each_type_of_cache(run, tiny_model):
    facts = {d: json.loads(run("plan", tiny_model, "--json", "--no-measure", "--kv-dtype", d).out) for d in ("f16", "bf16", "f32", "int8")}
    size = {d: f["cache_bytes_per_token"] for d, f in facts.items()}
    assert size["int8"] < size["f16"] == size["bf16"] < size["f32"]
    assert facts["int8"]["cache_bytes"] < facts["f16"]["cache_bytes"]
    assert facts["int8"]["fallbacks"] == []
    assert "(int8)" in run("plan", tiny_model, "--no-measure", "--kv-dtype", "int8").out
    assert run("plan", tiny_model, "--kv-dtype", "int7").code == 2
    done = run("run", tiny_model, "--prompt", "x", "-n", 2, "--kv-dtype", "int8", "--strict")
    assert done.code == 0


PARTIAL = """
from dataclasses import replace
from fastllm.api import API_VERSION, BackendSpec, DeviceInfo, No, Ready, Yes, hookimpl
from fastllm.backends.ref.backend import RefBackend

class Partial(RefBackend):
    name = "partial"

    def supports(self, q):
        if q.op == "attention":
            return No("this device has no softmax")
        answer = super().supports(q)
        own = q.op != "act_mul" and isinstance(answer, Yes)  # act_mul stays inherited
        return replace(answer, impl=answer.impl.replace("ref.", "partial.")) if own else answer

    def ops(self):
        return {name.replace("ref.", kind): op for name, op in super().ops().items() for kind in ("ref.", "partial.")}

@hookimpl
def fastllm_backends():
    return [BackendSpec("partial", API_VERSION, 1)]

@hookimpl
def fastllm_probe(name):
    return Ready((DeviceInfo("0", "partial"),))

@hookimpl
def fastllm_open_backend(name, device, options):
    return Partial()
"""


def test_a_backend_whose_rows_depend_on_each_other_says_so_and_strict_refuses_it(run, tiny_model, tmp_path):
    path = tmp_path / "partial.py"
    path.write_text(PARTIAL.replace('if q.op == "attention":', 'if q.op == "nothing":').replace('q.op != "act_mul" and ', "").replace('"partial.")) if own', '"partial."), varies=("rows",) if q.op == "linear" else ()) if own'))
    options = ("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path, "--backend", "partial")
    done = run(*options)
    assert done.code == 0
    assert "what shares the batch may change results: linear of 'partial' declares it" in done.err
    refused = run(*options, "--strict")
    assert refused.code == 2
    assert "--strict: what shares the batch" in refused.err


REWRITES = """

@hookimpl
def fastllm_transform_graph(graph, target):
    nodes = [replace(n, attrs={**n.attrs, "kind": "relu"}) if n.op == "act_mul" else n for n in graph.nodes]
    return replace(graph, nodes=nodes, outputs=graph.outputs[: len(graph.outputs) - CUT])
"""


def test_a_plugin_may_rewrite_the_graph_of_its_device_but_not_what_it_gives(run, tiny_model, tmp_path):
    answers = []
    for tail in ("", REWRITES.replace("CUT", "0")):
        path = tmp_path / "partial.py"
        path.write_text(PARTIAL + tail)
        done = run("run", tiny_model, "--prompt", "xyz", "-n", 8, "--temperature", 0, "--ignore-eos", "--json", "--plugin", path, "--backend", "partial")
        assert done.code == 0, done.err
        answers.append(json.loads(done.out)["output_ids"])
    assert answers[0] != answers[1]
    path.write_text(PARTIAL + REWRITES.replace("CUT", "1"))
    broken = run("plan", tiny_model, "--no-measure", "--plugin", path, "--backend", "partial")
    assert broken.code == 3
    assert "failed to rewrite the graph" in broken.err


@pytest.fixture
def partial(tmp_path):
    """A plug-in that leaves one op to another device."""
    path = tmp_path / "partial.py"
    path.write_text(PARTIAL)
    return ("--plugin", path, "--backend", "partial")


def test_ops_that_leave_their_device_are_lines_of_plan_and_run(run, tiny_model, partial):
    facts = json.loads(run("plan", tiny_model, "--json", "--no-measure", *partial).out)
    left = {f["op"]: f for f in facts["fallbacks"]}
    assert {op: (f["device"], f["count"]) for op, f in left.items()} == {"kv_write": ("cpu_avx", 2), "attention": ("cpu_avx", 2), "act_mul": ("cpu_avx", 2)}
    assert left["attention"]["reason"] == "partial: this device has no softmax"
    assert "only inherits" in left["act_mul"]["reason"]
    assert facts["copy_bytes_per_token"] == sum(f["bytes_per_token"] for f in left.values()) > 0
    shown = run("plan", tiny_model, "--no-measure", *partial)
    assert shown.out.count("leaves its device") == 3
    assert "attention" not in shown.err  # once is enough
    warned = run("run", tiny_model, "--prompt", "x", "-n", 1, *partial)
    assert warned.code == 0
    [line] = [line for line in warned.err.splitlines() if "elsewhere" in line]
    assert "6 of " in line
    assert "kv_write, attention, act_mul on cpu_avx (`fastllm plan` or --verbose says why)" in line
    each = run("run", tiny_model, "--prompt", "x", "-n", 1, "--verbose", *partial).err
    assert "attention (× 2) runs on cpu_avx: partial: this device has no softmax" in each
    assert "elsewhere" not in each
    allowed = run("run", tiny_model, "--prompt", "x", "-n", 1, "--fallback", "allow", *partial)
    assert "ops run elsewhere" in allowed.err
    assert "attention" not in allowed.err
    for more in (("--fallback", "error"), ("--strict",)):
        refused = run("run", tiny_model, "--prompt", "x", "-n", 1, *more, *partial)
        assert refused.code == 5
        assert "no softmax" in refused.err
        assert "act_mul: partial: it only inherits this op" in refused.err


# doctor and backends -----------------------------------------------------------------------------------------------------


def test_doctor_names_the_machine_and_every_backend(run):
    facts = json.loads(run("doctor", "--json", "--no-smoke").out)
    assert set(facts) == {"machine", "limits", "caches", "backends", "smoke", "advice"}
    assert int(facts["machine"]["numa nodes"]) >= 1
    assert facts["backends"]["ref"]["state"] == "ready"
    assert "cpu_avx" in facts["backends"]
    people = run("doctor", "--no-smoke")
    assert people.code == 0
    assert "backend ref: ready" in people.out
    assert "advice: " in people.out


def test_doctor_answers_with_a_model_that_is_here(run, package, tiny_model, monkeypatch, tmp_path):
    from fastllm.cli import doctor
    from fastllm.formats import sources

    none = json.loads(run("doctor", "--json").out)["smoke"]
    assert none == {"state": "not run: no model is here", "hint": "fastllm download"}
    assert run("download", package, "--quiet").code == 0
    monkeypatch.setenv("FASTLLM_BACKEND", "ref")
    broken = run("doctor")  # this model has no tokenizer
    assert "state: failed with exit code 1" in broken.out
    assert "advice: the 64 tokens failed: see smoke above" in broken.out
    assert broken.code == 1
    monkeypatch.setenv("FASTLLM_BACKEND", "nosuch")
    assert (run("doctor").code, run("doctor", "--no-smoke").code) == (2, 0)
    monkeypatch.setattr(doctor, "SMOKE_S", 0.01)
    late = run("doctor")
    assert (late.code, "no 64 tokens in" in late.out) == (1, True)
    monkeypatch.undo()
    folder = shutil.copytree(tiny_model, tmp_path / "longer")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    monkeypatch.setattr(sources, "list_cached", lambda: [sources.CachedModel(str(folder), folder, 1, "", "")])
    good = json.loads(run("doctor", "--json").out)
    assert good["smoke"]["state"] == "good"
    assert "exit_code" not in good["smoke"]
    assert "tokens/s" in good["smoke"]["speed"]


def test_doctor_of_one_backend_exits_with_its_state(run, monkeypatch):
    fine = run("doctor", "ref")
    assert (fine.code, "self-test: one linear and eight tokens of a tiny model are right" in fine.out) == (0, True)
    assert "self-test" not in run("doctor", "ref", "--no-smoke").out
    unknown = run("doctor", "nosuch")
    assert unknown.code == 2
    assert "no backend is called 'nosuch'" in unknown.err
    monkeypatch.setenv("FASTLLM_DISABLE_PLUGINS", "cpu_avx")
    assert run("doctor", "cpu_avx").code == 2


def test_backends_are_listed_for_people_and_as_json(run):
    rows = json.loads(run("backends", "list", "--json").out)
    assert {"ref", "cpu_avx"} <= {r["name"] for r in rows}
    assert {"name", "state", "reason", "hint", "devices", "priority", "options", "exit_code"} <= set(rows[0])
    assert run("backends", "list").out == run("backends").out == run("backend", "list").out
    assert "host memory, numpy" in run("backends").out


def test_one_backend_is_shown_with_its_options(run):
    out = run("backends", "show", "cpu_avx").out
    assert "option threads" in out
    assert "{" not in out
    facts = json.loads(run("backends", "show", "cpu_avx", "--json").out)
    assert facts["options"]["threads"]["type"] == "int"
    assert "environment" in facts


def test_a_broken_backend_is_a_line_of_the_list_and_3_when_shown(run, tmp_path):
    plugin = tmp_path / "bad.py"
    plugin.write_text(PARTIAL.replace('return Ready((DeviceInfo("0", "partial"),))', 'raise OSError("red \\x1b[31m driver")'))
    listed = run("backends", "list", "--plugin", plugin)
    assert listed.code == 0
    line = next(line for line in listed.out.splitlines() if line.startswith("partial"))
    assert "broken" in line
    assert "driver" in line
    assert "\x1b" not in listed.out
    assert run("backends", "show", "partial", "--plugin", plugin).code == 3


def test_plan_shows_recurrent_state_and_its_snapshots_apart(run, recurrent_model, tiny_model):
    facts = json.loads(run("plan", recurrent_model, "--backend", "ref", "--no-measure", "--json").out)
    slots = facts["sequences"] + facts["state_snapshots"]
    assert facts["state_snapshots"] == 64
    assert 0 <= facts["state_bytes"] - slots * 6 * 4 * (3 * 40 + 4 * 4 * 6) < 12 * 64  # each of 12 states begins at a multiple of 64
    assert facts["total_bytes"] == sum(facts[f"{part}_bytes"] for part in ("weights", "cache", "state", "activations"))
    line = f"recurrent state        {facts['state_bytes'] / (1 << 20):.1f} MiB, for {facts['sequences']} sequences and 64 snapshots"
    assert line in run("plan", recurrent_model, "--backend", "ref", "--no-measure").out
    assert "recurrent" not in run("plan", tiny_model, "--backend", "ref", "--no-measure").out
