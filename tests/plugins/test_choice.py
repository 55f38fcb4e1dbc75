"""Discovery, filters, duplicates, choice and options."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

from fastllm.core.backend import API_VERSION
from fastllm.core.errors import BackendBroken, BackendDisabled, BackendNotFound, BackendUnavailable, ConfigError, UsageError
from fastllm.core.graph import GraphBuilder
from fastllm.core.plugins import BackendRegistry

OPTIONS = """
@hookimpl
def fastllm_backends():
    options = {
        "threads": Option(int, 0, help="threads; 0: as many as cores"),
        "scale": Option(float, 1.0),
        "pinned": Option(bool, False),
        "mode": Option(str, "fast", ("fast", "exact")),
    }
    return [BackendSpec(NAME, API_VERSION, 1, priority=PRIORITY, options=options)]
"""
BUILT_IN = [p.name for p in metadata.entry_points(group="fastllm.backends") if p.dist and p.dist.name == "fastllm-engine"]
RECORDS_PROBE = "@hookimpl\ndef fastllm_probe(name):\n    print('probed', name)\n    return Ready((DeviceInfo('0', 'x'),))"


def run_python(code, site=None):
    """Standard output of a fresh interpreter that sees the site."""
    env = {"PYTHONPATH": str(site.folder)} if site else {}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_and_listing_names_loads_no_backend(site, plugin):
    site.install(plugin(head="print('imported')"))
    code = (
        "import sys\nfrom fastllm.core.plugins import BackendRegistry\nr = BackendRegistry()\n"
        f"print([n for n in {sorted(['acme_npu', *BUILT_IN])} if n not in r.names()],"  # whoever runs the tests may have more
        "[m for m in sys.modules if m.startswith(('fastllm.backends', 'fastllm_backend_acme'))])"
    )
    assert run_python(code, site) == "[] []\n"


def test_the_built_in_backends_come_through_the_same_entry_points(env):
    points = {p.name: p.value for p in metadata.entry_points(group="fastllm.backends") if p.dist.name == "fastllm-engine"}
    registry = BackendRegistry(env=env)
    assert {"ref", "cpu_avx"} <= points.keys() <= set(registry.names())
    assert registry.state("ref", probe=False).module == points["ref"]
    assert registry.open("ref").supports is not None


def test_without_installed_metadata_the_message_says_what_to_do(env, monkeypatch):
    monkeypatch.setattr(metadata, "distributions", list)
    registry = BackendRegistry(env=env)
    assert registry.names() == []
    assert any("fastllm-engine is not installed" in line and "pip install -e ." in line for line in registry.messages)
    with pytest.raises(BackendNotFound) as caught:
        registry.select("ref")
    assert "pip install -e ." in caught.value.fix
    with pytest.raises(BackendUnavailable):
        registry.select()


def test_damaged_metadata_hides_only_itself(site, env, plugin):
    site.install(plugin(), metadata="nothing here")
    site.install(plugin("other_npu"), "other_npu", "other", module="other_mod")
    registry = BackendRegistry(env=env)
    assert registry.names() == sorted(["other_npu", *BUILT_IN])
    assert any("metadata in" in line and "fastllm_backend_acme-0.3.1.dist-info" in line for line in registry.messages)


def test_an_unknown_name_shows_close_matches_and_who_asked(site, env, plugin):
    site.install(plugin())
    with pytest.raises(BackendNotFound, match="no backend is called 'acme_npo'") as caught:
        BackendRegistry(env={**env, "FASTLLM_BACKEND": "acme_npo"}).select()
    assert caught.value.exit_code == 2
    assert "did you mean 'acme_npu'?" in caught.value.fix
    assert caught.value.who == "FASTLLM_BACKEND"
    with pytest.raises(BackendNotFound):
        BackendRegistry(env=env).check_name("acme_npo")


def test_flag_beats_variable_beats_file_beats_auto(site, env, plugin, toml):
    for name, priority in (("aa", 10), ("bb", 20), ("cc", 30), ("dd", 40)):
        site.install(plugin(name, priority), name, f"dist-{name}", module=f"mod_{name}")
    file = toml('[run]\nbackend = "cc:1"\n')
    both = {**env, "FASTLLM_BACKEND": "bb"}
    chosen = [
        BackendRegistry(file, env=both).select("aa"),
        BackendRegistry(file, env=both).select(),
        BackendRegistry(file, env=env).select(),
        BackendRegistry(env=env).select(),
        BackendRegistry(file, env=both).select("auto"),
    ]
    assert [str(s) for s in chosen] == ["aa:0", "bb:0", "cc:1", "dd:0", "dd:0"]
    assert [s.origin for s in chosen] == ["--backend", "FASTLLM_BACKEND", f"{file}:2 [run] backend", "auto", "auto"]


def test_auto_takes_the_highest_priority_and_probes_no_further(site, env, plugin, toml, capsys):
    for name, priority in (("low", 10), ("never", -1), ("high", 80), ("alike", 80)):
        site.install(plugin(name, priority, probe=RECORDS_PROBE), name, f"dist-{name}", module=f"mod_{name}")
    assert BackendRegistry(env=env).select().name == "alike"
    assert capsys.readouterr().err == "probed alike\n"
    file = toml("[priority]\nlow = 90\nnever = 5\n")
    registry = BackendRegistry(file, env=env)
    assert registry.select().name == "low"
    assert [(s.name, s.priority) for s in registry.states() if s.state == "ready"][:4] == [("low", 90), ("alike", 80), ("high", 80), ("never", 5)]
    assert registry.state("low").priority_from == f"{file}:2"
    assert registry.state("high").priority_from == "dist-high"


def test_a_device_is_chosen_by_id_and_an_unknown_one_lists_the_known(site, env, plugin):
    site.install(plugin())
    registry = BackendRegistry(env=env)
    assert registry.select("acme_npu").device == "0"
    assert registry.open("acme_npu:1").device == "1"
    with pytest.raises(UsageError, match="has no device '2'") as caught:
        registry.select("acme_npu:2")
    assert "known: 0, 1" in caught.value.fix
    with pytest.raises(UsageError, match="auto takes no device"):
        registry.select("auto:1")


@pytest.mark.parametrize(
    ("variables", "text", "by"),
    [
        ({"FASTLLM_DISABLE_PLUGINS": "acme_npu, cpu_avx, opencl_generic"}, "", "FASTLLM_DISABLE_PLUGINS=acme_npu, cpu_avx, opencl_generic"),
        ({"FASTLLM_PLUGINS": "other_npu"}, "", "FASTLLM_PLUGINS=other_npu"),
        ({"FASTLLM_PLUGINS": ""}, "", "FASTLLM_PLUGINS="),
        ({}, '[plugins]\ndisable = ["acme_npu"]\n', "plugins.toml:2 [plugins] disable"),
        ({}, '[plugins]\nenable = ["other_npu"]\n', "plugins.toml:2 [plugins] enable"),
    ],
)
def test_a_disabled_backend_is_not_imported_skipped_by_auto_and_loud_by_name(site, env, plugin, toml, variables, text, by):
    site.install(plugin(head="raise RuntimeError('imported')"))
    site.install(plugin("other_npu", 1), "other_npu", "other", module="other_mod")
    registry = BackendRegistry(toml(text), env={**env, **variables})
    with pytest.raises(BackendDisabled, match="backend 'acme_npu' is disabled by") as caught:
        registry.select("acme_npu")
    assert caught.value.exit_code == 2
    assert caught.value.message.endswith(by)
    state = registry.state("acme_npu")
    assert (state.state, state.exit_code) == ("disabled", 2)
    assert registry.select().name in ("other_npu", "ref")
    assert not [line for line in registry.messages if "acme_npu" in line]
    assert registry.state("ref").state == "ready"


def test_nothing_hides_ref_and_an_allow_list_spares_built_ins(site, env, plugin, toml):
    registry = BackendRegistry(toml('[plugins]\ndisable = ["ref"]\n'), env={**env, "FASTLLM_DISABLE_PLUGINS": "ref", "FASTLLM_PLUGINS": ""})
    assert registry.select("ref").name == "ref"
    assert len([line for line in registry.messages if "'ref' cannot be disabled" in line]) == 2
    assert registry.state("cpu_avx", probe=False).state != "disabled"


def test_a_variable_that_names_nothing_installed_is_said(env):
    registry = BackendRegistry(env={**env, "FASTLLM_PLUGINS": "acme_npu"})
    assert registry.messages == ["FASTLLM_PLUGINS names 'acme_npu', which is not installed; known: " + ", ".join(sorted(BUILT_IN))]
    assert registry.remarks == set()


def test_two_distributions_with_one_name_are_both_quarantined_until_an_override(site, env, plugin, toml):
    site.install(plugin())
    site.install(plugin(), distribution="evil-npu", module="evil_mod", version="9")
    registry = BackendRegistry(env=env)
    with pytest.raises(BackendBroken, match="installed 2 times; none is used") as caught:
        registry.select("acme_npu")
    assert "fastllm-backend-acme 0.3.1" in caught.value.why
    assert "evil-npu 9" in caught.value.why
    assert 'acme_npu = "fastllm-backend-acme"' in caught.value.fix
    assert registry.select().name == "ref"
    assert any("installed 2 times" in line for line in registry.messages)
    chosen = BackendRegistry(toml('[override]\nacme_npu = "evil-npu"\n'), env=env)
    assert chosen.state("acme_npu").distribution == "evil-npu"
    assert chosen.open("acme_npu").name == "acme_npu"
    wrong = BackendRegistry(toml('[override]\nacme_npu = "unknown"\n'), env=env)
    assert "plugins.toml:2 names 'unknown', which is not one of them" in wrong.state("acme_npu").reason


def test_an_older_copy_further_down_the_path_is_not_a_second_claim(site, env, plugin, tmp_path, monkeypatch):
    site.install(plugin())
    older = type(site)(tmp_path / "older")
    older.install(plugin(), version="0.1.0", module="old_layout")
    monkeypatch.setattr(sys, "path", [*sys.path, str(older.folder)])
    state = BackendRegistry(env=env).state("acme_npu")
    assert (state.state, state.version) == ("ready", "0.3.1")


def test_shadowing_a_built_in_quarantines_both_but_never_ref(site, env, plugin):
    site.install(plugin("cpu_avx", 100, head="raise RuntimeError('imported')"), "cpu_avx")
    site.install(plugin("ref", 100, head="raise RuntimeError('imported')"), "ref", "ref-thief", module="thief")
    registry = BackendRegistry(env={**env, "FASTLLM_DISABLE_PLUGINS": "opencl_generic"})
    assert registry.state("cpu_avx").state == "broken"
    assert registry.state("ref").distribution == "fastllm-engine"
    assert registry.select().name == "ref"
    assert any("ignored: ref-thief" in line for line in registry.remarks)
    assert not any("'cpu_avx'" in line for line in registry.remarks), "what auto skips is no remark"


def test_a_backend_without_an_entry_point_is_not_used_and_said(site, env, plugin):
    two = "@hookimpl\ndef fastllm_backends():\n    return [BackendSpec(n, API_VERSION, 1) for n in (NAME, 'stowaway')]"
    site.install(plugin(backends=two))
    registry = BackendRegistry(env=env)
    registry.select("acme_npu")
    assert "stowaway" not in registry.names()
    assert any("'stowaway' without an entry point" in line for line in registry.messages)
    assert set(registry.messages) == registry.remarks


def test_options_are_parsed_by_type_and_the_flag_beats_the_file(site, env, plugin, toml):
    site.install(plugin(backends=OPTIONS))
    file = toml("[backend.acme_npu]\nthreads = 2\nscale = 3\n")
    registry = BackendRegistry(file, env=env)
    assert registry.open("acme_npu").options == {"threads": 2, "scale": 3.0, "pinned": False, "mode": "fast"}
    given = {"threads": "4", "pinned": "on", "mode": "exact", "scale": "0.5"}
    assert registry.open("acme_npu", given).options == {"threads": 4, "scale": 0.5, "pinned": True, "mode": "exact"}


@pytest.mark.parametrize(
    ("given", "message", "fix"),
    [
        ({"thread": "4"}, "has no option 'thread'", "did you mean 'threads'?"),
        ({"threads": "four"}, "--backend-opt threads=four: must be int", "threads; 0: as many as cores"),
        ({"threads": "2.5"}, "must be int", ""),
        ({"scale": "nan"}, "must be float", ""),
        ({"pinned": "maybe"}, "must be bool", ""),
        ({"mode": "slow"}, "is not offered", "one of fast, exact; default fast"),
    ],
)
def test_a_wrong_option_is_a_usage_error(site, env, plugin, given, message, fix):
    site.install(plugin(backends=OPTIONS))
    with pytest.raises(UsageError, match=message) as caught:
        BackendRegistry(env=env).open("acme_npu", given)
    assert fix in caught.value.fix
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("line", "message"), [("thread = 2", "no option 'thread'"), ("threads = true", "= True: must be int"), ('scale = "1"', "must be float")])
def test_a_wrong_option_in_the_file_names_file_and_line(site, env, plugin, toml, line, message):
    site.install(plugin(backends=OPTIONS))
    file = toml(f"[run]\n\n[backend.acme_npu]\n{line}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        BackendRegistry(file, env=env).open("acme_npu")
    assert caught.value.who == f"{file}:4"


def test_states_can_be_printed_as_json(site, env, plugin):
    site.install(plugin(backends=OPTIONS, probe="@hookimpl\ndef fastllm_probe(name):\n    return Unavailable('no NPU')"))
    rows = {s.name: json.loads(json.dumps(s.as_dict())) for s in BackendRegistry(env=env).states()}
    assert rows["acme_npu"]["error"]["exit_code"] == 4
    assert rows["acme_npu"]["options"]["mode"] == {"type": "str", "default": "fast", "choices": ["fast", "exact"], "help": ""}
    assert (rows["acme_npu"]["state"], rows["acme_npu"]["api"], rows["acme_npu"]["version"]) == ("unavailable", "{}.{}".format(*API_VERSION), "0.3.1")
    assert (rows["ref"]["error"], rows["ref"]["exit_code"], rows["acme_npu"]["exit_code"]) == (None, 0, 4)
    assert rows["ref"]["devices"][0]["id"]
    assert rows["cpu_avx"]["state"] == "disabled"


def test_a_plugin_may_start_a_process_that_loads_the_plugins_again(site, env, plugin, monkeypatch):
    opens = """
    @hookimpl
    def fastllm_open_backend(name, device, options):
        import subprocess, sys
        code = f"from fastllm.core.plugins import BackendRegistry; print(BackendRegistry().select({name!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return Tiny(name, device, {"child": done.stdout.strip()})
    """
    site.install(plugin(open_=opens))
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    assert BackendRegistry(env=env).open("acme_npu").options == {"child": "acme_npu:0"}


def test_two_registries_share_nothing(site, env, plugin):
    site.install(plugin())
    first, second = BackendRegistry(env=env), BackendRegistry(env={**env, "FASTLLM_PLUGINS": ""})
    assert first.open("acme_npu") is not first.open("acme_npu")
    assert (first.state("acme_npu").state, second.state("acme_npu").state) == ("ready", "disabled")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return target.device", "returned str, not a Graph"),
        ("object.__setattr__(graph.nodes[0], 'op', 'teleport')\n    return graph", "ShapeError: node 0 (teleport)"),
        ("graph.values.clear()\n    return graph", "ShapeError: node 0 (embed): input 'ids' is used before it is made"),
    ],
)
def test_a_rewritten_graph_is_checked_again(site, env, plugin, body, why):
    site.install(plugin(tail=f"@hookimpl\ndef fastllm_transform_graph(graph, target):\n    {body}"))
    site.install(plugin("same", tail="@hookimpl\ndef fastllm_transform_graph(graph):\n    return graph"), "same", "same", module="same_mod")
    builder = GraphBuilder("one")
    graph = builder.build(builder.embed(builder.input("ids"), builder.weight("table", (4, 8))))
    registry = BackendRegistry(env=env)
    assert registry.transform_graph(graph, registry.select("same")) is graph
    assert registry.transform_graph(graph, registry.select("ref")) is graph
    with pytest.raises(BackendBroken, match="failed to rewrite the graph") as caught:
        registry.transform_graph(graph, registry.select("acme_npu"))
    assert why in caught.value.why
