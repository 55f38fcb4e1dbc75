"""AMX kernels of cpu_avx on machines without AMX: in emulation of its instructions, and what is built for real.

The bits of every format in emulation are tested in test_cpu_linear.py; here: row independence, the self-test that guards the variant, and
the instructions in the object code.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fastllm.api import UsageError
from fastllm.backends.cpu_avx import _native, isa, pack
from tests.backends.test_cpu_linear import NATIVE, Case, _Acts, _Ops, _Target, _Weight, same_bits

COMPILER = shutil.which("cc") or shutil.which("gcc")
FLAGS = ["-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-psabi", f"-I{NATIVE}"]
AMX = "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16".split()
AGREE, DIFFER, CRASHED = 0, 1, 2

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler to build emulated kernels with"),
    pytest.mark.skipif(not (NATIVE / "kernels" / "tiles.h").exists(), reason="the sources of the kernels are not installed here"),
]


def objects(folder: Path, variant: str, *flags: str) -> list[str]:
    """Object files of the linear kernels of an emulated variant, in `folder`."""
    folder.mkdir()
    names = [*sorted(str(p) for p in NATIVE.glob("kernels/linear*.c")), str(NATIVE / "kernels" / "elementwise.c")]
    define = ["-DFL_EMULATE", f"-DFL_VARIANT={variant}", f"-DFL_{variant.upper()}=1"]
    subprocess.run([str(COMPILER), "-O2", "-fPIC", *FLAGS, *define, *flags, "-c", *names], check=True, cwd=folder)
    return [str(p) for p in folder.glob("*.o")]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    """fault -> a library with both emulated variants and the self-test; fault: 0 none, 1 a wrong product, 2 a crash."""
    folder = tmp_path_factory.mktemp("tiles")
    trusted = objects(folder / "avx512", "avx512")
    made: dict[int, ctypes.CDLL] = {}

    def library(fault: int) -> ctypes.CDLL:
        if fault not in made:
            tested = objects(folder / f"amx{fault}", "amx", f"-DFL_TILE_FAULT={fault}")
            target = folder / f"tiles{fault}.so"
            sources = [str(NATIVE / name) for name in ("selftest.c", "pack.c")]
            command = [str(COMPILER), "-O2", "-fPIC", "-shared", *FLAGS, *sources, *trusted, *tested, "-o", str(target), "-lm"]
            subprocess.run(command, check=True)
            made[fault] = ctypes.CDLL(str(target))
        return made[fault]

    return library


def run(ops: _Ops, case: Case, exact: bool = False) -> np.ndarray:
    """y [T, N] of a case by an emulated variant."""
    number = _native.layout_number(case.layout)
    kind = _native.prepare_kind(number, exact, bool(ops.bf16))
    prepared = np.zeros(_native.prepared_bytes(kind, case.T, case.K), np.uint8)
    scratch, y = np.full(_native.linear_scratch() + 64, 0xFF, np.uint8), np.zeros((case.T, case.N), np.float32)
    weight, acts = _Weight(number, case.N, case.K, case.packed.ctypes.data), _Acts(kind, case.T, case.K, prepared.ctypes.data)
    ops.prepare(acts, case.x.ctypes.data, case.K, 0, case.T)
    target = _Target(None, None, None, y.ctypes.data, case.N, case.N, None, -1)
    ops.linear(weight, None, acts, target, 0, (case.N + 31) // 32, scratch.ctypes.data + -scratch.ctypes.data % 64)
    return y


@pytest.mark.parametrize("format", ["q4_0", "q6_k", "int4g128", "int8g64", "bf16"])
def test_a_row_on_tiles_does_not_depend_on_its_company(format: str, build) -> None:
    ops = _Ops.in_dll(build(0), "fl_linear_table_amx")
    case = Case(5, format, 75, 70, 512)
    whole, x = run(ops, case), case.x
    for rows in ([74], [3, 4], list(range(16)), list(range(20, 53)), list(range(43, 75))):
        case.x, case.T = np.ascontiguousarray(x[rows]), len(rows)
        assert same_bits(run(ops, case), np.ascontiguousarray(whole[rows])), rows


@pytest.mark.parametrize("format", pack.LAYOUTS)
def test_tiles_give_the_bits_of_avx512_for_many_rows(format: str, build) -> None:
    case = Case(6, format, 200, 40, 768)
    one, other = (run(_Ops.in_dll(build(0), f"fl_linear_table_{name}"), case) for name in ("amx", "avx512"))
    if format == "bf16":  # another order of sums
        assert np.all(np.abs(one - other) <= 2.0**-20 * (np.abs(case.x) @ np.abs(case.decoded()).T))
    else:
        assert same_bits(one, other)


@pytest.mark.parametrize(("fault", "result"), [(0, AGREE), (1, DIFFER), (2, CRASHED)])
def test_the_self_test_tells_right_from_wrong_from_crashing(fault: int, result: int, build) -> None:
    library = build(fault)
    tables = [ctypes.byref(_Ops.in_dll(library, f"fl_linear_table_{name}")) for name in ("amx", "avx512")]
    assert library.fl_compare_in_child(*tables) == result


def test_the_result_of_the_self_test_is_known_where_nobody_waits_for_children(build) -> None:
    library = build(1)
    tables = [ctypes.byref(_Ops.in_dll(library, f"fl_linear_table_{name}")) for name in ("amx", "avx512")]
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert library.fl_compare_in_child(*tables) == DIFFER
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("wrong", ["nothing", "another width", "pairs", "codes"])
def test_the_self_test_sees_widths_pairs_and_codes(wrong: str, build) -> None:
    library = build(0)
    trusted = _Ops.in_dll(library, "fl_linear_table_avx512")

    def linear(w, up, a, to, strip0, strip1, scratch) -> None:
        trusted.linear(w, up, a, to, strip0, strip1, scratch)
        seen = {"another width": w[0].K % 256 and w[0].K > 256, "pairs": bool(up), "codes": to[0].codes}
        if seen.get(wrong):
            ctypes.c_uint8.from_address((to[0].codes and ctypes.cast(to[0].codes, ctypes.POINTER(_Acts))[0].data) or to[0].y).value ^= 1

    tested = _Ops(trusted.prepare, type(trusted.linear)(linear), trusted.unpack_row, trusted.bf16)
    assert library.fl_compare_kernels(ctypes.byref(tested), ctypes.byref(trusted)) == (AGREE if wrong == "nothing" else DIFFER)


def test_amx_that_fails_its_self_test_is_passed_over_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "its kernels crashed in the self-test at first use"
    monkeypatch.setattr(isa, "variants", lambda: {"baseline": "", "avx2": "", "avx512": "", "amx": why})
    monkeypatch.delenv("FASTLLM_ISA", raising=False)
    assert isa.choose("auto") == "avx512"
    assert isa.distrusted("auto") == f"cpu_avx takes avx512 instead of amx: {why}"
    assert isa.distrusted("avx2") == ""
    with pytest.raises(UsageError, match="crashed in the self-test"):
        isa.choose("amx")
    monkeypatch.setattr(isa, "variants", lambda: {"baseline": "", "amx": "the processor has no AMX (tile, int8, bf16)"})
    assert isa.distrusted("auto") == ""


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump to read object code with")
def test_the_real_build_holds_tile_instructions(tmp_path: Path) -> None:
    accepted = subprocess.run([str(COMPILER), *AMX, "-xc", "-c", "/dev/null", "-o", str(tmp_path / "probe.o")], capture_output=True)
    if accepted.returncode:
        pytest.skip("this compiler does not know AMX")
    flags = [*FLAGS, *AMX, "-DFL_VARIANT=amx", "-DFL_AMX=1"]
    target = tmp_path / "tiles.o"
    subprocess.run([str(COMPILER), "-O1", *flags, "-c", str(NATIVE / "kernels" / "linear_tiles.c"), "-o", str(target)], check=True)
    code = subprocess.run(["objdump", "-d", str(target)], check=True, capture_output=True, text=True).stdout
    for name in ("ldtilecfg", "tileloadd", "tdpbssd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert f"\t{name} " in code or f"\t{name}\n" in code, name
