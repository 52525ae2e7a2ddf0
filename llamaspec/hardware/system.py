"""Cores and memory, as a process in a container sees them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_NO_LIMIT = 2**60  # version 1 writes nearly 2^63 for "none"


def physical_cores() -> int:
    """Cores this process may use: physical ones, within its affinity mask and its container's CPU quota; at least 1."""
    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    quota = cpu_quota()
    return max(1, min(physical, allowed_cpus(), round(quota) if quota else physical))


def allowed_cpus() -> int:
    """Logical CPUs in this process's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1


def available_memory() -> int:
    """Bytes that can still be allocated without swapping, within the container's limit."""
    available: int = psutil.virtual_memory().available
    limit = memory_limit()
    if limit is not None and (used := _memory_used()) is not None:
        available = min(available, max(0, limit - used))
    return available


def identity() -> dict[str, Any]:
    """What tells this machine from another as far as speed goes."""
    from llamaspec.llama.devices import gpus

    return {
        "processor": processor_name(),
        "cores": physical_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [(gpu.description, gpu.memory_total) for gpu in gpus()],
    }


def processor_name() -> str:
    """The processor's name, or else its kind."""
    rows = (row.partition(":") for row in _text(PROC / "cpuinfo").splitlines())
    named = next((value.strip() for key, _, value in rows if key.strip() == "model name"), "")
    return named or platform.processor() or platform.machine()


def cpu_quota() -> float | None:
    """CPUs that the container's quota allows, of any control group this process is in; None without one."""
    quotas = []
    for folder in _groups("cpu"):
        numbers = _words(folder / "cpu.max")
        if not numbers:
            numbers = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(numbers) == 2 and numbers[0].isdigit() and numbers[1].isdigit() and int(numbers[1]):
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def memory_limit() -> int | None:
    """Bytes that the container may use, the least limit of any control group this process is in; None without one."""
    limits = [
        number
        for folder in _groups("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (number := _read_number(folder / name)) is not None and number < _NO_LIMIT
    ]
    return min(limits, default=None)


def _memory_used() -> int | None:
    """Bytes in use of the innermost group that tells, cached files left out: the kernel gives those back on demand."""
    for folder in _groups("memory"):
        for name in ("memory.current", "memory.usage_in_bytes"):
            used = _read_number(folder / name)
            if used is not None:
                rows = [row.split() for row in _text(folder / "memory.stat").splitlines()]
                cached = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
                return max(0, used - cached.get("file", cached.get("total_cache", 0)))
    return None


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control groups for a controller, the innermost first; version 2, then version 1.

    In a container the path told by /proc is often not there, and the root is the container's own group.
    """
    for row in _text(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = (*row.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder.is_dir())


def _read_number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
