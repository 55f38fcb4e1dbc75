"""Runs the whole suite on the backends that publish a result: `cpu_avx` in every variant that this machine has (Gold), `opencl_generic` on the
device that is here (Silver). Leaves the reports in docs/conformance, and what they say in the package of the backend. The documents say so as
soon as its sources are others than those that were tested.

    make conformance                                  # all, after every mutant
    python scripts/conformance_reports.py BACKEND …   # these alone
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


def runs() -> dict[str, list[tuple[str, str, list[str]]]]:
    """backend -> (name of the report, level, further options) of each run."""
    variants = [name for name, missing in isa.variants().items() if not missing]
    return {
        "cpu_avx": [(f"cpu_avx-{v}", "gold", ["--backend-opt", f"isa={v}"]) for v in variants],
        "opencl_generic": [("opencl_generic", "silver", [])],
    }


def main(wanted: list[str]) -> int:
    """The number of runs that do not reach their level. wanted: backends, [] for all."""
    failed, known = 0, runs()
    if unknown := set(wanted) - set(known):
        sys.exit(f"{', '.join(sorted(unknown))}: no report of it is published here; there are {', '.join(known)}")
    for backend in wanted or known:
        reports = []
        for name, level, options in known[backend]:
            folder = f"build/conformance/{name}"
            failed += run("run", "--backend", backend, *options, "--level", level, "--report-dir", folder)
            target = ROOT / "docs" / "conformance" / name
            target.mkdir(parents=True, exist_ok=True)
            for file in KEPT:
                shutil.copy(ROOT / folder / file, target / file)
            reports.append(f"{folder}/conformance.json")
        failed += run("publish", *reports, "--into", f"backends/{backend}")
    subprocess.run([sys.executable, "scripts/make_docs.py"], cwd=ROOT, check=True)
    return failed


def run(*arguments: str) -> bool:
    """Whether a conformance command failed."""
    command = ["fastllm", "conformance", *arguments]
    print(" ".join(command), flush=True)
    return bool(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
