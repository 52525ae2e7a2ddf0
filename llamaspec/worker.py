"""One thread that drives llama.cpp for as long as a pair lives.

OpenMP keeps a team of threads per calling thread: two threads that decode in turn cost nearly twice the time. And a caller
who waits for another thread can be interrupted (Ctrl+C) while native code runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

from llamaspec.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """Runs calls one after the other, in its own thread.

    Args:
        stop: asks the work at hand to stop, from any thread; called when the waiting caller is interrupted.
        resume: takes that back, once the work has stopped.
    """

    def __init__(self, stop: Callable[[], None], resume: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="llamaspec")
        self._stop = stop
        self._resume = resume
        self._thread: int | None = None
        self._closed = False

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`, or its exception. An interrupt of the caller stops the work before it is raised."""
        if threading.get_ident() == self._thread:
            return function(*args, **kwargs)
        if self._closed:
            raise UsageError("this pair is closed")
        future: Future[T] | None = None
        try:
            future = self._executor.submit(self._call, lambda: function(*args, **kwargs))
            return self._result(future)
        except BaseException:
            # An interrupt may also come before submit has returned: the work then has no name, but close() stops it.
            if future is not None and not future.done():
                self._stop_and_wait(future)
            raise

    def close(self) -> None:
        """Stop the work at hand and end the thread."""
        self._closed = True
        self._stop()
        self._executor.shutdown()

    @staticmethod
    def _result(future: Future[T]) -> T:
        while True:
            try:
                # In slices: a signal that arrives just before an endless wait begins is not noticed until it ends.
                return future.result(timeout=0.1)
            except TimeoutError:
                if future.done():
                    return future.result()

    def _call(self, work: Callable[[], T]) -> T:
        self._thread = threading.get_ident()
        return work()

    def _stop_and_wait(self, future: Future[T]) -> None:
        self._stop()
        while not future.done():
            try:
                wait([future])
            except KeyboardInterrupt:
                continue  # impatience does not make native code stop faster, and leaving now would corrupt the cache
        self._resume()
