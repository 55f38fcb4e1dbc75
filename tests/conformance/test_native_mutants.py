"""Faults planted into the C of `cpu_avx`: compiled in a temporary folder, loaded as a backend of its own, and caught by the suite.

An anchor that is no longer in the source is an error here: a mutant that plants nothing proves nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import fastllm.backends.cpu_avx
from fastllm.conformance import check_backend

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(fastllm.backends.cpu_avx.__file__).parent
FLAGS = ["-O1", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-w", "-march=x86-64-v2"]

# name -> (file, text, what it becomes, cases that must fail, their rule)
FAULTS = {
    "wrong_tail": (
        "kernels/rows.c", "for (; k < C; k++) {\n                float v = p[k] * scale;", "for (; k + 1 < C; k++) {\n                float v = p[k] * scale;",
        ["rms_norm/f32/row/m3-n33/*#bound"], "bound",
    ),
    "stale_scale": (
        "kernels/linear.c", "g->scale = amax / 127.0f;", "static _Thread_local float before = 1.0f; g->scale = before; before = amax / 127.0f;",
        ["linear/f32*q8_0/row/m17-*#bound"], "bound",
    ),
    "unread_last_block": (
        "kernels/attention.c", "if (v.hi < v.lo) v.hi = v.lo;\n    return v;", "if (v.hi > 16) v.hi -= v.hi % 16;\n    if (v.hi < v.lo) v.hi = v.lo;\n    return v;",
        ["attention/f32/row/l17-b16/needle#bound"], "bound",
    ),
    "lost_tail_of_channels": (
        "kernels/recurrent.c", "for (int v = 0; v < VECTORS && 8 * v < n; v++) {", "for (int v = 0; v < VECTORS && 8 * v + 7 < n; v++) {",
        ["short_conv/f32/gap/l5_3-c33-k3/gap#bound"], "bound",
    ),
    "state_that_has_not_faded": (
        "kernels/recurrent.c", "(wide_value(even[j]) + wide_value(odd[j])) * decay) * share;", "(wide_value(even[j]) + wide_value(odd[j]))) * share;",
        ["delta_rule/f32/row/l17-j1-h2-d16_16/forgets#bound"], "bound",
    ),
    # no instruction waits for the one before it, and thread 1 begins only when thread 0 is through: the race is lost with certainty
    "missing_barrier": (
        "program.c",
        "if (ins->barrier & mask) fl_pool_barrier(pool);\n        double start = timed ? now() : 0.0;\n        execute(p, ins, thread, threads, scratch);",
        """static _Atomic long ahead;
        static long behind;
        if (thread == 1 && ins == p->code)
            for (behind += p->n_code; ahead < behind;) nanosleep(&(struct timespec){0, 1000000}, NULL);
        (void)mask, (void)pool;
        double start = timed ? now() : 0.0;
        execute(p, ins, thread, threads, scratch);
        if (thread == 0) ahead++;""",
        ["linear/f32*q8_0/row/m8-n127-*#bound"], "bound",
    ),
}  # fmt: skip

PLUGIN = """
import importlib.util, sys
from fastllm.api import API_VERSION, OPSET, BackendSpec, DeviceInfo, Ready, hookimpl

@hookimpl
def fastllm_backends():
    return [BackendSpec("planted", API_VERSION, OPSET)]

@hookimpl
def fastllm_probe(name):
    return Ready((DeviceInfo("0", "a CPU with a fault"),))

@hookimpl
def fastllm_open_backend(name, device, options):
    import fastllm.backends.cpu_avx as package
    whole = "fastllm.backends.cpu_avx._native"
    if whole not in sys.modules:
        spec = importlib.util.spec_from_file_location(whole, LIBRARY)
        sys.modules[whole] = package._native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package._native)
    from fastllm.backends.cpu_avx.backend import CpuBackend
    return CpuBackend(threads=2, isa="baseline", pin=False)
"""


class Build:
    """A baseline-only build of `cpu_avx._native`, file by file, so that a fault compiles one file again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.native = folder, folder / "native"
        shutil.copytree(SOURCE / "native", self.native)
        made = ROOT / "build" / "c" / "backends" / "cpu_avx" / "_native.c"
        self.module = folder / "_native.c"
        if made.is_file() and made.stat().st_mtime >= (SOURCE / "_native.pyx").stat().st_mtime:
            shutil.copy(made, self.module)
        else:
            directives = ["-X", "boundscheck=False", "-X", "wraparound=False", "-X", "cdivision=True"]
            subprocess.run([sys.executable, "-m", "cython", "-3", *directives, str(SOURCE / "_native.pyx"), "-o", str(self.module)], check=True)
        sources = [self.module, *sorted(self.native.glob("*.c")), *sorted(self.native.glob("kernels/*.c"))]
        self.objects = {path: self.compiled(path) for path in sources}

    def compiled(self, path: Path, text: str | None = None, name: str = "") -> Path:
        """An object file of a source, or of a changed text of it."""
        target = self.folder / f"{name}{path.parent.name}-{path.stem}.o"
        source = path
        if text is not None:
            source = path.with_name(f"{name}{path.name}")
            source.write_text(text)
        kernel = path.parent.name == "kernels"
        defines = ["-DFL_VARIANT=baseline", "-DFL_BASELINE=1"] if kernel else ["-DFL_HAVE_BASELINE=1", "-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION"]
        includes = [f"-I{self.native}", f"-I{np.get_include()}", f"-I{sysconfig.get_path('include')}"]
        flags = ["-O0" if f == "-O1" and path == self.module else f for f in FLAGS]
        subprocess.run(["cc", *flags, *defines, *includes, "-c", str(source), "-o", str(target)], check=True)
        return target

    def plugin(self, name: str) -> Path:
        """A backend file with one fault ("" for none)."""
        objects = dict(self.objects)
        if name:
            file, text, fault = FAULTS[name][:3]
            path = self.native / file
            before = path.read_text()
            assert before.count(text) == 1, f"{file} has the anchor of '{name}' {before.count(text)} times: plant it anew"
            objects[path] = self.compiled(path, before.replace(text, fault), f"{name}_")
        library = self.folder / f"native_{name or 'honest'}.so"
        subprocess.run(["cc", "-shared", "-pthread", *map(str, objects.values()), "-lm", "-o", str(library)], check=True)
        plugin = self.folder / f"planted_{name or 'honest'}.py"
        plugin.write_text(PLUGIN.replace("LIBRARY", repr(str(library))))
        return plugin


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    if sysconfig.get_platform().rpartition("-")[2] != "x86_64":
        pytest.skip("the baseline variant is compiled for x86-64 here")
    return Build(tmp_path_factory.mktemp("native"))


def test_the_build_without_a_fault_passes_what_the_faults_fail(build):
    cases = [case for fault in FAULTS.values() for case in fault[3]]
    results = check_backend("planted", cases=cases, plugin_paths=[build.plugin("")])
    assert [f"{r.id}: {r.message}" for r in results if r.status != "passed"] == []
    assert len(results) >= len(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_by_the_rule_that_it_breaks(build, name):
    *_, cases, rule = FAULTS[name]
    results = check_backend("planted", cases=cases, plugin_paths=[build.plugin(name)])
    failed = [r for r in results if r.status == "failed"]
    assert failed, f"'{name}' passes {', '.join(r.id for r in results)}"
    assert {r.rule for r in failed} == {rule}, failed[0].message
    assert max(r.margin for r in failed) >= 2
