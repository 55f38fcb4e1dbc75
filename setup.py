"""Build script: maps the top-level folders to packages and compiles the native code.

Every folder of the house is a package below `fastllm` (see `PACKAGES`). The C kernels of `cpu_avx` are compiled once per
instruction-set variant from the same sources; which variant runs is chosen at run time. A compiler that does not know a
variant's flags builds without it, and `fastllm doctor` says so.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

ROOMS = {"core": "core", "models": "models", "formats": "formats", "text": "text", "backends": "backends", "conformance": "conformance"}
PACKAGE_DIR = {"fastllm": "interface", **{f"fastllm.{name}": folder for name, folder in ROOMS.items()}}


def find_packages() -> list[str]:
    """Every folder with an `__init__.py` below a room, as its dotted package name."""
    found = []
    for package, folder in PACKAGE_DIR.items():
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            found.append(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    return found


COMMON = ["-O3", "-std=gnu11", "-g0", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-unused-function", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16"]
AMX = [*AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"]
X86 = platform.machine().lower() in ("x86_64", "amd64")
VARIANTS = {"baseline": ["-march=x86-64-v2"] if X86 else [], **({"avx2": AVX2, "avx512": AVX512, "amx": AMX} if X86 else {})}

NATIVE = Path("backends/cpu_avx/native")
KERNELS = sorted(str(p) for p in NATIVE.glob("kernels/*.c"))  # compiled once per variant
SHARED = sorted(str(p) for p in NATIVE.glob("*.c"))  # compiled once

JOBS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # compilers at once
DEBUG = os.environ.get("FASTLLM_DEBUG_BUILD") == "1"  # bounds-checked Cython, for CI
DIRECTIVES = {"language_level": 3, "boundscheck": DEBUG, "wraparound": DEBUG, "cdivision": True, "embedsignature": True}
NUMPY = {"include_dirs": [numpy.get_include()], "define_macros": [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]}


class BuildExt(build_ext):
    """Compiles `native/kernels/*.c` once per variant and links all variants into the one extension of `cpu_avx`."""

    def finalize_options(self) -> None:
        """Extensions beside each other, unless somebody says otherwise: nearly all of the time goes by in compilers."""
        super().finalize_options()
        self.parallel = self.parallel or JOBS

    def build_extension(self, ext: Extension) -> None:
        """Adds the variant objects to `cpu_avx._native`, then builds as usual."""
        if ext.name.endswith("cpu_avx._native"):
            built = []
            for variant, flags in VARIANTS.items():
                if self._accepts(flags):
                    built.append(variant)
                else:
                    print(f"fastllm: this compiler does not know {' '.join(flags)}: building without the {variant} variant")
            wanted = [(variant, kernel) for variant in built for kernel in KERNELS]
            longest = sorted(wanted, key=lambda pair: os.path.getsize(pair[1]), reverse=True)  # first, so that none is left over at the end
            with ThreadPoolExecutor(self.parallel) as pool:
                objects = dict(zip(longest, pool.map(self._kernel, *zip(*longest, strict=True)), strict=True))
            for pair in wanted:
                ext.extra_objects += objects[pair]
            ext.define_macros += [(f"FL_HAVE_{v.upper()}", "1") for v in built]
        super().build_extension(ext)

    def _kernel(self, variant: str, source: str) -> list[str]:
        return self.compiler.compile(
            [source],
            output_dir=str(Path(self.build_temp) / variant),
            macros=[("FL_VARIANT", variant), (f"FL_{variant.upper()}", "1")],
            include_dirs=[str(NATIVE)],
            extra_postargs=[*COMMON, *VARIANTS[variant]],
            depends=[str(p) for p in NATIVE.rglob("*.h")],
        )

    def _accepts(self, flags: list[str]) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder) / "probe.c"
            probe.write_text("#if defined(__x86_64__)\n#include <immintrin.h>\n#endif\nint probe(void) { return 0; }\n")
            try:
                self.compiler.compile([str(probe)], output_dir=folder, extra_postargs=list(flags))
            except Exception:
                return False
        return True


class BuildPy(build_py):
    """Ships `plugins.toml` (kept at the root, where people look for it) inside the package."""

    def run(self) -> None:
        """Copies the packaged defaults beside the modules."""
        super().run()
        if not self.editable_mode:
            shutil.copy(ROOT / "plugins.toml", Path(self.build_lib) / "fastllm" / "plugins.toml")


extensions = [
    Extension("fastllm.core._kernels", ["core/_kernels.pyx"], depends=sorted(map(str, Path("core").glob("*.h"))), extra_compile_args=[*COMMON, "-Wno-unused-variable"], **NUMPY),
    Extension("fastllm.core._steps", ["core/_steps.pyx"], extra_compile_args=COMMON, **NUMPY),
    Extension("fastllm.formats._strings", ["formats/_strings.pyx"], extra_compile_args=COMMON),
    Extension("fastllm.text._matcher", ["text/_matcher.pyx"], extra_compile_args=COMMON),
    Extension("fastllm.text._pieces", ["text/_pieces.pyx"], extra_compile_args=COMMON),
    Extension(
        "fastllm.backends.cpu_avx._native",
        ["backends/cpu_avx/_native.pyx", *SHARED],
        depends=[*KERNELS, *(str(p) for p in NATIVE.rglob("*.h"))],
        extra_compile_args=COMMON,
        extra_link_args=["-pthread"],
        libraries=["m"],
        include_dirs=[str(NATIVE), numpy.get_include()],
        define_macros=NUMPY["define_macros"],
    ),
]
extensions = [e for e in extensions if Path(e.sources[0]).exists()]

setup(
    packages=find_packages(),
    package_dir=PACKAGE_DIR,
    include_package_data=False,  # the source distribution holds more than the wheel
    package_data={
        "": ["py.typed", "*.pxd", "*.pyi", "*.json", "*.toml"],  # of every package; setuptools knows no "*" here
        "fastllm": ["scaffold/templates/*/*.in", "web/static/*"],
        "fastllm.backends.gpu": ["kernels/*.fl", "kernels/*.h"],
        "fastllm.conformance": ["calibration/*.json"],
    },
    ext_modules=cythonize(extensions, build_dir="build/c", compiler_directives=DIRECTIVES, show_all_warnings=False),
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
)
