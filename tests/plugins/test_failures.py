"""What a plug-in can do wrong, and what its user reads."""

from __future__ import annotations

import re

import pytest

from fastllm.core.backend import API_VERSION
from fastllm.core.errors import BackendBroken, BackendIncompatible, BackendUnavailable, OutOfMemory, UsageError
from fastllm.core.plugins import BackendRegistry, check_api, loader
from fastllm.core.plugins.discovery import Candidate, Source
from fastllm.core.plugins.report import blamed

RAISES_AT_IMPORT = "raise ImportError('libacme.so.2: cannot open shared object file')"


def broken_state(site, env, source, name="acme_npu", state="broken"):
    """Installs a plug-in; checks that it is loud by name, quarantined by auto, and does no harm to `ref`. Returns its error."""
    site.install(source)
    registry = BackendRegistry(env=env)
    error_class = {"broken": BackendBroken, "incompatible": BackendIncompatible}[state]
    with pytest.raises(error_class) as caught:
        registry.select(name)
    assert registry.state(name).state == state
    assert registry.state("ref").state == "ready"
    assert registry.select("auto").name == "ref"
    assert [line for line in registry.messages if name in line], "auto must say what it skipped"
    with pytest.raises(error_class):
        BackendRegistry(env=env, strict=True).select("auto")
    assert caught.value.exit_code == 3
    return caught.value


def test_an_import_error_names_distribution_entry_point_vendor_frame_and_fix(site, env, plugin):
    package = site.install(plugin(head="from fastllm_backend_acme import _driver"))
    (package / "_driver.py").write_text(f"import json\n\n{RAISES_AT_IMPORT}\n")
    with pytest.raises(BackendBroken) as caught:
        BackendRegistry(env=env).select("acme_npu")
    assert caught.value.render().splitlines() == [
        "fastllm: error: backend 'acme_npu' failed to load",
        "  who: fastllm-backend-acme 0.3.1  [fastllm.backends: acme_npu = fastllm_backend_acme.plugin]",
        "  why: ImportError: libacme.so.2: cannot open shared object file   (fastllm_backend_acme/_driver.py:3)",
        '  fix: pip install "fastllm-backend-acme[runtime]"  |  skip it: FASTLLM_DISABLE_PLUGINS=acme_npu  |  fastllm doctor acme_npu',
    ]


def test_why_ends_with_the_innermost_frame_of_the_vendor_not_of_a_library(site, env, plugin):
    error = broken_state(site, env, plugin(head="import json\n\ndef parse():\n    return json.loads('{')\n\nparse()"))
    assert re.fullmatch(r"JSONDecodeError: .*   \(fastllm_backend_acme/plugin\.py:\d+\)", error.why)


def test_an_entry_point_to_a_missing_module_is_broken(site, env, plugin):
    site.install(plugin(), entries="acme_npu = fastllm_backend_acme.nothing")
    error = BackendRegistry(env=env).state("acme_npu").error
    assert error is not None
    assert "No module named 'fastllm_backend_acme.nothing'" in error.why


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (RAISES_AT_IMPORT, "ImportError: libacme.so.2"),
        ("import sys\nsys.exit(7)", "SystemExit: 7"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def wrong(:", "SyntaxError: "),
        ("class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise Odd", "Odd: (its message cannot be read)"),
    ],
)
def test_a_module_that_fails_at_import_is_quarantined(site, env, plugin, head, why):
    error = broken_state(site, env, plugin(head=head))
    assert error.why.startswith(why)
    assert "plugin.py:" in error.why


def test_keyboard_interrupt_at_import_is_the_users_and_passes(site, env, plugin):
    site.install(plugin(head="raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        BackendRegistry(env=env).select("acme_npu")


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        ("@hookimpl\ndef fastllm_prob(name): ...", "has a hook 'fastllm_prob' that does not exist; did you mean fastllm_probe?"),
        ("@hookimpl\ndef fastllm_environment(name='x'): return {}", "argument 'name' has a default"),
        ("@hookimpl\ndef fastllm_environment(name, *, more): return {}", "argument 'more' is keyword-only"),
        ("@hookimpl\ndef fastllm_environment(name, colour): return {}", "{'colour'} are declared in the hookimpl"),
        ("def fastllm_environment(name): return {}", "fastllm_environment is not marked with fastllm.api.hookimpl"),
    ],
)
def test_a_hook_that_would_be_ignored_or_called_wrongly_is_refused_with_its_owner(site, env, plugin, tail, why):
    error = broken_state(site, env, plugin(tail=tail))
    assert why in error.why
    assert error.who.startswith("fastllm-backend-acme 0.3.1")


@pytest.mark.parametrize(("part", "hook"), [("probe", "fastllm_probe"), ("open_", "fastllm_open_backend"), ("backends", "fastllm_backends")])
def test_a_missing_mandatory_hook_is_named(site, env, plugin, part, hook):
    assert hook in broken_state(site, env, plugin(**{part: ""})).why


def test_a_hook_may_take_fewer_arguments(site, env, plugin):
    site.install(plugin(open_="@hookimpl\ndef fastllm_open_backend(device):\n    return Tiny(NAME, device)"))
    assert BackendRegistry(env=env).open("acme_npu:1").device == "1"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("BackendSpec(NAME, API_VERSION, 1)", "fastllm_backends() returned BackendSpec; it must return a list of BackendSpec"),
        ("[]", "returned list of nothing"),
        ("[{'name': NAME}]", "returned list of dict"),
        ("[BackendSpec('Acme', API_VERSION, 1)]", "names 'Acme'"),
        ("[BackendSpec(NAME, API_VERSION, 1)] * 2", "names are unique"),
        ("[BackendSpec('other', API_VERSION, 1)]", "does not list 'acme_npu'; it lists other"),
        ("[BackendSpec(NAME, '0.1', 1), BackendSpec('other', API_VERSION, 1)]", "BackendSpec.api_version is '0.1'"),
        ("[BackendSpec(NAME, API_VERSION, 0)]", "BackendSpec.opset is 0"),
        ("[BackendSpec(NAME, API_VERSION, 1, priority=101)]", "BackendSpec.priority is 101"),
        ("[BackendSpec(NAME, API_VERSION, 1, options=['threads'])]", "BackendSpec.options is list"),
        ("[BackendSpec(NAME, API_VERSION, 1, options={'threads': 4})]", "BackendSpec.options['threads'] must be an Option"),
        ("[BackendSpec(NAME, API_VERSION, 1, options={'t': Option(list, [])})]", "BackendSpec.options['t'] must be an Option"),
        ("[BackendSpec(NAME, API_VERSION, 1, options={'t': Option(int, 'x')})]", "BackendSpec.options['t'] is an Option of type int, and its default 'x' is str"),
        ("[BackendSpec(NAME, API_VERSION, 1, options={'t': Option(int, True)})]", "its default True is bool"),
        ("[BackendSpec(NAME, API_VERSION, 1, options={'t': Option(str, 'a', ('a', 1))})]", "its choice 1 is int"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_wrong_description_is_refused(site, env, plugin, answer, why):
    error = broken_state(site, env, plugin(backends=f"@hookimpl\ndef fastllm_backends():\n    return {answer}"))
    assert why in error.why


def test_an_option_may_have_no_default_and_a_whole_number_for_float(site, env, plugin):
    options = "{'a': Option(int, None), 'b': Option(float, 1, (1, 2.5)), 'c': Option(bool, False)}"
    site.install(plugin(backends=f"@hookimpl\ndef fastllm_backends():\n    return [BackendSpec(NAME, API_VERSION, 1, options={options})]"))
    assert BackendRegistry(env=env).open("acme_npu").options == {"a": None, "b": 1, "c": False}


def test_only_a_plug_in_whose_code_was_on_the_way_is_blamed_for_a_syntax_error():
    def raised(module):
        """A syntax error in somebody's file, met by code of `module`."""
        space = {"__name__": module}
        exec(compile("def meet():\n    compile('x = (', '/home/me/config.py', 'exec')", "meet.py", "exec"), space)
        with pytest.raises(SyntaxError) as caught:
            space["meet"]()
        return caught.value

    candidate = Candidate("odd", Source("vendor_pkg.plugin", "vendor", "1"))
    assert blamed(candidate, raised("another")) is None
    assert "config.py:1" in blamed(candidate, raised("vendor_pkg.reader")).why


def test_each_module_of_a_distribution_is_remembered(site, env, plugin):
    """With their distribution as the key, errors of the first module would be nobody's."""
    site.install(plugin(), entries="acme_npu = fastllm_backend_acme.plugin\nacme_gpu = fastllm_backend_acme.second")
    (site.folder / "fastllm_backend_acme" / "second.py").write_text(plugin(name="acme_gpu"))
    registry = BackendRegistry(env=env)
    for name in ("acme_npu", "acme_gpu"):
        registry.open(name)
    mine = {c.name for s, c in loader.STRANGERS.items() if s.distribution == "fastllm-backend-acme"}
    assert mine == {"acme_npu", "acme_gpu"}


@pytest.mark.parametrize(("version", "side"), [("(0, 0)", "fastllm-backend-acme"), (f"(1, {API_VERSION[1] + 1})", "fastllm-engine"), ("(7, 0)", "fastllm-engine")])
def test_another_version_of_the_interface_is_incompatible_and_says_which_side_to_upgrade(site, env, plugin, version, side):
    backends = f"@hookimpl\ndef fastllm_backends():\n    return [BackendSpec(NAME, {version}, 1)]"
    hook_of_that_version = "@hookimpl\ndef fastllm_teleport(name): ..."
    error = broken_state(site, env, plugin(backends=backends, tail=hook_of_that_version), state="incompatible")
    assert side in error.fix
    assert f"this fastllm has {API_VERSION[0]}.{API_VERSION[1]}" in error.message


@pytest.mark.parametrize("version", ["'1.2'", "(1, -1)", "None", "(1, 2, 3)", "1.2"])
def test_a_version_that_is_none_is_the_fault_of_its_plug_in_and_of_no_list(site, contained, plugin, version):
    """The parent takes a child's word apart: what is no version must not get there as one."""
    site.install(plugin(backends=f"@hookimpl\ndef fastllm_backends():\n    return [BackendSpec(NAME, {version}, 1)]"))
    found = {s.name: s for s in BackendRegistry(env=contained).states()}
    assert (found["acme_npu"].state, found["acme_npu"].api, found["ref"].state) == ("broken", None, "ready")
    assert "it must be (major, minor)" in found["acme_npu"].reason


@pytest.mark.parametrize(
    ("theirs", "ours", "side"),
    [
        ((0, 1), (0, 1), ""),
        ((0, 1), (0, 2), "plugin"),
        ((0, 3), (0, 2), "host"),
        ((1, 0), (1, 4), ""),
        ((1, 5), (1, 4), "host"),
        ((2, 0), (1, 4), "host"),
        ((0, 9), (1, 0), "plugin"),
    ],
)
def test_version_rule(theirs, ours, side):
    assert check_api(theirs, ours) == side


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise RuntimeError('driver 12 is too old')", r"RuntimeError: driver 12 is too old   \(fastllm_backend_acme/plugin.py:\d+\)"),
        ("import sys; sys.exit()", r"SystemExit   \(.*\)"),
        ("return True", r"fastllm_probe\(\) returned bool; it must return Ready or Unavailable"),
        ("return None", r"fastllm_probe\(\) returned NoneType.*"),
        ("return Ready(())", r"Ready.devices must be a tuple of at least one DeviceInfo"),
        ("return Ready(('0',))", r"Ready.devices must be .*"),
        ("return Ready((DeviceInfo('0', 5),))", r"name and detail of device '0' must be strings"),
        ("return Ready((DeviceInfo('0', 'a', '8 GB'),))", r"memory_bytes of device '0' is '8 GB'; it must be an integer"),
        ("return Ready((DeviceInfo('0', 'a'), DeviceInfo('0', 'b')))", r"device ids are \['0', '0'\].*"),
    ],
)
def test_a_probe_that_fails_or_answers_nonsense_is_broken(site, env, plugin, body, why):
    error = broken_state(site, env, plugin(probe=f"@hookimpl\ndef fastllm_probe(name):\n    {body}"))
    assert error.message == "backend 'acme_npu' failed to probe"
    assert re.fullmatch(why, error.why)


@pytest.mark.parametrize("body", ["return Unavailable('no NPU', 'plug it in')", "raise BackendUnavailable('x', why='no NPU', fix='plug it in')"])
def test_an_unavailable_device_is_loud_by_name_and_one_line_for_auto(site, env, plugin, body):
    site.install(plugin(probe=f"@hookimpl\ndef fastllm_probe(name):\n    {body}"))
    registry = BackendRegistry(env=env)
    with pytest.raises(BackendUnavailable) as caught:
        registry.open("acme_npu")
    assert (caught.value.exit_code, caught.value.why, caught.value.fix) == (4, "no NPU", "plug it in")
    state = registry.state("acme_npu")
    assert (state.state, state.reason, state.hint) == ("unavailable", "no NPU", "plug it in")
    assert registry.select("auto").name == "ref"
    assert len([line for line in registry.messages if "no NPU" in line and "plug it in" in line]) == 1
    with pytest.raises(BackendUnavailable):
        BackendRegistry(env=env, strict=True).select("auto")


@pytest.mark.parametrize(("priority", "lines"), [(10, 0), (30, 1)])
def test_auto_is_silent_about_what_it_would_not_have_chosen(site, env, plugin, toml, priority, lines):
    site.install(plugin(head=RAISES_AT_IMPORT))
    site.install(plugin("other_npu", 20), "other_npu", "other", module="other_mod")
    registry = BackendRegistry(toml(f"[priority]\nacme_npu = {priority}\n"), env=env)
    assert (registry.select("auto").name, len(registry.messages)) == ("other_npu", lines)


@pytest.mark.parametrize(
    ("body", "error_class", "text"),
    [
        ("raise OSError('libacme.so.2')", BackendBroken, "OSError: libacme.so.2   (fastllm_backend_acme/plugin.py:"),
        ("import sys; sys.exit(1)", BackendBroken, "SystemExit: 1"),
        ("return object()", BackendBroken, "fastllm_open_backend() returned object; it must return a Backend"),
        ("raise BackendUnavailable('busy', why='in use')", BackendUnavailable, "in use"),
    ],
)
def test_a_failing_open_is_an_error_with_an_owner(site, env, plugin, body, error_class, text):
    site.install(plugin(open_=f"@hookimpl\ndef fastllm_open_backend(name):\n    {body}"))
    with pytest.raises(error_class) as caught:
        BackendRegistry(env=env).open("acme_npu")
    assert text in caught.value.why
    assert caught.value.who.startswith("fastllm-backend-acme")


def test_errors_that_a_backend_raises_on_purpose_pass_open(site, env, plugin):
    site.install(plugin(open_="@hookimpl\ndef fastllm_open_backend(name):\n    from fastllm.api import OutOfMemory\n    raise OutOfMemory('full')"))
    with pytest.raises(OutOfMemory):
        BackendRegistry(env=env).open("acme_npu")


def test_strict_plugins_shows_plug_in_authors_their_own_traceback(site, env, plugin):
    site.install(plugin(probe="@hookimpl\ndef fastllm_probe(name):\n    return 1 / 0"))
    with pytest.raises(ZeroDivisionError):
        BackendRegistry(env={**env, "FASTLLM_STRICT_PLUGINS": "1"}).select("auto")
    site.install(plugin(head="import sys\nsys.exit(3)"), module="acme_exit", distribution="acme-exit", name="exits")
    with pytest.raises(RuntimeError, match=r"called sys.exit\(3\)"):
        BackendRegistry(env={**env, "FASTLLM_STRICT_PLUGINS": "1"}).select("exits")


def test_a_failing_plugin_leaves_its_neighbour_in_one_distribution_usable(site, env, plugin):
    two = "@hookimpl\ndef fastllm_backends():\n    return [BackendSpec('good', API_VERSION, 1), BackendSpec('bad', API_VERSION, 0)]"
    site.install(plugin(backends=two), entries="good = fastllm_backend_acme.plugin\nbad = fastllm_backend_acme.plugin")
    registry = BackendRegistry(env=env)
    assert registry.open("good").name == "good"
    assert registry.state("bad").state == "broken"


def test_a_wrapper_cannot_touch_the_answer_of_another_vendor(site, env, plugin):
    site.install(plugin())
    spoiler = "@hookimpl(wrapper=True)\ndef fastllm_environment(name):\n    yield\n    return {'stolen': 'yes'}"
    site.install(plugin("spoiler", tail=spoiler), "spoiler", "spoiler", module="spoiler_mod")
    registry = BackendRegistry(env=env)
    assert registry.environment("spoiler") == {"stolen": "yes"}
    assert registry.environment("acme_npu") == {}


def test_a_wrong_environment_is_refused(site, env, plugin):
    site.install(plugin(tail="@hookimpl\ndef fastllm_environment(name):\n    return {'driver': 12}"))
    with pytest.raises(BackendBroken, match="fastllm_environment"):
        BackendRegistry(env=env).environment("acme_npu")


def test_trace_prints_every_hook_call(site, env, plugin, capsys):
    site.install(plugin())
    BackendRegistry(env={**env, "FASTLLM_TRACE_HOOKS": "1"}).select("acme_npu")
    assert "fastllm_probe" in capsys.readouterr().err


def test_a_plugin_file_is_loaded_by_path_and_a_failing_one_is_loud(tmp_path, env, plugin):
    good, bad = tmp_path / "my-npu.py", tmp_path / "bad.py"
    good.write_text(plugin("my_npu", 1))
    bad.write_text("raise ValueError('unfinished')")
    registry = BackendRegistry(plugin_paths=[good], env={**env, "FASTLLM_PLUGINS": ""})
    assert registry.open("my_npu").name == "my_npu"
    assert registry.state("my_npu").entry_point == "--plugin"
    broken = BackendRegistry(plugin_paths=[bad], env=env)
    with pytest.raises(BackendBroken, match=r"plug-in .*bad\.py failed to load") as caught:
        broken.select()
    assert "ValueError: unfinished" in caught.value.why
    assert ":1)" in caught.value.why
    with pytest.raises(ValueError, match="unfinished"):
        BackendRegistry(plugin_paths=[bad], env={**env, "FASTLLM_STRICT_PLUGINS": "1"})
    with pytest.raises(UsageError, match="there is no such file"):
        BackendRegistry(plugin_paths=[tmp_path / "none.py"], env=env)


@pytest.mark.parametrize("deed", ["raise ValueError('unfinished')", "import ctypes; ctypes.string_at(0)", "import os; os._exit(0)", "raise type('Odd', (BaseException,), {})"])
def test_a_file_that_does_not_load_is_a_line_for_who_names_another_backend_and_the_error_of_who_names_its_own(tmp_path, site, contained, plugin, deed):
    good, bad = tmp_path / "my-npu.py", tmp_path / "bad.py"
    good.write_text(plugin("my_npu", 1))
    bad.write_text(deed)
    site.install(plugin())
    registry = BackendRegistry(plugin_paths=[good, bad], env=contained)
    (line,) = registry.messages
    assert line.startswith(f"plug-in {bad} failed to load, and nothing of it is used: ")
    assert line.endswith(f"correct {bad}")
    assert registry.remarks == set(), "--strict refuses it"
    assert [registry.select(name).name for name in ("ref", "my_npu", "acme_npu")] == ["ref", "my_npu", "acme_npu"]
    assert {s.name: s.state for s in registry.states()} | {"my_npu": "ready", "acme_npu": "ready", "ref": "ready", "fake": "ready"} == {s.name: s.state for s in registry.states()}
    with pytest.raises(BackendBroken) as caught:
        registry.select("bad")
    assert (caught.value.message, caught.value.exit_code) == (f"no backend is called 'bad', and plug-in {bad} failed to load", 3)
    assert caught.value.why in line
    with pytest.raises(BackendBroken, match=r"^plug-in .*bad\.py failed to load$"):
        registry.select()
    assert BackendRegistry(plugin_paths=[bad], env={**contained, "FASTLLM_BACKEND": "ref"}).select().name == "ref"


def test_a_file_that_no_longer_loads_in_a_later_process_is_what_the_error_says(tmp_path, contained, plugin):
    """Its names were read, so nobody is told that there is no such backend."""
    path, flag = tmp_path / "odd.py", tmp_path / "read"
    head = f"import pathlib\nif (flag := pathlib.Path({str(flag)!r})).exists():\n    raise RuntimeError('the driver is gone')\nflag.touch()"
    path.write_text(plugin(name="odd", head=head))
    registry = BackendRegistry(plugin_paths=[path], env=contained)
    assert "odd" in registry.names()
    with pytest.raises(BackendBroken) as caught:
        registry.select("odd")
    assert "no backend is called" not in caught.value.message
    assert "RuntimeError: the driver is gone" in caught.value.why


def test_the_usual_way_out_of_a_broken_backend_names_it():
    error = BackendBroken("it broke", backend="acme_npu")
    assert error.render().endswith("fix: fastllm doctor acme_npu shows more; FASTLLM_DISABLE_PLUGINS=acme_npu runs without it")
    assert error.fix == ""
    assert BackendBroken("it broke").as_dict()["error"]["fix"].startswith("fastllm doctor NAME shows")
