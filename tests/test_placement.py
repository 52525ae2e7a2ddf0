"""A load follows the plan: what is left open is chosen for the machine, what cannot fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import llamaspec
from llamaspec import LoadOptions
from llamaspec.errors import OutOfMemoryError
from llamaspec.gguf_header import read_model
from llamaspec.hardware import room
from llamaspec.placement import settle
from llamaspec.plan import GpuRoom, Room
from llamaspec.roofline import Rate

RATE = Rate(1e9, "assumed")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Room]:
    """The machine that plans see; put another in its place."""
    held = [Room(2**30, RATE)]

    def here(utilization: float = room.UTILIZATION, *, measure: bool = True) -> Room:
        taken = [replace(gpu, free_bytes=round((gpu.free_bytes or 0) * utilization)) for gpu in held[0].gpus]
        return replace(held[0], gpus=tuple(taken))

    monkeypatch.setattr(room, "here", here)
    return held


def test_what_is_open_is_chosen(target: Path, far_draft: Path, machine: list[Room]) -> None:
    models = read_model(target), read_model(far_draft)
    options, said = settle(*models, LoadOptions(threads=3))
    assert (options.n_ctx, options.gpu_layers, options.draft_gpu_layers, options.threads) == (512, 0, 0, 3)
    assert said == ()
    machine[0] = Room(2**30, RATE, (GpuRoom("GPU0", 2**30, RATE),))
    options, said = settle(*models, LoadOptions())
    assert (options.gpu_layers, options.draft_gpu_layers) == (3, 2)
    assert settle(*models, LoadOptions(gpu_layers=1, n_ctx=100))[0].gpu_layers == 1


def test_the_margin_of_a_gpu_refuses_nothing(target: Path, machine: list[Room]) -> None:
    model = read_model(target)
    machine[0] = Room(2**30, RATE, (GpuRoom("GPU0", 2**30, RATE),))
    options = LoadOptions(gpu_layers=-1)
    low, high = 0, 2**30
    while high - low > 1024:  # the least memory that a whole share of the card allows
        middle = (low + high) // 2
        machine[0] = replace(machine[0], gpus=(GpuRoom("GPU0", middle, RATE),))
        try:
            settle(model, None, options)
            high = middle
        except OutOfMemoryError:
            low = middle
    machine[0] = replace(machine[0], gpus=(GpuRoom("GPU0", high, RATE),))
    assert settle(model, None, options)[0].gpu_layers == 3


def test_a_smaller_context_is_told(target: Path, machine: list[Room]) -> None:
    model = read_model(target)
    machine[0] = Room(11 * 2**20, RATE)
    with pytest.raises(OutOfMemoryError):
        settle(model, None, LoadOptions())
    with pytest.raises(OutOfMemoryError) as caught:
        llamaspec.load(target, options=LoadOptions())
    assert caught.value.table[0].split() == ["MiB", "CPU"]
    assert caught.value.hint == "ask for a smaller quantization or model"
