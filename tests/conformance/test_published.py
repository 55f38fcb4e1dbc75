"""Published results: from a verified report into a package, and from there into the list of backends and the documents."""

from __future__ import annotations

import errno
import importlib.util
import json
from pathlib import Path

import pytest

from fastllm.api import API_VERSION, UsageError
from fastllm.cli.main import run_command
from fastllm.conformance.calibrate import calibrate, named_target
from fastllm.conformance.case import CaseResult
from fastllm.conformance.levels import SUITE_VERSION, standing
from fastllm.conformance.published import FILE, publish, read_published, standing_of
from fastllm.conformance.report import SCHEMA, sealed, write_reports
from fastllm.conformance.sources import kernel_hash, source_folders
from fastllm.conformance.suite import all_cases

ROOT = Path(__file__).resolve().parents[2]
API = "{}.{}".format(*API_VERSION)


def report(folder, level="bronze", **more):
    """A report in which every case of a level passed, as far as `standing` asks: made without running one."""
    wanted = [c for c in all_cases().values() if c.level == "bronze"]
    cases = [CaseResult(c.id, c.op, c.group, c.level, c.required, "passed", native=False, margin=0.5 if c.bin else None, bin=c.bin) for c in wanted]
    earned = standing(cases, "bronze", whole=True)
    body = {
        "schema": SCHEMA, "suite": SUITE_VERSION, "api": API, "opset": 1, "engine": "0", "backend": "acme", "distribution": "acme", "version": "0.3", "device": "d", "environment": {},
        "options": {}, "execution": "device", "device_kind": "device", "emulated": False, "expected": [], "floors": [], "sources": "ab", "tolerance": {}, "date": "2026-01-01", "command": "run", "seed": 1, "asked": level, "quick": False,
        "filters": {"op": [], "case": []}, "time_s": 3.0, "standing": earned.as_dict(), "perf": None, "cases": [c.as_dict() for c in cases], **more,
    }  # fmt: skip
    write_reports(body, folder)
    return folder / "conformance.json"


def test_a_report_becomes_a_line_of_the_package(tmp_path, capsys):
    path = report(tmp_path / "r")
    other = report(tmp_path / "s", execution="cpu", device_kind="cpu", options={"fast": "no"})
    (tmp_path / "package").mkdir()
    assert run_command(["conformance", "publish", str(path), str(other), "--into", str(tmp_path / "package")]) == 0
    assert "2 runs, native 0/14, bronze L1" in capsys.readouterr().out
    found = read_published(tmp_path / "package")
    assert [(s["level"], s["verification"], s["version"]) for s in found] == [("bronze", "L2", "0.3"), ("bronze", "L1", "0.3")]
    assert standing_of(found[:1]) == ("0/14", "bronze L2")
    assert standing_of([]) == ("", "")
    assert "bronze · opset 1 · native 0/14 · L2" in (tmp_path / "r" / "badge.svg").read_text()


@pytest.fixture
def full_disk(monkeypatch):
    """full_disk(word): a file with the word in its name is cut, and its writer gets an error."""
    whole = Path.write_text

    def fill(word):
        def cut(path, text, *args, **kwargs):
            whole(path, text[: len(text) // 2] if word in path.name else text, *args, **kwargs)
            if word in path.name:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_text", cut)

    return fill


def test_what_a_full_disk_cuts_leaves_the_files_as_they_were(full_disk, monkeypatch, tmp_path):
    path, out = report(tmp_path / "r"), tmp_path / "out"
    publish([path], tmp_path / FILE)
    monkeypatch.setattr("fastllm.conformance.calibrate.run_cases", lambda job, chosen: [])
    calibrate([named_target("blas")], out)

    def content():
        return {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file()}

    before = content()
    assert len(before) == 7
    for word, write in (
        ("badge", lambda: report(tmp_path / "r", version="0.4")),
        (FILE, lambda: publish([path], tmp_path / FILE)),
        ("blas", lambda: calibrate([named_target("blas")], out)),
    ):
        full_disk(word)
        with pytest.raises(OSError, match="No space"):
            write()
        assert content() == before, word


def test_what_is_not_true_is_not_published(tmp_path):
    path = report(tmp_path / "r")
    body = json.loads(path.read_text())
    body["cases"][3]["status"] = "failed"
    path.write_text(json.dumps(body))
    with pytest.raises(UsageError, match="does not verify"):
        publish([path], tmp_path / FILE)
    quick = report(tmp_path / "q")
    body = json.loads(quick.read_text())
    body["standing"]["level"] = ""
    body["cases"] = body["cases"][:1]
    body["filters"]["case"] = [body["cases"][0]["id"]]
    earned = standing([CaseResult.from_dict(c) for c in body["cases"]], "bronze", whole=False)
    body["standing"] = earned.as_dict()
    quick.write_text(json.dumps(sealed(body)))
    with pytest.raises(UsageError, match="no level"):
        publish([quick], tmp_path / FILE)
    with pytest.raises(UsageError, match="several backends"):
        publish([report(tmp_path / "a"), report(tmp_path / "b", backend="other")], tmp_path / FILE)
    assert not (tmp_path / FILE).exists()
    for text in ("[", "[3]", '[{"level": "platinum"}]', "{}"):
        (tmp_path / FILE).write_text(text)
        assert read_published(tmp_path) == []


def test_the_list_of_backends_shows_what_is_published(tmp_path, monkeypatch, capsys):
    from fastllm import host

    folder = tmp_path / "package"
    folder.mkdir()
    publish([report(tmp_path / "r")], folder / FILE)
    monkeypatch.setattr(host, "plugin_folder", lambda module: folder if "ref" in module else None)
    assert run_command(["backends", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "0/14    bronze L2" in lines["ref"]
    assert "no report" in lines["fake"]
    assert run_command(["backends", "list", "--json"]) == 0
    states = {s["name"]: s for s in json.loads(capsys.readouterr().out)}
    assert states["ref"]["conformance"][0]["level"] == "bronze"
    assert states["fake"]["conformance"] == []
    assert run_command(["backends", "show", "ref"]) == 0
    assert "bronze L2, native 0/14, 0.3" in capsys.readouterr().out


def test_the_documents_say_when_the_sources_have_changed(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    package = tmp_path / "backends" / "acme"
    package.mkdir(parents=True)
    (package / "kernel.c").write_text("int x;")
    publish([report(tmp_path / "r", sources=kernel_hash(package))], package / FILE)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    page = tmp_path / "docs" / "conformance" / "acme" / "conformance.md"
    page.parent.mkdir(parents=True)
    page.write_text((tmp_path / "r" / "conformance.md").read_text())
    text = script.conformance_reports()
    assert "as tested" in text
    assert "[`acme`](conformance/acme/conformance.md)" in text
    assert "earlier runs" not in text
    (package / "kernel.c").write_text("int y;")
    assert "changed since" in script.conformance_reports()
    (package / FILE).unlink()
    text = script.conformance_reports()
    assert f"No result of suite {SUITE_VERSION} is published" in text
    assert f"Pages of earlier runs, which say nothing about the sources of today:\n\n- [acme](conformance/acme/conformance.md): suite {SUITE_VERSION}, interface {API}, 2026-01-01" in text


def test_the_hash_is_over_every_folder_that_the_package_names(tmp_path, monkeypatch):
    """A backend that is built on another package changes with it."""
    package, kernels = tmp_path / "acme", tmp_path / "acme_kernels"
    for folder in (package, kernels):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    alone = kernel_hash(package)
    (package / "conformance.toml").write_text('sources = ["acme_kernels"]\n')
    before = kernel_hash(package)
    assert before != alone
    (kernels / "k.cl").write_text("kernel void f() {}")
    assert kernel_hash(package) != before
    for text, why in (('sources = ["acme_nothing"]', "there is no module 'acme_nothing'"), ("sources = 3", "list of modules"), ("sources =", "not valid TOML")):
        (package / "conformance.toml").write_text(text)
        with pytest.raises(UsageError, match=why):
            kernel_hash(package)


def test_the_code_that_opencl_shares_belongs_to_it():
    folder = Path(importlib.util.find_spec("fastllm.backends.opencl_generic").origin).parent
    assert [p.name for p in source_folders(folder)] == ["opencl_generic", "gpu"]
