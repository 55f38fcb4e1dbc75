"""Runs the whole suite on `cpu_avx` in every variant that this machine has, leaves the reports in docs/conformance, and what they say in the
package of the backend. The documents say so as soon as its sources are others than those that were tested.

    make conformance
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from fastllm.backends.cpu_avx import isa

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("conformance.md", "badge.svg")
"""What is committed; JSON, JUnit and HTML stay in build/conformance."""


def main() -> int:
    """The number of variants that do not reach Gold."""
    failed, reports = 0, []
    for variant in (name for name, missing in isa.variants().items() if not missing):
        folder = f"build/conformance/cpu_avx-{variant}"
        command = ["fastllm", "conformance", "run", "--backend", "cpu_avx", "--backend-opt", f"isa={variant}", "--level", "gold", "--report-dir", folder]
        print(" ".join(command), flush=True)
        failed += bool(subprocess.run(command, cwd=ROOT, check=False).returncode)
        target = ROOT / "docs" / "conformance" / f"cpu_avx-{variant}"
        target.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            shutil.copy(ROOT / folder / name, target / name)
        reports.append(f"{folder}/conformance.json")
    publish = ["fastllm", "conformance", "publish", *reports, "--into", "backends/cpu_avx"]
    print(" ".join(publish), flush=True)
    failed += bool(subprocess.run(publish, cwd=ROOT, check=False).returncode)
    subprocess.run([sys.executable, "scripts/make_docs.py"], cwd=ROOT, check=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
