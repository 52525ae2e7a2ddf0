"""A stand-in for NVIDIA's management library: the functions of `pynvml` that llamaspec calls, with chosen answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GIB = 2**30


class NvmlError(Exception):
    """As pynvml.NVMLError: `value` is NVML's return code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=24 * GIB, used=2 * GIB, free=22 * GIB),
    "nvmlDeviceGetMemoryBusWidth": 384,
    "nvmlDeviceGetMaxClockInfo": 10501,
    "nvmlDeviceGetCudaComputeCapability": (8, 9),
    "nvmlDeviceGetEnforcedPowerLimit": 450000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 450000,
    "nvmlDeviceGetPowerUsage": 61500,
    "nvmlDeviceGetTemperature": 41,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=3, memory=1),
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1,
    "nvmlDeviceGetClockInfo": 210,
    "nvmlDeviceGetDisplayActive": 0,
    "nvmlDeviceGetMigMode": NvmlError(3),
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=77, usedGpuMemory=GIB)],
    "nvmlDeviceGetGraphicsRunningProcesses": [],
}


class Library:
    """`answers` replaces some of ANSWERS, for every card; an exception among them is raised, a function is called."""

    def __init__(self, answers: dict[str, Any] | None = None, cards: int = 1, init: Exception | None = None) -> None:
        self._answers = ANSWERS | (answers or {})
        self._cards = cards
        self._init = init
        self.open = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self._init is not None:
            raise self._init
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self._cards

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "560.35.03"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 12060

    def __getattr__(self, name: str) -> Any:
        try:
            answer = self._answers[name]
        except KeyError:
            raise AttributeError(name) from None

        def function(*arguments: Any) -> Any:
            value = answer(*arguments) if callable(answer) and not isinstance(answer, SimpleNamespace) else answer
            if isinstance(value, Exception):
                raise value
            return value

        return function
