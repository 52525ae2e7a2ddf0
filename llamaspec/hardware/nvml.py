"""NVIDIA's management library, asked with patience: every field may be missing.

Drivers lack fields by card, by permission, in containers, under MIG and WSL, and a card can fall off the bus between two
questions. `Nvml` asks one field at a time; what cannot be had is None, with the reason kept. The bindings are nvidia-ml-py's
module `pynvml`, imported when first needed; older packages under the same name answer in bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

# nvmlReturn_t, from nvml.h
_REASONS = {
    3: "not supported",
    4: "no permission",
    6: "not found",
    9: "the NVIDIA driver is not loaded",
    12: "no NVIDIA driver",
    13: "the driver is too old to say",
    15: "the GPU is lost",
    18: "the driver and its library differ in version: reboot after the driver update",
}
_NO_DRIVER = 12
_GPU_IS_LOST = 15

# nvmlClocksEventReasons, from nvml.h; idle and "as the user set the clocks" are no throttling
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}


class Bindings(Protocol):
    """What is used of `pynvml`: its functions by name."""

    def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class CardProcess:
    """A process that holds memory of a card; bytes, None where the driver does not say."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Card:
    """One NVIDIA card. Every field but `index` may be None: not reported.

    Attributes:
        index: NVML's, by PCI bus; CUDA may count in another order.
        memory_total, memory_used, memory_free: bytes; of the MIG slices together where only they answer.
        bus_width_bits, memory_clock_mhz: the memory's bus, and the most its clock does.
        compute_capability: (major, minor).
        power_limit_w, power_default_w, power_w: watts.
        temperature_c: degrees Celsius.
        utilization_percent: of the last sample period.
        sm_clock_mhz: now.
        throttles: why the clocks are held down now; empty when they are not.
        display_attached: a screen is driven from it.
        mig: it is cut into MIG slices.
        processes: who holds memory of it.
        missing: field -> why it is None.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    bus_width_bits: int | None = None
    memory_clock_mhz: int | None = None
    compute_capability: tuple[int, int] | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    utilization_percent: int | None = None
    sm_clock_mhz: int | None = None
    throttles: tuple[str, ...] | None = None
    display_attached: bool | None = None
    mig: bool | None = None
    processes: tuple[CardProcess, ...] | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second the memory is specified for: bus width x clock x 2 (both edges)."""
        if not self.bus_width_bits or not self.memory_clock_mhz:
            return None
        return self.bus_width_bits / 8 * self.memory_clock_mhz * 1e6 * 2

    @property
    def lost(self) -> bool:
        """It has fallen off the bus since the driver started."""
        return _REASONS[_GPU_IS_LOST] in self.missing.values()


@dataclass(frozen=True, slots=True)
class Nvidia:
    """All that NVML says. `error` is why it says nothing, None when it does; `present` is False where there is no driver."""

    error: str | None = None
    present: bool = True
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    cards: tuple[Card, ...] = ()


class Nvml:
    """A session with the management library; a context manager. `bindings` stands in for `pynvml` in tests."""

    def __init__(self, bindings: Bindings | None = None) -> None:
        self.error: str | None = None
        self.present = True
        self._handles: list[Any] = []
        try:
            self._library: Any = bindings if bindings is not None else importlib.import_module("pynvml")
        except ImportError as error:
            self.error, self.present = f"nvidia-ml-py is not installed ({error})", False
            return
        try:
            self._library.nvmlInit()
        except Exception as error:
            self.error = _reason(error)
            self.present = getattr(error, "value", None) != _NO_DRIVER
            return
        count = self.ask("nvmlDeviceGetCount", {}, "count") or 0
        for index in range(count):
            self._handles.append(self.ask("nvmlDeviceGetHandleByIndex", {}, "handle", index))

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session."""
        if self.error is None:
            self.ask("nvmlShutdown", {}, "shutdown")

    def ask(self, function: str, missing: dict[str, str], name: str, *arguments: Any) -> Any:
        """The answer of one NVML function, or None; then `missing[name]` says why."""
        try:
            answer = getattr(self._library, function)(*arguments)
        except Exception as error:
            missing[name] = _reason(error)
            return None
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer

    def report(self) -> Nvidia:
        """Everything, once."""
        if self.error is not None:
            return Nvidia(self.error, self.present)
        version = self.ask("nvmlSystemGetCudaDriverVersion_v2", {}, "cuda")
        return Nvidia(
            driver=self.ask("nvmlSystemGetDriverVersion", {}, "driver"),
            cuda=(version // 1000, version % 1000 // 10) if isinstance(version, int) else None,
            cards=tuple(self.card(index) for index in range(len(self._handles))),
        )

    def card(self, index: int) -> Card:
        """One card, all of its fields."""
        handle = self._handles[index]
        missing: dict[str, str] = {}
        if handle is None:
            return Card(index, missing={"handle": "the GPU does not answer"})

        def get(name: str, function: str, *arguments: Any) -> Any:
            return self.ask(function, missing, name, handle, *arguments)

        mig_mode = get("mig", "nvmlDeviceGetMigMode")
        mig = bool(mig_mode[0]) if mig_mode is not None else None
        memory = self._memory(handle, missing, bool(mig))
        display = get("display_attached", "nvmlDeviceGetDisplayActive")
        capability = get("compute_capability", "nvmlDeviceGetCudaComputeCapability")
        milliwatts = {
            name: get(name, function)
            for name, function in (
                ("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit"),
                ("power_default_w", "nvmlDeviceGetPowerManagementDefaultLimit"),
                ("power_w", "nvmlDeviceGetPowerUsage"),
            )
        }
        return Card(
            index,
            name=get("name", "nvmlDeviceGetName"),
            uuid=get("uuid", "nvmlDeviceGetUUID"),
            memory_total=memory[0],
            memory_used=memory[1],
            memory_free=memory[2],
            bus_width_bits=get("bus_width_bits", "nvmlDeviceGetMemoryBusWidth"),
            memory_clock_mhz=get("memory_clock_mhz", "nvmlDeviceGetMaxClockInfo", 2),
            compute_capability=tuple(capability) if capability is not None else None,
            **{name: value / 1000 if value is not None else None for name, value in milliwatts.items()},
            temperature_c=get("temperature_c", "nvmlDeviceGetTemperature", 0),
            **self._load(handle, missing),
            display_attached=bool(display) if display is not None else None,
            mig=mig,
            processes=self._processes(handle, missing),
            missing=missing,
        )

    def pulse(self, index: int) -> Card:
        """One card, the fields that change while it works: memory, load, clock, temperature, throttling."""
        handle = self._handles[index]
        missing: dict[str, str] = {}
        if handle is None:
            return Card(index, missing={"handle": "the GPU does not answer"})
        memory = self._memory(handle, missing, False)
        return Card(
            index,
            memory_total=memory[0],
            memory_used=memory[1],
            memory_free=memory[2],
            temperature_c=self.ask("nvmlDeviceGetTemperature", missing, "temperature_c", handle, 0),
            **self._load(handle, missing),
            missing=missing,
        )

    @property
    def count(self) -> int:
        """Cards."""
        return len(self._handles)

    def _load(self, handle: Any, missing: dict[str, str]) -> dict[str, Any]:
        rates = self.ask("nvmlDeviceGetUtilizationRates", missing, "utilization_percent", handle)
        reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", missing, "throttles", handle)
        return {
            "utilization_percent": rates.gpu if rates is not None else None,
            "sm_clock_mhz": self.ask("nvmlDeviceGetClockInfo", missing, "sm_clock_mhz", handle, 1),
            "throttles": tuple(text for bit, text in THROTTLES.items() if reasons & bit) if reasons is not None else None,
        }

    def _memory(self, handle: Any, missing: dict[str, str], mig: bool) -> tuple[int | None, int | None, int | None]:
        """Total, used, free. A card in MIG mode may answer for its slices only."""
        info = self.ask("nvmlDeviceGetMemoryInfo", missing, "memory", handle)
        if info is not None:
            return info.total, info.used, info.free
        slices = self._slices(handle) if mig else []
        found = [one for one in (self.ask("nvmlDeviceGetMemoryInfo", {}, "memory", part) for part in slices) if one is not None]
        if not found:
            return None, None, None
        return sum(one.total for one in found), sum(one.used for one in found), sum(one.free for one in found)

    def _slices(self, handle: Any) -> list[Any]:
        count = self.ask("nvmlDeviceGetMaxMigDeviceCount", {}, "slices", handle) or 0
        found = (self.ask("nvmlDeviceGetMigDeviceHandleByIndex", {}, "slice", handle, index) for index in range(count))
        return [part for part in found if part is not None]

    def _processes(self, handle: Any, missing: dict[str, str]) -> tuple[CardProcess, ...] | None:
        lists = [
            self.ask(f"nvmlDeviceGet{kind}RunningProcesses", missing, "processes", handle) for kind in ("Compute", "Graphics")
        ]
        if all(one is None for one in lists):
            return None
        missing.pop("processes", None)
        held: dict[int, int | None] = {}
        for one in lists:
            for process in one or ():
                used = getattr(process, "usedGpuMemory", None)
                held[process.pid] = used if isinstance(used, int) else None
        return tuple(CardProcess(pid, used) for pid, used in held.items())


def report(connect: Callable[[], Nvml] = Nvml) -> Nvidia:
    """What NVML says about this machine, in one session."""
    with connect() as session:
        return session.report()


def _reason(error: Exception) -> str:
    if isinstance(error, AttributeError):
        return "the installed NVML bindings do not know it"
    return _REASONS.get(getattr(error, "value", -1), str(error) or type(error).__name__)
