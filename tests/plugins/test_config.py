"""plugins.toml: layers, checks, and the line of every complaint."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastllm.core.errors import ConfigError
from fastllm.core.plugins import BackendRegistry, load_config


def test_the_packaged_file_is_found_and_valid(env):
    config = load_config(env)
    assert config.get("run", "backend").value == "auto"
    assert config.get("run", "fallback").layer == "packaged"
    assert BackendRegistry(env=env).fallback == "warn"
    assert BackendRegistry(env=env, strict=True).fallback == "error"


def test_layers_are_merged_key_by_key(tmp_path, env, toml):
    folder = tmp_path / "conf"
    folder.mkdir()
    (folder / "plugins.toml").write_text('[run]\nbackend = "ref"\nfallback = "allow"\n[plugins]\nenable = ["a1"]\n[priority]\na1 = 3\n')
    file = toml('[run]\nfallback = "error"\n[plugins]\ndisable = ["b2"]\n[backend.cpu_avx]\nthreads = 2\n')
    config = load_config({**env, "FASTLLM_CONFIG": str(folder)}, file)
    assert {k: (s.value, s.layer, s.line) for k, s in config.settings.items() if s.layer != "packaged"} == {
        ("run", "backend"): ("ref", "user", 2),
        ("run", "fallback"): ("error", "--plugins-file", 2),
        ("plugins", "disable"): (["b2"], "--plugins-file", 4),
        ("priority", "a1"): (3, "user", 7),
        ("backend", "cpu_avx", "threads"): (2, "--plugins-file", 6),
    }


def test_the_user_folder_follows_the_platform_and_the_current_folder_is_not_read(tmp_path, env, monkeypatch):
    user = tmp_path / "home" / ".config" / "fastllm"
    user.mkdir(parents=True)
    (user / "plugins.toml").write_text('[run]\nbackend = "from_home"\n')
    xdg = tmp_path / "xdg" / "fastllm"
    xdg.mkdir(parents=True)
    (xdg / "plugins.toml").write_text('[run]\nbackend = "from_xdg"\n')
    (tmp_path / "plugins.toml").write_text('[run]\nbackend = "from_here"\n')
    monkeypatch.chdir(tmp_path)
    assert load_config(env).get("run", "backend").value == "from_home"
    assert load_config({**env, "XDG_CONFIG_HOME": str(tmp_path / "xdg")}).get("run", "backend").value == "from_xdg"
    with pytest.raises(ConfigError, match="is not a folder"):
        load_config({**env, "FASTLLM_CONFIG": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("text", "line", "message", "fix"),
    [
        ("\n[run]\nbakend = 'ref'\n", 3, "unknown key 'bakend' in [run]", "did you mean 'backend'?"),
        ("# x\n\n[plugin]\ndisable = []\n", 3, "unknown table [plugin]", "did you mean 'plugins'?"),
        ("[run]\nbackend = 3\n", 2, "run.backend is an integer; it must be a string", ""),
        ("[run]\nfallback = 'warm'\n", 2, "run.fallback = 'warm' is not a policy", "did you mean 'warn'?"),
        ("run = 'ref'\n", 1, "run is a string; it must be a table", "[run]"),
        ("[plugins]\ndisable = 'ref'\n", 2, "plugins.disable must be a list", ""),
        ("[plugins]\ndisable = [\n  1,\n]\n", 2, "plugins.disable must be a list", ""),
        ("[plugins]\nenable = []\ndisable = []\n", 2, "both enable and disable", ""),
        ("[priority]\na1 = 1\nb2 = 101\n", 3, "priority.b2 = 101 is not an integer up to 100", ""),
        ("[priority]\nb2 = true\n", 2, "priority.b2 = True is not an integer", ""),
        ("[priority]\nB = 1\n", 2, "'B' in [priority] is not a backend name", ""),
        ("[override]\na1 = ['x']\n", 2, "override.a1 is a list; it must be a string", ""),
        ("[backend]\ncpu_avx = 2\n", 2, "backend.cpu_avx is an integer; it must be a table", ""),
        ("[run]\nbackend = \n", 2, "is not valid TOML", ""),
        ("[run]\nbackend = 1979-05-27\n", 2, "run.backend is a date or time", ""),
        ("priority.a1 = 'x'\n", 1, "priority.a1 = 'x' is not an integer", ""),
        ('[backend."Bad"]\nx = 1\n', 1, "'Bad' in [backend] is not a backend name", ""),
    ],
)
def test_a_mistake_is_reported_with_file_line_and_close_matches(env, toml, tmp_path, text, line, message, fix):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(env, file)
    assert message in caught.value.message
    assert caught.value.who == f"{file}:{line}"
    assert fix in caught.value.fix
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read_is_one_clear_error(env, tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(env, tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8: byte 2"):
        load_config(env, tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(env, Path(tmp_path))
    (tmp_path / "deep.toml").write_text("x = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(env, tmp_path / "deep.toml")
