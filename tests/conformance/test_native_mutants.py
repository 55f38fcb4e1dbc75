"""Faults planted into the C of `cpu_avx`, in each variant that runs here: compiled in a temporary folder, loaded as a backend of its own, and
caught by the suite. `native_faults.py` lists them.

An anchor that is no longer in the source is an error here: a mutant that plants nothing proves nothing.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import fastllm.backends.cpu_avx
from fastllm.backends.cpu_avx import isa
from fastllm.conformance import check_backend

from .native_faults import ALL, FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(fastllm.backends.cpu_avx.__file__).parent
FLAGS = ["-Og", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-w"]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
VARIANTS = {
    "baseline": ["-march=x86-64-v2"], "avx2": AVX2, "avx512": [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "bf16"))],
    "amx": ["-march=x86-64-v2", "-DFL_EMULATE"],
}  # fmt: skip
"""As in setup.py, but for amx: its instructions in plain C, which the choice of a variant must let pass."""
RUNS = [name for name, missing in isa.variants().items() if name == "amx" or not missing]
EMULATED = ("static const char *missing_cpu(int isa) {\n    regs", "static const char *missing_cpu(int isa) {\n    if (isa == FL_ISA_AMX) return NULL;\n    regs")
TILES = [f"linear/f32*{format}/row/m{rows}-*#bound" for format in ("q4_0", "q6_k", "int4g64", "bf16") for rows in (17, 64, 80)]
"""Cases that the kernels of amx pass beside those of the faults."""
CACHES = ["attention/bf16/row/*/gqa#bound", "attention/int8/row/*/gqa#bound", "kv_write/int8/row/k2-d32_32-b16/normal#bound"]
"""Caches that are kept in pairs where attention is compiled for them, which it is not in emulation."""


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
    return CpuBackend(threads=2, isa=ISA, pin=False)
"""


class Build:
    """A build of `cpu_avx._native` with every variant that runs here, file by file, so that a fault compiles one file of one variant again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.native = folder, folder / "native"
        shutil.copytree(SOURCE / "native", self.native)
        choice = self.native / "isa.c"
        assert choice.read_text().count(EMULATED[0]) == 1
        choice.write_text(choice.read_text().replace(*EMULATED))
        made = ROOT / "build" / "c" / "backends" / "cpu_avx" / "_native.c"
        self.module = folder / "_native.c"
        if made.is_file() and made.stat().st_mtime >= (SOURCE / "_native.pyx").stat().st_mtime:
            shutil.copy(made, self.module)
        else:
            directives = ["-X", "boundscheck=False", "-X", "wraparound=False", "-X", "cdivision=True"]
            subprocess.run([sys.executable, "-m", "cython", "-3", *directives, str(SOURCE / "_native.pyx"), "-o", str(self.module)], check=True)
        wanted = [(path, "") for path in (self.module, *sorted(self.native.glob("*.c")))]
        wanted += [(path, variant) for variant in RUNS for path in sorted(self.native.glob("kernels/*.c"))]
        with ThreadPoolExecutor(2) as pool:
            self.objects = dict(zip(wanted, pool.map(lambda pair: self.compiled(*pair), wanted), strict=True))

    def compiled(self, path: Path, variant: str, text: str | None = None, name: str = "") -> Path:
        """An object file of a source, for one variant if it is a kernel's, or of a changed text of it."""
        target = self.folder / f"{name}{variant}-{path.stem}.o"
        source = path
        if text is not None:
            source = path.with_name(f"{name}{path.name}")
            source.write_text(text)
        defines = [f"-DFL_VARIANT={variant}", f"-DFL_{variant.upper()}=1"] if variant else [*(f"-DFL_HAVE_{v.upper()}=1" for v in RUNS), "-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION"]
        includes = [f"-I{self.native}", f"-I{np.get_include()}", f"-I{sysconfig.get_path('include')}"]
        subprocess.run(["cc", *FLAGS, *VARIANTS[variant or "baseline"], *defines, *includes, "-c", str(source), "-o", str(target)], check=True)
        return target

    def plugin(self, variant: str, fault: Fault | None = None) -> Path:
        """A backend file that runs one variant, with one fault."""
        objects, name = dict(self.objects), f"{fault.name if fault else 'honest'}_{variant}"
        if fault is not None:
            path = self.native / fault.file
            before = path.read_text()
            assert before.count(fault.text) == 1, f"{fault.file} has the anchor of '{fault.name}' {before.count(fault.text)} times: plant it anew"
            key = (path, variant if path.parent.name == "kernels" else "")
            objects[key] = self.compiled(*key, before.replace(fault.text, fault.instead), f"{name}_")
        library = self.folder / f"native_{name}.so"
        subprocess.run(["cc", "-shared", "-pthread", *map(str, objects.values()), "-lm", "-o", str(library)], check=True)
        plugin = self.folder / f"planted_{name}.py"
        plugin.write_text(PLUGIN.replace("LIBRARY", repr(str(library))).replace("ISA", repr(variant)))
        return plugin


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    if sysconfig.get_platform().rpartition("-")[2] != "x86_64":
        pytest.skip("variants of x86-64 are compiled here")
    return Build(tmp_path_factory.mktemp("native"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_build_without_a_fault_passes_what_the_faults_fail(build, variant):
    if variant not in RUNS:
        pytest.skip(f"this processor does not run {variant}")
    cases = [case for fault in FAULTS if variant in fault.variants for case in fault.cases] + (TILES + CACHES if variant == "amx" else [])
    results = check_backend("planted", cases=cases, plugin_paths=[build.plugin(variant)])
    assert [f"{r.id}: {r.message}" for r in results if r.status != "passed"] == []
    assert len(results) >= sum(variant in fault.variants for fault in FAULTS)


@pytest.mark.parametrize(("variant", "fault"), [pytest.param(v, f, id=f"{v}-{f.name}") for v in VARIANTS for f in FAULTS if v in f.variants])
def test_a_planted_fault_is_caught_by_the_rule_that_it_breaks(build, variant, fault):
    if variant not in RUNS:
        pytest.skip(f"this processor does not run {variant}")
    results = check_backend("planted", cases=list(fault.cases), plugin_paths=[build.plugin(variant, fault)])
    failed = [r for r in results if r.status == "failed"]
    assert failed, f"'{fault.name}' in {variant} passes {', '.join(r.id for r in results)}"
    assert {r.rule for r in failed} == {"bound"}, failed[0].message
    assert max(r.margin for r in failed) >= 2


def test_every_variant_has_faults():
    own = {v for v in VARIANTS if any(f.variants == (v,) for f in FAULTS)}
    assert {"baseline", "avx512", "amx"} <= own
    assert all(len([f for f in FAULTS if v in f.variants]) >= 4 for v in ALL)


def test_the_script_that_runs_the_whole_suite_on_emulated_tiles_still_finds_what_it_changes():
    """Only a run says that it works; it takes minutes."""
    spec = importlib.util.spec_from_file_location("conformance_emulated", ROOT / "scripts" / "conformance_emulated.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert [(SOURCE / "native" / name).read_text().count(before) for name, before, _ in script.CHANGES] == [1] * len(script.CHANGES)
    assert set(script.AVX512) == set(VARIANTS["avx512"])
