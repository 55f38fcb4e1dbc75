"""The collector of cycles rests while a model is loaded, and works again whatever happened."""

from __future__ import annotations

import gc

import pytest

from fastllm.cli.collector import collector_at_rest


def test_the_collector_rests_inside_and_works_afterwards():
    with collector_at_rest():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_at_rest():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with collector_at_rest():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_run_loads_with_the_collector_at_rest(run, tiny_model, monkeypatch):
    from fastllm import loading

    seen, load = [], loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *args: (seen.append(gc.isenabled()), load(*args))[1])
    assert run("run", tiny_model, "--prompt", "hi", "--max-tokens", "1", "--backend", "ref").code == 0
    assert seen == [False]
    assert gc.isenabled()
