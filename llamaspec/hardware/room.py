"""The room a plan has on this machine: what is free, and how fast it is."""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec import hardware
from llamaspec.hardware import bandwidth, nvml
from llamaspec.llama import devices
from llamaspec.plan import GpuRoom, Room
from llamaspec.roofline import Rate

UTILIZATION = 0.92
"""Share of a GPU's memory that may be taken: the driver's own contexts and the desktop need the rest."""

ASSUMED_RAM = Rate(40e9, "assumed")
ASSUMED_GPU = Rate(400e9, "assumed")


def here(utilization: float = UTILIZATION, *, measure: bool = True) -> Room:
    """This machine now.

    Args:
        utilization: share of each GPU's memory that may be taken, 0 to 1.
        measure: measure the bandwidth of system memory (0.1 to 0.3 s) and ask NVML for the cards'; otherwise both are assumed,
            which is enough to compare placements.
    """
    found = [gpu for gpu in devices.gpus() if gpu.kind == "gpu"] or list(devices.gpus())
    cards = nvml.report().cards if measure and found else ()
    rooms = []
    for index, gpu in enumerate(found):
        free = gpu.memory_free - round((1 - utilization) * gpu.memory_total) if gpu.memory_total else None
        rooms.append(GpuRoom(gpu.name, None if free is None else max(free, 0), _rate(gpu, index, cards)))
    return Room(
        ram_bytes=hardware.available_memory(),
        ram_rate=Rate(bandwidth.measure(hardware.physical_cores()), "measured") if measure else ASSUMED_RAM,
        gpus=tuple(rooms),
        repacked=devices.repacked_types(),
    )


def _rate(gpu: devices.Device, index: int, cards: Sequence[nvml.Card]) -> Rate:
    """The bandwidth of the card of this name; of several alike any will do."""
    alike = [card for card in cards if card.name and card.name in gpu.description]
    card = alike[0] if alike else cards[index] if index < len(cards) and "CUDA" in gpu.name else None
    specified = card.bandwidth if card is not None else None
    return Rate(specified, "specified") if specified else ASSUMED_GPU
