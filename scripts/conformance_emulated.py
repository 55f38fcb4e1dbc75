"""Runs the whole suite on `cpu_avx` in the variant amx, on a processor without AMX: its tile instructions are plain C, all else is what is shipped.

The package is copied to `build/emulated`, with `kernels/tiles.h` as it is compiled with -DFL_EMULATE and an `isa.c` that passes over the question for AMX, and becomes a
plug-in of its own, `cpu_avx_tiles`, whose device is of kind `emulated`. Such a device reports no speed, and Gold needs that: Silver is the most that it can reach, though every
case of Gold is run. Leaves the page of the report, and what it says, in docs/conformance. The processor must have AVX-512 with VNNI and BF16, as the other instructions of the variant are the real ones.

    python scripts/conformance_emulated.py            # build, whole suite, page
    python scripts/conformance_emulated.py ARGUMENT …  # build, then fastllm conformance run with these: --quick, --op linear …
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "backends" / "cpu_avx"
NAME = "cpu_avx_tiles"
PAGE = ROOT / "docs" / "conformance" / NAME
COMMON = ["-O3", "-std=gnu11", "-g0", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-w", "-Wno-psabi"]
AVX512 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2", *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "bf16"))]
VARIANTS = {"baseline": ["-march=x86-64-v2"], "avx512": AVX512, "amx": AVX512}
"""As in setup.py, but amx has no instruction of AMX."""
CHANGES = (
    ("kernels/tiles.h", "#ifdef FL_EMULATE\n", "#if 1\n"),
    ("isa.c", '    if (!HAS(seven.d, 24) || !HAS(seven.d, 25)', '    return failed_selftest();\n    if (!HAS(seven.d, 24) || !HAS(seven.d, 25)'),
)  # fmt: skip
"""File below `native`, what is there once, and what takes its place."""

PLUGIN = '''"""cpu_avx on AMX tiles that are plain C."""

from dataclasses import replace

from fastllm.api import Ready, hookimpl

from . import plugin
from .plugin import fastllm_environment as fastllm_environment


@hookimpl
def fastllm_backends():
    (spec,) = plugin.fastllm_backends()
    return [replace(spec, name="cpu_avx_tiles", summary="cpu_avx, tiles of AMX in emulation", priority=-1)]


@hookimpl
def fastllm_probe(name):
    found = plugin.fastllm_probe(name)
    return Ready(tuple(replace(d, kind="emulated") for d in found.devices)) if isinstance(found, Ready) else found


@hookimpl
def fastllm_open_backend(name, device, options):
    return plugin.fastllm_open_backend(name, device, {**options, "isa": "amx"})


@hookimpl
def fastllm_requirements(name):
    from fastllm.conformance import Requirements

    return Requirements(time_factor=10, emulated=True)
'''


def build(folder: Path) -> None:
    """The plug-in, as it would be installed, in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "fastllm_cpu_avx_tiles"
    native = folder / "native"
    shutil.copytree(SOURCE / "native", native)
    for name, before, after in CHANGES:
        text = (native / name).read_text()
        if text.count(before) != 1:
            sys.exit(f"{name} has {before.strip()!r} {text.count(before)} times, not once: change it here as well")
        (native / name).write_text(text.replace(before, after))
    package.mkdir()
    for path in SOURCE.glob("*.py"):
        shutil.copy(path, package / path.name)
    (package / "tiles.py").write_text(PLUGIN)
    _compile(folder, native, package / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    info = folder / "fastllm_cpu_avx_tiles-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastllm-cpu-avx-tiles\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[fastllm.backends]\n{NAME} = {package.name}.tiles\n")


def _compile(folder: Path, native: Path, target: Path) -> None:
    module = folder / "_native.c"
    directives = [part for d in ("boundscheck=False", "wraparound=False", "cdivision=True", "embedsignature=True") for part in ("-X", d)]
    subprocess.run([sys.executable, "-m", "cython", "-3", *directives, str(SOURCE / "_native.pyx"), "-o", str(module)], check=True)
    compiler = os.environ.get("CC", "cc").split()
    includes = [f"-I{native}", f"-I{np.get_include()}", f"-I{sysconfig.get_path('include')}", "-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION"]

    def compiled(wanted: tuple[Path, str]) -> str:
        path, variant = wanted
        made = folder / f"{variant}-{path.stem}.o"
        defines = [f"-DFL_VARIANT={variant}", f"-DFL_{variant.upper()}=1"] if variant else [f"-DFL_HAVE_{v.upper()}=1" for v in VARIANTS]
        subprocess.run([*compiler, *COMMON, *VARIANTS.get(variant, []), *defines, *includes, "-c", str(path), "-o", str(made)], check=True)
        return str(made)

    wanted = [(path, "") for path in (module, *sorted(native.glob("*.c")))]
    wanted += [(path, variant) for variant in VARIANTS for path in sorted(native.glob("kernels/*.c"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, wanted))
    subprocess.run([*compiler, "-shared", "-pthread", *objects, "-lm", "-o", str(target)], check=True)


def main(arguments: list[str]) -> int:
    """0 if nothing failed and all that an emulated device can reach is reached."""
    folder, report = ROOT / "build" / "emulated", ROOT / "build" / "conformance" / NAME
    build(folder)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    chosen = arguments or ["--level", "gold", "--report-dir", str(report.relative_to(ROOT))]
    command = ["fastllm", "conformance", "run", "--backend", NAME, *chosen]
    print(" ".join(command), flush=True)
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
    if arguments:
        return code
    standing = json.loads((report / "conformance.json").read_text(encoding="utf-8"))["standing"]
    if standing["level"] != "silver" or standing["counts"]["failed"] or standing["counts"]["not run"]:
        return 1
    PAGE.mkdir(parents=True, exist_ok=True)
    for file in ("conformance.md", "badge.svg"):
        shutil.copy(report / file, PAGE / file)
    _publish(report / "conformance.json")
    subprocess.run([sys.executable, "scripts/make_docs.py"], cwd=ROOT, check=True)
    return 0


def _publish(report: Path) -> None:
    """What the report says beside its page, with the hash of the sources that were copied, by which the documents know whether they changed since."""
    from fastllm.conformance.published import FILE, publish
    from fastllm.conformance.sources import kernel_hash

    (said,) = publish([report], PAGE / FILE)
    (PAGE / FILE).write_text(json.dumps([{**said, "sources": kernel_hash(SOURCE)}], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
