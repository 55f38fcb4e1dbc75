"""The worker: runs cases in a process of its own and prints each result as a line of JSON.

    python -m fastllm.conformance.worker            a job (`runner.Job`) on stdin
    python -m fastllm.conformance.worker --digests  a target on stdin: hashes of results, for D1

What the backend or its driver prints goes to stderr.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import IO, Any

from .case import Case, CaseResult, Requirements
from .session import Session, Target

__all__ = ["main", "requirements_from"]


def requirements_from(body: dict[str, Any]) -> Requirements:
    """The reverse of `dataclasses.asdict`."""
    tolerance = {k: (float(v[0]), str(v[1])) for k, v in body.get("tolerance", {}).items()}
    return Requirements(tolerance, body.get("time_factor", 1.0), body.get("emulated", False))


def main() -> int:
    """Runs the job; exit status 0 whatever the cases say."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    body = json.loads(sys.stdin.read())
    if "--digests" in sys.argv[1:]:
        from .suite.determinism import digests

        with Session(Target.from_dict(body)) as session:
            answer.write(json.dumps(digests(session.bench)) + "\n")
        return 0
    from .perf_cases import perf_cases
    from .runner import cases_for
    from .suite.soak import named_soak

    target = Target.from_dict(body["target"])
    known = {**cases_for(target, body["seed"]), **perf_cases(), **named_soak(body["ids"])}
    with Session(target, requirements_from(body["requirements"])) as session:
        for case_id in body["ids"]:
            _say(answer, {"start": case_id})
            result = _run(known[case_id], session, body["seed"])
            if result.status == "failed" and body.get("dump"):
                _dump(body["dump"], case_id, session)
            _say(answer, {"result": result.as_dict()})
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # threads and exit handlers of a driver have no say any more


def _run(case: Case, session: Session, seed: int) -> CaseResult:
    return case.run(session, seed)


def _say(answer: IO[str], message: dict[str, Any]) -> None:
    answer.write(json.dumps(message, default=str) + "\n")
    answer.flush()


def _dump(folder: str, case_id: str, session: Session) -> None:
    """Operands and results of the last op that ran, as NAME.npz."""
    import re
    from pathlib import Path

    import numpy as np

    Path(folder).mkdir(parents=True, exist_ok=True)
    np.savez(Path(folder) / (re.sub(r"[^\w.-]+", "_", case_id) + ".npz"), **session.last)


if __name__ == "__main__":
    sys.exit(main())
