"""What makes a streamed token cheap must not be seen: wake-ups that are put off, frames from a template, histograms of our own."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import random
import sys
import threading
from functools import partial
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from fastllm.server import bridge as bridges
from fastllm.server.bell import Bell
from fastllm.server.bridge import EVERY_S, LATE_S, MANY, Bridge
from fastllm.server.metrics import SECONDS, Tally
from fastllm.server.sse import SLOT, Chunks, frame


class Loop:
    """Counts wake-ups; `turn` is what the loop does then."""

    def __init__(self):
        self.woken, self.closed, self._calls, self.timers, self.soon = 0, False, [], [], []

    def call_soon(self, call):
        self.soon.append(call)

    def call_soon_threadsafe(self, call):
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.woken += 1
        self._calls.append(call)

    def call_later(self, delay, call):
        self.timers.append(mock.Mock(delay=delay, call=call, cancelled=False))
        self.timers[-1].cancel.side_effect = lambda timer=self.timers[-1]: setattr(timer, "cancelled", True)
        return self.timers[-1]

    def turn(self):
        calls, self._calls = self._calls, []
        for call in calls:
            call()


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(bridges.time, "monotonic", lambda: now[0])
    return now


def test_the_loop_is_woken_once_for_all_events_of_a_step_and_in_their_order():
    loop, got = Loop(), []
    bridge = Bridge(loop)
    for number in range(8):
        bridge.put(got.append, number)
    assert loop.woken == 0, "the engine has not said that it computes"
    bridge.wake()
    bridge.wake()
    assert loop.woken == 1
    loop.turn()
    assert got == list(range(8))
    bridge.wake()
    assert loop.woken == 1, "nothing is queued"


def test_tokens_of_quick_steps_leave_together_and_never_wait_longer_than_said(clock):
    loop, got, waits = Loop(), [], []
    bridge, step_s = Bridge(loop), EVERY_S * 0.4
    for _ in range(30):
        bridge.put(lambda put_at: got.append(clock[0] - put_at), clock[0], urgent=False)
        bridge.wake(step_s)
        loop.turn()
        clock[0] += step_s
    waits += got
    assert loop.woken == 15
    assert max(waits) < EVERY_S


def test_no_more_events_are_gathered_than_a_stream_may_hold(clock):
    loop = Loop()
    bridge = Bridge(loop)
    bridge.put(lambda: None)
    bridge.wake(0.001)
    loop.turn()
    lines = [bridge.line(lambda events: events.clear()) for _ in range(3)]
    for woken in (2, 3):
        for number in range(MANY - 1):
            lines[number % 3].put(0, urgent=False)
            bridge.wake(0.0001)
        assert loop.woken == woken - 1
        lines[1].put(0, urgent=False)
        bridge.wake(0.0001)
        assert loop.woken == woken
        loop.turn()


def test_slow_steps_first_tokens_and_what_nothing_follows_wake_at_once(clock):
    loop = Loop()
    bridge = Bridge(loop)
    bridge.put(lambda: None)
    bridge.wake(0.001)
    loop.turn()
    for urgent, next_s in ((False, EVERY_S), (True, 0.001), (False, None)):
        before = loop.woken
        bridge.put(lambda: None, urgent=False)
        bridge.put(lambda: None, urgent=urgent)
        bridge.put(lambda: None, urgent=False)
        bridge.wake(next_s)
        loop.turn()
        assert loop.woken == before + 1, (urgent, next_s)


def test_the_loop_takes_what_waits_for_a_step_that_does_not_end(clock):
    loop, got = Loop(), []
    bridge = Bridge(loop)
    bridge.put(got.append, 1)
    bridge.wake(0.001)
    loop.turn()
    bridge.put(got.append, 2, urgent=False)
    bridge.wake(0.001)  # a step of a millisecond, thinks the engine; and stands
    loop.turn()
    assert (got, loop.woken) == ([1], 1)
    (timer,) = loop.timers
    assert timer.delay == LATE_S
    timer.call()
    assert got == [1, 2]
    assert not loop.timers[1].cancelled
    loop.timers[1].call()
    assert len(loop.timers) == 2, "nothing has come: nobody looks again"


def test_a_wake_up_puts_the_look_off(clock):
    loop = Loop()
    bridge = Bridge(loop)
    for _ in range(3):
        bridge.put(lambda: None)
        bridge.wake()
        loop.turn()
    assert [timer.cancelled for timer in loop.timers] == [True, True, False]


def test_a_wake_up_that_finds_nothing_leaves_a_look_for_what_is_put_off_after_it(clock):
    loop, got = Loop(), []
    bridge = Bridge(loop)
    bridge.put(got.append, 1)
    bridge.wake()
    loop.turn()
    bridge.put(got.append, 2)
    bridge.wake()
    loop.timers[-1].call()  # the loop runs what is due before what it was woken for
    assert got == [1, 2]
    loop.turn()
    bridge.put(got.append, 3, urgent=False)
    bridge.wake(0.001)
    loop.turn()
    assert (got, loop.woken, loop.timers[-1].cancelled) == ([1, 2], 2, False)
    loop.timers[-1].call()
    assert got == [1, 2, 3]


def test_a_look_that_is_due_between_two_wake_ups_is_not_the_last(clock):
    loop, got = Loop(), []
    bridge = Bridge(loop)

    def another():  # comes while the loop calls what it was woken for, and is taken with it
        bridge.put(got.append, 2)
        bridge.wake()

    bridge.put(another)
    bridge.wake()
    loop.turn()
    assert (got, loop.woken) == ([2], 2)
    loop.timers[-1].call()  # nothing waits
    loop.turn()
    bridge.put(got.append, 3, urgent=False)
    bridge.wake(0.001)
    assert (loop.woken, loop.timers[-1].cancelled) == (2, False)
    loop.timers[-1].call()
    assert got == [2, 3]


def test_what_is_to_be_done_soon_is_done_after_all_that_waits_also_where_something_fails():
    loop, got = Loop(), []
    bridge = Bridge(loop)

    def fails():
        raise ValueError("of a receiver")

    for number in range(3):
        bridge.put(lambda number=number: (got.append(number), bridge.soon(lambda: got.append(f"after {number}"))))
    bridge.put(fails)
    bridge.put(got.append, 3)
    bridge.wake()
    with pytest.raises(ValueError, match="of a receiver"):
        loop.turn()
    assert got == [0, 1, 2, "after 0", "after 1", "after 2"]
    bridge.soon(lambda: got.append("alone"))
    assert len(loop.soon) == 1, "nothing is being called: the loop's next turn"
    bridge.wake()
    loop.turn()
    assert got[6:] == [3]


def test_what_is_to_be_done_soon_is_done_where_another_of_it_fails():
    loop, got = Loop(), []
    bridge = Bridge(loop)

    def fails(number):
        got.append(number)
        raise ValueError(f"of {number}")

    for number in range(4):
        bridge.put(bridge.soon, partial(fails if number % 2 else got.append, number))
    bridge.wake()
    with pytest.raises(ValueError, match="of 1"):
        loop.turn()
    assert got == [0, 1, 2, 3]


def test_a_line_is_called_once_for_all_that_waits_and_keeps_their_order():
    loop, got = Loop(), []
    bridge = Bridge(loop)

    def take(name, events):
        got.append((name, list(events)))
        events.clear()

    lines = [bridge.line(partial(take, name)) for name in "ab"]
    for number in range(3):
        for line in lines:
            line.put(number, urgent=False)
    bridge.wake()
    loop.turn()
    assert got == [("a", [0, 1, 2]), ("b", [0, 1, 2])]
    bridge.wake()
    assert loop.woken == 1, "nothing waits"


def test_a_line_hurries_for_what_is_urgent_and_for_nothing_else(clock):
    loop = Loop()
    bridge = Bridge(loop)
    line = bridge.line(lambda events: events.clear())
    for urgent, woken in ((True, 1), (False, 1), (False, 1), (True, 2), (False, 2)):
        line.put(0, urgent=urgent)
        bridge.wake(0.0001)
        loop.turn()
        assert loop.woken == woken


def test_what_comes_while_a_line_is_read_is_read_once():
    """The engine's thread may put at any moment: before the receiver looks, while it does, and after."""
    loop, got = Loop(), []
    bridge = Bridge(loop)

    def take(events):
        while events:
            got.append(events.popleft())
            if len(got) in (1, 3):
                line.put(got[-1] + 10)

    line = bridge.line(take)
    line.put(1)
    line.put(2)
    bridge.wake()
    loop.turn()
    bridge.wake()
    loop.turn()
    assert got == [1, 2, 11, 21]


def test_a_receiver_that_fails_loses_no_later_event():
    loop, got = Loop(), []
    bridge = Bridge(loop)

    def take(events):
        got.append(events.popleft())
        if got == [1]:
            raise ValueError("of a receiver")

    line = bridge.line(take)
    line.put(1)
    bridge.wake()
    with pytest.raises(ValueError, match="of a receiver"):
        loop.turn()
    line.put(2)
    bridge.wake()
    loop.turn()
    assert got == [1, 2]


def test_a_bell_answers_on_the_loop_and_again_after_it_was_closed():
    answered = []

    async def main():
        loop, here = asyncio.get_running_loop(), threading.get_ident()

        async def rung(times):
            thread = threading.Thread(target=lambda: [bell.ring() for _ in range(times)])
            thread.start()
            while not answered:
                await asyncio.sleep(0)
            thread.join()
            await asyncio.sleep(0)
            assert set(answered) == {here}
            answered.clear()

        bell = Bell(loop, lambda: answered.append(threading.get_ident()))
        await rung(1)
        bell.open()
        ends = bell._ends
        await rung(1)
        await rung(100_000)  # more than a pipe holds
        bell.close()
        bell.close()
        for end in ends:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(end)
        await rung(1)
        return bell

    bell = asyncio.run(main())
    bell.ring()  # nobody waits
    assert not answered


def test_a_bell_does_not_give_pythons_lock_away():
    """With turns that are never forced, the loop gets the lock when the other thread waits for something, and not before."""
    order, times = [], 20_000

    async def main():
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        bell = Bell(loop, lambda: order.append("loop"))
        bell.open()

        def engine():
            ready.wait()
            for _ in range(times):
                bell.ring()
                order.append("engine")
            loop.call_soon_threadsafe(done.set)

        ready, interval = threading.Event(), sys.getswitchinterval()
        thread = threading.Thread(target=engine)
        thread.start()
        sys.setswitchinterval(60)
        try:
            loop.call_later(0.01, ready.set)
            await done.wait()
        finally:
            sys.setswitchinterval(interval)
        thread.join()
        await asyncio.sleep(0.01)
        bell.close()

    asyncio.run(main())
    assert order[:times] == ["engine"] * times
    assert "loop" in order


@pytest.mark.parametrize("lacks", ["readers", "write"])
def test_a_bell_rings_otherwise_where_there_are_no_pipes_or_no_such_call(monkeypatch, lacks):
    async def main():
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        bell = Bell(loop, answered.set)
        if lacks == "readers":
            monkeypatch.setattr(loop, "add_reader", mock.Mock(side_effect=NotImplementedError))
        else:
            monkeypatch.setattr(ctypes, "PyDLL", mock.Mock(side_effect=OSError))
        bell.open()
        assert bell._ends is None
        bell.ring()
        await answered.wait()
        bell.close()

    asyncio.run(main())


def test_a_closed_loop_is_no_matter_of_the_engine():
    loop = Loop()
    bridge, loop.closed = Bridge(loop), True
    bridge.put(lambda: None)
    bridge.wake()


@pytest.mark.parametrize("extra", [{}, {"usage": None}])
def test_a_frame_from_a_template_is_the_frame(extra):
    head = {"id": "x", "object": "chunk", "choices-": "0"}
    choice = {"index": 3, "delta": {"content": SLOT}, "logprobs": None, "finish_reason": None}
    made = Chunks(head, extra).around(choice)
    texts = ["", "a", ' "\\/', "\n\r\t\x00\x1f\x7f", "é€😀\u2028", '"choices":[0]', SLOT, "%s{}"]
    for text in texts:
        filled = {**choice, "delta": {"content": text}}
        assert made([text]) == frame({**head, "choices": [filled], **extra}), text
    assert made(texts) == b"".join(made([text]) for text in texts)


@pytest.mark.parametrize("labels", [{}, {"model_name": "a\"b", "engine": "0"}])
def test_a_tally_reads_as_the_librarys_histogram(labels):
    rng, tally, ours, theirs = random.Random(1), Tally(SECONDS), CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x_seconds", "Text.", tuple(labels), buckets=SECONDS, registry=theirs)
    histogram = histogram.labels(**labels) if labels else histogram
    for value in [*SECONDS, 0.0, *(math.exp(rng.uniform(-9, 8)) for _ in range(500))]:
        tally.add(value)
        histogram.observe(value)

    class Source:
        def collect(self):
            yield tally.family("x_seconds", "Text.", labels)

    ours.register(Source())

    def lines(registry):
        return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line and "_sum" not in line)

    assert lines(ours) == lines(theirs)
    [mine] = list(Source().collect())
    assert next(s.value for s in mine.samples if s.name == "x_seconds_sum") == pytest.approx(sum_of(theirs))


def sum_of(registry):
    return next(s.value for m in registry.collect() for s in m.samples if s.name == "x_seconds_sum")
