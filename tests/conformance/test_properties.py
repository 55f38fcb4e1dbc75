"""hypothesis looks for sizes that break a property (derandomised: the same sizes in every run). What it finds is to become a line of
EXAMPLES, so that every backend is asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastllm.api import RefBackend
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.conformance.bench import Bench
from fastllm.conformance.case import Failure
from fastllm.conformance.numbers import Numbers
from fastllm.conformance.suite.properties import EXAMPLES, PROPERTIES

small, width, seeds = st.integers(1, 9), st.integers(1, 300), st.integers(0, 1 << 32)
SIZES = {
    "linearity": {"rows": small, "n": st.integers(1, 70), "k": width},
    "split_k": {"rows": small, "n": st.integers(1, 70), "k": st.integers(2, 300), "at": st.integers(0, 1000)},
    "rows_permuted": {"rows": st.integers(1, 40), "width": width, "format": st.sampled_from(["f32", "q4_0", "q8_0"])},
    "softmax_shift": {"rows": small, "width": width, "shift": st.integers(-1000, 1000)},
    "rope_turns": {"half": st.integers(1, 48), "position": st.integers(0, 131071), "distance": st.integers(0, 3000)},
    "paged_is_contiguous": {"length": st.integers(1, 140), "rows": small, "heads": st.integers(1, 3), "block": st.sampled_from([16, 32, 64])},
    "heads_permuted": {"length": st.integers(1, 80), "rows": small, "groups": st.integers(1, 3), "size": st.integers(1, 6)},
    "quantised_twice": {"rows": small, "groups": st.integers(1, 8), "group": st.sampled_from([16, 32, 64, 128])},
}
searched = settings(max_examples=30, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=["ref", "cpu_avx"])
def bench(request):
    with RefBackend() if request.param == "ref" else CpuBackend(threads=2, kv_dtype="f32") as backend:
        yield Bench(backend)


@pytest.mark.parametrize("name", PROPERTIES)
def test_no_sizes_break_a_property(bench, name):
    @searched
    @given(seed=seeds, sizes=st.fixed_dictionaries(SIZES[name]))
    def search(seed, sizes):
        PROPERTIES[name][1](bench, Numbers(seed), **sizes)

    search()


def test_every_property_has_examples_and_is_searched():
    assert set(PROPERTIES) == set(SIZES) == {name for name, _ in EXAMPLES}


class Sloppy(RefBackend):
    """Wrong in what single results hardly show."""

    def ops(self):
        """linear: a row counts a little more the further down it is; softmax: where its first element is large."""
        honest = super().ops()

        def linear(x, weight, bias, *, out, stream, ws):
            honest["ref.linear"](x, weight, bias, out=out, stream=stream, ws=ws)
            rows = self.read(out, stream)
            rows *= 1 + np.arange(len(rows), dtype=np.float32)[:, None] * np.float32(2.0**-20)

        def softmax(x, *, out, stream, ws):
            honest["ref.softmax"](x, out=out, stream=stream, ws=ws)
            self.read(out, stream)[...] *= 1 + (self.read(x, stream)[..., :1] > 5) * 2.0**-12

        return {**honest, "ref.linear": linear, "ref.softmax": softmax}


@pytest.mark.parametrize(("name", "sizes"), [("rows_permuted", {"rows": 9, "width": 64}), ("softmax_shift", {"rows": 1, "width": 65, "shift": 700})])
def test_a_property_fails_where_it_does_not_hold(name, sizes):
    with Sloppy() as backend, pytest.raises(Failure) as found:
        PROPERTIES[name][1](Bench(backend), Numbers(1), **sizes)
    assert found.value.rule == "prop"
