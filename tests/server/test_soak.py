"""The soak, for seconds instead of minutes; and planted faults, each of which it must name."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import psutil
import pytest

from fastllm.server import generation
from fastllm.server.bridge import Line

_spec = importlib.util.spec_from_file_location("soak_server", Path(__file__).parents[2] / "scripts" / "soak_server.py")
soak_server = importlib.util.module_from_spec(_spec)
sys.modules["soak_server"] = soak_server  # its dataclasses look it up
_spec.loader.exec_module(soak_server)


# A client that leaves leaves its connection to the collector.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


@pytest.fixture
def loaded(start):
    """A server that has less room than the soak asks for."""
    server = start({"max_batch_size": 2, "max_queue": 2, "kv_cache_tokens": 2048})
    yield server
    server.close()


def soak(server, seconds, settle_s=20.0):
    process = psutil.Process(os.getpid())
    return asyncio.run(soak_server.soak(server.url, process, seconds, clients=12, settle_s=settle_s, big_bytes=2_000_000))


def test_a_soaked_server_is_as_it_was(loaded):
    report = soak(loaded, 6)
    assert report.faults == []
    assert min(report.requests, report.cancelled) > 0, report  # how many is a matter of the speed of the machine
    assert report.refused, report


def test_a_planted_leak_is_named(loaded, monkeypatch):
    close, count = loaded.engine._blocks.close, 0

    def sometimes(blocks):
        nonlocal count
        count += 1
        if count % 40:
            close(blocks)

    monkeypatch.setattr(loaded.engine._blocks, "close", sometimes)
    faults = soak(loaded, 1, settle_s=1).faults
    assert any("fastllm_kv_blocks" in fault or "server is gone" in fault for fault in faults), faults


def test_a_planted_lost_wake_up_is_named(loaded, monkeypatch):
    put, count = Line.put, 0

    def sometimes(line, event, urgent=True):
        nonlocal count
        count += 1
        if count % 50 or event[0] is not None:  # the end of a request is lost
            put(line, event, urgent)

    monkeypatch.setattr(Line, "put", sometimes)
    monkeypatch.setattr(soak_server, "ANSWER_S", 1)
    assert any(fault.startswith("lost") or "no answer" in fault for fault in soak(loaded, 2, settle_s=1).faults)


def test_a_planted_cross_talk_is_named(loaded, monkeypatch):
    feed, feed_all, kept = generation.Answer.feed, generation.Answer.feed_all, []

    def mixed(self, event):
        text, logprobs = feed(self, event)
        kept.append(text)
        return (kept[-7] if len(kept) % 10 == 0 else text), logprobs

    def all_mixed(self, token_ids):
        texts = feed_all(self, token_ids)
        kept.extend(texts)
        return [kept[-7] if n % 10 == 0 else text for n, text in enumerate(texts)]

    monkeypatch.setattr(generation.Answer, "feed", mixed)
    monkeypatch.setattr(generation.Answer, "feed_all", all_mixed)
    monkeypatch.setattr(generation.Answer, "text", property(lambda self: "".join(self.parts) + kept[len(kept) // 2]))
    assert any("probe" in fault for fault in soak(loaded, 1).faults)
