"""Containers to measure in: control groups, what is seen in them, and the rows that are made. No test looks at how long anything took."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import containers, peers
from benchmarks.containers import Container, container, cpu_group

THREADS = "from fastllm.backends.cpu_avx.threads import choose_threads; print(choose_threads(0).count, choose_threads(0).reason)"


def machine(root, cgroup, **files):
    """A made-up /proc/self/cgroup and control groups (path below /sys/fs/cgroup -> text; a folder where the text is None)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        (path if text is None else path.parent).mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)


def made(root, monkeypatch):
    """(folder, v2, what its files hold) of a group with 1.5 cores; its files, which a kernel removes with it, are removed by hand."""
    monkeypatch.setattr(containers.Path, "rmdir", lambda self: [self.joinpath(n).unlink() for n in os.listdir(self)] and os.rmdir(self))
    with cpu_group(150_000, root) as (group, v2):
        found = {p.name: p.read_text() for p in group.iterdir()}
    assert not group.exists()
    return group.parent, v2, found


def test_a_group_of_v1_lies_below_ours_in_the_hierarchy_of_its_controller(tmp_path, monkeypatch):
    machine(tmp_path, "5:memory:/m\n1:cpu:/a\n0::/\n", **{"cpu/a": None, "cgroup.subtree_control": "hugetlb\n"})
    found = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    assert made(tmp_path, monkeypatch) == (tmp_path / "sys/fs/cgroup/cpu/a", False, found)


@pytest.mark.parametrize("where", ["", "unified"])
def test_a_group_of_v2_needs_a_controller_that_children_may_use(tmp_path, monkeypatch, where):
    machine(tmp_path, "0::/b\n", **{f"{where}/b/cgroup.subtree_control".lstrip("/"): "cpuset cpu\n"})
    assert made(tmp_path, monkeypatch) == (tmp_path / "sys/fs/cgroup" / where / "b", True, {"cpu.max": "150000 100000"})


def test_without_a_controller_there_is_no_group(tmp_path):
    machine(tmp_path, "0::/\n", **{"cgroup.subtree_control": "cpuset\n"})
    with pytest.raises(OSError, match="no control group here has a cpu controller"), cpu_group(150_000, tmp_path):
        pass


@pytest.mark.parametrize("kind", containers.CONTAINERS, ids=lambda k: k.name)
def test_the_engine_takes_one_thread_in_each_container(kind):
    try:
        with container(kind) as prefix:
            done = subprocess.run([*prefix, sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no such container here: {error}")
    if kind.quota and done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no such container here: {done.stderr.strip()}")
    assert done.stdout.startswith("1 "), done.stderr
    assert ("1.5 cores" if kind.quota else "1 CPU in the affinity mask") in done.stdout


WORKER = """
import sys, json
for line in sys.stdin:
    message = json.loads(line)
    if message["do"] == "load":
        threads = message["threads"] or 1
    print(json.dumps({"result": {"threads": threads} if message["do"] == "load" else 1 / SPEEDS[threads]}), flush=True)
"""


def rows(tmp_path, monkeypatch, speeds, kind):
    script = tmp_path / "w.py"
    script.write_text(WORKER.replace("SPEEDS", json.dumps(speeds).replace('"', "")))
    monkeypatch.setattr(containers, "OURS", peers.Peer("", str(script)))
    monkeypatch.setattr(containers, "model_path", lambda name: name)
    return list(containers.container_rows("m", [kind], ["decode:0"], 2, 2))


def test_the_default_stands_beside_the_best_count_set_by_hand(tmp_path, monkeypatch):
    [(options, row)] = rows(tmp_path, monkeypatch, {1: 30.0, 2: 40.0}, Container(cpus=1))
    assert (options, row.value.median, row.limit, row.ratio.median) == ({"threads": 1}, 30, 40, 0.75)
    assert (row.limit_of, row.params["container"]) == ("2 threads by hand", "affinity mask of 1")
    [(_, row)] = rows(tmp_path, monkeypatch, {1: 30.0, 2: 20.0}, Container(cpus=1))
    assert (row.limit_of, row.ratio.median) == ("1 thread by hand", 1)


def test_a_container_that_cannot_be_made_is_a_row_with_the_reason(tmp_path, monkeypatch):
    def refuse(kind):
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(containers, "container", refuse)
    [(options, row)] = rows(tmp_path, monkeypatch, {1: 1.0, 2: 1.0}, Container(quota=1.5))
    assert (options, row.value, row.reason) == ({}, None, "PermissionError: [Errno 13] not yours")
