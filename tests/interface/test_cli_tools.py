"""`fastllm run --tools`: calls as lines of JSON, held to their schemas; what is wrong is said at once."""

from __future__ import annotations

import json

import pytest

from .test_cli_run import KEYS, edited

SCHEMA = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "pick", "description": "Picks.", "parameters": SCHEMA}}, {"type": "function", "function": {"name": "clock"}}]
FAST = ("--backend", "ref", "--prompt", "Hi", "--max-tokens", 400)
KNOWS = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def model(tiny_model, tmp_path):
    """The tiny model with room for a description of tools."""
    return edited(tiny_model, tmp_path, "config.json", lambda c: c.update(max_position_embeddings=1024))


@pytest.fixture
def tools(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    return path


def test_a_call_is_one_line_and_the_template_notes_are_not_on_stdout(run, model, tools):
    got = run("run", model, *FAST, "--tools", tools, "--tool-choice", "pick")
    assert got.code == 0, got.err
    [line] = got.out.splitlines()
    call = json.loads(line)
    assert call["name"] == "pick"
    assert call["arguments"] in ({"k": "a"}, {"k": "b"})
    assert "knows no tools" in got.err


def test_the_object_has_the_calls(run, model, tools):
    got = run("run", model, *FAST, "--tools", tools, "--tool-choice", "pick", "--json")
    answer = json.loads(got.out)
    assert set(answer) == KEYS | {"tool_calls"}
    [call] = answer["tool_calls"]
    assert (call["name"], set(call["arguments"]), answer["text"], answer["finish_reason"]) == ("pick", {"k"}, "", "tool_calls")


def test_the_template_writes_the_tools_where_it_knows_how(run, model, tools, tmp_path):
    (tmp_path / "knows").mkdir()
    knows = edited(model, tmp_path / "knows", "tokenizer_config.json", lambda c: c.update(chat_template=KNOWS))
    asked = ("run", knows, *FAST[:-1], 1, "--json", "--strict")
    with_tools, plain = (json.loads(run(*asked, *more).out)["prompt_ids"] for more in (("--tools", tools), ()))
    assert len(with_tools) > len(plain) + len('"description": "Picks."')
    assert with_tools[-len(plain) :] == plain
    refused = run("run", model, *FAST, "--tools", tools, "--strict")
    assert refused.code == 2
    assert "knows no tools" in refused.err


def test_text_stays_text_and_a_cut_call_is_said(run, model, tools):
    got = run("run", model, *FAST, "--tools", tools, "--temperature", 0, "--max-tokens", 5)
    assert got.code == 0
    plain = json.loads(run("run", model, *FAST, "--tools", tools, "--temperature", 0, "--max-tokens", 5, "--json").out)
    assert got.out.removesuffix("\n") == plain["text"].removesuffix("\n")
    assert plain["tool_calls"] == []
    long = {"type": "object", "properties": {"k": {"const": "a" * 300}}, "required": ["k"]}
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "pick", "parameters": long}}]))
    cut = run("run", model, *FAST, "--tools", tools, "--tool-choice", "pick", "--max-tokens", 200)
    assert (cut.code, cut.out.strip()) == (0, "")
    assert "'pick' is cut" in cut.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "no list of tools"),
        ("[]", "no list of tools"),
        ("[", "not JSON"),
        ('[{"type": "function", "function": {}}]', "tools[0].function.name is missing"),
        ('[{"type": "web_search"}]', "tools[0]"),
        (json.dumps([TOOLS[0], TOOLS[0]]), "one name"),
        ('[{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}]', "tools[0].function.parameters"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_one_error(run, model, tmp_path, text, said):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    got = run("run", model, *FAST, "--tools", path)
    assert got.code == 2
    assert said in got.err
    assert str(path) in got.err
    assert got.err.count("error:") == 1


@pytest.mark.parametrize("more", [("--raw",), ("--stop", "x"), ("--regex", "a"), ("--tool-choice", "nobody")])
def test_what_has_no_place_beside_them(run, model, tools, more):
    got = run("run", model, *FAST, "--tools", tools, *more)
    assert got.code == 2
    assert more[0].removeprefix("--") in got.err.replace("tool_choice", "tool-choice")


def test_tools_need_a_prompt_and_a_template(run, model, tools, tmp_path):
    assert "-i" in run("run", model, "--tools", tools, "-i", "--prompt", "Hi").err
    assert "--tools FILE" in run("run", model, *FAST, "--tool-choice", "auto").err
    (tmp_path / "plain").mkdir()
    plain = edited(model, tmp_path / "plain", "tokenizer_config.json", lambda c: c.pop("chat_template"))
    got = run("run", plain, *FAST, "--tools", tools)
    assert got.code == 2
    assert "no chat template" in got.err
