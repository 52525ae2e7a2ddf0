"""How fast this machine's memory is read, measured."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BYTES_PER_THREAD = 64 << 20
_ROUNDS = 5


def measure(threads: int, bytes_per_thread: int = _BYTES_PER_THREAD) -> float:
    """Bytes per second that `threads` threads read together from system memory, the best of five passes.

    Each thread folds an array of its own (bitwise or, without the interpreter's lock), larger than its share of any usual
    cache, as decoding folds weights. Takes 0.1 to 0.3 seconds, and `threads` x 64 MiB of memory.
    """
    size = bytes_per_thread // 8
    with ThreadPoolExecutor(threads) as pool:
        # written by the thread that will read it: on machines with several memory nodes it then lies near
        arrays = list(pool.map(lambda _: np.ones(size, np.uint64), range(threads)))
        best = float("inf")
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            best = min(best, time.perf_counter() - began)
    return threads * size * 8 / best
