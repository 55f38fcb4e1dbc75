"""An engine at its ends: used after close, closed by many, called back by code that raises, without memory, forked, left running.

Nobody may wait for ever, what fails is a typed error, and what was taken is given back.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from fastllm import LLM, SamplingParams
from fastllm.core.errors import EngineError, FastLLMError, OutOfMemory
from fastllm.core.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LIMIT_S = 60


def opened(folder: Path, backend: str = "cpu_avx") -> LLM:
    return LLM(folder, backend=backend, threads=2 if backend == "cpu_avx" else 0, offline=True)


def python(code: str, *args: object, rc: int = 0) -> str:
    """Runs code in a process of its own; returns what it prints."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == rc, (done.returncode, done.stderr[-2000:])
    return done.stdout


@pytest.mark.parametrize("backend", ["ref", "cpu_avx"])
def test_every_call_after_close_says_that_it_is_closed(tiny_folder, backend):
    llm = opened(tiny_folder, backend)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.generate("abc"),
        lambda: llm.generate([[5, 6], [7]]),
        lambda: llm.stream("abc"),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.loaded.engine.submit(Request([5, 6])),
    ):
        with pytest.raises(EngineError, match="the engine is closed"):
            call()
    assert not llm.loaded.engine.stats().running


def test_sixteen_threads_submit_cancel_and_close_at_once(tiny_folder):
    """Some are cancelled, late ones are refused, each by a typed error; nobody hangs; the last state is clean."""
    llm = opened(tiny_folder)
    wrong: list[BaseException] = []
    answered = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for turn in range(16):
            try:
                kind = rng.randrange(4)
                if kind == 0:
                    answered.append(llm.generate([[5 + number] * rng.randrange(1, 20)] * 2, SamplingParams(max_tokens=3, seed=1)))
                elif kind == 1:
                    for _ in llm.stream([5, 6, 7], GREEDY):
                        break
                elif kind == 2:
                    handle = llm.loaded.engine.submit(Request([5, 6, 7], SamplingParams(max_tokens=5, n=3)))
                    handle.cancel(rng.randrange(-2, 5))
                    handle.cancel()
                    handle.result(LIMIT_S)
                else:
                    llm.loaded.engine.stats()
                if number in (3, 7) and turn == 10:
                    llm.close()
            except FastLLMError:
                pass
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert answered
    stats = llm.loaded.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


@pytest.mark.parametrize(
    "raised", [ValueError("x"), MemoryError(), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), GeneratorExit(), StopIteration()]
)
def test_whatever_on_event_raises_fails_that_request_only(tiny_folder, raised):
    """Also what is no `Exception`: a callback that bridges to asyncio meets CancelledError, one that exits meets SystemExit."""
    with opened(tiny_folder) as llm:
        engine = llm.loaded.engine
        want = llm.generate([5, 6], GREEDY)[0].output_ids

        def at_token(handle, event):
            if event is not None:
                raise raised

        def at_end(handle, event):
            if event is None:
                raise raised

        with pytest.raises(FastLLMError, match=type(raised).__name__):
            engine.submit(Request([5, 6], GREEDY), at_token).result(LIMIT_S)
        other = engine.submit(Request([5, 6], GREEDY), at_end)
        assert llm.generate([5, 6], GREEDY)[0].output_ids == want
        assert other.done
        assert engine.healthy
        assert engine.stats().blocks_used == 0


def test_memory_errors_of_numpy_and_python_are_out_of_memory(tiny_folder, monkeypatch):
    with opened(tiny_folder, "ref") as llm:
        engine = llm.loaded.engine
        run = engine._runner.run

        def fails(batch):
            raise MemoryError("Unable to allocate 8.00 KiB")

        monkeypatch.setattr(engine._runner, "run", fails)
        with pytest.raises(OutOfMemory, match="Unable to allocate") as caught:
            llm.generate([5, 6], GREEDY)
        assert caught.value.fix
        monkeypatch.setattr(engine._runner, "run", run)
        assert len(llm.generate([5, 6], GREEDY)[0].output_ids) == 8


def test_a_program_for_which_there_is_no_memory_is_out_of_memory(tiny_folder, monkeypatch):
    """Whichever native allocation fails, in the compiler or behind it, loading ends by one typed error and gives all back."""
    from fastllm.backends.cpu_avx import _native

    class Counted:
        left, used = 10**9, 0

        def __call__(self, *args):
            self.left -= 1
            self.used += 1
            if self.left < 0:
                raise MemoryError
            return real(*args)

    real, counted = _native.Memory, Counted()
    monkeypatch.setattr(_native, "Memory", counted)
    opened(tiny_folder).close()
    total = counted.used
    assert total > 5
    before = threading.active_count()
    for k in range(total):
        counted.left = k
        with pytest.raises(OutOfMemory):
            opened(tiny_folder)
    counted.left = 10**9
    opened(tiny_folder).close()
    assert threading.active_count() == before


def test_an_engine_whose_thread_cannot_start_is_an_error_and_leaves_nothing(tiny_folder, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    before = psutil.Process().num_fds()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EngineError, match="cannot start") as caught:
            opened(tiny_folder)
        assert "ulimit" in caught.value.fix
    del caught
    assert psutil.Process().num_fds() <= before


def test_a_forked_child_gets_an_error_can_close_load_anew_and_exit(tiny_folder):
    out = python(
        """
import os, sys, warnings
from fastllm import LLM, SamplingParams
from fastllm.core.errors import EngineError
warnings.simplefilter("ignore")
few = SamplingParams(max_tokens=2)
llm = LLM(sys.argv[1], backend="cpu_avx", threads=2)
running = llm.stream([5, 6], SamplingParams(max_tokens=40, ignore_eos=True))
child = os.fork()
if child == 0:
    for call in (lambda: llm.generate([5], few), lambda: list(running)):
        try:
            call()
        except EngineError as error:
            print("another process" in error.message, flush=True)
    llm.close()
    with LLM(sys.argv[1], backend="cpu_avx", threads=2) as own:
        print(len(own.generate([5], few)), flush=True)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(running.result().finish_reason)
llm.close()
""",
        tiny_folder,
    )
    assert out.split() == ["True", "True", "1", "length"]


IN_FLIGHT = {
    "streaming": "next(iter(llm.stream([5, 6], long)))",
    "never read": "kept = llm.stream([5, 6], long)",
    "a daemon": "threading.Thread(target=lambda: quiet(lambda: llm.generate([5, 6], long)), daemon=True).start()",
    "exit": "kept = llm.stream([5, 6], long); sys.exit(3)",
}


@pytest.mark.parametrize("backend", ["ref", "cpu_avx"])
@pytest.mark.parametrize("how", IN_FLIGHT)
def test_the_interpreter_ends_with_work_in_flight(tiny_folder, how, backend):
    code = f"""
import contextlib, sys, threading
from fastllm import LLM, SamplingParams
from fastllm.core.errors import FastLLMError
long = SamplingParams(max_tokens=50, ignore_eos=True)
def quiet(call):
    with contextlib.suppress(FastLLMError):
        call()
llm = LLM(sys.argv[1], backend={backend!r})
{IN_FLIGHT[how]}
"""
    assert python(code, tiny_folder, rc=3 if how == "exit" else 0) == ""


def test_forty_models_opened_and_closed_leave_memory_threads_and_descriptors_as_they_were(tiny_folder):
    out = python(
        """
import gc, json, sys, psutil
from fastllm import LLM, SamplingParams
from fastllm.core.errors import FastLLMError
p, seen = psutil.Process(), []
for i in range(42):
    with LLM(sys.argv[1], backend="cpu_avx" if i % 3 else "ref") as llm:
        llm.generate("abc", SamplingParams(max_tokens=1))
    try:
        LLM(sys.argv[1], ctx=10**9, backend="cpu_avx")
    except FastLLMError:
        pass
    if i in (14, 41):
        gc.collect()
        seen.append((p.memory_info().rss, p.num_fds(), p.num_threads()))
print(json.dumps(seen))
""",
        tiny_folder,
    )
    (rss, fds, threads), (rss_after, fds_after, threads_after) = json.loads(out)
    assert (fds_after, threads_after) == (fds, threads)
    assert rss_after - rss < 4 << 20


@pytest.mark.skipif(not hasattr(os, "kill") or sys.platform == "win32", reason="POSIX signals")
def test_keyboard_interrupt_in_generate_frees_what_it_ran(tiny_folder):
    """Ctrl-C reaches the main thread while it waits; the requests are cancelled and the model can be used at once."""
    out = python(
        """
import os, signal, sys
from fastllm import LLM, SamplingParams
from fastllm.core.request import Request
llm = LLM(sys.argv[1], backend="cpu_avx", threads=2)
engine = llm.loaded.engine
long = SamplingParams(max_tokens=50, ignore_eos=True)
for _ in range(5):
    engine.submit(Request([7], SamplingParams(max_tokens=1)), lambda handle, event: os.kill(os.getpid(), signal.SIGINT) if event is None else None)
    try:
        while True:
            llm.generate([[5, 6]] * 8, long)
    except KeyboardInterrupt:
        pass
    assert len(llm.generate([5], SamplingParams(max_tokens=2, ignore_eos=True))[0].output_ids) == 2
print(engine.healthy)
llm.close()
s = engine.stats()
print(s.running, s.waiting, s.blocks_used)
""",
        tiny_folder,
    )
    assert out.split() == ["True", "0", "0", "0"]


def test_many_more_threads_than_cores_take_turns_instead_of_spinning(tiny_folder, monkeypatch):
    """A thread that spins holds the core that the others need; the answer is the same."""
    from fastllm.backends.cpu_avx import _native

    asked = []

    def pool(threads, cores, *spins):
        asked.append((threads, spins))
        return real(threads, cores, *spins)

    real = _native.Pool
    monkeypatch.setattr(_native, "Pool", pool)
    answers = []
    for threads in (1, 512):
        with LLM(tiny_folder, backend="cpu_avx", threads=threads, offline=True) as llm:
            answers.append(llm.generate([5, 6, 7], GREEDY)[0].output_ids)
    assert answers[0] == answers[1]
    assert asked[1] == (512, (0.0, 0.0))
    assert min(asked[0][1]) > 0
