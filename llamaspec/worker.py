"""One thread that drives llama.cpp for as long as a pair lives.

OpenMP keeps a team of threads per calling thread: two threads that decode in turn cost nearly twice the time. And a caller
who waits for another thread can be interrupted (Ctrl+C) while native code runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from llamaspec.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """Runs calls one after the other, in its own thread.

    Lighter than an executor: a round of a small model takes milliseconds, and a Future's condition a tenth of one.

    Args:
        stop: asks the work at hand to stop, from any thread; called when the waiting caller is interrupted.
        resume: takes that back, once the work has stopped.
    """

    def __init__(self, stop: Callable[[], None], resume: Callable[[], None]) -> None:
        self._stop = stop
        self._resume = resume
        self._closed = False
        self._last: Job[Any] | None = None
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="llamaspec", daemon=True)
        self._thread.start()
        # The thread knows only its queue, so that a worker nobody holds any more can go, and end it.
        self._end = weakref.finalize(self, self._jobs.put, None)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`, or its exception. An interrupt of the caller stops the work before it is raised."""
        if self.is_here:
            return function(*args, **kwargs)
        job = Job(function, args, kwargs)
        try:
            self._put(job)
            return self.wait(job)
        except KeyboardInterrupt:
            self._stop_and_wait(job)
            raise

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Have it run while the caller goes on; `wait` gives the result. Not from the worker's own thread."""
        job = Job(function, args, kwargs)
        self._put(job)
        return job

    def wait(self, job: Job[T]) -> T:
        """The result of a job, or its exception. An interrupt of the caller stops the work before it is raised."""
        self._check_open()
        try:
            # In slices: a signal that arrives just before an endless wait begins is not noticed until it ends.
            while not job.done.acquire(timeout=0.1):
                pass
        except BaseException:
            self._stop_and_wait(job)
            raise
        return job.outcome()

    def halt(self) -> None:
        """Stop what was started last, and wait until it has stopped. Not from the worker's own thread."""
        if self._last is not None:
            self._stop_and_wait(self._last)

    @property
    def is_here(self) -> bool:
        """Is this the worker's own thread?"""
        return threading.get_ident() == self._thread.ident

    @property
    def closed(self) -> bool:
        """Was it closed?"""
        return self._closed

    def close(self) -> None:
        """Stop the work at hand and end the thread."""
        self._closed = True
        self._stop()
        self._end()
        self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this pair is closed")

    def _put(self, job: Job[Any]) -> None:
        self._check_open()
        self._last = job
        self._jobs.put(job)

    def _stop_and_wait(self, job: Job[T]) -> None:
        while not job.finished and self._thread.is_alive():
            try:
                job.abandoned = True
                self._stop()
                job.done.acquire(timeout=0.1)
            except KeyboardInterrupt:
                continue  # impatience does not make native code stop faster, and leaving now would corrupt the cache
        self._resume()


class Job(Generic[T]):
    """A call, and what became of it. `done` is released once, when it is finished or was abandoned before it began."""

    __slots__ = ("_args", "_error", "_function", "_kwargs", "_result", "abandoned", "done", "finished")

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self.done = threading.Lock()
        self.done.acquire()
        self.finished = False
        self.abandoned = False
        self._result: list[T] = []
        self._error: BaseException | None = None

    def work(self) -> None:
        try:
            if not self.abandoned:
                self._result.append(self._function(*self._args, **self._kwargs))
        except BaseException as error:
            self._error = error
        self.finished = True
        self.done.release()

    def outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result[0]


def _serve(jobs: SimpleQueue[Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.work()
        del job  # a result must not live on until the next call comes
