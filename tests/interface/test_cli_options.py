"""What every command takes: flags of ftllm, variables, a configuration file, and MODEL in several places."""

from __future__ import annotations

import json
import logging
import re
import shutil

import click
import pytest

from fastllm.cli.command import Command, long_name
from fastllm.cli.config_file import CONFIG_ONLY
from fastllm.cli.group import COMMANDS, cli
from fastllm.cli.old_flags import OLD_COMMANDS, OLD_FLAGS, old_flag
from fastllm.cli.terminal import Reporter
from fastllm.core.errors import UsageError

GREEDY = ("--temperature", 0, "-n", 4, "--ignore-eos", "--backend", "ref", "--json")


def walk() -> dict[str, click.Command]:
    """Every command by its path."""
    found, pending = {}, [(name, cli.get_command(click.Context(cli), name)) for name in COMMANDS]
    while pending:
        path, command = pending.pop()
        found[path] = command
        if isinstance(command, click.Group):
            pending += [(f"{path} {name}", c) for name, c in command.commands.items()]
    return found


ALL = walk()
LOADING = ("run", "server", "webui", "bench model", "plan", "backends status", "dump-config")
EVERYWHERE = (
    "--backend --device --threads --ctx --dtype --group-size --compute-dtype --kv-dtype --kv-cache-size --block-size --max-batch-size --prefix-cache --lora "
    "--chat-template --fallback --offline --strict --quiet --verbose --debug --quant-bit --no-quant-layer --moe-dtype --verify-model --progress --config"
).split()


def parsed(command: str, *args: object, **environment: str) -> dict:
    """The values of a command line that is not run."""
    context = click.Context(cli, info_name="fastllm")
    words = [str(a) for a in args]
    return ALL[command].make_context(command, words, parent=context).params


@pytest.fixture
def answer(run, tiny_model):
    """answer(*args) -> the object of --json, of a prompt to the tiny model unless args name one."""

    def call(*args, model=tiny_model):
        done = run("run", *(() if model is None else (model,)), "--prompt", "hello", *GREEDY, *args)
        assert done.code == 0, done.err
        return json.loads(done.out)

    return call


@pytest.mark.parametrize("command", LOADING)
def test_options_of_loading_are_there_wherever_a_model_is_loaded(command):
    names = {o for p in ALL[command].params for o in (*p.opts, *p.secondary_opts)}
    assert set(EVERYWHERE) <= names


def test_every_option_of_every_command_has_a_variable_of_its_name():
    odd = {"--backend": None, "--config": "FASTLLM_CONFIG_FILE", "--token": "HF_TOKEN"}
    for path, command in ALL.items():
        assert isinstance(command, Command | click.Group), path
        if isinstance(command, click.Group):
            continue
        for option in command.params:
            if isinstance(option, click.Option):
                name = long_name(option)
                expected = odd[name] if name in odd else f"FASTLLM_{name[2:].replace('-', '_').upper()}"
                assert option.envvar == expected, f"{path} {name}"


# flags of ftllm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", OLD_FLAGS, ids=lambda row: row.names[0])
def test_every_flag_of_the_table_does_what_it_says(row, tiny_model):
    for pattern in row.names:
        name = pattern.replace("*", "any")
        typed = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        takers = [c for c in ALL.values() if not isinstance(c, click.Group) and (row.kind in ("note", "no") or any(row.text in p.opts or name in p.opts for p in c.params))]
        assert takers, f"{name}: no command takes {row.text}"
        command = takers[0] if row.kind in ("same", "new") else ALL["run"]
        out, notes = [], []
        if row.kind == "no":
            with pytest.raises(Exception, match=re.escape(name)) as raised:
                command._written([typed, "1"], notes, {})
            assert raised.value.exit_code == row.exit_code
            assert raised.value.fix or ": " not in row.text
            continue
        out = command._written([typed, *(["true"] if row.takes else []), "MODEL"], notes, {})
        if row.kind == "note":
            assert out == ["MODEL"]
            assert notes == [f"{name} has no effect: {row.text}"]
        elif row.kind == "new":
            assert out == [row.text, *([row.written("true")] if row.takes else []), "MODEL"]
        else:
            assert out == [typed, "true", "MODEL"]


def test_values_are_written_as_ours():
    assert parsed("server", "--tokens", 5000)["kv_cache_size"] == ("tokens", 5000)
    assert parsed("server", "--kv_cache_limit", "2G")["kv_cache_size"] == ("bytes", 2 * 10**9)
    assert parsed("server", "--cache_history", "false")["prefix_cache"] == "off"
    assert parsed("server", "--prefix_cache", "true")["prefix_cache"] == "on"
    assert parsed("server", "--enable_thinking=false")["thinking"] == "off"
    assert parsed("server", "--kv_cache_dtype", "float16")["kv_dtype"] == "f16"
    assert parsed("server", "--max_batch", 3, "--page_size", 32, "--chunked_prefill_size", 128)["max_batch_size"] == 3
    assert parsed("server", "--max_batch", -1, "--kv_cache_limit", "auto", "--kv_cache_dtype=auto")["kv_cache_size"] is None
    assert parsed("server", "--startup-progress", "ndjson")["progress"] == "json"
    assert parsed("server", "--dev_mode")["dev"] is True
    assert parsed("download", "--hf_token", "x", "-j", 2)["token"] == "x"


def test_values_of_options_are_not_read_as_flags(tiny_model):
    assert parsed("run", tiny_model, "--prompt", "--mtp")["prompt"] == "--mtp"
    assert parsed("run", tiny_model, "--", "--amx")["prompt_argument"] == "--amx"
    assert parsed("run", tiny_model, "-q", "-n", 3, "--low")["max_tokens"] == 3


WITH_VALUE = [name.replace("*", "any") for row in OLD_FLAGS if row.kind == "note" and row.takes for name in row.names]


@pytest.mark.parametrize("name", WITH_VALUE)
def test_a_flag_without_effect_swallows_no_option_and_no_model(name):
    """ftllm has most of them with a value; one that is left out must not cost the option behind it."""
    for following in (["-p", "MODEL"], ["-n", "3"], ["--prompt", "x"], ["-q"], []):
        assert ALL["run"]._written([name, *following], [], {}) == following
        assert ALL["run"]._written([name, "1", *following], [], {}) == following
        assert ALL["run"]._written([f"{name}=1", *following], [], {}) == following
    assert ALL["run"]._written([name, "-1", "MODEL"], [], {}) == ["MODEL"]


def test_an_option_whose_value_may_be_left_out_swallows_no_flag():
    optional = [(c, p) for c in ALL.values() for p in c.params if isinstance(p, click.Option) and p._flag_needs_value]
    assert {long_name(p) for _, p in optional} >= {"--embedding", "--soak"}
    for command, option in optional:
        notes = []
        assert command._written([long_name(option), "--low", "--amx", "on"], notes, {}) == [f"{long_name(option)}={option.flag_value}"]
        assert [line.split()[0] for line in notes] == ["--low", "--amx"]


def test_an_option_whose_value_may_be_left_out_swallows_no_model():
    assert parsed("server", "--embedding", "MODEL")["embedding"] == "last"
    assert parsed("server", "--embedding", "MODEL")["model"] == "MODEL"
    assert parsed("server", "--embedding", "mean", "MODEL")["embedding"] == "mean"
    assert parsed("server", "--embedding=cls", "MODEL")["embedding"] == "cls"
    assert parsed("server", "MODEL", "--embedding")["embedding"] == "last"


def test_a_flag_without_effect_is_one_line_and_an_error_under_strict(run, tiny_model):
    asked = ("run", tiny_model, "--prompt", "x", *GREEDY)
    plain, noted = run(*asked), run(*asked, "--cache_fast", "true", "-l", "--autotune_layers")
    assert noted.code == 0
    assert json.loads(noted.out)["output_ids"] == json.loads(plain.out)["output_ids"]
    assert [line.split(" has no effect")[0] for line in noted.err.splitlines() if "no effect" in line] == ["fastllm: --cache-fast", "fastllm: -l", "fastllm: --autotune-layers"]
    assert "no effect" not in run(*asked, "--cache_fast", "true", "-q").err
    strict = run(*asked, "--cache_fast", "true", "--strict")
    assert strict.code == 2
    assert "--strict: --cache-fast has no effect" in strict.err


@pytest.mark.parametrize(("flags", "code", "what"), [(("--mtp", 2), 5, "drafts"), (("--tp", "0,1"), 5, "--backend NAME"), (("--api_base", "http://x"), 2, "that server"), (("--max_batch", 2), 2, "--max-batch-size")])
def test_a_refusal_names_the_way(run, tiny_model, flags, code, what):
    done = run("inspect", tiny_model, *flags)
    assert done.code == code
    assert what in done.err
    assert "No such option" not in done.err


@pytest.mark.parametrize("name", OLD_COMMANDS)
def test_commands_of_ftllm_that_are_not_here_name_the_way(run, name):
    done = run(name)
    assert done.code == 2
    assert OLD_COMMANDS[name] in done.err


def test_patterns_stand_for_what_begins_so():
    assert old_flag("--moe-cache-anything").kind == "note"
    assert old_flag("--moe-cpu-cache").exit_code == 5
    assert old_flag("--nosuch") is None


# the model -----------------------------------------------------------------------------------------------------------------


def test_the_model_may_be_an_option_and_the_prompt_an_argument(answer, run, tiny_model):
    plain = answer()
    for how in (("-p", tiny_model), ("--path", tiny_model), (f"--model={tiny_model}",)):
        assert answer(*how, model=None)["output_ids"] == plain["output_ids"]
    argument = run("run", tiny_model, "hello", *GREEDY)
    assert json.loads(argument.out)["prompt_ids"] == plain["prompt_ids"]
    assert json.loads(run("run", "-p", tiny_model, "hello", *GREEDY).out)["prompt_ids"] == plain["prompt_ids"]
    assert run("inspect", "-p", tiny_model).out == run("inspect", tiny_model).out
    two = run("inspect", tiny_model, "-p", "other")
    assert (two.code, "two models" in two.err) == (2, True)
    prompts = run("run", tiny_model, "a", "--prompt", "b")
    assert (prompts.code, "two prompts" in prompts.err) == (2, True)


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_a_command_that_needs_a_model_says_so(run, command):
    done = run(command, *(("-o", "x.flm") if command == "convert" else ()))
    assert done.code == 2
    assert "MODEL" in done.err


def test_the_form_of_the_binary(run, answer, tiny_model):
    done = run("--model", tiny_model, "--prompt", "hello", *GREEDY)
    assert json.loads(done.out)["output_ids"] == answer()["output_ids"]
    shown = run("--model", tiny_model, "--http-mode", "--port", 9000, "--dump-config", "--backend", "ref")
    assert shown.code == 0
    assert "port = 9000  # command line" in shown.out
    shown = run("--model", tiny_model, "--dump-config", "--backend", "ref")
    assert f'model = "{tiny_model}"' in shown.out
    assert "port" not in shown.out


# variables and files -------------------------------------------------------------------------------------------------------


def test_a_flag_wins_over_a_variable_and_a_variable_over_a_file(tmp_path, monkeypatch, tiny_model):
    path = tmp_path / "c.toml"
    path.write_text('top-k = 3\nmax_tokens = 5\nkv-cache-size = "2MiB"\nprefix-cache = false\ngroup-size = 64\nstop = "x"\n')
    got = parsed("run", tiny_model, "--config", path)
    assert (got["top_k"], got["max_tokens"], got["kv_cache_size"], got["prefix_cache"], got["group_size"], got["stop"]) == (3, 5, ("bytes", 2 << 20), "off", "64", ("x",))
    monkeypatch.setenv("FASTLLM_TOP_K", "4")
    assert parsed("run", tiny_model, "--config", path)["top_k"] == 4
    assert parsed("run", tiny_model, "--config", path, "--top-k", 5)["top_k"] == 5
    monkeypatch.setenv("FASTLLM_CONFIG_FILE", str(path))
    monkeypatch.setenv("FASTLLM_QUIET", "1")
    got = parsed("run", tiny_model)
    assert (got["max_tokens"], got["quiet"]) == (5, True)
    monkeypatch.setenv("FASTLLM_MODEL", "other")
    assert parsed("plan")["model"] == "other"
    assert parsed("plan", tiny_model)["model"] == str(tiny_model)


def test_an_error_says_that_a_value_is_from_a_variable_or_a_file(run, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "c.toml").write_text("top-k = -5\n")
    done = run("run", tiny_model, "--prompt", "x", "--config", tmp_path / "c.toml")
    assert (done.code, "c.toml" in done.err, "--top-k" in done.err) == (2, True, True)
    monkeypatch.setenv("FASTLLM_CTX", "many")
    done = run("run", tiny_model, "--prompt", "x")
    assert (done.code, "from the variable FASTLLM_CTX" in done.err) == (2, True)


def test_json_and_debug_hold_as_variables_for_errors_too(run, monkeypatch):
    monkeypatch.setenv("FASTLLM_JSON", "1")
    assert json.loads(run("inspect", "/no/such").out)["error"]["exit_code"] == 2


def test_a_file_of_options_may_stand_in_the_place_of_the_model(run, answer, tiny_model, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'model = "{tiny_model}"\nmax-tokens = 3\nport = 9000\n')
    done = run("run", path, "--prompt", "hello", "--temperature", 0, "--ignore-eos", "--backend", "ref", "--json")
    assert json.loads(done.out)["output_ids"] == answer()["output_ids"][:3]
    assert done.err.count("mine.toml: 'port' has no effect: it is no option of `fastllm run`") == 1
    assert len(answer("--max-tokens", 4, model=path)["output_ids"]) == 4
    path.write_text("max-tokens = 3\n")
    empty = run("run", path, "--prompt", "x")
    assert (empty.code, "names no model" in empty.err) == (2, True)
    path.write_text("nosuch = 3\n")
    unknown = run("run", tiny_model, "--config", path, "--prompt", "x")
    assert (unknown.code, "no option 'nosuch'" in unknown.err) == (2, True)
    path.write_text("a = [")
    broken = run("run", path, "--prompt", "x")
    assert (broken.code, "mine.toml" in broken.err) == (2, True)
    assert run("run", tmp_path / "absent.toml", "--prompt", "x").code == 2


def test_a_configuration_of_ftllm_is_a_model(run, answer, tiny_model, tmp_path):
    path = tmp_path / "config.json"
    defaults = dict.fromkeys("threads max_batch chunked_prefill_size moe_device_layers moe_experts tokens page_size prefix_cache_snapshot_max_records".split(), -1)
    defaults |= dict.fromkeys("moe_dtype moe_atype device tp moe_device cache_history cache_fast enable_thinking prefix_cache custom lora cache_dir dtype_config ori chat_template".split(), "")
    defaults |= dict.fromkeys("dtype atype kv_cache_dtype kv_cache_limit tool_call_parser".split(), "auto")
    defaults |= {"cuda_embedding": False, "cuda_shared_expert": "true", "gpu_mem_ratio": 0.9, "cuda_slab": 0, "mtp": 0, "triton": False, "enable_amx": "false", "FASTLLM_ACTIVATE_NUMA": "OFF", "FASTLLM_NUMA_THREADS": 27}
    path.write_text(json.dumps({"model": str(tiny_model), **defaults, "max_context_length": 32, "cache_history": "true"}))
    done = run("run", path, "--prompt", "hello", *GREEDY)
    assert json.loads(done.out)["output_ids"] == answer()["output_ids"]
    assert "no effect" not in done.err
    assert "context of 32" in run("run", path, "--prompt", "x" * 60, "--backend", "ref").err
    path.write_text(json.dumps({"model": str(tiny_model), "tp": "0,1"}))
    assert run("run", path, "--prompt", "x").code == 5
    path.write_text(json.dumps({"model_type": "llama", "model": "x"}))
    assert "configuration alone" in run("run", path, "--prompt", "x").err


def test_a_configuration_of_ftllm_keeps_values_that_are_off(run, tiny_model, tmp_path):
    path = tmp_path / "config.json"
    chosen = {"enable_thinking": False, "prefix_cache": "off", "temperature": 0, "threads": 0}
    path.write_text(json.dumps({"model": str(tiny_model), **chosen, "top_k": -1, "mtp": 0, "cuda_embedding": False, "cache_fast": "off", "triton": False}))
    got = parsed("run", path)
    assert (got["thinking"], got["prefix_cache"], got["temperature"], got["top_k"]) == ("off", "off", 0, None)
    assert "no effect" not in run("dump-config", path, "--backend", "ref").err


def test_the_file_in_the_place_of_the_model_wins_over_the_one_of_config(run, capsys, tiny_model, tmp_path, monkeypatch):
    site, mine = tmp_path / "site.toml", tmp_path / "mine.toml"
    site.write_text('model = "other"\nctx = 32\ntop-k = 3\nport = 9000\n')
    mine.write_text(f'model = "{tiny_model}"\nctx = 48\n')
    typed = parsed("run", mine, "--config", site)
    monkeypatch.setenv("FASTLLM_CONFIG_FILE", str(site))
    for got in (typed, parsed("run", mine), parsed("run", "-p", mine)):
        assert (got["model"], got["ctx"], got["top_k"]) == (str(tiny_model), 48, 3)
    capsys.readouterr()
    shown = run("run", mine, "--dump-config", "--backend", "ref")
    assert f"ctx = 48  # {mine}" in shown.out
    assert f"top-k = 3  # {site}" in shown.out
    assert shown.err.count("'port' has no effect") == 1
    mine.write_text(f'model = "{tiny_model}"\nmin-p = 7\n')
    wrong = run("run", mine, "--prompt", "x")
    assert (wrong.code, str(mine) in wrong.err, str(site) in wrong.err) == (2, True, False)


def test_the_model_of_a_file_that_was_typed_wins_over_the_variable(tiny_model, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text(f'model = "{tiny_model}"\n')
    monkeypatch.setenv("FASTLLM_MODEL", "other")
    assert parsed("plan", path)["model"] == str(tiny_model)
    monkeypatch.setenv("FASTLLM_MODEL", str(path))
    assert parsed("plan")["model"] == str(tiny_model)


@pytest.mark.parametrize("key", [*CONFIG_ONLY, "plugins_file", "o"])
def test_a_model_may_not_run_code_open_a_server_or_say_where_to_write(tiny_model, tmp_path, key):
    path = tmp_path / "mine.toml"
    path.write_text(f'model = "{tiny_model}"\n{key} = {"true" if key in ("insecure", "overwrite") else json.dumps(str(tmp_path / "x"))}\n')
    for command in ("server", "dump-config", "download"):
        if key == "o" and command != "dump-config":
            continue
        with pytest.raises(UsageError, match=f"'{key}' is not taken from a file in the place of MODEL") as caught:
            parsed(command, path)
        assert "--config" in caught.value.fix
    assert parsed("dump-config" if key in ("o", "output", "overwrite") else "server", "--config", path)["model"] == str(tiny_model)


def test_a_dump_with_an_address_is_for_config(run, tiny_model, tmp_path):
    path = tmp_path / "out.toml"
    assert run("dump-config", tiny_model, "--backend", "ref", "--host", "::1", "-o", path).code == 0
    assert parsed("server", "--config", path)["hosts"] == ("::1",)
    assert run("server", path).code == 2


def test_nought_is_a_value_of_a_dump(run, tiny_model, tmp_path):
    path = tmp_path / "out.toml"
    assert run("dump-config", tiny_model, "--backend", "ref", "--temperature", 0, "--top-k", 0, "-o", path).code == 0
    got = parsed("run", path)
    assert (got["temperature"], got["top_k"]) == (0, 0)


@pytest.mark.parametrize("command", ["run", "dump-config"])
def test_what_is_dumped_gives_the_same_again(run, answer, tiny_model, tmp_path, monkeypatch, command):
    monkeypatch.setenv("FASTLLM_TOP_K", "7")
    path = tmp_path / "out.toml"
    asked = (tiny_model, "--ctx", 48, "--backend", "ref", "--stop", "zz") if command == "run" else (tiny_model, "--ctx", 48, "--backend", "ref")
    done = run(command, *asked, *(("--dump-config",) if command == "run" else ("-o", path)))
    assert done.code == 0, done.err
    if command == "run":
        path.write_text(done.out)
    text = path.read_text()
    assert "ctx = 48  # command line" in text
    assert "top-k = 7  # variable FASTLLM_TOP_K" in text
    assert "temperature = 0.5  # generation_config.json" in text
    assert re.search(r'^backend = "ref', text, re.MULTILINE)
    monkeypatch.delenv("FASTLLM_TOP_K")
    got = parsed("run", path)
    assert (got["ctx"], got["top_k"], got["temperature"]) == (48, 7, 0.5)
    assert got["backend"].startswith("ref")
    assert "no effect" not in run("run", path, "--prompt", "x", "-n", 1).err
    again = run(command, path, *(("--dump-config",) if command == "run" else ("--json",)))
    assert again.code == 0, again.err
    assert "out.toml" in again.out


def test_a_dump_as_json_names_origins_and_no_secrets(run, tiny_model):
    found = json.loads(run("dump-config", tiny_model, "--api-key", "a-secret-key", "--json", "--backend", "ref").out)
    assert found["model"] == str(tiny_model)
    assert found["values"]["ctx"] == {"value": 64, "origin": "the model's own"}
    assert "a-secret-key" not in json.dumps(found)
    assert "a-secret-key" not in run("dump-config", tiny_model, "--api-key", "a-secret-key", "--backend", "ref").out


# single options ------------------------------------------------------------------------------------------------------------


def test_bits_are_a_dtype(run, tiny_model):
    assert run("plan", tiny_model, "--dtype", "auto", "--backend", "ref", "--no-measure").code == 0
    wanted = ("--group-size", 32, "--backend", "ref", "--json", "--no-measure")
    plain, bits = (json.loads(run("plan", tiny_model, *a, *wanted).out)["weights_bytes"] for a in (("--dtype", "int8"), ("--quant-bit", 8)))
    assert plain == bits
    differ = run("plan", tiny_model, "--quant-bit", 4, "--dtype", "int8")
    assert (differ.code, "differ" in differ.err) == (2, True)
    assert run("plan", tiny_model, "--quant-bit", 5).code == 2


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cpu_avx"), ("ref", "ref"), ("CPU", "cpu_avx")])
def test_a_device_names_the_backend(run, tiny_model, device, backend):
    assert json.loads(run("plan", tiny_model, "--device", device, "--json", "--no-measure").out)["backend"] == backend


@pytest.mark.parametrize(("options", "code"), [(("--device", "0"), 2), (("--device", "cuda:0,1"), 5), (("--device", "{'cuda:0':1}"), 5), (("--device", "cpu", "--backend", "ref"), 2), (("--device", "cuda"), 2), (("--device", "1", "--backend", "ref:0"), 2)])
def test_devices_that_cannot_be(run, tiny_model, options, code):
    assert run("plan", tiny_model, *options).code == code


def test_a_template_may_be_another_one(run, answer, tiny_model, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert len(answer("--chat-template", path)["prompt_ids"]) == len("hello")
    path.write_text("{{ messages }}{% for x in")
    assert run("run", tiny_model, "--prompt", "x", "--chat-template", path).code == 1
    for text, word in (("You are a helpful assistant.", "no chat template"), ("{{ x }}\udcff", "UTF-8")):
        path.write_text(text, errors="surrogateescape")
        done = run("run", tiny_model, "--prompt", "x", "--chat-template", path)
        assert (done.code, word in done.err) == (2, True), done.err
    done = run("run", tiny_model, "--prompt", "x", "--chat-template", tmp_path / "absent")
    assert (done.code, "--chat-template: absent: there is no such file" in done.err) == (2, True)


def test_the_tokenizer_may_be_of_another_folder(run, answer, tiny_model, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages[0]['content'] }}"}))
    assert len(answer("--tokenizer-from", folder)["prompt_ids"]) == len("hello")
    (folder / "tokenizer.json").unlink()
    none = run("run", tiny_model, "--prompt", "x", "--ori", folder)
    assert (none.code, "no tokenizer" in none.err) == (1, True)


def test_a_model_is_verified_before_it_is_loaded(run, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    assert run("run", folder, "--prompt", "x", "-n", 1, "--backend", "ref", "--verify-model").code == 0
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-2:] = b"\x80\x7f"  # a bf16 infinity
    (folder / "model.safetensors").write_bytes(data)
    unseen = run("run", folder, "--prompt", "x", "-n", 1, "--backend", "ref")
    assert (unseen.code, "no finite logit" in unseen.err) == (1, True)  # loaded, and computed with
    broken = run("run", folder, "--prompt", "x", "-n", 1, "--backend", "ref", "--verify-model")
    assert (broken.code, "no finite logit" in broken.err) == (1, False)
    assert "infinity" in broken.err


def test_the_cache_of_a_chat_has_the_size_that_was_asked_for(run, tiny_model):
    asked = ("plan", tiny_model, "--backend", "ref", "--json", "--no-measure")
    one, four, blocks = (json.loads(run(*asked, *a).out) for a in ((), ("--max-batch-size", 4), ("--kv-cache-size", "192tok", "--block-size", 32)))
    assert (one["sequences"], four["sequences"]) == (1, 4)
    assert four["cache_bytes"] == 4 * one["cache_bytes"]
    assert blocks["cache_bytes"] == 3 * one["cache_bytes"]


THINKS = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking is defined and not enable_thinking %}NO{% endif %}"


def test_thinking_is_a_switch_of_the_template(run, answer, tiny_model, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(THINKS)
    plain, off, on = (len(answer("--chat-template", path, *a)["prompt_ids"]) for a in ((), ("--thinking", "off"), ("--thinking", "on")))
    assert (off - plain, on - plain) == (2, 0)
    asked = ("run", tiny_model, "--prompt", "x", *GREEDY, "--thinking", "off")
    assert "--thinking has no effect" in run(*asked).err
    assert run(*asked, "--strict").code == 2


def test_progress_as_events_makes_every_line_of_stderr_an_object(run, tiny_model):
    done = run("run", tiny_model, "--prompt", "x", "-n", 2, "--backend", "ref", "--progress", "json", "--cache_fast", "true")
    events = [json.loads(line) for line in done.err.splitlines()]
    kinds = {e["event"] for e in events}
    assert kinds == {"message", "progress"}
    load = [e for e in events if e["event"] == "progress"]
    assert load[-1]["what"] == "load"
    assert load[-1]["done"] == load[-1]["total"]
    assert any("tok" in e["text"] and "ttft" in e["text"] for e in events if e["event"] == "message")
    failed = run("run", "/no/such", "--prompt", "x", "--progress=json")
    [event] = [json.loads(line) for line in failed.err.splitlines()]
    assert (event["event"], event["exit_code"]) == ("error", 2)


def test_what_a_backend_logs_is_an_event_too(capsys):
    log = logging.getLogger("fastllm.some_backend")
    with Reporter(style="json"):
        log.warning("fastllm: %s compiles its kernels", "gpu")
    assert json.loads(capsys.readouterr().err) == {"event": "message", "text": "gpu compiles its kernels"}
    with Reporter(style="plain"):
        log.warning("again")
    assert "event" not in capsys.readouterr().err


# the shell -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "incomplete", "offered"),
    [
        ([], "du", {"dump-config"}),
        (["run"], "--prefix", {"--prefix-cache"}),
        (["run"], "smo", {"smollm2"}),
        (["show", "--mtp"], "gemma3-", {"gemma3-270m"}),
        (["server", "--schedule"], "", {"fcfs", "shortest-remaining"}),
        (["backends"], "sh", {"show"}),
    ],
)
def test_lines_are_completed(typed, incomplete, offered, monkeypatch, tmp_path):
    from click.shell_completion import BashComplete

    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path))
    found = BashComplete(cli, {}, "fastllm", "_FASTLLM_COMPLETE").get_completions(typed, incomplete)
    assert offered <= {item.value for item in found}


@pytest.mark.parametrize(("shell", "what"), [("bash", "complete -o nosort -F"), ("zsh", "#compdef fastllm"), ("fish", "complete --no-files --command fastllm")])
def test_each_shell_gets_a_script(fastllm, shell, what):
    done = fastllm("", env={"_FASTLLM_COMPLETE": f"{shell}_source"})
    assert done.returncode == 0
    assert what in done.stdout


def test_commands_and_choices_take_dashes_and_underscores(run, tiny_model):
    done = run("dump_config", tiny_model, "--backend", "ref", "--schedule", "shortest_remaining", "--log_format", "json")
    assert done.code == 0
    assert 'schedule = "shortest-remaining"  # command line' in done.out


def test_the_configuration_of_a_file_itself(run, tiny_model):
    assert json.loads(run("inspect", tiny_model, "--dump-config").out) == json.loads((tiny_model / "config.json").read_text())


@pytest.mark.parametrize("arguments", [("run", ""), ("run", "-p", " "), ("show", ""), ("server", "")])
def test_an_empty_name_of_a_model_is_not_the_default(run, arguments):
    done = run(*arguments)
    assert done.code == 2
    assert "MODEL is empty" in done.err


def test_a_cache_that_is_too_small_names_an_option_that_there_is(run, tiny_model):
    done = run("run", tiny_model, "--prompt", "x", "--kv-cache-size", "1tok")
    assert done.code == 2
    assert "--kv-cache-size 4096tok" in done.err
