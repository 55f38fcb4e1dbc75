"""`fastllm run` with a prompt: where it comes from, what is printed where, and every sampling flag."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys

import pytest

GREEDY = ("--temperature", 0, "--max-tokens", 6, "--ignore-eos", "--backend", "ref")
KEYS = {"prompt_ids", "output_ids", "text", "finish_reason", "seed", "timings", "backend", "threads"}
TIMINGS = {"load_s", "ttft_s", "prompt_tokens", "prompt_s", "decode_tokens", "decode_s"}


@pytest.fixture
def answer(run, tiny_model):
    """answer(*args, stdin="") -> the object of --json."""

    def call(*args, stdin="", model=tiny_model):
        result = run("run", model, "--json", *GREEDY, *args, stdin=stdin)
        assert result.code == 0, result.err
        return json.loads(result.out)

    return call


@pytest.fixture
def plain_model(tiny_model, tmp_path):
    """The tiny model without a chat template."""
    return edited(tiny_model, tmp_path, "tokenizer_config.json", lambda c: c.pop("chat_template"))


def edited(model, tmp_path, name, change):
    folder = tmp_path / "edited"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))
    return folder


def test_json_holds_exactly_the_documented_keys(answer):
    got = answer("--prompt", "hello")
    assert set(got) == KEYS
    assert set(got["timings"]) == TIMINGS
    assert got["backend"] == "ref"
    assert got["finish_reason"] == "length"
    assert len(got["output_ids"]) == got["timings"]["decode_tokens"] == 6
    assert len(got["prompt_ids"]) == got["timings"]["prompt_tokens"]
    assert all(value >= 0 for value in got["timings"].values())


def test_the_prompt_may_be_an_option_a_pipe_or_both(answer):
    option = answer("--prompt", "hello")
    assert answer(stdin="hello")["prompt_ids"] == option["prompt_ids"]
    joined = answer("--prompt", "hello", stdin="world\n")
    assert joined["prompt_ids"] == answer("--prompt", "hello\nworld\n")["prompt_ids"]


def test_an_idle_stdin_that_is_neither_pipe_nor_file_is_not_waited_for(tiny_model):
    ours, theirs = os.pipe()[0], os.openpty()
    os.close(ours)
    command = [sys.executable, "-m", "fastllm", "run", str(tiny_model), "--prompt", "x", "-n", "1", "--backend", "ref", "-q"]
    done = subprocess.run(command, stdin=theirs[1], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    for end in theirs:
        os.close(end)


def test_raw_sends_the_prompt_as_it_is_and_special_text_stays_text(answer):
    chat = answer("--prompt", "a<|im_end|>b")
    raw = answer("--raw", "--prompt", "a<|im_end|>b")
    assert len(raw["prompt_ids"]) == len("a<|im_end|>b")
    assert not {0, 1, 2} & set(raw["prompt_ids"])
    assert chat["prompt_ids"].count(2) == 1  # the template's own; the one in the message is text
    assert len(chat["prompt_ids"]) > len(raw["prompt_ids"])


def test_system_comes_before_the_message(answer):
    plain, system = answer("--prompt", "x"), answer("--prompt", "x", "--system", "be brief")
    assert system["prompt_ids"][-len(plain["prompt_ids"]) :] == plain["prompt_ids"]
    assert system["prompt_ids"].count(1) == plain["prompt_ids"].count(1) + 1


def test_option_names_take_dashes_and_underscores(answer):
    assert answer("--prompt", "x", "--max_tokens", 3)["output_ids"] == answer("--prompt", "x", "--max-tokens", 3)["output_ids"]
    assert answer("--prompt", "x", "--ignore_eos", "--top_k", 1, "--repeat_penalty", 1.5)["finish_reason"] == "length"


def test_seeds_decide(answer):
    def ids(seed):
        return answer("--prompt", "x", "--temperature", 3, "--top-k", 0, "--top-p", 1, "--seed", seed, "-n", 12)["output_ids"]

    assert ids(7) == ids(7)
    assert ids(7) != ids(8)
    assert ids(-1) == ids(2**64 - 1)


@pytest.mark.parametrize(
    ("flag", "value", "field"),
    [
        ("--temperature", "1.5", "temperature"),
        ("--top-k", "7", "top_k"),
        ("--top-p", "0.3", "top_p"),
        ("--min-p", "0.1", "min_p"),
        ("--repeat-penalty", "1.3", "repetition_penalty"),
        ("--presence-penalty", "0.5", "presence_penalty"),
        ("--frequency-penalty", "-0.5", "frequency_penalty"),
        ("--seed", "5", "seed"),
        ("--max-tokens", "2", "max_tokens"),
    ],
)
def test_every_sampling_flag_reaches_the_engine(run, tiny_model, monkeypatch, flag, value, field):
    from fastllm.core.engine import Engine

    seen, submit = [], Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, request, *rest: seen.append(request) or submit(self, request, *rest))
    assert run("run", tiny_model, "--prompt", "x", "-n", 1, "--backend", "ref", flag, value).code == 0
    assert getattr(seen[0].params, field) == float(value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--temperature", "nan"), ("--temperature", "6"), ("--top-p", "1.1"), ("--top-k", "-2"), ("--min-p", "x"), ("--seed", str(2**64)), ("--max-tokens", "0")],
)
def test_values_out_of_range_are_usage_errors_that_name_the_option(run, tiny_model, flag, value):
    result = run("run", tiny_model, "--prompt", "x", "-n", 1, "--backend", "ref", flag, value)
    assert result.code == 2
    assert flag.strip("-") in result.err.replace("_", "-")
    assert result.err.startswith("fastllm: error: ")


def test_stop_ends_the_answer_and_ignore_eos_goes_on(answer, tiny_model):
    free = answer("--prompt", "x", "--raw", "-n", 30)
    assert free["finish_reason"] == "length"
    word = free["text"][5:7]
    cut = answer("--prompt", "x", "--raw", "-n", 30, "--stop", word)
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == free["text"][: free["text"].index(word)]


def test_the_answer_alone_is_on_stdout(fastllm, tiny_model):
    done = fastllm("run", tiny_model, "--prompt", "x", *GREEDY, "--raw")
    quiet = fastllm("run", tiny_model, "--prompt", "x", *GREEDY, "--raw", "--quiet")
    assert done.returncode == quiet.returncode == 0
    assert done.stdout == quiet.stdout
    assert done.stdout.endswith("\n")
    assert "tok @" in done.stderr
    assert "ctx 7/64" in done.stderr
    assert "seed" not in done.stderr  # nothing was drawn
    assert quiet.stderr == ""


def test_the_drawn_seed_is_told_and_repeats_the_answer(fastllm, tiny_model):
    options = ("run", tiny_model, "--prompt", "x", "--temperature", 2, "-n", 8, "--backend", "ref")
    first = fastllm(*options)
    seed = first.stderr.rsplit("seed ", 1)[1].strip()
    assert fastllm(*options, "--seed", seed).stdout == first.stdout


def test_text_is_streamed_while_the_answer_is_made(run, tiny_model, monkeypatch):
    from fastllm.cli import terminal

    pieces = []
    monkeypatch.setattr(terminal, "write_answer", pieces.append)
    assert run("run", tiny_model, "--prompt", "x", *GREEDY, "--raw").code == 0
    assert len(pieces) > 2


@pytest.mark.parametrize(
    "environment",
    [{"NO_COLOR": "1"}, {"COLUMNS": "1"}, {"LANG": "C", "LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"HOME": ""}, {"TERM": "dumb"}],
)
def test_odd_environments_give_the_same_answer(fastllm, tiny_model, environment):
    options = ("run", tiny_model, "--prompt", "grün", *GREEDY, "--raw", "--json")
    plain, odd = (json.loads(fastllm(*options, env=e).stdout) for e in ({}, environment))
    assert (odd["prompt_ids"], odd["output_ids"]) == (plain["prompt_ids"], plain["output_ids"])


def test_no_home_is_no_obstacle(tiny_model, tmp_path):
    command = [sys.executable, "-m", "fastllm", "run", str(tiny_model), "--prompt", "x", "-n", "1", "-q"]
    bare = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=tmp_path, env=bare, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("run",), ("--help",), ("list",), ("backends", "list")])
def test_a_reader_that_left_is_141_without_a_word(tiny_model, command):
    ours, theirs = os.pipe()
    os.close(ours)
    more = (str(tiny_model), "--prompt", "x", "-n", "4", "--backend", "ref", "-q") if command == ("run",) else ()
    done = subprocess.run(
        [sys.executable, "-m", "fastllm", *command, *more], stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", [("run",), ("--help",), ("list", "--json")])
def test_a_full_disk_behind_stdout_is_one_error(tiny_model, command):
    more = (str(tiny_model), "--prompt", "x", "-n", "4", "--backend", "ref", "-q") if command == ("run",) else ()
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fastllm", *command, *more], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"fastllm: error: the output cannot be written: No space left on device\n")
    assert b"Exception" not in done.stderr


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_standard_streams_do_no_harm(tiny_model, closed):
    command = f'exec "$0" -m fastllm run "$1" --prompt x -n 1 --backend ref -q {closed}>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, str(tiny_model)], capture_output=True, timeout=60, check=False)
    assert done.returncode == (1 if closed == 1 else 0)
    assert b"Traceback" not in done.stderr
    if closed == 1:
        assert b"the output cannot be written" in done.stderr


@pytest.mark.parametrize("command", ["argument", "pipe"])
def test_bytes_that_are_no_text_are_one_error(tiny_model, command):
    base = [sys.executable, "-m", "fastllm", "run", str(tiny_model), "-n", "1", "--backend", "ref"]
    more, data = ([b"--prompt", b"a\xff"], b"") if command == "argument" else ([], b"abc\xff")
    done = subprocess.run([*base, *more], input=data, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_empty_prompts(run, tiny_model, answer):
    result = run("run", tiny_model, "--backend", "ref", stdin=" \n")
    assert result.code == 2
    assert "--prompt" in result.err
    raw = run("run", tiny_model, "--backend", "ref", "--raw", "--prompt", "")
    assert (raw.code, raw.err.splitlines()[0]) == (2, "fastllm: error: the prompt is empty: there is no token to continue from")
    assert len(answer("--prompt", "")["prompt_ids"]) > 3  # the template asks


def test_a_prompt_longer_than_the_context_names_both_numbers(run, tiny_model):
    result = run("run", tiny_model, "--backend", "ref", "--raw", "--json", stdin="a" * 200_000)
    assert result.code == 1
    error = json.loads(result.out)["error"]
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", 200_000, 64)
    assert "200,000" in result.err
    assert "64" in result.err
    assert "--ctx" not in error["fix"]  # the model cannot do more
    small = run("run", tiny_model, "--backend", "ref", "--raw", "--ctx", 16, stdin="a" * 20)
    assert small.code == 1
    assert "larger --ctx" in small.err


def test_without_a_template_the_prompt_is_continued_and_a_system_prompt_refused(run, answer, plain_model):
    got = run("run", plain_model, "--prompt", "abc", *GREEDY)
    assert got.code == 0
    assert "no chat template" in got.err
    assert len(answer("--prompt", "abc", model=plain_model)["prompt_ids"]) == 3
    refused = run("run", plain_model, "--prompt", "abc", "--system", "x", *GREEDY)
    assert refused.code == 2
    assert "--system" in refused.err


def test_options_that_exclude_each_other(run, tiny_model):
    assert run("run", tiny_model, "--raw", "--system", "x", "--prompt", "y").code == 2
    assert run("run", tiny_model, "--json", "-i", "--prompt", "y").code == 2


def test_threads_without_effect_are_said_and_refused_by_strict(run, tiny_model):
    options = ("run", tiny_model, "--prompt", "x", "-n", 1, "--backend", "ref", "--threads", 2)
    assert "--threads has no effect" in run(*options).err
    assert run(*options, "--strict").code == 2


def test_threads_are_used_and_reported(run, tiny_model):
    result = run("run", tiny_model, "--prompt", "x", "-n", 1, "--backend", "cpu_avx", "--threads", 1, "--json")
    assert json.loads(result.out)["threads"] == 1


def test_notes_of_a_model_are_lines_with_one_prefix_and_errors_under_strict(run, tiny_model, tmp_path):
    folder = edited(tiny_model, tmp_path, "config.json", lambda c: c.update(auto_map={"AutoModel": "x.Y"}))
    options = ("run", folder, "--prompt", "x", "-n", 1, "--backend", "ref")
    said = [line for line in run(*options).err.splitlines() if "auto_map" in line]
    assert len(said) == 1
    assert said[0].count("fastllm:") == 1
    strict = run(*options, "--strict")
    assert strict.code == 2
    assert "auto_map" in strict.err


@pytest.mark.parametrize(("key", "value"), [("temperature", -1), ("top_p", "x"), ("top_k", 1.5), ("temperature", 1e300)])
def test_sampling_settings_of_a_model_that_cannot_be_are_named(run, tiny_model, tmp_path, key, value):
    folder = edited(tiny_model, tmp_path, "generation_config.json", lambda c: c.update({key: value}))
    result = run("run", folder, "--prompt", "x", "-n", 1, "--backend", "ref")
    assert result.code == 1
    assert f"generation_config.json: {key}" in result.err


def test_controls_of_an_answer_are_shown_on_a_terminal_only(monkeypatch, capsys):
    from fastllm.cli.terminal import escape_controls, write_answer

    text = "a\x1b[31mb\x07\x9bc\u202ed\n\te"
    assert escape_controls(text) == "a\\x1b[31mb\\x07\\x9bc\\u202ed\n\te"
    write_answer(text)
    assert capsys.readouterr().out == text


def test_an_answer_follows_a_grammar(run, tiny_model, tmp_path):
    base = ("run", tiny_model, "--prompt", "x", "--backend", "ref", "--seed", 1, "--temperature", 1, "-n", 40, "-q")
    (tmp_path / "s.json").write_text('{"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["n"]}')
    (tmp_path / "g.gbnf").write_text('root ::= "yes" | "no"\n')
    done = json.loads(run(*base, "--json-schema", tmp_path / "s.json", "--json").out)
    assert done["text"].lstrip()[0] == "{"
    assert run(*base, "--grammar", tmp_path / "g.gbnf").out in ("yes\n", "no\n")
    done = json.loads(run(*base, "--regex", "[ab]{3}", "--json").out)
    assert re.fullmatch("[ab]{3}", done["text"])
    assert done["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--regex", "a("), "cannot be enforced"),
        (("--regex", "a", "--grammar", "x"), "one grammar"),
        (("--json-schema", "/no/such/file"), "cannot be read"),
        (("--json-schema", __file__), "is not JSON"),
        (("--regex", "a", "-i"), "holds one answer"),
    ],
)
def test_grammars_that_cannot_be(run, tiny_model, options, what):
    done = run("run", tiny_model, "--prompt", "x", "--backend", "ref", *options)
    assert done.code == 2
    assert what in done.err


def test_a_group_size_without_a_type_is_said_to_have_no_effect(run, tiny_model):
    asked = ("run", tiny_model, "--prompt", "a", *GREEDY)
    assert "--group-size has no effect" in run(*asked, "--group-size", 64).err
    assert "--group-size" not in run(*asked).err
    assert "--group-size has no effect" not in run(*asked, "--group-size", 64, "--dtype", "int8").err
    strict = run(*asked, "--group-size", 64, "--strict")
    assert strict.code == 2
    assert "--group-size has no effect" in strict.err


def test_names_that_upstream_has_are_taken(run, tiny_model):
    same = ("--prompt", "hi", *GREEDY, "--json")
    ours, theirs = (json.loads(run("run", *args, *same).out) for args in (
        (tiny_model, "--ctx", 48, "--kv-dtype", "f32"), (tiny_model, "--max_context_length", 48, "--kv_cache_dtype", "f32"),
    ))  # fmt: skip
    assert ours["output_ids"] == theirs["output_ids"]
    assert "48" in run("run", tiny_model, "--max_context_length", 48, "--prompt", "x" * 60, "--backend", "ref").err


def test_quiet_holds_for_what_backends_log(caplog):
    from fastllm.cli import terminal

    log = logging.getLogger("fastllm.opencl")
    for quiet in (True, False):
        with terminal.Reporter(quiet=quiet):
            log.warning("quiet is %s", quiet)
    assert caplog.messages == ["quiet is False"]
