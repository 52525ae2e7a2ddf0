"""The native library, loaded once."""

from __future__ import annotations

import functools
import os
from types import ModuleType

from llamaspec.errors import UnfitError
from llamaspec.llama import log


@functools.cache
def load() -> ModuleType:
    """The low-level bindings (`llama_cpp.llama_cpp`), with llama.cpp initialised and its log in memory.

    Raises:
        UnfitError: llama-cpp-python is not installed, or its native library does not load on this machine.
    """
    # A GGML_ASSERT forks gdb for a backtrace, which can hang a terminal.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        import llama_cpp.llama_cpp as llama
    except (ImportError, OSError, RuntimeError) as error:
        raise UnfitError(
            f"llama.cpp does not load: {error}",
            "reinstall the runtime: pip install --force-reinstall --no-cache-dir llama-cpp-python",
        ) from error
    log.install(llama)
    llama.llama_backend_init()
    module: ModuleType = llama
    return module


def versions() -> dict[str, str]:
    """The versions that a report must name: llama-cpp-python's and llama.cpp's."""
    from importlib.metadata import version

    return {
        "llama_cpp_python": version("llama-cpp-python"),
        "llama_cpp": load().llama_version().decode(),
    }
