"""One snapshot of the machine, for reports."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import psutil

from llamaspec.errors import LlamaspecError
from llamaspec.hardware import nvml, system
from llamaspec.hardware.nvml import Nvidia
from llamaspec.llama import devices, library

_Answer = TypeVar("_Answer")
_PCI = Path("/sys/bus/pci/devices")
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380")
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
"""PCI vendors whose cards are worth a GPU build; adapters of virtual machines and graphics inside a processor are not."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The llama.cpp that is installed.

    Attributes:
        versions: of llama-cpp-python and llama.cpp.
        devices: what ggml can compute on.
        features: backend -> option -> value, by llama.cpp's own account; as {"CPU": {"AVX2": "1"}}.
        gpu_offload: it was built with a backend for GPUs.
        cuda_runtime: version of the CUDA runtime it is linked with; None without, or where it is not told.
    """

    versions: dict[str, str]
    devices: tuple[devices.Device, ...]
    features: dict[str, dict[str, str]]
    gpu_offload: bool
    cuda_runtime: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class PciGpu:
    """A graphics card on the PCI bus: its vendor, and the kernel driver it is bound to, None without one."""

    vendor: str
    driver: str | None


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder of caches, with the bytes free on its file system."""

    path: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process has to work with. None: not reported.

    Attributes:
        python, system: versions, as text.
        wsl: it is Linux inside Windows.
        cpu, cpu_flags: the processor's name, and its features as Linux names them.
        logical_cpus, physical_cores, allowed_cpus: all, without hyperthreads, in the affinity mask.
        cpu_quota: CPUs the container may use.
        usable_cores: what llamaspec takes for its threads.
        memory_total, memory_available, memory_limit, swap_total, swap_used: bytes; the limit is the container's.
        huge_pages: the kernel's mode for transparent ones.
        pci_gpus, nvidia: the cards there are.
        backend, backend_error: the llama.cpp there is, or why none loads.
        process_names: process id -> name, of those that hold memory of a card.
        disks: where models are kept.
        packages: installed packages that matter, name -> version.
    """

    python: str
    system: str
    wsl: bool
    cpu: str | None
    cpu_flags: frozenset[str] | None
    logical_cpus: int
    physical_cores: int | None
    allowed_cpus: int
    cpu_quota: float | None
    usable_cores: int
    memory_total: int
    memory_available: int
    memory_limit: int | None
    swap_total: int | None
    swap_used: int | None
    huge_pages: str | None
    pci_gpus: tuple[PciGpu, ...]
    nvidia: Nvidia
    backend: Backend | None
    backend_error: LlamaspecError | None
    process_names: dict[int, str]
    disks: tuple[Disk, ...]
    packages: dict[str, str]


def snapshot(connect: Callable[[], nvml.Nvml] = nvml.Nvml) -> Machine:
    """Look at the machine. Takes a fraction of a second, the time to load llama.cpp included."""
    backend: Backend | None = None
    error: LlamaspecError | None = None
    try:
        backend = _backend()
    except LlamaspecError as failure:
        error = failure
    cards = nvml.report(connect)
    memory = psutil.virtual_memory()
    swap = _quietly(psutil.swap_memory)
    cpu = system.PROC / "cpuinfo"
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        wsl="microsoft" in platform.release().lower(),
        cpu=system.processor_name() or None,
        cpu_flags=frozenset(flags.split()) if (flags := _cpuinfo(cpu, "flags") or _cpuinfo(cpu, "Features")) else None,
        logical_cpus=psutil.cpu_count() or 1,
        physical_cores=psutil.cpu_count(logical=False),
        allowed_cpus=system.allowed_cpus(),
        cpu_quota=system.cpu_quota(),
        usable_cores=system.physical_cores(),
        memory_total=memory.total,
        memory_available=system.available_memory(),
        memory_limit=system.memory_limit(),
        swap_total=swap.total if swap is not None else None,
        swap_used=swap.used if swap is not None else None,
        huge_pages=_huge_pages(),
        pci_gpus=pci_gpus(),
        nvidia=cards,
        backend=backend,
        backend_error=error,
        process_names=_names(process.pid for card in cards.cards for process in card.processes or ()),
        disks=_disks(),
        packages=_packages(("llama-cpp-python", "nvidia-ml-py", "pynvml", "nvidia-ml-py3", "psutil", "numpy")),
    )


def pci_gpus(root: Path = _PCI) -> tuple[PciGpu, ...]:
    """The graphics cards on the PCI bus of the vendors in VENDORS; empty where there is no such list."""
    found = []
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        vendor = VENDORS.get(_line(device / "vendor"))
        if vendor and _line(device / "class").startswith(_DISPLAY_CLASSES):
            driver = device / "driver"
            found.append(PciGpu(vendor, driver.resolve().name if driver.exists() else None))
    return tuple(found)


def _backend() -> Backend:
    llama = library.load()
    return Backend(
        versions=library.versions(),
        devices=devices.devices(),
        features=devices.features(),
        gpu_offload=bool(llama.llama_supports_gpu_offload()),
        cuda_runtime=_cuda_runtime(),
    )


def _cuda_runtime() -> tuple[int, int] | None:
    """From the name of the library that is mapped into this process: libcudart.so.12.4.127."""
    found = re.search(r"libcudart\.so\.(\d+)(?:\.(\d+))?", _whole(system.PROC / "self" / "maps"))
    return (int(found[1]), int(found[2] or 0)) if found else None


def _cpuinfo(path: Path, key: str) -> str | None:
    found = re.search(rf"^{key}\s*:\s*(.+)$", _whole(path), re.MULTILINE)
    return found[1].strip() if found else None


def _huge_pages() -> str | None:
    found = re.search(r"\[(\w+)\]", _whole(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    return found[1] if found else None


def _names(pids: Iterable[int]) -> dict[int, str]:
    return {pid: name for pid in pids if (name := _quietly(partial(_name, pid))) is not None}


def _name(pid: int) -> str:
    return psutil.Process(pid).name()


def _disks() -> tuple[Disk, ...]:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folders = [
        Path(os.environ.get("HF_HUB_CACHE") or home / "hub"),
        Path(os.environ.get("LLAMA_CACHE") or Path.home() / ".cache" / "llama.cpp"),
    ]
    found = []
    for folder in folders:
        there = next((parent for parent in (folder, *folder.parents) if parent.is_dir()), None)
        usage = _quietly(partial(shutil.disk_usage, there)) if there is not None else None
        if usage is not None:
            found.append(Disk(str(folder), usage.free))
    return tuple(found)


def _packages(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _quietly(question: Callable[[], _Answer]) -> _Answer | None:
    """The answer, or None where this system does not give one."""
    try:
        return question()
    except (psutil.Error, OSError, RuntimeError, NotImplementedError, AttributeError):
        return None


def _line(path: Path) -> str:
    return _whole(path).strip()


def _whole(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
