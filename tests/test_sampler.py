"""What the machine does meanwhile: the thread that looks, what its samples add up to, and who is to blame for a fall."""

from __future__ import annotations

import mmap
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from llamaspec.hardware import sampler, system
from llamaspec.hardware.nvml import Nvml
from llamaspec.hardware.sampler import CardSample, Sample, Sampler, Usage, look, slowdown
from tests.nvml_stand_in import ANSWERS, GIB, Library, NvmlError


def sample(at: float, *, faults: int | None = 0, swapped: int | None = 0, cards: tuple[CardSample, ...] = ()) -> Sample:
    return Sample(at, 100 + int(at), 1000 - int(at), 90.0, faults, swapped, cards)


def card(used: int | None = GIB, throttles: tuple[str, ...] | None = (), load: int | None = 50) -> CardSample:
    return CardSample(used, 24 * GIB, load, 2000, 60, throttles)


def tokens(*speeds: float, seconds: float = 10.0) -> list[tuple[float, int]]:
    """Rounds of one token, `seconds` at each speed in turn."""
    found = [(0.0, 1)]
    for speed in speeds:
        start = found[-1][0]
        found += [(start + (i + 1) / speed, 1) for i in range(round(speed * seconds))]
    return found


def test_the_thread_looks_and_stops() -> None:
    looked = threading.Event()

    def temperature(*_: object) -> int:
        looked.set()
        return 41

    library = Library({"nvmlDeviceGetTemperature": temperature})
    before = threading.active_count()
    with Sampler(interval=60, connect=lambda: Nvml(library)) as running:
        assert looked.wait(30)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert len(running.samples) == 2  # one at once, one at the end
    latest = running.latest
    assert latest is not None
    assert latest.resident_bytes > 2**20
    assert latest.cards[0].used_bytes == 2 * GIB
    assert not library.open


def test_a_machine_without_cards_or_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PROC", tmp_path)
    seen = look(psutil.Process(), Nvml(Library(init=NvmlError(12))))
    assert (seen.major_faults, seen.swapped_in_bytes, seen.cards) == (None, None, ())
    usage = Usage.of([seen, seen])
    assert usage is not None
    assert (usage.major_faults, usage.pages) == (None, False)


def test_faults_and_swap_are_read_from_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PROC", tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text("42 (a) strange) name) S 1 2 3 4 5 6 7 8 1234 9 10\n")
    (tmp_path / "vmstat").write_text("pgpgin 5\npswpin 3\npswpout 7\n")
    assert sampler._major_faults() == 1234
    assert sampler._swapped_in() == 3 * mmap.PAGESIZE


def test_a_card_that_reports_nothing() -> None:
    seen = look(psutil.Process(), Nvml(Library({name: NvmlError(3) for name in ANSWERS})))
    assert seen.cards == (CardSample(None, None, None, None, None, None),)


def test_what_samples_add_up_to() -> None:
    cards = [(card(GIB, load=10),), (card(3 * GIB, ("power cap",), 90),), (card(2 * GIB, None, None),)]
    usage = Usage.of([sample(t, faults=int(t) * 7, cards=held) for t, held in zip((0.0, 1.0, 2.0), cards, strict=True)])
    assert usage == Usage(2.0, 102, 998, 14, 0, (3 * GIB,), (50.0,), ("power cap",), 0.125)
    assert not usage.pages
    assert Usage.of([sample(0)]) is None


def test_paging_is_a_rate() -> None:
    slow, fast = (Usage.of([sample(0), sample(10, faults=faults)]) for faults in (100, 1000))
    assert slow is not None
    assert fast is not None
    assert (slow.pages, fast.pages) == (False, True)
    swapping = Usage.of([sample(0), sample(10, swapped=100 << 20)])
    assert swapping is not None
    assert swapping.pages


def test_a_fall_with_a_cause_is_named() -> None:
    fell = tokens(20.0, 5.0)
    paging = [sample(t, faults=0 if t < 10 else int(t - 10) * 500) for t in range(21)]
    assert slowdown(paging, fell) == (
        "the speed fell from 20.0 to 5.0 tokens/s while memory was read back from disk (5000 major faults, 0 MiB swapped in)"
    )
    hot = [sample(t, cards=(card(throttles=("too hot (hardware)",) if t > 10 else ()),)) for t in range(21)]
    assert "the GPU was throttled (too hot (hardware))" in (slowdown(hot, fell) or "")
    full = [sample(t, cards=(card(used=24 * GIB),)) for t in range(21)]
    assert "the memory of GPU 0 is full" in (slowdown(full, fell) or "")


def test_no_fall_and_no_cause_are_not_named() -> None:
    quiet = [sample(t) for t in range(21)]
    paging = [sample(t, faults=t * 500) for t in range(21)]
    assert slowdown(quiet, tokens(20.0, 5.0)) is None
    assert slowdown(paging, tokens(20.0, 18.0)) is None
    assert slowdown(paging, tokens(5.0, 20.0)) is None
    assert slowdown(paging, tokens(20.0, 5.0)[:10]) is None
    assert slowdown([], tokens(20.0, 5.0)) is None


def test_load_of_a_card_is_its_gpu_figure() -> None:
    seen = look(psutil.Process(), Nvml(Library({"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=3)})))
    assert seen.cards[0].utilization_percent == 97


def test_the_fullest_memory_is_the_machine_s_or_a_card_s() -> None:
    full, unknown = card(23 * GIB), card(None)
    early = replace(sample(0, cards=(full, unknown)), available_bytes=500, memory_bytes=1000)
    late = replace(sample(1, cards=(unknown,)), available_bytes=10, memory_bytes=1000)
    assert early.fullest == pytest.approx(23 / 24)
    assert late.fullest == pytest.approx(0.99)
    assert sample(0).fullest is None
    usage = Usage.of([early, late])
    assert usage is not None
    assert usage.fullest == pytest.approx(0.99)
