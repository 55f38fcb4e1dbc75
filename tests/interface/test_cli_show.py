"""`fastllm show`, and `fastllm download` into a folder."""

from __future__ import annotations

import json
import shutil

TOOLS = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if tools %}{{ tools }}<tool_call>{% endif %}{% if enable_thinking %}<think>\n{% endif %}"


def test_show_tells_how_a_model_is_talked_to(run, tiny_model):
    facts = json.loads(run("show", tiny_model, "--json").out)
    assert facts["context"] == 64
    assert facts["defaults"]["temperature"] == {"value": 0.5, "origin": "generation_config.json"}
    assert facts["defaults"]["top_k"]["origin"] == "built in"
    assert facts["end_ids"] == [{"id": 2, "text": "<|im_end|>"}]
    assert facts["tokenizer"]["bos"] == {"id": 1, "text": "<|im_start|>"}
    assert (facts["template"]["tool_parser"], facts["template"]["writes_tools"]) == ("hermes", False)
    people = run("show", tiny_model)
    assert people.code == 0
    shown = {line[:22].strip(): line[23:] for line in people.out.splitlines()}
    assert shown["temperature"] == "0.5 (generation_config.json)"
    assert shown["ends an answer"] == "2 <|im_end|>"
    assert shown["thinking switch"] == "none"
    assert "{% for m in messages %}" in run("show", tiny_model, "--template").out


def test_show_names_parsers_that_the_template_speaks_of(run, tiny_model, tmp_path):
    (tmp_path / "t.jinja").write_text(TOOLS)
    facts = json.loads(run("show", tiny_model, "--chat-template", tmp_path / "t.jinja", "--json").out)["template"]
    assert facts["writes_tools"]
    assert facts["tool_parser"] == "hermes"
    assert facts["thinking_switch"]
    assert facts["reasoning"]["opening"] == "<think>"


def test_show_of_what_cannot_run_or_chat(run, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nosuch\x1b[31m"}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    done = run("show", folder)
    assert done.code == 0
    assert "not_runnable" in done.out
    assert "none: text is continued" in done.out
    assert "\x1b" not in done.out


def test_a_package_is_put_into_a_folder(run, package, tmp_path):
    done = run("download", package, "--local-dir", tmp_path / "here", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{tmp_path / 'here' / 'tiny.gguf'}\n"
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["tiny.gguf"]
    refused = run("download", package, "--include", "*.gguf")
    assert (refused.code, "only hub repositories" in refused.err) == (2, True)
    listed = json.loads(run("list", "--json", "--cache-dir", tmp_path / "home").out)
    assert any(row["cached"] for row in listed)
    assert not any(row["cached"] for row in json.loads(run("list", "--json", "--cache-dir", tmp_path / "other").out))
