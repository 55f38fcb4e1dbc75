"""Which suites of others there are, where they come from, and how each is run.

Nothing of them is in this repository: `fetch` takes source distributions from the package index that pip is configured for, keeps them
under build/external, and makes one environment with the clients that they test with.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CACHE", "SUITES", "NotFetched", "Suite", "environment", "fetch"]

CACHE = Path(__file__).resolve().parents[2] / "build" / "external"

LLAMA = "vendor/llama.cpp"
PACKAGES = (
    "openai[aiohttp]==3.57.0",
    "anthropic[aiohttp]==2.14.0",
    "http-snapshot[httpx]==0.1.9",
    "inline-snapshot>=0.28",
    "pytest>=8",
    "pytest-asyncio>=1",
    "pytest-timeout>=2.3",
    "requests>=2.32",
    "wget>=3.2",
    "filelock>=3.16",
    "numpy>=2",
    "prometheus-client>=0.20",
)
"""What the suites import. Both clients are pinned to the version whose tests are run."""


class NotFetched(Exception):
    """The package index does not give what a suite needs. network: because it could not be asked; else it has lost it."""

    def __init__(self, why: str, network: bool):
        super().__init__(why)
        self.network = network


NETWORK = re.compile(
    r"Retrying \(Retry\(|ConnectionError|NewConnectionError|ConnectTimeout|ReadTimeout|timed out|ProxyError|Max retries exceeded|"
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable|HTTP error (5\d\d|429)|\b(5\d\d|429) (Server|Client) Error"
)
"""What pip says where the index could not be asked."""


@dataclass(frozen=True)
class Suite:
    """One suite.

    package, version: of the source distribution. members: folders of it that are unpacked. root: where pytest runs, inside of it. files:
    what is run, relative to root; other files of the suite are about routes that no server but the vendor's has, and the list of exclusions
    says so. bounded: what `--bounded` runs of it, a `-k` expression; "" is all.
    server: options of `fastllm server`.
    """

    name: str
    package: str
    version: str
    members: tuple[str, ...]
    root: str
    files: tuple[str, ...]
    bounded: str = ""
    server: tuple[str, ...] = ()


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "openai",
            "openai",
            "3.57.0",
            ("tests", "pyproject.toml"),
            "",
            (
                "tests/api_resources/test_completions.py",
                "tests/api_resources/test_models.py",
                "tests/api_resources/test_responses.py",
                "tests/api_resources/responses",
                "tests/api_resources/chat/test_completions.py",
            ),
        ),
        Suite(
            "openai-embeddings",
            "openai",
            "3.57.0",
            ("tests", "pyproject.toml"),
            "",
            ("tests/api_resources/test_embeddings.py",),
            server=("--embedding",),
        ),
        Suite(
            "anthropic",
            "anthropic",
            "2.14.0",
            ("tests", "pyproject.toml"),
            "",
            (
                "tests/api_resources/test_messages.py",
                "tests/api_resources/test_models.py",
                "tests/api_resources/beta/test_messages.py",
                "tests/api_resources/beta/test_models.py",
            ),
        ),
        Suite(
            "llama.cpp",
            "llama-cpp-python",
            "0.3.36",
            (f"{LLAMA}/tools/server/tests", f"{LLAMA}/models/templates"),
            f"{LLAMA}/tools/server/tests",
            ("unit",),
            bounded="test_completion.py or test_compat or test_tokenize or test_security or test_chat_completion.py",
        ),
    )
}


def _run(command: list[str], what: str, limit_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise NotFetched(f"{what}: no answer in {limit_s:g} s", network=True) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise NotFetched(f"{what}: {lines[-1] if lines else 'pip failed'}", network=NETWORK.search(done.stderr) is not None)


def fetch(suite: Suite) -> Path:
    """The suite's unpacked folder. Raises NotFetched if the index does not give it."""
    home = CACHE / f"{suite.package}-{suite.version}"
    if not (home / ".complete").exists():
        _unpack(suite, home)
    lost = [name for name in suite.files if not (home / suite.root / name).exists()]
    if lost:
        raise NotFetched(f"{suite.package} {suite.version} has no {', '.join(lost)}", network=False)
    return home


def _unpack(suite: Suite, home: Path) -> None:
    downloads = CACHE / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    found = _archive(downloads, suite)
    if found is None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", "-d", str(downloads)]
        _run([*pip, "--no-binary", suite.package, f"{suite.package}=={suite.version}"], f"{suite.package} {suite.version}", 300)
        found = _archive(downloads, suite)
    if found is None:
        raise NotFetched(f"{suite.package} {suite.version}: the index gave no source distribution", network=False)
    with tarfile.open(found) as archive:
        for member in archive:
            inner = member.name.partition("/")[2]
            if any(inner == wanted or inner.startswith(wanted + "/") for wanted in suite.members):
                member.name = inner
                archive.extract(member, home, filter="data")
    home.mkdir(exist_ok=True)
    (home / ".complete").touch()


def _archive(folder: Path, suite: Suite) -> Path | None:
    name = re.sub(r"[-_.]+", "[-_.]", suite.package)
    pattern = re.compile(rf"{name}-{re.escape(suite.version)}\.tar\.gz", re.IGNORECASE)
    return next((path for path in folder.iterdir() if pattern.fullmatch(path.name)), None)


def environment() -> Path:
    """A Python with the clients and what the suites import, apart from ours. Raises NotFetched."""
    digest = hashlib.sha256("\n".join(PACKAGES).encode()).hexdigest()[:12]
    home = CACHE / f"env-{digest}-{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin" / "python"
    if not (home / ".complete").exists():
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        _run([*pip, *PACKAGES], "the clients' packages", 600)
        (home / ".complete").touch()
    return python
