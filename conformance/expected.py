"""Expected failures: `conformance.toml` of a vendor's package, strict in both directions.

    [[expected]]
    id = "attention/*/window16#bound"   # a pattern
    class = "unsupported"               # unsupported, bug, future or flaky
    reason = "windows are not written yet"
    issue = "https://…"                 # may be left out
    until = "0.4"                       # version of the vendor's package from which on it must pass

`[[floor]]` entries of the same file are read by `perf`, `sources` by `sources`. An entry that matches no case, one whose cases all pass, and one whose `until` is reached are failures themselves.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastllm.api import UsageError

from .case import CaseResult, matches
from .levels import NEVER_EXPECTED

__all__ = ["ExpectedFailure", "apply_expected", "read_expected"]

CLASSES = ("unsupported", "bug", "future", "flaky")
VERSION = re.compile(r"\d+(\.\d+)*\S*")


@dataclass(frozen=True)
class ExpectedFailure:
    """One entry; kind is its `class`."""

    id: str
    kind: str
    reason: str
    issue: str = ""
    until: str = ""


def read_expected(path: str | Path) -> list[ExpectedFailure]:
    """The entries of a file. Raises UsageError naming what is wrong with it."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", who=str(path), fix="name an existing conformance.toml") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", who=str(path), fix="see https://toml.io") from None
    unknown = set(document) - {"expected", "floor", "sources"}
    entries = document.get("expected", [])
    if unknown or not isinstance(entries, list):
        raise UsageError(f"{path} may hold sources, [[expected]] and [[floor]] entries only", who=str(path), fix="write each as [[expected]] or [[floor]]")
    found = []
    for number, entry in enumerate(entries, 1):
        keys = {"id", "class", "reason", "issue", "until"}
        where = f"{path}, entry {number}"
        odd = sorted(set(entry) - keys) or sorted(k for k, v in entry.items() if not isinstance(v, str)) if isinstance(entry, dict) else ["the entry"]
        if odd:
            raise UsageError(f"{where}: {', '.join(odd)} cannot be; it may have the texts {', '.join(sorted(keys))}", who=str(path))
        missing = [key for key in ("id", "reason", "class") if not entry.get(key)]
        if missing or entry["class"] not in CLASSES:
            why = f"{' and '.join(missing)} missing" if missing else f"class is '{entry['class']}'"
            raise UsageError(f"{where}: {why}; id, reason and class ({', '.join(CLASSES)}) are needed", who=str(path))
        if entry.get("until") and not VERSION.fullmatch(entry["until"]):
            raise UsageError(f"{where}: until is '{entry['until']}'; it must be a version of the package, such as 0.4", who=str(path))
        found.append(ExpectedFailure(entry["id"], entry["class"], entry["reason"], entry.get("issue", ""), entry.get("until", "")))
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:4])


def apply_expected(
    results: Sequence[CaseResult], entries: Sequence[ExpectedFailure], version: str = "", *, whole: bool = True, known: Iterable[str] = (),
) -> list[CaseResult]:  # fmt: skip
    """The results with failures that are listed marked `expected`, and a failed result for every entry that is out of date.

    version: of the vendor's package. known: ids of all cases there are: an entry may be about one that did not run (of a higher level, of another op), and
    must be about one of them. whole: False for a filtered run, in which an entry about cases of the vendor, or without `known` any, may match nothing.
    """
    out, ids = list(results), list(known)
    for entry in entries:
        fits = [r for r in out if matches(r.id, entry.id)]
        complaint = ""
        if not fits and (not any(matches(i, entry.id) for i in ids) if ids and not entry.id.startswith("vendor/") else whole):
            complaint = "it matches no case"
        elif entry.until and version and _version(version) >= _version(entry.until):
            complaint = f"it was expected until {entry.until}; this is {version}"
        elif fits and all(r.status == "passed" for r in fits) and entry.kind != "flaky":
            complaint = "every case that it names passes: take it out"
        if complaint:
            out.append(CaseResult(f"expected/-/-/{entry.id}/entry#honest", "expected", "expected", "bronze", True, "failed", "honest", f"expected failure '{entry.id}': {complaint}"))
            continue
        for result in fits:
            if result.status == "failed" and result.rule in NEVER_EXPECTED:
                result.message += "; wrong numbers, broken guards and D2 are never expected failures: answer No instead"
            elif result.status == "failed":
                result.status, result.message = "expected", f"{entry.kind}: {entry.reason} ({result.message})"
    return out
