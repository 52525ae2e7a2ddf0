"""The NVIDIA management library: each odd answer it is known to give, from a stand-in of the same interface."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llamaspec.hardware import nvml
from llamaspec.hardware.nvml import Nvml
from tests.nvml_stand_in import ANSWERS, GIB, Library, NvmlError


def report(library: Library) -> nvml.Nvidia:
    return nvml.report(lambda: Nvml(library))


def test_a_card_as_it_should_be() -> None:
    library = Library()
    found = report(library)
    assert (found.error, found.driver, found.cuda) == (None, "560.35.03", (12, 6))
    (card,) = found.cards
    assert card.name == "NVIDIA GeForce RTX 4090"
    assert card.bandwidth == pytest.approx(1008e9, rel=1e-3)
    assert (card.memory_total, card.memory_free) == (24 * GIB, 22 * GIB)
    assert (card.power_limit_w, card.power_w) == (450.0, 61.5)
    assert card.throttles == ()
    assert card.display_attached is False
    assert card.processes == (nvml.CardProcess(77, GIB),)
    assert card.missing == {"mig": "not supported"}
    assert not library.open


@pytest.mark.parametrize(
    ("code", "said", "present"),
    [
        (12, "no NVIDIA driver", False),
        (9, "the NVIDIA driver is not loaded", True),
        (18, "reboot after the driver update", True),
        (4, "no permission", True),
        (999, "code 999", True),
    ],
)
def test_a_library_that_does_not_start(code: int, said: str, present: bool) -> None:
    found = report(Library(init=NvmlError(code)))
    assert said in (found.error or "")
    assert found.present is present
    assert found.cards == ()


def test_bindings_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    found = nvml.report()
    assert "nvidia-ml-py is not installed" in (found.error or "")


@pytest.mark.parametrize("code", [3, 4, 6, 13, 15, 999])
def test_every_field_may_be_missing(code: int) -> None:
    (card,) = report(Library({name: NvmlError(code) for name in ANSWERS})).cards
    fields = [f for f in card.__slots__ if f not in ("index", "missing")]
    assert [getattr(card, name) for name in fields] == [None] * len(fields)
    assert card.bandwidth is None
    assert card.lost is (code == 15)


def test_old_bindings_lack_functions_and_answer_in_bytes() -> None:
    library = Library({"nvmlDeviceGetName": b"Tesla T4"})
    del library._answers["nvmlDeviceGetMemoryBusWidth"]
    (card,) = report(library).cards
    assert card.name == "Tesla T4"
    assert card.missing["bus_width_bits"] == "the installed NVML bindings do not know it"


def test_mig_slices_answer_for_their_card() -> None:
    def memory(handle: Any) -> Any:
        return NvmlError(4) if handle == 0 else SimpleNamespace(total=10 * GIB, used=GIB, free=9 * GIB)

    answers = {
        "nvmlDeviceGetMigMode": (1, 1),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMaxMigDeviceCount": 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda _, i: f"slice {i}" if i < 2 else NvmlError(6),
        "nvmlDeviceGetUtilizationRates": NvmlError(3),
    }
    (card,) = report(Library(answers)).cards
    assert card.mig is True
    assert (card.memory_total, card.memory_free) == (20 * GIB, 18 * GIB)
    assert card.utilization_percent is None


def test_unified_memory_is_not_reported() -> None:
    (card,) = report(Library({"nvmlDeviceGetMemoryInfo": NvmlError(3), "nvmlDeviceGetMemoryBusWidth": NvmlError(3)})).cards
    assert card.memory_total is None
    assert card.bandwidth is None
    assert card.missing["memory"] == "not supported"


def test_one_of_two_cards_is_lost() -> None:
    def answer(name: str) -> Any:
        return lambda handle, *_: NvmlError(15) if handle == 1 else ANSWERS[name]

    library = Library({name: answer(name) for name in ANSWERS}, cards=2)
    first, second = report(library).cards
    assert not first.lost
    assert second.lost
    assert first.memory_total == 24 * GIB


def test_a_handle_that_is_refused() -> None:
    class Refusing(Library):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
            raise NvmlError(15)

    library = Refusing()
    with Nvml(library) as session:
        assert session.card(0).missing == {"handle": "the GPU does not answer"}
        assert session.pulse(0).missing == {"handle": "the GPU does not answer"}


def test_throttling_is_named() -> None:
    (card,) = report(Library({"nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x4 | 0x40})).cards
    assert card.throttles == ("power cap", "too hot (hardware)")


def test_processes_whose_memory_is_not_told() -> None:
    answers = {
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1, usedGpuMemory=None)],
        "nvmlDeviceGetGraphicsRunningProcesses": NvmlError(3),
    }
    (card,) = report(Library(answers)).cards
    assert card.processes == (nvml.CardProcess(1, None),)


def test_the_pulse_is_what_changes() -> None:
    with Nvml(Library()) as session:
        card = session.pulse(0)
    assert (card.memory_used, card.utilization_percent, card.sm_clock_mhz, card.temperature_c) == (2 * GIB, 3, 210, 41)
    assert card.name is None
