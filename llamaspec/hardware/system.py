"""What this machine has: cores and memory, as a process in a container sees them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def physical_cores() -> int:
    """Cores this process may use: physical ones, within its affinity mask and its container's CPU quota; at least 1."""
    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return max(1, min(physical, allowed, _cgroup_cpus() or physical))


def available_memory() -> int:
    """Bytes that can still be allocated without swapping, within the container's limit."""
    available: int = psutil.virtual_memory().available
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _cgroup_file_cache()))
    return available


def identity() -> dict[str, Any]:
    """What tells this machine from another as far as speed goes."""
    from llamaspec.llama.devices import gpus

    return {
        "processor": _processor_name(),
        "cores": physical_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [(gpu.description, gpu.memory_total) for gpu in gpus()],
    }


def _processor_name() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
        return next(row.partition(":")[2].strip() for row in rows if row.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _cgroup_cpus() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


def _cgroup_file_cache() -> int:
    """Bytes of the container's use that are cached files, which the kernel gives back on demand."""
    try:
        rows = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith("file "))
    except (OSError, ValueError, StopIteration):
        return 0


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
