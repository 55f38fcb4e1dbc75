"""fastllm.conformance: the suite that tells whether a backend is right.

    results = check_backend("acme", level="silver")              # a list of CaseResult; raises nothing

    @parametrize_with_cases("acme", level="bronze")              # one pytest test per case
    def test_conformance(case):
        case.run()

`fastllm conformance run --backend acme` is the same from the command line. A vendor's plug-in may give `Requirements` and its own
`Case`s through hooks. Everything else in this package is private.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .case import DEFAULT_SEED, Case, CaseResult, Failure, NotApplicable, Outcome, Requirements

__all__ = ["Case", "CaseResult", "Failure", "NotApplicable", "Outcome", "Requirements", "check_backend", "parametrize_with_cases"]


def check_backend(
    name: str, level: str = "bronze", *, expected: str | Path | None = None, quick: bool = False, ops: Sequence[str] = (),
    cases: Sequence[str] = (), options: Mapping[str, str] | None = None, plugin_paths: Sequence[str | Path] = (), seed: int = DEFAULT_SEED,
) -> list[CaseResult]:  # fmt: skip
    """Runs the suite on backend NAME[:DEVICE], each group in a process of its own, and returns a result per case.

    level: bronze, silver or gold. expected: a conformance.toml (default: the one in the vendor's package). quick, ops, cases: a part of
    the cases, as patterns. options: `key=value` of the backend. Raises nothing: a backend that does not open is a failed result.
    """
    from .run import RunOptions, check
    from .runner import Selection
    from .session import Target

    target = Target(name, dict(options or {}), plugin_paths=tuple(str(p) for p in plugin_paths))
    return list(check(RunOptions(target, Selection(level, quick, tuple(ops), tuple(cases)), seed, expected=expected)))


def parametrize_with_cases(
    name: str, level: str = "bronze", *, quick: bool = False, ops: Sequence[str] = (), cases: Sequence[str] = (),
    options: Mapping[str, str] | None = None, plugin_paths: Sequence[str | Path] = (), expected: str | Path | None = None, argument: str = "case",
) -> Any:  # fmt: skip
    """A pytest decorator: one test per case, in this process. The test calls `case.run()`, which fails with the case's message, skips
    with its reason where it does not apply, and xfails (strictly) what `expected` lists. Raises UsageError for a selection
    that matches nothing."""
    from .pytest_cases import bound_cases

    return bound_cases(name, level, quick, tuple(ops), tuple(cases), dict(options or {}), tuple(map(str, plugin_paths)), expected, argument)
