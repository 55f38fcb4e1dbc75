"""Loaded into the pytest of a suite: marks what is excluded, loosens what only the suite's own model could give, and counts.

An excluded case still runs, and one that passes is a failure: then its exclusion is wrong. Only cases that cannot fail quickly (they
would download, or wait) are left out. The runner passes the list in FASTLLM_EXTERNAL, and reads the counts from FASTLLM_EXTERNAL_REPORT.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

REASONS: list[tuple[re.Pattern[str], dict]] = []
RULES: dict = {}
COUNTS = {"passed": 0, "failed": 0, "excluded": 0, "not run": 0, "loosened": 0}
FAILED: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Reads the list."""
    RULES.update(tomllib.loads(Path(os.environ["FASTLLM_EXTERNAL"]).read_text()))
    REASONS.extend((re.compile(entry["cases"]), entry) for entry in RULES.get("excluded", ()))


class AnyCount(int):
    """A number of tokens, where the suite names that of its own model's tokenizer."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and not isinstance(other, bool) and other >= 0

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the excluded, and loosens."""
    used: set[int] = set()
    counts = set(RULES.get("loosened", {}).get("counts", ()))
    kept = []
    for item in items:
        at = next((i for i, (pattern, _) in enumerate(REASONS) if pattern.search(item.nodeid)), None)
        callspec = getattr(item, "callspec", None)
        touched = counts & set(callspec.params) if callspec is not None else set()
        for name in touched:
            callspec.params[name] = AnyCount(callspec.params[name])
        if at is None:
            COUNTS["loosened"] += bool(touched)
            kept.append(item)
            continue
        used.add(at)
        entry = REASONS[at][1]
        if entry.get("run", True):
            item.add_marker(pytest.mark.xfail(reason=entry["reason"], strict=True))
            kept.append(item)
        else:
            COUNTS["not run"] += 1
    items[:] = kept
    unused = [pattern.pattern for i, (pattern, _) in enumerate(REASONS) if i not in used]
    if unused and not config.getoption("keyword") and not os.environ.get("FASTLLM_EXTERNAL_PART"):
        raise pytest.UsageError(f"exclusions that fit no case: {unused}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Words that only the suite's own model says are any words."""
    words = set(RULES.get("loosened", {}).get("words", ()))
    if words:
        import utils  # of the suite

        strict = utils.match_regex
        utils.match_regex = lambda regex, text: isinstance(text, str) and len(text) > 0 if regex in words else strict(regex, text)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Counts each case once."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        if report.outcome == "passed":
            COUNTS["passed"] += 1
        elif hasattr(report, "wasxfail"):
            COUNTS["excluded"] += 1
        elif report.outcome == "skipped":
            COUNTS["not run"] += 1
        else:
            _failed(report)
    elif report.outcome == "failed":
        _failed(report)


def _failed(report: pytest.TestReport) -> None:
    COUNTS["failed"] += 1
    crash = getattr(report.longrepr, "reprcrash", None)
    why = crash.message if crash is not None else str(report.longrepr)
    FAILED.append(f"{report.nodeid}: {' '.join(why.split())[:400]}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leaves the counts to the runner."""
    Path(os.environ["FASTLLM_EXTERNAL_REPORT"]).write_text(json.dumps({"counts": COUNTS, "failed": FAILED}))
