"""Bakes a backend package in every style and treats it as a stranger's: installed as a wheel next to an installed engine, tested, broken.

    python scripts/check_scaffold.py build/clean-env/bin/python     the environment has fastllm's wheel; run it from outside of the tree

What must hold: it registers; it reaches Bronze with nothing native, or says why its device is not there; its own tests pass; `backend check` finds
nothing; and once its module raises, the message names it, whoever does not need it is not disturbed, and the exit code is that of a broken
plug-in. In the numpy style the vendor then writes `linear`: first with an off-by-one in its last group, and the suite names op, dtypes, shape,
index and bound; then right, and the whole of Bronze says `native 1/N`. The kernel is `linear_kernel` below, which a test of the tree uses, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

STYLES = ("numpy", "cython", "opencl", "cupy")
EXTRAS = {"opencl": "[runtime,test]"}  # cupy's runtime needs a device
WITHOUT_DEVICE = {"cupy"}
BROKEN = 'raise RuntimeError("libacme.so.2 is missing")\n'
EXIT_BROKEN, EXIT_UNAVAILABLE = 3, 4
GROUP = 32
LINEAR = '''

def supports(q):
    """`linear` in f32; the rest is inherited."""
    return Yes("VENDOR.linear") if q.op == "linear" and set(q.dtypes) <= {"f32", None} else None


def functions(backend):
    """The one op of ours, on the device's memory: row by row, in groups of GROUP products."""
    import numpy as np

    def array(t):
        words = t.buffer.handle.bytes[t.offset :]
        dense = [int(np.prod(t.shape[i + 1 :])) for i in range(len(t.shape))]
        return np.lib.stride_tricks.as_strided(words[: len(words) // 4 * 4].view(np.float32), t.shape, [4 * s for s in t.strides or dense])

    def linear(x, weight, bias, *, out, stream, ws):
        if 0 in out.shape:
            return
        rows, matrix, result = array(x), array(weight), array(out)  # [T, K], [N, K], [T, N]
        result[...] = 0
        k = rows.shape[-1]
        for t, row in enumerate(rows):
            for start in range(0, k, GROUP):
                stop = min(start + GROUP, END)
                result[t] += (matrix[:, start:stop] * row[start:stop]).sum(axis=1)
        if bias is not None:
            result += array(bias)

    return {"VENDOR.linear": linear}
'''


def linear_kernel(vendor: str, *, right: bool) -> str:
    """What the vendor adds to `ops.py`: a native `linear`; if it is not right, the last group ends one product early."""
    return LINEAR.replace("VENDOR", vendor).replace("GROUP", str(GROUP)).replace("END", "k" if right else "k - 1")



def run(*command: object, expect: int = 0, folder: Path | None = None) -> str:
    """Runs a command; its output, both streams. Ends the script if the exit code is another."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=folder or "/", env=environment, stdin=subprocess.DEVNULL, check=False
    )
    text = done.stdout + done.stderr
    if done.returncode != expect:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}, not {expect}\n{text[-4000:]}")
    return text


def needs(text: str, *pieces: str) -> None:
    """Ends the script if a piece is not in the text."""
    for piece in pieces:
        if piece not in text:
            sys.exit(f"'{piece}' is missing from:\n{text[-4000:]}")


def check(python: Path, style: str, folder: Path) -> str:
    """One style; returns a line about it."""
    name, command = f"acme_{style}", [python, "-m", "fastllm"]
    run(*command, "backend", "new", name, "--style", style, "--dir", folder)
    package = folder / f"fastllm-backend-acme-{style}"
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", f"{package}{EXTRAS.get(style, '[test]')}")
    if style in WITHOUT_DEVICE:
        needs(run(*command, "backends", "show", name, expect=EXIT_UNAVAILABLE), "unavailable", "pip install")
        needs(run(*command, "run", "--backend", name, "--prompt", "x", expect=EXIT_UNAVAILABLE), name)
        said = "says that its device is not there"
    else:
        needs(run(*command, "backends", "show", name), "ready")
        said = run(*command, "conformance", "run", "--backend", name, "--level", "bronze").strip().splitlines()[0]
        needs(said, "bronze", "native 0/")
        needs(run(*command, "backend", "check", name), "ok     packaging", "ok     quick cases", "native 0/")
    if style == "numpy":
        said += f"; {first_kernel(python, name)}"
    tests = ["tests"] if style == "numpy" else [f"tests/test_{name}.py"]  # the shared suite has run: once through pytest is enough
    run(python, "-m", "pytest", "-q", *tests, folder=package)
    module = run(python, "-c", f"import fastllm_backend_{name}.plugin as p; print(p.__file__)").strip()
    Path(module).write_text(Path(module).read_text(encoding="utf-8") + BROKEN, encoding="utf-8")
    text = run(*command, "run", "--backend", name, "--prompt", "x", expect=EXIT_BROKEN)
    needs(text, f"'{name}'", f"fastllm-backend-acme-{style}", "libacme.so.2 is missing", "plugin.py", "fix: ")
    needs(run(*command, "backends", "list"), "broken", "cpu_avx")
    run(python, "-m", "pip", "--disable-pip-version-check", "uninstall", "-qy", f"fastllm-backend-acme-{style}")
    return f"{style}: {said}"


def first_kernel(python: Path, name: str) -> str:
    """The vendor's Monday: a native `linear` with a fault, then without; returns what the suite says in the end."""
    command = [python, "-m", "fastllm"]
    ops = Path(run(python, "-c", f"import fastllm_backend_{name}.ops as o; print(o.__file__)").strip())
    inherited = ops.read_text(encoding="utf-8")
    ops.write_text(inherited + linear_kernel(name, right=False), encoding="utf-8")
    text = run(*command, "conformance", "run", "--backend", name, "--op", "linear", expect=1)
    needs(text, "failed: linear/f32*f32/row/m", f"{name}.linear: ", "elements are wrong; worst at [", "instead of", "bound ", "(margin ", "no level")
    needs(run(*command, "run", "--backend", name, "--prompt", "x", expect=EXIT_BROKEN), "gives wrong answers", "worst at [")
    ops.write_text(inherited + linear_kernel(name, right=True), encoding="utf-8")
    said = run(*command, "conformance", "run", "--backend", name, "--level", "bronze").strip().splitlines()[0]
    needs(said, "bronze", "native 1/")
    ops.write_text(inherited, encoding="utf-8")
    return f"with a linear of its own: {said}"


def main() -> int:
    """Argument: the Python of an environment with fastllm installed."""
    python = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        for style in STYLES:
            print(check(python, style, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
