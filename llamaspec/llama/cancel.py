"""A flag that stops native code at work."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys


class CancelFlag:
    """Set from any thread; llama.cpp's CPU backend asks it between the operators of a graph.

    The question must not cost a trip into Python, so the callback is C's own strlen, asked for the length of a string that
    this flag owns: "" is false, one character is true. Other backends do not ask while a graph runs; for them the callers
    look at `is_set()` between decodes.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    @property
    def is_set(self) -> bool:
        return self._text[0] != b"\0"

    def set(self) -> None:
        self._text[0] = b"x"

    def clear(self) -> None:
        self._text[0] = b"\0"

    @property
    def callback(self) -> int:
        """The address of a C function `bool (void * data)`; `data` is `address`."""
        libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else ctypes.util.find_library("c"))
        address = ctypes.cast(libc.strlen, ctypes.c_void_p).value
        assert address is not None
        return address

    @property
    def address(self) -> int:
        return ctypes.addressof(self._text)
