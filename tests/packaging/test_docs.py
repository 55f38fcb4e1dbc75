"""The documents say what the code does: generated parts are current, links lead somewhere, options, variables and limits exist, and
examples run (on a tiny model that stands in for the one they name)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    """A Python file of the repository that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_test_{Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_docs = load("scripts/make_docs.py")
DOCUMENTS = [p.relative_to(ROOT).as_posix() for p in make_docs.documents()]
OTHER_OPTIONS = {"--cells", "--check", "--cpus", "--create-home", "--durations", "--from", "--http-mode", "--isa", "--minutes", "--model", "--no-cache-dir", "--no-deps", "--no-install-recommends", "--opt", "--out", "--peer", "--stop-timeout", "--write"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """(what stands behind the language, content) of every fenced block of a language."""
    found = re.findall(rf"^```{language}(?: +([^\n]*))?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(info.strip(), body) for info, body in found]


def prose(text: str) -> str:
    """The text without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Names that a link to a heading of the document may use."""
    headings = re.findall(r"^#+ +(.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(name: str, text: str) -> list[str]:
    """Relative links of a document that lead nowhere."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(text if not path else file.read_text(encoding="utf-8"))):
            dead.append(f"{name}: {target}")
    return dead


def command_lines(text: str) -> Iterator[str]:
    """Every `fastllm …` that a document shows in a block of shell."""
    for _, body in blocks(text, "sh"):
        for line in body.splitlines():
            for part in re.split(r"&&|\|", re.sub(r"\s+#.*$", "", line)):
                if part.strip().startswith("fastllm"):
                    yield part.strip()


def parse(words: list[str]) -> None:
    """Parses a command line without running it. Raises click.UsageError."""
    group = importlib.import_module("fastllm.cli.group").cli
    parent = click.Context(group, info_name="fastllm")
    command: click.Command = group
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        found = command.get_command(parent, words[0])
        if found is None:
            raise click.UsageError(f"no command {words[0]}")
        command, words = found, words[1:]
    command.make_context("fastllm", list(words), parent=parent)


def source_text() -> str:
    """Everything that may read an environment variable."""
    rooms = ("core", "models", "formats", "text", "backends", "conformance", "interface", "benchmarks")
    files = [p for room in rooms for p in (ROOT / room).rglob("*.py") if "__pycache__" not in p.parts]
    return "\n".join(p.read_text(encoding="utf-8") for p in [*files, ROOT / "setup.py"])


VARIABLE = re.compile(r"\b(?:FASTLLM|HF|XDG)_[A-Z][A-Z_]*[A-Z]\b")


def environment_variables(text: str) -> set[str]:
    """Variables of our own that the code names as a string."""
    return set(re.findall(r"[\"'](FASTLLM_[A-Z][A-Z_]*)[\"'=]", text))


def option_variables() -> set[str]:
    """Variables that stand for options; one line of the documents says so for all."""
    return {f"FASTLLM_{name[2:].replace('-', '_').upper()}" for name in make_docs.option_names()}


# what is written --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_generated_parts_are_current(name):
    assert make_docs.rendered(read(name)) == read(name), "run: python scripts/make_docs.py"


def test_emulated_tiles_are_spoken_of_where_their_report_is():
    row = "[`cpu_avx`](conformance/cpu_avx_tiles/conformance.md)", "isa=amx, tiles emulated"
    said = "In the row of emulated tiles"
    without, with_row = make_docs._without_a_report([]), make_docs._without_a_report([row])
    assert (said in without, said in with_row) == (False, True)
    assert "Tests emulate them" in without


def test_every_generated_part_is_used_somewhere():
    used = {part for name in DOCUMENTS for part in re.findall(r"<!-- generated: ([\w.-]+) -->", read(name))}
    assert used == set(make_docs.PARTS)


def test_the_conditions_that_a_table_says_to_be_below_are():
    text, condition = read("docs/operator-interface.md"), "the device runs all parts natively (see below)"
    assert make_docs.decompositions().count(condition) == text.count(condition) == 3
    assert text.rindex(condition) < text.index("are also defined by `RefBackend`, because the parts do more work than the op")


def test_every_command_has_a_table():
    shown = {part.removeprefix("options.").replace(".", " ") for part in make_docs.PARTS if part.startswith("options.")}
    assert shown == {name for name, command in make_docs.commands() if not isinstance(command, click.Group)}


def test_an_argument_that_ends_in_a_bracket_keeps_it():
    assert "`NAME[:DEVICE]`" in make_docs.command_options("backends check")
    assert "`MODEL`" in make_docs.command_options("run")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_relative_links_lead_somewhere(name):
    assert dead_links(name, read(name)) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documented_options_exist(name):
    text = re.sub(r"`(?:pip|python|npm) [^`]*`", "", read(name))
    named = {n.replace("_", "-") for n in re.findall(r"(?<![\w-])--[a-z][a-z_-]*[a-z]", re.sub(r"<!--.*?-->", "", text))}
    assert named <= make_docs.option_names() | OTHER_OPTIONS


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documented_variables_exist(name):
    code = source_text() + "".join(option_variables())
    assert [v for v in set(VARIABLE.findall(read(name))) if v not in code and v != "HF_ENDPOINT"] == []  # the hub's library reads it


def test_every_variable_of_the_code_is_documented():
    documented = {v for name in DOCUMENTS for v in VARIABLE.findall(read(name))}
    assert environment_variables(source_text()) - documented - option_variables() == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_shown_command_lines_can_be_parsed(name):
    for line in command_lines(read(name)):
        try:
            parse(shlex.split(line)[1:])
        except click.UsageError as error:
            pytest.fail(f"{name}: {line}: {error.format_message()}")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_make_targets_that_are_named_exist(name):
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    text = read(name)
    assert {t for _, body in blocks(text, "sh") for t in re.findall(r"^make ([a-z]+)", body, re.MULTILINE)} <= targets
    rooms = "core|models|formats|text|backends|interface|scripts|tests|docs"
    paths = re.findall(rf"`((?:{rooms})/[\w./-]*\w\.(?:py|pyx|c|h|md|json|toml))`", text)
    assert [p for p in paths if not (ROOT / p).exists() and "NAME" not in p] == []


LIMITS = {
    "GGUF: tensors · metadata pairs": "formats.gguf.MAX_TENSORS formats.gguf.MAX_KEYS",
    "GGUF: strings and inner arrays in all": "formats.gguf.MAX_ITEMS",
    "GGUF: length of a tensor's name · of a key": "formats.gguf.MAX_TENSOR_NAME_BYTES formats.gguf.MAX_NAME_BYTES",
    "safetensors: header · tensors · dimensions": " ".join(
        f"formats.safetensors_file.{name}" for name in ("MAX_HEADER_BYTES", "MAX_TENSORS", "MAX_RANK")
    ),
    "`config.json` and its kind": "formats.model_files.MAX_CONFIG_BYTES",
    "`tokenizer.json` · `tokenizer.model`": "text.huggingface.MAX_JSON_BYTES formats.model_files.MAX_TOKENIZER_BYTES",
    "JSON: depth · digits of a number": "formats.json_text.MAX_DEPTH formats.json_text.MAX_DIGITS",
    "vocabulary · merges": "text.vocabulary.MAX_TOKENS text.vocabulary.MAX_MERGES",
    "layers · heads · hidden size · vocabulary rows of a configuration": " ".join(
        f"models.keys.{name}" for name in ("MAX_LAYERS", "MAX_HEADS", "MAX_HIDDEN", "MAX_VOCAB")
    ),
}
"""Row of the table in docs/robustness.md -> the constants it speaks of."""
UNITS = {"MB": 1_000_000, "MiB": 1 << 20, "bytes": 1, "": 1}


@pytest.mark.parametrize("row", LIMITS)
def test_documented_limits_are_those_of_the_code(row):
    cell = re.search(rf"^\| {re.escape(row)} \| (.*?) \|$", read("docs/robustness.md"), re.MULTILINE)[1]
    shown = [re.fullmatch(r"([\d,]+) ?(\w*)", part.strip()).groups() for part in cell.split("·")]
    values = [int(number.replace(",", "")) * UNITS[unit] for number, unit in shown]
    assert values == [_constant(name) for name in LIMITS[row].split()]


def _constant(name: str) -> int:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"fastllm.{module}"), attribute)


def test_every_limit_of_the_table_is_checked():
    part = read("docs/robustness.md").partition("## Files")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| (.*?) \| [\d,]+.* \|$", part, re.MULTILINE)) == set(LIMITS)


def test_documented_budgets_are_those_of_the_code():
    from fastllm import loading
    from fastllm.core.engine import Engine
    from fastllm.text import template

    defaults = {p.name: p.default for f in (template.ChatTemplate, Engine) for p in inspect.signature(f).parameters.values()}
    budgets = [
        f"{defaults['time_s']:g} s, {defaults['max_steps']:,} steps, {defaults['memory_bytes'] >> 20} MiB",
        f"(at least {template.MIN_OUTPUT:,})",
        f"{template.MAX_SOURCE_CHARS:,} characters",
        f"({defaults['max_queue']} waiting)",
        f"{loading.MEMORY_SHARE:.0%}".replace("%", " %"),
        f"less {loading.RESERVE_BYTES >> 20} MiB and {loading.RESERVE_ENTRY_BYTES} bytes for each entry of the vocabulary",
        f"{loading.HELPER_BYTES >> 20} MiB and {loading.HELPER_ENTRY_BYTES} bytes for each entry more for each",
        f"{loading.reserve_bytes(49152) >> 20} MiB for SmolLM2",
        f"{loading.reserve_bytes(49152, 3) >> 20} MiB for SmolLM2 together",
        f"under {loading.MIN_CONTEXT} tokens",
    ]
    text = " ".join(read("docs/robustness.md").split())
    assert [b for b in budgets if b not in text] == []


def test_the_source_distribution_holds_every_kind_of_native_source():
    rules = dict(re.findall(r"^recursive-include (core|backends) (.*)$", read("MANIFEST.in"), re.MULTILINE))
    for room, patterns in rules.items():
        found = {p.suffix for p in (ROOT / room).rglob("*") if p.is_file() and "__pycache__" not in p.parts} - {".so", ".pyd"}
        assert found <= {pattern.removeprefix("*") for pattern in patterns.split()}, room


def test_the_measured_table_has_a_row_for_every_model_and_variant():
    script = load("scripts/measure_accuracy.py")
    part = read("docs/numerics.md").partition(script.BEGIN)[2].partition(script.END)[0]
    rows = re.findall(r"^\| ([\w-]+) \| (.*?) \| .* \|$", part, re.MULTILINE)[1:]
    variants = ["reference", *(script.shown(*variant) for variant in script.VARIANTS)]
    assert rows == [(name, variant) for name in script.MODELS for variant in variants]


# examples ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    """A folder with a model called `smollm2` in it: an existing path wins over a short name, so examples run on it."""
    conftest = load("tests/interface/conftest.py")
    folder = tmp_path_factory.mktemp("examples")
    model = folder / "smollm2"
    model.mkdir()
    shutil.copy(conftest.FIXTURES / "llama" / "model.safetensors", model)
    config = json.loads((conftest.FIXTURES / "llama" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    (model / "tokenizer.json").write_text(conftest.byte_tokenizer().to_str())
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps({**special, "chat_template": conftest.TEMPLATE}))
    return folder


def run_blocks(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the Python blocks of a document one after the other, as one program; returns how many."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FASTLLM_HOME", str(folder / "home"))
    monkeypatch.setenv("FASTLLM_OFFLINE", "1")
    names: dict[str, object] = {}
    found = [body for info, body in blocks(read(name), "python") if not info]
    for number, body in enumerate(found, 1):
        exec(compile(body, f"{name}, Python block {number}", "exec"), names)
    return len(found)


@pytest.mark.parametrize("name", ["README.md", "docs/python.md"])
def test_python_examples_run(name, examples, monkeypatch, capsys):
    assert run_blocks(name, examples, monkeypatch) >= (8 if name == "docs/python.md" else 1)
    assert capsys.readouterr().out


def test_all_python_blocks_are_run_by_a_test():
    known = {"README.md", "docs/python.md"}
    assert [n for n in DOCUMENTS if n not in known and [b for i, b in blocks(read(n), "python") if i != "tinyacme.py"]] == []


def call(capsys, *args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command line, in this process, without input."""
    with open(os.devnull) as nothing, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", nothing)
        code = importlib.import_module("fastllm.cli.main").run_command(list(args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_json_fields_that_are_documented_are_those_that_are_printed(examples, monkeypatch, capsys):
    monkeypatch.chdir(examples)
    code, out, err = call(capsys, "run", "smollm2", "--backend", "ref", "--prompt", "Hi", "--max-tokens", "2", "--json")
    assert code == 0, err
    printed = json.loads(out)
    part = read("docs/cli.md").partition("`--json` prints one object:")[2].partition("###")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", part, re.MULTILINE)
    assert {n for names, _ in rows for n in re.findall(r"`(\w+)`", names)} == set(printed)
    assert set(re.findall(r"`(\w+)`", dict(rows)["`timings`"])) == set(printed["timings"])


def test_the_chat_commands_that_are_documented_are_those_there_are():
    chat = importlib.import_module("fastllm.cli.chat_commands")
    part = read("docs/cli.md").partition("### The chat")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(/\w+)", part))
    assert documented == set(re.findall(r"\"(/\w+)\": \(", Path(chat.__file__).read_text(encoding="utf-8")))


def test_the_plugins_file_that_is_shown_is_accepted(tmp_path):
    from fastllm.core.plugins import BackendRegistry

    path = tmp_path / "plugins.toml"
    path.write_text(blocks(read("docs/backends.md"), "toml")[0][1])
    settings = BackendRegistry(path, env={"HOME": str(tmp_path)}).config
    assert settings.get("backend", "cpu_avx", "act").value == "f32"


def test_the_backend_that_contributing_shows_works(examples, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(examples)
    [source] = [body for info, body in blocks(read("CONTRIBUTING.md"), "python") if info == "tinyacme.py"]
    plugin = tmp_path / "tinyacme.py"
    plugin.write_text(source)
    code, out, err = call(capsys, "backends", "list", "--plugin", str(plugin), "--json")
    assert code == 0, err
    [state] = [s for s in json.loads(out) if s["name"] == "tinyacme"]
    assert (state["state"], state["priority"]) == ("ready", 10)

    arguments = ["smollm2", "--plugin", str(plugin), "--json"]
    code, out, err = call(capsys, "plan", *arguments, "--backend", "tinyacme", "--no-measure")
    assert code == 0, err
    left = json.loads(out)["fallbacks"]
    assert "linear" not in {f["op"] for f in left}
    assert {f["device"] for f in left} == {"cpu_avx"}
    code, out, err = call(capsys, "plan", *arguments, "--backend", "tinyacme", "--no-measure", "--fallback", "error")
    assert code == 5, err
    answers = {}
    for backend in ("ref", "tinyacme"):
        code, out, err = call(
            capsys, "run", *arguments, "--backend", backend, "--prompt", "Hello there", "--temperature", "0", "--max-tokens", "12", "--ignore-eos"
        )
        assert code == 0, err
        answers[backend] = json.loads(out)["output_ids"]
    assert answers["tinyacme"] == answers["ref"]
    assert len(answers["tinyacme"]) == 12


def test_a_row_of_the_shown_backend_does_not_depend_on_its_neighbours(tmp_path):
    import numpy as np

    from fastllm.api import Stream, Tensor

    [source] = [body for info, body in blocks(read("CONTRIBUTING.md"), "python") if info == "tinyacme.py"]
    names: dict[str, object] = {"__name__": "tinyacme"}
    exec(compile(source, "tinyacme.py", "exec"), names)
    backend = names["AcmeBackend"]()
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((7, 48), np.float32), rng.standard_normal((9, 48), np.float32)

    def tensor(values: np.ndarray) -> Tensor:
        return Tensor(backend.wrap_host(values.reshape(-1).view(np.uint8), False), 0, values.shape, "f32")

    def linear(rows: np.ndarray) -> np.ndarray:
        out = np.zeros((len(rows), 9), np.float32)
        backend.ops()["tinyacme.linear"](tensor(rows), tensor(w), None, out=tensor(out), stream=Stream(), ws=None)
        return out

    together = linear(x)
    assert np.allclose(together, x @ w.T, atol=1e-4)
    for t in range(len(x)):
        assert linear(x[t : t + 1].copy()).tobytes() == together[t].tobytes()


# the rules can fail -----------------------------------------------------------------------------------------------------


def test_a_stale_part_a_dead_link_and_a_wrong_option_are_found():
    stale = "<!-- generated: op-count -->\nOpset 0\n<!-- end -->"
    assert make_docs.rendered(stale) != stale
    with pytest.raises(KeyError):
        make_docs.rendered("<!-- generated: nothing -->\n<!-- end -->")
    assert dead_links("README.md", "[a](docs/cli.md) [b](docs/no.md) [c](docs/cli.md#run) [d](docs/cli.md#no) [e](#no)") == [
        "README.md: docs/no.md",
        "README.md: docs/cli.md#no",
        "README.md: #no",
    ]
    with pytest.raises(click.UsageError):
        parse(["run", "--no-such-option"])
    with pytest.raises(click.UsageError):
        parse(["backends", "show"])
    parse(["backends", "show", "cpu_avx"])
    assert list(command_lines("```sh\nmake x && fastllm list  # all\ncat a | fastllm run -i\n```")) == ["fastllm list", "fastllm run -i"]
    assert environment_variables('os.environ.get("FASTLLM_X")') == {"FASTLLM_X"}


def test_the_order_of_attention_sums_is_the_one_of_the_kernels() -> None:
    from fastllm.backends.cpu_avx.lower import KEY_RANGE

    header = read("backends/cpu_avx/native/kernels.h")
    sizes = {name: int(re.search(rf"\b{name} = (\d+)", header)[1]) for name in ("FL_RANGE", "FL_SUB")}
    assert sizes["FL_RANGE"] == KEY_RANGE
    text = " ".join(read("docs/numerics.md").split())
    assert f"keys in steps of {sizes['FL_SUB']} at fixed places of the context. Steps are summed within ranges of {KEY_RANGE} keys" in text
