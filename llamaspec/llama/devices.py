"""The devices that this build of llama.cpp can compute on."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from llamaspec.llama import library

KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}


@dataclass(frozen=True, slots=True)
class Device:
    """One ggml device. Memory in bytes, as its driver reports it (0 when it does not)."""

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int


def devices() -> tuple[Device, ...]:
    """Every device ggml has registered, in its order. Empty where the library does not export the device functions."""
    native = library.load()._lib
    try:
        count, get = native.ggml_backend_dev_count, native.ggml_backend_dev_get
        name, description = native.ggml_backend_dev_name, native.ggml_backend_dev_description
        kind, memory = native.ggml_backend_dev_type, native.ggml_backend_dev_memory
    except AttributeError:
        return ()
    count.restype = ctypes.c_size_t
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    name.restype = description.restype = ctypes.c_char_p
    kind.restype = ctypes.c_int
    for function in (name, description, kind):
        function.argtypes = [ctypes.c_void_p]
    size_p = ctypes.POINTER(ctypes.c_size_t)
    memory.restype, memory.argtypes = None, [ctypes.c_void_p, size_p, size_p]

    found = []
    for index in range(count()):
        device = get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(
            Device(
                name=(name(device) or b"").decode("utf-8", "replace"),
                description=(description(device) or b"").decode("utf-8", "replace"),
                kind=KINDS.get(kind(device), "unknown"),
                memory_free=free.value,
                memory_total=total.value,
            )
        )
    return tuple(found)


def gpus() -> tuple[Device, ...]:
    """The graphics processors among `devices()`, discrete ones first. Empty for a CPU-only build."""
    if not library.load().llama_supports_gpu_offload():
        return ()
    return tuple(d for kind in ("gpu", "igpu") for d in devices() if d.kind == kind)


def features() -> dict[str, dict[str, str]]:
    """What this build was compiled with, by llama.cpp's own account (llama_print_system_info).

    Backend -> option -> value, as {"CUDA": {"ARCHS": "890"}, "CPU": {"AVX2": "1"}}. Only what is on is listed.
    """
    text = library.load().llama_print_system_info().decode("utf-8", "replace")
    found: dict[str, dict[str, str]] = {}
    backend = "CPU"
    for pair in text.split("|"):
        option, equals, value = pair.partition("=")
        if " : " in option:
            backend, _, option = (part.strip() for part in option.partition(" : "))
        if equals:
            found.setdefault(backend, {})[option.strip()] = value.strip()
    return found


def repacked_types() -> frozenset[str]:
    """The tensor types that the CPU backend keeps rearranged copies of, beside the mapped file; GGUF's names.

    As ggml_repack_get_optimal_repack_type decides for x86 and ARM. With a GPU in use llama.cpp prefers other buffers, and
    nothing is copied.
    """
    cpu = features().get("CPU", {})
    if "REPACK" not in cpu or gpus():
        return frozenset()
    types: set[str] = set()
    if "AVX2" in cpu:
        types |= {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"}
    if "AVX512" in cpu:
        types |= {"Q2_K"}
    if "NEON" in cpu and "DOTPROD" in cpu:
        types |= {"Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "Q8_0"}
    return frozenset(types)
