"""Memory that control groups leave, from a made-up file system."""

from __future__ import annotations

import pytest

from fastllm.core.cgroup import available_memory

MIB = 1 << 20
V2 = ("0::/a", "sys/fs/cgroup/a", "memory.max", "memory.current", ("inactive_file", "active_file", "file_mapped", "file_dirty", "file_writeback"))
V1 = ("4:memory:/a", "sys/fs/cgroup/memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file", "total_mapped_file", "total_dirty", "total_writeback"))


@pytest.mark.parametrize("version", [V2, V1], ids=["v2", "v1"])
@pytest.mark.parametrize(
    ("files", "left"),
    [
        (None, 200),  # no memory.stat: all that is used counts
        ((120, 60, 30, 0, 0), 350),  # pages of files that nobody has mapped come back
        ((10, 10, 50, 0, 0), 200),  # shared memory is mapped and no file's: never less than nothing
        ((120, 60, 30, 40, 5), 305),  # what is still to be written does not go at once
        ((500, 0, 0, 0, 0), 400),  # read between two moments
    ],
)
def test_pages_of_files_that_nobody_has_mapped_are_no_memory_in_use(tmp_path, version, files, left):
    group, folder, limit, usage, names = version
    place = tmp_path / folder
    place.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group + "\n")
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {1 << 20} kB\n")
    (place / limit).write_text(f"{400 * MIB}\n")
    (place / usage).write_text(f"{200 * MIB}\n")
    if files is not None:
        (place / "memory.stat").write_text("".join(f"{n} {size * MIB}\n" for n, size in zip(names, files, strict=True)) + "strange line\n")
    assert available_memory(tmp_path) == left * MIB
