"""The probes that speeds are measured against: every instruction answers with a rate or a reason. No rate is compared with another, except that
no instruction is a hundred times faster than a multiply-add of 256 bits: that is a loop the compiler took away."""

from __future__ import annotations

import pytest

from fastllm.backends.cpu_avx import _native, isa
from fastllm.backends.cpu_avx.backend import CpuBackend


def test_every_instruction_has_a_rate_or_a_reason():
    with CpuBackend(threads=1) as cpu:
        found = cpu.peaks()
    assert set(found) == {"fma256", "maddubs", "fma512", "vnni", "avx512_bf16", "amx_int8", "amx_bf16"}
    variants = isa.variants()
    for name, dtype, variant, missing in _native.peaks():
        assert found[name][0] == dtype
        assert isinstance(found[name][1], str) == bool(missing)
        if why := variants[_native.isa_names()[variant]]:
            assert found[name][1] == why


@pytest.mark.skipif(bool(isa.variants().get("avx2", "no")), reason="no AVX2 here: nothing to compare with")
def test_no_loop_was_taken_away_by_the_compiler():
    with CpuBackend(threads=1) as cpu:
        rates = {name: rate for name, (_, rate) in cpu.peaks().items() if not isinstance(rate, str)}
    assert all(1e9 < rate < 100 * rates["fma256"] for rate in rates.values())


def test_the_peak_is_that_of_the_variant_in_use():
    with CpuBackend(threads=1, isa="baseline") as cpu:
        assert cpu.peak_ops("int8") is None
        assert cpu.peak_ops("words") is None
    if not isa.variants().get("avx2", "no"):
        with CpuBackend(threads=1, isa="avx2") as cpu:
            assert cpu.peak_ops("int8") > 0
            assert cpu.peak_ops("bf16") is None


def test_a_closed_backend_measures_nothing():
    cpu = CpuBackend(threads=1)
    cpu.close()
    with pytest.raises(ValueError, match="closed"):
        cpu.peaks()
    with pytest.raises(ValueError, match="closed"):
        cpu.peak_ops("int8")
