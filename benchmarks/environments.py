"""Virtual environments of peers and tools: made on request in a scratch folder, never a dependency of fastllm.

Each is made once; a file in it says what it was made of, and another recipe makes it anew. A recipe that fails raises Unavailable with the
last line of the tool, which becomes a row of the table.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["RECIPES", "WORKERS", "Environment", "Recipe", "Unavailable", "cache_folder", "environment"]

WORKERS = Path(__file__).parent / "workers"
READY = "fastllm-ready.json"


class Unavailable(Exception):
    """A peer that cannot be had, and why."""


@dataclass(frozen=True)
class Recipe:
    """What is installed, in order; each step is the arguments of one `pip install`, all with these environment variables."""

    steps: tuple[tuple[str, ...], ...]
    variables: dict[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Environment:
    """A finished environment. note: which build it is, for the table."""

    name: str
    folder: Path
    note: str = ""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"


def cache_folder() -> Path:
    """Scratch folder for environments, models and builds: FASTLLM_BENCH_CACHE, else `fastllm-bench` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FASTLLM_BENCH_CACHE") or Path(base) / "fastllm-bench")


def _llama_cpp(flags: str, note: str) -> Recipe:
    """llama-cpp-python from its source distribution; the CPU code and the Python API only."""
    cmake = f"{flags} -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_CURL=OFF"
    if shutil.which("ccache"):
        cmake += " -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DGGML_CCACHE=OFF"
    variables = {"CMAKE_ARGS": cmake, "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0)))}
    return Recipe((("--no-binary", "llama-cpp-python", "llama-cpp-python"), ("gguf", "tokenizers")), variables, note)


def _native_llama_cpp() -> Recipe:
    """The best build for this machine. GCC before 13 breaks llama.cpp's AMX code: its `_tile_loadconfig` tells the compiler that 8 of
    the 64 bytes of the tile configuration are read, and the rest is optimised away, so those compilers build without AMX."""
    if not re.search(r"\bamx_tile\b", Path("/proc/cpuinfo").read_text()):
        return _llama_cpp("-DGGML_NATIVE=ON", "built for this processor")
    version = subprocess.run([*os.environ.get("CC", "cc").split(), "-dumpfullversion"], capture_output=True, text=True, check=False).stdout
    if re.match(r"\d+\.\d+\.\d+$", version.strip()) and int(version.split(".")[0]) < 13:
        without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        flags = f"-DGGML_NATIVE=ON -DCMAKE_C_FLAGS='{without}' -DCMAKE_CXX_FLAGS='{without}'"
        return _llama_cpp(flags, f"built for this processor without AMX, which crashes when GCC {version.strip()} builds it")
    return _llama_cpp("-DGGML_NATIVE=ON", "built for this processor with AMX")


AVX2_ONLY = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF"

RECIPES = {
    "llama.cpp": _native_llama_cpp,
    "llama.cpp-avx2": lambda: _llama_cpp(AVX2_ONLY, "built for AVX2"),
    "ik_llama.cpp": lambda: Recipe((("ik-llama-cpp-python",),), note="wheel from the index"),
    "ftllm": lambda: Recipe((("ftllm", "transformers"),), note="wheel from the index"),
    "openvino": lambda: Recipe((("openvino-genai",),), note="wheel from the index"),
    "onnxruntime": lambda: Recipe(
        (("torch==2.13.0",), ("onnxruntime-genai", "transformers", "onnx", "onnx-ir")), note="wheel from the index, model by its own builder"
    ),
    "torch": lambda: Recipe((("torch==2.13.0",), ("transformers",)), note="wheel from the index, transformers' model"),
    "plots": lambda: Recipe((("matplotlib",),)),
}
"""Name of an environment -> how it is made."""


def environment(name: str) -> Environment:
    """The environment, made now if it is missing or of another recipe. Raises Unavailable."""
    recipe = RECIPES[name]()
    folder = cache_folder() / "envs" / name
    made_of = json.dumps(asdict(recipe), sort_keys=True)
    ready = folder / READY
    if not ready.exists() or ready.read_text() != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _call([sys.executable, "-m", "venv", os.fspath(folder)], {}, f"no environment for {name}")
        for step in recipe.steps:
            command = [os.fspath(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", *step]
            _call(command, recipe.variables, f"pip install {' '.join(step)}")
        ready.write_text(made_of)
    return Environment(name, folder, recipe.note)


def _call(command: list[str], variables: dict[str, str], what: str) -> None:
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.split("\n")
        raise Unavailable(f"{what} failed: {(errors[0] if errors else '').strip()[:300] or f'exit code {done.returncode}'}")
