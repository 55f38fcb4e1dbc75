"""Variables that nothing reads, and errors that name options which nobody typed."""

from __future__ import annotations

import json
import os

import click
import pytest

from fastllm.cli.config_file import all_commands
from fastllm.cli.variables import VARIABLES, origins, unknown_variables

SERVICE = {  # what a pod has for Services `fastllm` and `fastllm-server`
    "FASTLLM_SERVICE_HOST": "10.0.0.1",
    "FASTLLM_SERVICE_PORT": "8000",
    "FASTLLM_SERVICE_PORT_HTTP": "8000",
    "FASTLLM_PORT": "tcp://10.0.0.1:8000",
    "FASTLLM_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "FASTLLM_PORT_8000_TCP_PROTO": "tcp",
    "FASTLLM_PORT_8000_TCP_PORT": "8000",
    "FASTLLM_PORT_8000_TCP_ADDR": "10.0.0.1",
    "FASTLLM_SERVER_SERVICE_HOST": "10.0.0.2",
    "FASTLLM_SERVER_PORT": "udp://10.0.0.2:53",
    "FASTLLM_SERVER_PORT_53_UDP": "udp://10.0.0.2:53",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [n for n in os.environ if n.startswith("FASTLLM_")]:
        monkeypatch.delenv(name)


def test_a_misspelt_variable_is_told_with_the_name_that_was_meant(run, tiny_model, monkeypatch):
    monkeypatch.setenv("FASTLLM_CTXX", "64")
    monkeypatch.setenv("FASTLLM_QQQ", "1")
    done = run("plan", tiny_model, "--no-measure")
    assert done.code == 0
    assert done.err.count("FASTLLM_CTXX is no variable of fastllm (did you mean FASTLLM_CTX?); FASTLLM_QQQ is no variable of fastllm\n") == 1
    assert run("plan", tiny_model, "--no-measure", "--quiet").err == ""
    done = run("plan", tiny_model, "--no-measure", "--strict")
    assert (done.code, "--strict: FASTLLM_CTXX is no variable" in done.err, "unset it" in done.err) == (2, True, True)
    assert "FASTLLM_CTXX" in run("list").err  # also of commands without options for it


@pytest.mark.parametrize("name", [*sorted(VARIABLES - {"FASTLLM_CONFIG_FILE"}), "FASTLLM_PORT", "FASTLLM_EXTERNAL_MODEL", "FASTLLM_CPU_AVX_TRICK"])
def test_variables_of_other_commands_of_backends_and_of_the_tree_are_known(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert unknown_variables(all_commands()["run"]) == ()


def test_an_empty_variable_is_not_set(monkeypatch):
    monkeypatch.setenv("FASTLLM_CTXX", "")
    assert unknown_variables(all_commands()["run"]) == ()


def test_every_option_of_every_command_is_known(monkeypatch):
    commands = all_commands()
    names = {o.envvar for c in commands.values() for o in c.params if isinstance(o, click.Option) and o.envvar}
    assert {"FASTLLM_CTX", "FASTLLM_API_KEY"} <= names
    for name in names - {"FASTLLM_PLUGIN"}:  # with it none is told
        monkeypatch.setenv(name, "1")
    assert [unknown_variables(c) for c in commands.values()] == [()] * len(commands)


def test_what_kubernetes_sets_for_a_service_counts_as_not_set(run, tiny_model, monkeypatch):
    for name, value in SERVICE.items():
        monkeypatch.setenv(name, value)
    commands = all_commands()
    assert [unknown_variables(c) for c in commands.values()] == [()] * len(commands)
    assert "FASTLLM" not in run("list").err

    def port():
        return commands["server"].make_context("server", [str(tiny_model)]).params["port"]

    assert port() == 8000
    monkeypatch.setenv("FASTLLM_PORT", "9000")
    assert port() == 9000
    monkeypatch.setenv("FASTLLM_PORT", "tcp")
    with pytest.raises(click.BadParameter, match="it is from the variable FASTLLM_PORT"):
        port()


@pytest.mark.parametrize(("name", "value"), [("FASTLLM_SERVER_PORT", "9000"), ("FASTLLM_PORTS", "tcp://10.0.0.1:8000"), ("FASTLLM_PORT_HTTP", "8000"), ("FASTLLM_HOSTS", "10.0.0.1")])
def test_what_only_looks_like_that_is_told(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    (said,) = unknown_variables(all_commands()["run"])
    assert said.startswith(f"{name} is no variable of fastllm")


def test_where_a_backend_is_a_file_no_variable_is_told_as_its_name_is_not_known(run, tiny_model, monkeypatch):
    monkeypatch.setenv("FASTLLM_NPU_QUEUE", "2")
    assert "FASTLLM_NPU_QUEUE is no variable" in run("plan", tiny_model, "--no-measure").err
    done = run("plan", tiny_model, "--no-measure", "--plugin", "/no/such.py")
    assert ("/no/such.py" in done.err, "FASTLLM_NPU_QUEUE" in done.err) == (True, False)
    monkeypatch.setenv("FASTLLM_PLUGIN", "/no/such.py")
    assert "FASTLLM_NPU_QUEUE" not in run("list").err


@pytest.mark.parametrize(
    ("variable", "value", "args", "said"),
    [
        ("FASTLLM_DEVICE", "7", (), "--device is from the variable FASTLLM_DEVICE"),
        ("FASTLLM_DEVICE", "cuda,cpu", (), "--device is from the variable FASTLLM_DEVICE"),
        ("FASTLLM_QUANT_BIT", "4", ("--dtype", "int8"), "--quant-bit is from the variable FASTLLM_QUANT_BIT"),
        ("FASTLLM_BACKEND_OPT", "threads", (), "--backend-opt is from the variable FASTLLM_BACKEND_OPT"),
        ("FASTLLM_DTYPE", "int9", (), "--dtype is from the variable FASTLLM_DTYPE"),
        ("FASTLLM_PLUGIN", "/no/such.py", (), "--plugin is from the variable FASTLLM_PLUGIN"),
        ("FASTLLM_STRICT", "1", ("--group-size", 32), "--strict is from the variable FASTLLM_STRICT"),
    ],
)
def test_an_error_that_names_an_option_says_which_variable_it_is_from(run, tiny_model, monkeypatch, variable, value, args, said):
    monkeypatch.setenv(variable, value)
    done = run("plan", tiny_model, "--no-measure", *args)
    assert done.code in (2, 5)
    assert said in done.err
    error = json.loads(run("plan", tiny_model, "--no-measure", "--json", *args).out)["error"]
    assert said in error["why"]


def test_an_error_that_names_an_option_says_which_file_it_is_from(run, tiny_model, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('device = "7"\n')
    done = run("plan", tiny_model, "--no-measure", "--config", path)
    assert (done.code, f"--device is from {path}" in done.err) == (2, True)
    path.write_text('port = 0\nroot-path = "x"\n')
    assert f"--root-path is from {path}" in run("server", tiny_model, "--config", path).err


def test_what_was_typed_is_not_said_to_be_from_elsewhere(run, tiny_model, monkeypatch):
    monkeypatch.setenv("FASTLLM_DEVICE", "7")
    monkeypatch.setenv("FASTLLM_QUIET", "0")
    assert "is from" not in run("plan", tiny_model, "--no-measure", "--device", "8").err


def test_the_model_of_a_variable_that_is_not_found_is_said_to_be_from_it(run, monkeypatch):
    monkeypatch.setenv("FASTLLM_MODEL", "smollm3")
    assert "the model is from the variable FASTLLM_MODEL" in run("plan").err
    assert "is from" not in run("plan", "smollm4").err


@pytest.mark.parametrize(
    ("model", "text", "named"),
    [
        ("e", "--device 7 is a device of a backend, and none is named", False),
        ("e", "as in e.g. this one", False),
        ("e", "no model called 'e'", True),
        (".", "the device is not there. Name another...", False),
        (".", "3.5 is no whole number: see ./c.toml.", True),
        (".", "'.' has no config.json", True),
        ("llama", "llama3 and tiny-llama-1b are here", False),
        ("llama", "/models/llama/config.json is no JSON object", True),
        ("/models/x.gguf", "/models/x.gguf is cut.", True),
        ("/models/x.gguf", "/models/x.gguf.part is left", False),
        ("smollm3", "there is no smollm3.", True),
    ],
)
def test_a_model_is_named_by_a_text_that_holds_it_as_a_word_or_a_part_of_a_path(monkeypatch, model, text, named):
    monkeypatch.setenv("FASTLLM_MODEL", model)
    context = all_commands()["plan"].make_context("plan", [])
    assert origins(context, text) == ("the model is from the variable FASTLLM_MODEL" if named else "")


def test_a_note_says_which_variable_it_is_about(run, tiny_model, monkeypatch):
    monkeypatch.setenv("FASTLLM_GROUP_SIZE", "32")
    assert "--group-size has no effect: weights stay as they are stored without --dtype (--group-size is from the variable FASTLLM_GROUP_SIZE)\n" in run("plan", tiny_model, "--no-measure").err


def test_a_number_is_a_device_of_the_backend_that_the_variable_names(run, tiny_model, monkeypatch):
    monkeypatch.setenv("FASTLLM_BACKEND", "ref")
    assert run("plan", tiny_model, "--no-measure", "--device", 0).code == 0
    assert "backend 'ref' has no device '5'" in run("plan", tiny_model, "--no-measure", "--device", 5).err


@pytest.mark.parametrize(
    ("backend", "said"),
    [("ref:0", "FASTLLM_BACKEND=ref:0 and --device 0 differ"), ("auto", "FASTLLM_BACKEND=auto and --device 0"), ("nosuch", "FASTLLM_BACKEND=nosuch and --device 0")],
)
def test_a_backend_of_the_variable_beside_a_typed_device_is_said_to_be_of_the_variable(run, tiny_model, monkeypatch, backend, said):
    monkeypatch.setenv("FASTLLM_BACKEND", backend)
    done = run("plan", tiny_model, "--no-measure", "--device", 0)
    assert (done.code, said in done.err, f"--backend {backend}" in done.err) == (2, True, False), done.err
