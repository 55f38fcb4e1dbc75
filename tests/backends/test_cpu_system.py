"""What cpu_avx does with the machine: threads and quotas, instruction sets, memory, forks, and its plug-in."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from fastllm.api import (
    API_VERSION,
    CATALOGUE,
    HostTensor,
    KVSpec,
    No,
    OpQuery,
    OutOfMemory,
    Ready,
    ShapeError,
    Stream,
    Tensor,
    UsageError,
    Yes,
)
from fastllm.backends.cpu_avx import isa, plugin
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.backends.cpu_avx.threads import choose_threads, physical_cores
from fastllm.core.cgroup import throttled_periods


def machine(root, siblings, groups="0::/\n", files=()):
    """A made-up file system: siblings: CPU -> list text; files: path -> text."""
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, text in dict(files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


SMT = {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}


def test_hardware_threads_of_a_core_count_once_and_the_mask_is_obeyed(tmp_path):
    root = machine(tmp_path, SMT)
    assert physical_cores(range(8), root) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert physical_cores([1, 5, 6], root) == ((1, 5), (6,))
    assert choose_threads(0, root=root, allowed=range(8)).count == 4
    choice = choose_threads(0, root=root, allowed=[1, 5, 6])
    assert (choice.count, choice.cores) == (2, ((1, 5), (6,)))
    assert choose_threads(0, pin=False, root=root, allowed=range(8)).cores is None


@pytest.mark.parametrize(
    ("line", "count"),
    [("150000 100000", 1), ("200000 100000", 2), ("50000 100000", 1), ("max 100000", 4), ("900000 100000", 4)],
)
def test_a_quota_of_our_group_or_a_parent_limits_the_threads(tmp_path, line, count):
    files = {"sys/fs/cgroup/a/cpu.max": line, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}
    root = machine(tmp_path, SMT, "0::/a/b\n", files)
    choice = choose_threads(0, root=root, allowed=range(8))
    assert choice.count == count
    assert ("quota of" in choice.reason) == (line[:3] != "max")
    assert (choice.cores is None) == (count < 4)


def test_a_quota_of_the_first_version_of_control_groups(tmp_path):
    files = {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "250000", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}
    assert choose_threads(0, root=machine(tmp_path, SMT, "4:cpu,cpuacct:/x\n", files), allowed=range(8)).count == 2


def test_periods_that_a_quota_stopped_are_counted_where_most_were(tmp_path):
    files = {"sys/fs/cgroup/a/cpu.stat": "nr_periods 9\nnr_throttled 4\nthrottled_usec 7", "sys/fs/cgroup/a/b/cpu.stat": "nr_throttled 1"}
    assert throttled_periods(machine(tmp_path / "two", SMT, "0::/a/b\n", files)) == 4
    files = {"sys/fs/cgroup/cpu/x/cpu.stat": "nr_throttled 3", "sys/fs/cgroup/cpu/cpu.stat": "nr_throttled many"}
    assert throttled_periods(machine(tmp_path / "one", SMT, "4:cpu,cpuacct:/x\n", files)) == 3
    assert throttled_periods(tmp_path / "nothing") == 0


def test_an_asked_count_is_obeyed_and_warned_about(tmp_path):
    root = machine(tmp_path, SMT, "0::/\n", {"sys/fs/cgroup/cpu.max": "200000 100000"})
    choice = choose_threads(6, root=root, allowed=range(8))
    assert choice.count == 6
    assert "quota is 2 cores" in choice.warning
    assert choice.cores is None
    assert not choose_threads(2, root=root, allowed=range(8)).warning
    assert "only 1 CPUs" in choose_threads(2, root=tmp_path / "nothing", allowed=[3]).warning


def test_nothing_readable_still_gives_a_thread(tmp_path):
    assert choose_threads(0, root=tmp_path, allowed=[5]).count == 1


def test_an_instruction_set_that_cannot_run_is_an_error_not_a_crash(monkeypatch):
    known = isa.variants()
    assert known["baseline"] == ""
    for name, why in known.items():
        monkeypatch.setenv("FASTLLM_ISA", name)
        if why:
            with pytest.raises(UsageError, match="cannot run here"):
                CpuBackend(threads=1)
            with pytest.raises(UsageError, match="cannot run here"):
                CpuBackend(threads=1, isa=name)
        else:
            with CpuBackend(threads=1) as cpu:
                assert cpu.isa == name
    monkeypatch.setenv("FASTLLM_ISA", "mmx")
    with pytest.raises(UsageError, match="baseline, avx2"):
        CpuBackend(threads=1)


def test_the_plugin_says_what_it_is_without_loading_native_code():
    (spec,) = plugin.fastllm_backends()
    assert (spec.name, spec.api_version, spec.opset) == ("cpu_avx", API_VERSION, 1)
    ready = plugin.fastllm_probe("cpu_avx")
    assert isinstance(ready, Ready)
    assert set(plugin.fastllm_environment("cpu_avx")) >= {"cpu", "isa", "threads", "isa avx512"}
    code = "import sys, fastllm.backends.cpu_avx.plugin; print([m for m in sys.modules if m.endswith('_native')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    with plugin.fastllm_open_backend("cpu_avx", "0", {"threads": 1}) as cpu:
        assert cpu.threads == 1
    for bad in ({"threads": -1}, {"act": "int4"}, {"kv_dtype": "f8"}):
        with pytest.raises(UsageError):
            plugin.fastllm_open_backend("cpu_avx", "0", bad)


def test_memory_is_zeroed_counted_and_given_back():
    with CpuBackend(threads=2) as cpu:
        before = cpu.memory().used
        big = cpu.alloc(5 << 20, "weights")
        assert big.handle % (2 << 20) == 0
        assert cpu.memory().used == before + (5 << 20)
        data = np.zeros(5 << 20, np.uint8)
        data[:] = 7
        cpu.download(memoryview(data), big, 0, Stream())
        assert not data.any()
        cpu.upload(big, 100, memoryview(b"abc"), Stream())
        cpu.copy(big, 4000, big, 100, 3, Stream())
        back = bytearray(3)
        cpu.download(memoryview(back), big, 4000, Stream())
        assert back == b"abc"
        for offset, size in ((-1, 2), (5 << 20, 1), ((5 << 20) - 1, 2)):
            with pytest.raises(ShapeError):
                cpu.upload(big, offset, memoryview(bytes(size)), Stream())
        big.close()
        big.close()
        assert cpu.memory().used == before
        with pytest.raises(ValueError, match="closed"):
            cpu.upload(big, 0, memoryview(b"a"), Stream())
        with pytest.raises(OutOfMemory) as caught:
            cpu.alloc(1 << 60, "kv")
        assert caught.value.fields["requested"] == 1 << 60
        cpu.alloc(0, "scratch").close()


def test_read_only_host_memory_refuses_uploads():
    with CpuBackend(threads=1) as cpu:
        view = np.zeros(64, np.uint8)
        view.flags.writeable = False
        assert cpu.wrap_host(view, readonly=False) is None
        buffer = cpu.wrap_host(view, readonly=True)
        with pytest.raises(ShapeError, match="read-only"):
            cpu.upload(buffer, 0, memoryview(b"a"), Stream())
        assert cpu.wrap_host(np.zeros((4, 4), np.uint8)[:, :2], readonly=True) is None


def test_a_weight_that_is_not_what_its_layout_says_is_refused():
    with CpuBackend(threads=2) as cpu:
        layout = cpu.pack_layout((40, 64), "q8_0", frozenset({"linear"}))
        buffer = cpu.alloc(layout.nbytes, "weights")
        short = HostTensor("w", (40, 64), "q8_0", np.zeros(40 * 68 - 1, np.uint8))
        other = HostTensor("w", (40, 64), "q4_0", np.zeros(40 * 36, np.uint8))
        for bad in (short, other):
            with pytest.raises(ShapeError):
                cpu.pack_weight(bad, layout, buffer, 0)
        with pytest.raises(ShapeError):
            cpu.pack_weight(HostTensor("w", (40, 64), "q8_0", np.zeros(40 * 68, np.uint8)), layout, buffer, 64)


def test_packing_gives_the_same_bytes_for_any_number_of_threads():
    data = np.random.default_rng(1).integers(0, 120, 200 * 68).astype(np.uint8)
    found = []
    for threads in (1, 2, 3):
        with CpuBackend(threads=threads, pin=False) as cpu:
            layout = cpu.pack_layout((200, 64), "q8_0", frozenset({"linear"}))
            buffer = cpu.alloc(layout.nbytes, "weights")
            cpu.pack_weight(HostTensor("w", (200, 64), "q8_0", data), layout, buffer, 0)
            raw = bytearray(layout.nbytes)
            cpu.download(memoryview(raw), buffer, 0, Stream())
            found.append(bytes(raw))
    assert found[0] == found[1] == found[2]


def test_unknown_ops_dtypes_and_attributes_get_a_no():
    with CpuBackend(threads=1) as cpu:
        f32 = ("f32",)
        for query in (
            OpQuery("fly", f32),
            OpQuery("softmax", f32, attrs={"temperature": 1}),
            OpQuery("act_mul", f32, attrs={"kind": "swish"}),
            OpQuery("softmax", ("f16",)),
            OpQuery("linear", ("f32", "q9_9", None), (("T", 32), (4, 32), None)),
            OpQuery("softmax", f32, (("T", 2, 3, 4),)),
            OpQuery("attention", ("f32", "kv"), (("T", 2, 5000), ()), attrs={"scale": 1.0}),
            OpQuery("sample", f32),
        ):
            answer = cpu.supports(query)
            assert isinstance(answer, No), query
            assert answer.reason
        answer = cpu.supports(OpQuery("linear", ("f32", "q4_0", None), (("T", 64), (4, 64), None)))
        assert isinstance(answer, Yes)
        assert answer.act == "q8_g32"
        for op, shapes, reason in (
            ("short_conv", ((), ("T", 8), (8, 65)), "65 taps; the kernel takes 64 at most"),
            ("delta_rule", ((), ("T", 1, 1025)), "keys of 1025 elements; the kernel takes 1024 at most"),
        ):
            assert cpu.supports(OpQuery(op, ("slot", *["f32"] * (len(shapes) - 1)), shapes)) == No(reason)
        assert set(cpu.ops()) == set(CATALOGUE) - {"sample"}


def test_a_forked_child_gets_an_error_instead_of_waiting_for_ever():
    code = """
import os, sys, numpy as np
from fastllm.api import EngineError, Stream, Tensor
from fastllm.backends.cpu_avx.backend import CpuBackend
cpu = CpuBackend(threads=2)
x = np.ones((4, 8), np.float32)
t = Tensor(cpu.wrap_host(x.reshape(-1).view(np.uint8), readonly=False), 0, (4, 8), "f32")
call = lambda: cpu.ops()["add"](t, t, out=t, stream=Stream(), ws=None)
call()
child = os.fork()
if child == 0:
    try:
        call()
    except EngineError as error:
        cpu.close()
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
call()
assert x[0, 0] == 4
cpu.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity masks on this system")
def test_the_callers_affinity_is_its_own_again_after_every_run():
    before = os.sched_getaffinity(0)
    with CpuBackend(threads=0) as cpu:
        x = np.ones((4, 8), np.float32)
        t = Tensor(cpu.wrap_host(x.reshape(-1).view(np.uint8), readonly=False), 0, (4, 8), "f32")
        cpu.ops()["add"](t, t, out=t, stream=Stream(), ws=None)
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are watched through /proc")
def test_idle_threads_fall_asleep():
    def workers():
        return {int(t) for t in os.listdir("/proc/self/task")}

    def asleep(thread):
        with open(f"/proc/self/task/{thread}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "S"

    before = workers()
    with CpuBackend(threads=4, pin=False) as cpu:
        made = workers() - before
        assert len(made) == 3
        cpu.read_bandwidth(1 << 20)
        while not all(asleep(thread) for thread in made):
            pass  # ends when they sleep; the test's own time limit catches threads that never do
    assert not (workers() & made)


def test_bandwidth_is_a_positive_number_and_cache_blocks_have_sizes():
    with CpuBackend(threads=2) as cpu:
        assert cpu.read_bandwidth(2 << 20) > 1e8
        assert cpu.kv_block_bytes(KVSpec(3, 64, 64), 64) == 3 * 64 * 128 * 2 + 64
        assert cpu.kv_block_bytes(KVSpec(1, 576, 0), 64) == 64 * 576 * 2 + 64
