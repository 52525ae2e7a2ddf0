"""llama.cpp's log, kept in memory instead of on the terminal.

llama.cpp writes to file descriptor 2, where a terminal app draws. One callback takes every line, keeps the last ones and
remembers the last error, so that a failure can say why.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LEVELS = {0: "none", 1: "debug", 2: "info", 3: "warn", 4: "error"}  # ggml.h, enum ggml_log_level
ERROR = 4
CONTINUES = 5

_lines: deque[tuple[int, int, str]] = deque(maxlen=2000)  # (serial number, level, text)
_buffers: deque[tuple[int, str, str, int]] = deque(maxlen=200)  # (serial number, kind, place, bytes)
_BUFFER = re.compile(r": +(\S+) +(model|KV|RS|output|compute) buffer size = +([\d.]+) MiB$")
_numbers = itertools.count(1)
_lock = threading.Lock()
_open_line: list[str] = []
_open_level = 2
_callback: Any = None  # ctypes keeps no reference to a callback: this one lives as long as the process


def install(llama: Any) -> None:
    """Route llama.cpp's log into memory. `llama` is the `llama_cpp` module."""
    global _callback
    _callback = llama.llama_log_callback(_receive)
    llama.llama_log_set(_callback, ctypes.c_void_p(0))


def _receive(level: int, text: bytes | None, _user_data: object) -> None:
    global _open_level
    with _lock:
        if level != CONTINUES:
            _open_level = level
        _open_line.append((text or b"").decode("utf-8", "replace"))
        if not _open_line[-1].endswith("\n"):
            return
        line = "".join(_open_line).rstrip()
        _open_line.clear()
        if line.strip("."):
            number = next(_numbers)
            _lines.append((number, _open_level, line))
            if found := _BUFFER.search(line):
                _buffers.append((number, found[2], found[1], round(float(found[3]) * 2**20)))


def lines() -> list[str]:
    """The last 2,000 lines of llama.cpp's log, oldest first, each as `level: text`."""
    with _lock:
        return [f"{LEVELS.get(level, 'info')}: {line}" for _, level, line in _lines]


class Errors:
    """The error lines logged since this object was made: `reason()` after a native call has failed."""

    def __init__(self) -> None:
        with _lock:
            self._last_seen = _lines[-1][0] if _lines else 0

    def reason(self) -> str:
        """The first error logged since, without the name of the C function in front; "" when there is none."""
        with _lock:
            errors = [line for number, level, line in _lines if number > self._last_seen and level == ERROR]
        if not errors:
            return ""
        head, colon, rest = errors[0].partition(": ")
        return (rest if colon and " " not in head else errors[0]).strip()


class Buffers:
    """The buffers that llama.cpp has reported since this object was made: its own account of the memory it took."""

    def __init__(self) -> None:
        with _lock:
            self._last_seen = _buffers[-1][0] if _buffers else 0

    def sizes(self) -> dict[str, dict[str, int]]:
        """Kind ("model", "KV", "RS", "compute", "output") -> place ("CPU", "CPU_REPACK", "CUDA0", ...) -> bytes.

        llama.cpp prints hundredths of a MiB: no size is more exact than that.
        """
        total: dict[str, dict[str, int]] = {}
        with _lock:
            found = [entry for entry in _buffers if entry[0] > self._last_seen]
        for _, kind, place, size in found:
            places = total.setdefault(kind, {})
            places[place] = places.get(place, 0) + size
        return total


@contextmanager
def captured_stderr(into: list[str]) -> Iterator[None]:
    """Collect what C code prints to file descriptor 2 meanwhile: the grammar parser knows no log callback."""
    with tempfile.TemporaryFile() as file:
        try:
            saved = os.dup(2)
        except OSError:
            yield
            return
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            into.append(file.read().decode("utf-8", "replace"))
