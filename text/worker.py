"""The thread that computes masks of grammars beside the steps of a model, and how it ends: with those who use it, or before the interpreter does."""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import Final, Protocol

__all__ = ["Worker"]

END_S: Final = 5.0  # for the masks that are still to be computed when the interpreter ends


class Work(Protocol):
    """What a worker is given."""

    def work(self) -> None:
        """In the worker's thread; must not raise."""


class _Waiting:
    """Work that waits, None: the end. Nothing is taken after that."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False

    def put(self, work: Work) -> bool:
        """Whether it will be done."""
        with self._lock:
            if not self._ended:
                self.queue.put(work)
            return not self._ended

    def end(self, thread: threading.Thread) -> None:
        """Nobody has the worker any more, or the interpreter ends: it waits for the thread, since one that is inside of a library when Python is gone
        crashes the process as it comes back."""
        with self._lock:
            self._ended = True
            self.queue.put(None)
        if threading.current_thread() is not thread:  # whose last work may be the last that holds on to the worker
            thread.join(END_S)


class Worker:
    """One thread that works in the order in which it is asked. It starts with the first work, and ends when nobody has this object any more."""

    def __init__(self) -> None:
        self._waiting = _Waiting()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, work: Work) -> bool:
        """This is wanted. False: nobody does it, as the interpreter ends or no thread can be started."""
        if self._thread is None:
            try:
                self._start()
            except RuntimeError:
                return False
        return self._waiting.put(work)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=_work, args=(self._waiting.queue,), name="fastllm-mask", daemon=True)
                thread.start()
                self._thread = thread
                weakref.finalize(self, self._waiting.end, thread)


def _work(queue: SimpleQueue[Work | None]) -> None:
    while (work := queue.get()) is not None:
        work.work()
        del work  # it may be the last that holds on to its grammar
