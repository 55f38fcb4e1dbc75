"""Does the number of threads follow a container's limits, and what does it cost? Decodes under CPU quotas and affinity masks.

    .venv/bin/python scripts/measure_quota.py MODEL [--quota 1.5] [--quota 1] [--cpus 0] [--repeat 3] [--json FILE]

Each limit is set on a control group of its own (v1 or v2, whichever can be written; needs root) or as an affinity mask, around a new
process. In turns, `fastllm` chooses the threads itself and each number from 1 to the CPUs is set by hand; the ratio is the default's
speed over the best hand-set one. The target is 0.95.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PERIOD_US = 100_000
CHILD = """
import json, sys
from fastllm.bench import Bench
from fastllm.loading import LoadOptions, load_model
values = json.loads(sys.argv[1])
loaded = load_model(values["model"], LoadOptions(threads=values["threads"], ctx=512, max_batch_size=1, offline=True))
bench = Bench(loaded)
bench.decode(0, 8)
tokens = max(8, min(256, int(values["seconds"] / bench.decode(0, 8))))
speed = 1 / bench.decode(0, tokens)
backend = loaded.planned.backends[loaded.backend]
print(json.dumps({"tokens_per_s": speed, "threads": backend.threads, "reason": backend.reason}))
loaded.close()
"""


@contextlib.contextmanager
def quota_group(cores: float | None) -> Iterator[Path | None]:
    """A control group that may use so many cores, removed afterwards; None for no limit. Raises OSError where none can be made."""
    if cores is None:
        yield None
        return
    base = Path("/sys/fs/cgroup")
    name, quota = f"fastllm-quota-{os.getpid()}", int(cores * PERIOD_US)
    reasons = []
    for top in (base, base / "unified", base / "cpu", base / "cpu,cpuacct"):
        group = top / name
        try:
            group.mkdir()
        except OSError as error:
            reasons.append(f"{group}: {error.strerror}")
            continue
        try:
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            elif (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                reasons.append(f"{group}: no cpu controller")
                continue
            yield group
            return
        finally:
            group.rmdir()
    raise OSError("; ".join(reasons))


def run(model: str, threads: int, seconds: float, group: Path | None, cpus: set[int] | None) -> dict[str, Any]:
    """One process under the limits: tokens per second, threads, why so many. Raises RuntimeError with the end of its errors."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        if cpus is not None:
            os.sched_setaffinity(0, cpus)

    values = json.dumps({"model": model, "threads": threads, "seconds": seconds})
    done = subprocess.run([sys.executable, "-c", CHILD, values], capture_output=True, text=True, check=False, preexec_fn=enter)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def measure(model: str, quota: float | None, cpus: set[int] | None, repeat: int, seconds: float) -> dict[str, Any]:
    """Speeds of the default and of every hand-set number, in turns."""
    counts = [0, *range(1, len(os.sched_getaffinity(0)) + 1)]
    speeds: dict[int, list[float]] = {count: [] for count in counts}
    chosen: dict[str, Any] = {}
    with quota_group(quota) as group:
        for _ in range(repeat):
            for count in counts:
                found = run(model, count, seconds, group, cpus)
                speeds[count].append(found["tokens_per_s"])
                chosen = found if count == 0 else chosen
    medians = {count: statistics.median(values) for count, values in speeds.items()}
    best = max(counts[1:], key=lambda count: medians[count])
    return {
        "quota": quota, "cpus": sorted(cpus) if cpus else None, "threads": chosen["threads"], "reason": chosen["reason"], "default": medians[0],
        "by_hand": {str(count): medians[count] for count in counts[1:]}, "best": best, "ratio": medians[0] / medians[best],
    }  # fmt: skip


def main() -> int:
    """The command. 1 if a limit cannot be set or a default is below 0.95 of the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quota", type=float, action="append", default=[], help="cores, may be repeated")
    parser.add_argument("--cpus", action="append", default=[], help="affinity mask as a list such as 0,1, may be repeated")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="about as long decodes each process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    limits: list[tuple[float | None, set[int] | None]] = [(quota, None) for quota in options.quota]
    limits += [(None, {int(cpu) for cpu in text.split(",")}) for text in options.cpus]
    rows = []
    for quota, cpus in limits or [(1.5, None)]:
        try:
            rows.append(measure(options.model, quota, cpus, options.repeat, options.seconds))
        except (OSError, RuntimeError) as error:
            print(f"quota {quota}, cpus {cpus}: not measured: {error}", file=sys.stderr)
            return 1
        row = rows[-1]
        hand = ", ".join(f"{count}: {speed:.1f}" for count, speed in row["by_hand"].items())
        what = f"quota {quota:g}" if quota is not None else f"CPUs {','.join(map(str, row['cpus']))}"
        print(f"{what}: {row['threads']} threads by default, {row['default']:.1f} tok/s; by hand {hand}; ratio to the best {row['ratio']:.2f}  ({row['reason']})")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["ratio"] < 0.95 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
