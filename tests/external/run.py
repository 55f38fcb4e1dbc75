"""Runs the suites of other projects against our server.

    python tests/external/run.py [openai] [anthropic] [llama.cpp] [--bounded] [-k EXPRESSION]

Fails if a case fails that is not excluded, if one that is excluded passes, if an exclusion fits no case, and if any case, also an excluded
one, gets an answer of 500 or above (501 apart: a route is switched off). Where the package index cannot be reached, a suite is skipped with the reason; where it no longer has
a suite, too, but with CI=true that is a failure. `make external` runs all, and CI the bounded part: docs/server.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from model import make_model  # noqa: E402
from suites import CACHE, SUITES, NotFetched, Suite, environment, fetch  # noqa: E402

NAMES = ("gpt-6-astra", "claude-opus-4-6", "model_id")
"""Models that the clients' tests ask for by name."""
LIMIT_S = 1500  # of one suite
CASE_S = 60


@contextmanager
def served(model: Path, options: tuple[str, ...], faults: list[str]) -> Iterator[str]:
    """Our server on a free port: its address. faults: at the end, the lines of its log about answers of 500 and above."""
    names = [part for name in NAMES for part in ("--model-name", name)]
    command = [sys.executable, "-m", "fastllm", "server", str(model), "--port", "0", "-t", "1", "--ctx", "4096", "--max-tokens", "64", *names]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen([*command, *options, "--offline"], stdout=subprocess.PIPE, stderr=log, text=True, stdin=subprocess.DEVNULL) as server,
    ):
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            if not url:
                log.seek(0)
                raise SystemExit(f"the server did not start: {log.read()[-2000:]}")
            yield url
        finally:
            server.terminate()
            code = server.wait(60)
            log.seek(0)
            faults += [line.strip() for line in log if re.search(r" status=5(?!01)\d\d\b", line)]
        if code:
            raise SystemExit(f"the server ended with {code}")


@contextmanager
def forking(path: Path, model: Path, faults: list[str]) -> Iterator[str]:
    """The process that forks servers for llama.cpp's suite: its socket. faults: as of `served`."""
    told = path.with_name("faults")
    told.touch()
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    more = {**threads, "TOKENIZERS_PARALLELISM": "false", "FASTLLM_EXTERNAL_MODEL": str(model), "FASTLLM_EXTERNAL_FAULTS": str(told), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen([sys.executable, str(HERE / "zygote.py"), str(path)], stdout=subprocess.PIPE, env={**os.environ, **more})
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SystemExit("the adapter of llama.cpp's suite did not start")
        yield str(path)
    finally:
        process.kill()
        process.wait()
        faults += told.read_text().splitlines()


def run(suite: Suite, model: Path, python: Path, expression: str, bounded: bool, verbose: bool) -> bool:
    """One suite; True if all is as it should be."""
    root = fetch(suite) / suite.root
    excluded = HERE / f"{suite.name}.toml"
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        paths = os.pathsep.join((str(root), str(HERE)))
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "OPENAI", "ANTHROPIC", "LLAMA", "FASTLLM"))}
        more = {"FASTLLM_EXTERNAL": str(excluded), "FASTLLM_EXTERNAL_REPORT": str(report), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "external_plugin", "-o", "addopts=", "-o", "filterwarnings=default"]
        command += ["--tb=short" if verbose else "--tb=no", "--show-capture=no", "-rN", f"--timeout={CASE_S}", *suite.files]
        expression = expression or (suite.bounded if bounded else "")
        command += ["-k", expression] if expression else []
        start = time.monotonic()
        if suite.name == "llama.cpp":
            more |= {"LLAMA_SERVER_BIN_PATH": str(HERE / "llama-server"), "FASTLLM_PYTHON": sys.executable, "PORT": str(_free_port())}
            with forking(Path(scratch) / "zygote", model, faults) as more["FASTLLM_ZYGOTE"]:
                code = subprocess.run(command, cwd=root, env={**plain, **more}, timeout=LIMIT_S, check=False).returncode
        else:
            with served(model, suite.server, faults) as url:
                more["TEST_API_BASE_URL"] = f"{url}/v1" if suite.package == "openai" else url
                code = subprocess.run(command, cwd=root, env={**plain, **more}, timeout=LIMIT_S, check=False).returncode
        if not report.exists():
            print(f"{suite.name}: pytest ended with {code}, without a report")
            return False
        found = json.loads(report.read_text())
    counts = ", ".join(f"{number} {name}" for name, number in found["counts"].items() if number)
    print(f"{suite.name} ({suite.package} {suite.version}): {counts}; {time.monotonic() - start:.0f} s")
    for failed in found["failed"]:
        print(f"  FAILED {failed}")
    for line in faults:
        print(f"  FAILED the server answered: {line}")
    return code == 0 and not found["failed"] and not faults


def missing(what: str, error: NotFetched) -> bool:
    """Says why something is not run; True if that is no failure. A network that is down is nobody's fault; a suite that is lost would
    be green for ever."""
    fine = error.network or os.environ.get("CI", "").lower() not in ("true", "1")
    print(f"{'SKIPPED' if fine else 'FAILED'} {what}: {error}")
    return fine


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Runs what is asked; 1 if something is not as it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; none: all")
    parser.add_argument("--bounded", action="store_true", help="the part that CI runs")
    parser.add_argument("-k", default="", help="pytest's expression, for a part")
    parser.add_argument("-v", action="store_true", help="with tracebacks")
    asked = parser.parse_args()
    if unknown := [name for name in asked.suites if name not in SUITES]:
        parser.error(f"no suite {', '.join(unknown)}")
    good = True
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        python = environment()
    except NotFetched as error:
        return 0 if missing("all suites", error) else 1
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "tiny")
        for name in asked.suites or SUITES:
            try:
                good &= run(SUITES[name], model, python, asked.k, asked.bounded, asked.v)
            except NotFetched as error:
                good &= missing(name, error)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
