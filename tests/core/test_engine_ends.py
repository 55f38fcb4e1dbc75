"""The engine's failures and its end: steps that raise, rows that are not finite, close, fork, exit, and a soak."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from queue import Queue

import numpy as np
import psutil
import pytest

from fastllm.core.engine import Engine
from fastllm.core.errors import Cancelled, DeviceLost, EngineError, OutOfMemory
from fastllm.core.request import Request
from fastllm.core.sampling import SamplingParams

from .fake_runner import GREEDY, VOCAB, FakeRunner, Gate, all_free, alone, ask

# failures ------------------------------------------------------------------------------------------------------------------


def test_a_thread_that_cannot_start_is_an_error_of_ours(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(EngineError, match="can't start new thread"):
        Engine(FakeRunner())


def fail_steps(which: set[int], error: BaseException) -> Callable:
    """A `before` that raises in the steps of these numbers."""
    count = iter(range(10**9))

    def before(batch) -> None:
        if next(count) in which:
            raise error

    return before


class Odd(BaseException):
    """What a plug-in may raise: no Exception."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ZeroDivisionError("boom"), EngineError),
        (SystemExit(0), EngineError),
        (Odd("gone"), EngineError),
        (KeyboardInterrupt(), EngineError),
        (DeviceLost("the device was reset"), DeviceLost),
        (OutOfMemory("no room", requested=5, free=1), OutOfMemory),
    ],
)
def test_a_failed_step_fails_its_requests_and_spares_the_others(error, kind):
    runner = FakeRunner(max_sequences=1, before=fail_steps({1}, error))
    with Engine(runner) as engine:
        bad, good = engine.submit(ask([1, 2], request_id="bad")), engine.submit(ask([1, 2]))
        with pytest.raises(kind, match="request 'bad': a step failed: ") as caught:
            bad.result()
        assert caught.value is not error
        assert isinstance(error, EngineError | OutOfMemory) or caught.value.__cause__ is error
        assert good.result().choices[0].token_ids == alone([1, 2], GREEDY)[0]
        assert engine.healthy
    all_free(engine)


@pytest.mark.parametrize("error", [MemoryError("the k-th call"), Odd("the k-th call")], ids=["memory", "odd"])
@pytest.mark.parametrize("limits", [{}, {"stateful": True, "num_snapshots": 3}], ids=["blocks", "snapshots"])
def test_whichever_call_of_the_executor_fails_the_engine_goes_on_and_loses_no_block(limits, error):
    """The k-th call of run, copy_block, touch_block, keep_state or restore_state raises, for every k of a small run."""
    prompts = [[1, 2, 3, 4, 5, 6], [9] * 11]
    for k in range(100):
        left = [k]

        class Failing(FakeRunner):
            def count(self, left=left):
                left[0] -= 1
                if left[0] == -1:
                    raise error

            def run(self, batch):
                self.count()
                return super().run(batch)

            def copy_block(self, src, dst):
                self.count()
                super().copy_block(src, dst)

            def touch_block(self, block):
                self.count()
                super().touch_block(block)

            def keep_state(self, slot, snapshot):
                self.count()
                super().keep_state(slot, snapshot)

            def restore_state(self, snapshot, slot):
                self.count()
                super().restore_state(snapshot, slot)

        with Engine(Failing(num_blocks=8, max_blocks=8, max_tokens=6, **limits), stateful=bool(limits)) as engine:
            handles = [engine.submit(ask(p, n=2)) for p in prompts]
            failed = []
            for handle, prompt in zip(handles, prompts, strict=True):
                try:
                    assert [c.token_ids for c in handle.result().choices] == [alone(prompt, GREEDY)[0]] * 2
                except (OutOfMemory, EngineError) as told:
                    failed.append(told)
            left[0] = 10**9
            assert all(f"{type(error).__name__}: the k-th call" in told.message for told in failed)
            assert all(isinstance(told, OutOfMemory) == isinstance(error, MemoryError) for told in failed), "Python's and numpy's: by a type that maps to 503"
            assert engine.healthy
            for prompt in prompts:
                assert engine.submit(ask(prompt)).result().choices[0].token_ids == alone(prompt, GREEDY)[0]
        all_free(engine)
        if not failed:
            break
    assert 8 < k < 99


def test_requests_that_nothing_would_run_are_failed_and_not_left_waiting(monkeypatch):
    engine = Engine(FakeRunner())
    monkeypatch.setattr(engine._scheduler, "add", lambda sequence: None)
    with pytest.raises(EngineError, match="1 requests are left, but no sequence of theirs waits or runs"):
        engine.submit(ask([1])).result()
    engine.close()


def test_tokens_before_a_failure_are_delivered():
    with Engine(FakeRunner(before=fail_steps({2}, ValueError("x")))) as engine:
        events = iter(engine.submit(ask([1, 2])))
        assert [next(events).token_id, next(events).token_id] == alone([1, 2], GREEDY)[0][:2]
        with pytest.raises(EngineError):
            next(events)


def test_two_failures_and_a_success_do_not_make_it_unhealthy():
    with Engine(FakeRunner(before=fail_steps({0, 1, 3, 4}, ValueError("x")))) as engine:
        for _ in range(2):
            with pytest.raises(EngineError):
                engine.submit(ask([1])).result()
        assert engine.submit(ask([1], max_tokens=1)).result()
        for _ in range(2):
            with pytest.raises(EngineError):
                engine.submit(ask([1])).result()
        assert engine.healthy
        assert engine.submit(ask([1])).result()


def test_the_third_failure_in_a_row_fails_everything():
    runner = FakeRunner(max_sequences=1)
    gate = Gate(runner)
    engine = Engine(runner)
    handles = [engine.submit(ask([t], request_id=f"r{t}")) for t in range(5)]
    gate.wait()
    runner.before = fail_steps({0, 1, 2}, ValueError("boom"))
    late = engine.submit(ask([9], request_id="late"))
    gate.open()
    for handle in handles[1:]:
        with pytest.raises(EngineError, match="boom"):
            handle.result()
    with pytest.raises(EngineError, match="3 steps in a row failed"):
        late.result()
    assert not engine.healthy
    assert not engine.stats().healthy
    with pytest.raises(EngineError, match="the engine is unhealthy: 3 steps"):
        engine.submit(ask([1]))
    engine.close()
    all_free(engine)


def test_rows_without_finite_logits_fail_their_request_only_and_are_not_found_again():
    with Engine(FakeRunner(num_blocks=32, poison=[13])) as engine:
        prompt = list(range(10))
        good, bad = engine.submit(ask(prompt)), engine.submit(ask([*prompt, 13, *range(6)], request_id="bad"))
        with pytest.raises(EngineError, match="'bad': the model gave no finite logit at position 17"):
            bad.result()
        assert good.result().choices[0].token_ids == alone(prompt, GREEDY)[0]
        assert engine._blocks.find(np.array([*prompt, 13, *range(6)], np.int32)) == []
        with pytest.raises(EngineError, match="at position 11"):
            engine.submit(ask([*prompt, 13, 5, 6], prompt_logprobs=True)).result()
        assert engine.healthy
    all_free(engine)


def test_an_executor_that_returns_too_few_ids_is_an_error():
    class Short(FakeRunner):
        def run(self, batch):
            output = super().run(batch)
            output.ids = output.ids[:-1]
            return output

    with Engine(Short()) as engine, pytest.raises(EngineError, match="sampled 1 rows and the executor returned 0"):
        engine.submit(ask([1])).result()


def test_an_executor_without_logits_cannot_give_log_probabilities():
    class Blind(FakeRunner):
        def run(self, batch):
            output = super().run(batch)
            output.logits = None
            return output

    with Engine(Blind()) as engine:
        with pytest.raises(EngineError, match="gave no logits"):
            engine.submit(ask([1], logprobs=1)).result()
        assert engine.submit(ask([1])).result()


def test_a_defect_of_the_thread_itself_leaves_nobody_waiting(monkeypatch):
    engine = Engine(FakeRunner())

    def fall(*_):
        raise SystemExit("gone")

    monkeypatch.setattr(engine._scheduler, "advance", fall)
    with pytest.raises(EngineError, match="ended by a defect: SystemExit: gone"):
        engine.submit(ask([1])).result()
    with pytest.raises(EngineError, match="unhealthy"):
        engine.submit(ask([1]))
    assert not engine.healthy
    engine.close()
    assert engine._runner.closed


# the end -------------------------------------------------------------------------------------------------------------------


def test_close_cancels_what_runs_and_waits():
    runner = FakeRunner(max_sequences=1)
    gate = Gate(runner)
    engine = Engine(runner)
    handles = [engine.submit(ask([t])) for t in range(3)]
    gate.wait()
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.open()
    closer.join(30)
    assert not closer.is_alive()
    for handle in handles:
        with pytest.raises(Cancelled):
            list(handle)
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.submit(ask([1]))
    all_free(engine)


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_what_closing_the_runner_raises_is_told_once(kind):
    class Stuck(FakeRunner):
        def close(self):
            raise kind("cannot unmap")

    engine = Engine(Stuck())
    with pytest.raises(EngineError, match=f"closing the model failed: {kind.__name__}: cannot unmap") as caught:
        engine.close()
    assert isinstance(caught.value.__cause__, kind)
    engine.close()


def test_two_engines_live_side_by_side():
    with Engine(FakeRunner()) as one, Engine(FakeRunner(block_size=2, max_blocks=32, num_blocks=32)) as two:
        handles = [e.submit(ask([t, t])) for t in range(4) for e in (one, two)]
        assert [h.result().choices[0].token_ids for h in handles] == [alone([t, t], GREEDY)[0] for t in range(4) for _ in (one, two)]


def test_an_idle_engine_sleeps():
    """Without work the thread blocks on its condition, without a time limit: it wakes for a request and for nothing else."""
    engine = Engine(FakeRunner())
    asleep: Queue[tuple] = Queue()
    wait = engine._wake.wait

    def watched(*limit):
        asleep.put(limit)
        return wait(*limit)

    engine._wake.wait = watched
    with engine:
        for _ in range(2):
            engine.submit(ask([1])).result()
            assert asleep.get(timeout=30) == ()
        assert engine.stats().stalled_s == 0.0
        assert all(limit == () for limit in asleep.queue)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_refused_and_cannot_hang():
    with Engine(FakeRunner()) as engine:
        handle = engine.submit(ask([1]))
        handle.result()
        script = [lambda: engine.submit(ask([1])), lambda: next(iter(handle)), handle.result]
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own warning about threads and fork
            child = os.fork()
        if child == 0:
            for call in script:
                try:
                    call()
                    os.write(writer, b"-")
                except EngineError as error:
                    os.write(writer, b"y" if "another process" in error.message else b"?")
            handle.cancel()
            engine.close()
            engine._at_exit()
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 10) == b"yyy"
        os.close(reader)
        os.close(writer)
        assert not engine._runner.closed
        assert engine.submit(ask([1])).result()


def test_the_interpreter_exits_cleanly_with_work_in_flight():
    program = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from fake_runner import FakeRunner
        from fastllm.core.engine import Engine
        from fastllm.core.request import Request
        from fastllm.core.sampling import SamplingParams

        engine = Engine(FakeRunner(max_blocks=1000, num_blocks=1000))
        handles = [engine.submit(Request([t], SamplingParams(max_tokens=3900))) for t in range(9)]
        print(next(iter(handles[0])).index, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), os.path.dirname(__file__)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# soak ----------------------------------------------------------------------------------------------------------------------


def test_soak_random_requests_and_cancels_return_everything():
    """500 requests from several threads, a fifth cancelled: right tokens, and blocks, threads, descriptors and memory as before."""
    process = psutil.Process()
    threads, files = threading.active_count(), process.num_fds()
    runner = FakeRunner(num_blocks=10, max_blocks=8, max_sequences=4, max_tokens=12)
    engine = Engine(runner, max_queue=1000)
    wrong: list[str] = []

    def client(seed: int, count: int) -> None:
        draw = random.Random(seed)
        handles = []
        for number in range(count):
            length = draw.randint(1, 24)
            prompt = [p % 4 for p in range(length - 1)] + [draw.randrange(VOCAB)]
            params = SamplingParams(
                temperature=draw.choice([0.0, 1.0]), seed=number, n=draw.choice([1, 1, 1, 2]), max_tokens=draw.randint(1, 8),
                prompt_logprobs=draw.random() < 0.1,
            )  # fmt: skip
            handle = engine.submit(Request(prompt, params, [0], f"{seed}.{number}", salt=draw.choice(["", "a"])))
            handles.append((handle, prompt, params, draw.random() < 0.2))
            for position, (other, *_, drop) in enumerate(handles):
                if drop and position % 7 == number % 7:
                    other.cancel()
        for handle, prompt, params, drop in handles:
            if drop:
                handle.cancel()
                continue
            result = handle.result(120)
            for index, choice in enumerate(result.choices):
                if choice.token_ids != alone(prompt, params, params.seed, index, [0])[0]:
                    wrong.append(handle.request_id)

    def wave() -> None:
        clients = [threading.Thread(target=client, args=(seed, 50)) for seed in range(5)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    wave()
    before = objects()
    wave()
    assert objects() - before < 200, "objects of ended requests are kept"
    assert not wrong
    engine.close()
    stats = engine.stats()
    assert stats.requests_finished + stats.requests_cancelled == 500
    assert stats.requests_cancelled > 20
    assert stats.preemptions > 0
    all_free(engine)
    assert engine._blocks.num_free + engine._blocks.num_cached == 10
    assert threading.active_count() == threads
    assert process.num_fds() == files
