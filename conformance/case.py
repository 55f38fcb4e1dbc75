"""Cases, results, and how a case says that something is wrong.

A case's id is `op/dtypes/layout/shape/variant#rule`. It reproduces alone: its data come from a hash of the suite's seed and the id.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from fastllm.api import FastLLMError

from .numbers import Numbers, seed_of

if TYPE_CHECKING:
    from .session import Session

__all__ = ["DEFAULT_SEED", "LEVELS", "RULES", "STATUSES", "Case", "CaseResult", "Failure", "NotApplicable", "Outcome", "Requirements", "matches"]

DEFAULT_SEED = 1
LEVELS = ("bronze", "silver", "gold")
STATUSES = ("passed", "expected", "n/a", "failed", "not run")
RULES = ("bound", "exact", "guard", "error", "honest", "contract", "prop", "d0", "d1", "d2", "d3", "leak", "model", "serve")


def matches(case_id: str, pattern: str) -> bool:
    """Whether an id fits a pattern. `*` and `?` are wild; brackets are not."""
    return fnmatchcase(case_id, pattern.replace("[", "[[]"))


class Failure(Exception):
    """A case that fails. rule: what was broken (it may be another than the case is about, a guard for instance)."""

    def __init__(self, rule: str, message: str, **facts: Any):
        super().__init__(message)
        self.rule, self.message, self.facts = rule, message, facts


class NotApplicable(Exception):
    """A case that this backend need not pass, with the reason."""


@dataclass(frozen=True)
class Requirements:
    """What a vendor tells the suite (hook `fastllm_requirements`).

    tolerance: case pattern -> (factor up to 4, reason): a looser bound, printed, Bronze only. time_factor: multiplies the time
    limit of a case, for emulated devices (at most 10). emulated: the device is not real, and the report says so.
    """

    tolerance: dict[str, tuple[float, str]] = field(default_factory=dict)
    time_factor: float = 1.0
    emulated: bool = False


@dataclass
class Outcome:
    """What a passed case saw. margin: worst error / bound; native: the backend's own implementation, without a download."""

    margin: float | None = None
    nmse: float | None = None
    index: tuple[int, ...] = ()
    impl: str = ""
    native: bool | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One case. group: cases that run in one worker process; level: of whose required set it is; required: N/A is a failure;
    quick: part of `--quick`; check: runs it, raises Failure or NotApplicable; bin: what calibration groups its margin by."""

    id: str
    op: str
    group: str
    check: Callable[[Session, Numbers], Outcome | None]
    level: str = "bronze"
    required: bool = False
    quick: bool = False
    bin: str = ""
    limit_s: float = 30.0

    @property
    def rule(self) -> str:
        """What the case is about."""
        return self.id.rpartition("#")[2]

    def run(self, session: Session, seed: int = DEFAULT_SEED) -> CaseResult:
        """Runs it and never raises, but for Ctrl-C and exits."""
        start = time.perf_counter()
        result = CaseResult(self.id, self.op, self.group, self.level, self.required, bin=self.bin)
        try:
            outcome = self.check(session, Numbers(seed_of(seed, self.id))) or Outcome()
        except NotApplicable as reason:
            result.status, result.message = "n/a", str(reason)
            if self.required:
                result.status, result.rule = "failed", "honest"
                result.message = f"required for {self.level}, but: {reason}"
        except Failure as failure:
            result.status, result.rule, result.message = "failed", failure.rule, failure.message
            for name in ("margin", "nmse", "index", "impl", "native"):
                if name in failure.facts:
                    setattr(result, name, failure.facts[name])
        except Exception as error:
            result.status, result.rule = "failed", "error"
            result.message = f"{type(error).__name__}: {error}"
            if isinstance(error, FastLLMError) and error.why:
                result.message += f" ({error.why})"
        else:
            result.status = "passed"
            result.margin, result.nmse, result.index = outcome.margin, outcome.nmse, outcome.index
            result.impl, result.native, result.facts = outcome.impl, outcome.native, outcome.facts
        if result.status == "failed":
            session.reset()
        result.time_s = time.perf_counter() - start
        return result


@dataclass
class CaseResult:
    """status: passed | failed | n/a | expected (failed, as listed) | not run. rule: what broke, of a failed case."""

    id: str
    op: str
    group: str
    level: str
    required: bool = False
    status: str = "not run"
    rule: str = ""
    message: str = ""
    impl: str = ""
    native: bool | None = None
    margin: float | None = None
    nmse: float | None = None
    index: tuple[int, ...] = ()
    time_s: float = 0.0
    bin: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data; infinite margins as text, which JSON has no number for."""
        body = asdict(self)
        for name in ("margin", "nmse"):
            if body[name] is not None and not abs(body[name]) < float("inf"):
                body[name] = "inf"
        body["index"] = list(self.index)
        return body

    @staticmethod
    def from_dict(body: dict[str, Any]) -> CaseResult:
        """The reverse of `as_dict`. Raises TypeError or ValueError for something else."""
        known = {f.name for f in fields(CaseResult)}
        if not isinstance(body, dict) or not {"id", "op", "group", "level", "status"} <= set(body) <= known:
            raise ValueError(f"not the result of a case: {body!s:.80}")
        values = dict(body)
        for name in ("margin", "nmse"):
            if values.get(name) is not None:
                values[name] = float(values[name])
        values["index"] = tuple(values.get("index", ()))
        return CaseResult(**values)
