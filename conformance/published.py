"""Published results: what a backend's package says of the runs that it passed, a few lines for each, in `conformance-reports.json`.

`fastllm conformance publish` writes the file from whole reports, which it verifies first; `fastllm backends list` and the documents read
it. It is the vendor's word: `verify` proves that a report is consistent, not that it is honest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastllm.api import UsageError

from .case import LEVELS
from .files import write_whole

__all__ = ["FILE", "publish", "read_published", "standing_of", "summary"]

FILE = "conformance-reports.json"
COPIED = ("suite", "api", "opset", "engine", "backend", "version", "device", "execution", "options", "date", "command", "sources", "time_s")


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is published of a report. verification: L1 executed on a CPU or emulated, L2 ran on a device."""
    own = report["standing"]
    return {
        **{key: report[key] for key in COPIED}, "level": own["level"], "native": own["native"], "native_of": own["native_of"], "counts": own["counts"],
        "verification": "L2" if report["execution"] == "device" else "L1",
    }  # fmt: skip


def publish(reports: Sequence[str | Path], target: Path) -> list[dict[str, Any]]:
    """Writes the summaries of reports (paths of conformance.json) to a file; returns them.

    Raises UsageError for a report that does not verify, that reached no level, or whose backend is another one's."""
    from .verify import verify  # the whole suite, which listing backends does without

    found = []
    for path in reports:
        wrong = verify(path)
        if wrong:
            raise UsageError(f"{path} does not verify: {wrong[0]}", who=str(path), fix="run the suite again, with --report-dir")
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        if not report["standing"]["level"]:
            raise UsageError(f"{path} reached no level", who=str(path), fix="publish the report of a whole run")
        found.append(summary(report))
    if len({s["backend"].partition(":")[0] for s in found}) > 1:
        raise UsageError("the reports are of several backends", fix="publish one backend at a time, into its own package")
    write_whole({target: json.dumps(found, indent=1) + "\n"})
    return found


def read_published(folder: Path | None) -> list[dict[str, Any]]:
    """The summaries in a package's folder; [] if there are none, or none that can be read."""
    if folder is None:
        return []
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return [s for s in found if {"level", "native", "native_of", "verification", "version"} <= set(s) and s["level"] in LEVELS]
    except (OSError, ValueError, TypeError):
        return []


def standing_of(published: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(native "k/N", level "gold L1") of the weakest of several runs; ("", "") of none."""
    if not published:
        return "", ""
    weakest = min(published, key=lambda s: LEVELS.index(s["level"]))
    fewest = min(published, key=lambda s: s["native"])
    return f"{fewest['native']}/{fewest['native_of']}", f"{weakest['level']} {min(s['verification'] for s in published)}"
