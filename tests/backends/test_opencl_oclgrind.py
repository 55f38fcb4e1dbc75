"""The kernels under Oclgrind, a simulated OpenCL device that checks every access: bounds, data races, divergent barriers.

Shapes are small; each kernel runs once. Its check for uninitialised memory is not used: it does not see what the host writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OCLGRIND = shutil.which("oclgrind")
BENCH = Path(__file__).parent / "opencl_bench.py"

pytest.importorskip("pyopencl")
pytestmark = pytest.mark.skipif(OCLGRIND is None, reason="oclgrind is not installed (apt-get install oclgrind)")


def simulate(tmp_path, *program):
    """Runs python under Oclgrind; returns the process and what Oclgrind logged (it exits with 0 whatever it found)."""
    log = tmp_path / "oclgrind.log"
    env = os.environ | {"OCL_ICD_VENDORS": str(tmp_path), "PYOPENCL_NO_CACHE": "1", "PYOPENCL_BUILD_OPTIONS": "-cl-opt-disable"}
    env["FASTLLM_HOME"] = str(tmp_path / "home")
    command = [OCLGRIND, "--data-races", "--log", str(log), sys.executable, *program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    return done, log.read_text() if log.exists() else ""


@pytest.mark.parametrize("kernels", ["lanes", "vector"])
def test_no_kernel_leaves_its_memory_or_races(kernels, tmp_path):
    done, log = simulate(tmp_path, str(BENCH), kernels)
    assert done.returncode == 0, done.stderr[-2000:]
    assert log == ""


BROKEN = """
import numpy as np, pyopencl as cl
device = cl.get_platforms()[0].get_devices()[0]
context = cl.Context([device])
queue = cl.CommandQueue(context)
buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 64)
program = cl.Program(context, "__kernel void f(__global int *x) { x[get_global_id(0) + 1] = 1; x[0] = get_global_id(0); }").build()
program.f(queue, (16,), (16,), buffer)
queue.finish()
"""


def test_the_detector_is_awake(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    _, log = simulate(tmp_path, str(script))
    assert "Invalid write" in log
    assert "data race" in log
