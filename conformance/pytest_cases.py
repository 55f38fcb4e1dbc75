"""The pytest side: cases bound to one session, as the parameters of a test. pytest is imported only here."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .case import Case, matches
from .expected import ExpectedFailure, read_expected
from .levels import NEVER_EXPECTED
from .runner import Selection, cases_for, choose
from .session import Session, Target

__all__ = ["BoundCase", "bound_cases"]


@dataclass(frozen=True)
class BoundCase:
    """A case and the session that it runs in."""

    case: Case
    session: Session
    expected: ExpectedFailure | None = None

    def run(self) -> None:
        """Runs it; the outcome is pytest's."""
        import pytest

        result = self.case.run(self.session)
        if result.status == "n/a":
            pytest.skip(result.message)
        if self.expected is not None and result.status == "passed" and self.expected.kind != "flaky":
            pytest.fail(f"{result.id} is expected to fail ({self.expected.reason}), but passes: take it out of conformance.toml", pytrace=False)
        if result.status == "failed":
            text = f"{result.id}\n{result.rule}: {result.message}"
            if self.expected is not None and result.rule not in NEVER_EXPECTED:
                pytest.xfail(f"{self.expected.reason}: {text}")
            pytest.fail(text, pytrace=False)


def bound_cases(
    name: str, level: str, quick: bool, ops: tuple[str, ...], cases: tuple[str, ...], options: dict[str, str], plugin_paths: tuple[str, ...],
    expected: str | Path | None, argument: str,
) -> Any:  # fmt: skip
    """`pytest.mark.parametrize` over the chosen cases; one session for all of them, closed at exit."""
    import pytest

    target = Target(name, options, plugin_paths=plugin_paths)
    chosen = choose(Selection(level, quick, ops, cases), cases_for(target).values())
    entries = read_expected(expected) if expected is not None else []
    session = Session(target)
    atexit.register(session.reset)
    bound = [BoundCase(c, session, next((e for e in entries if matches(c.id, e.id)), None)) for c in chosen]
    return pytest.mark.parametrize(argument, bound, ids=[c.id for c in chosen])
