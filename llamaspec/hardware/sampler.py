"""What the machine does while a pair works: memory, load, clocks, heat, paging.

A thread looks a few times a second, at /proc, psutil and NVML, and keeps the figures; who shows or sums them up asks for them.
One look costs about a tenth of a millisecond without cards, some milliseconds for each card.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import psutil

from llamaspec.hardware import system
from llamaspec.hardware.nvml import Nvml

INTERVAL = 0.5
KEPT = 7200
"""Samples kept: an hour at the usual interval."""

_FALL = 0.7  # a speed below this share of the best sustained one is a fall
_FEW_FAULTS_PER_SECOND = 20
_MANY_SWAPPED_BYTES_PER_SECOND = 1 << 20


@dataclass(frozen=True, slots=True)
class CardSample:
    """One card at one moment; None: not reported. Bytes, percent, MHz, degrees Celsius."""

    used_bytes: int | None
    total_bytes: int | None
    utilization_percent: int | None
    sm_clock_mhz: int | None
    temperature_c: int | None
    throttles: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The machine at one moment. None: not reported.

    Attributes:
        at: time.monotonic().
        resident_bytes: of this process, mapped files included.
        available_bytes: of the machine.
        cpu_percent: of this process since the sample before; 100 is one core.
        major_faults: pages this process has had read from disk since it started.
        swapped_in_bytes: by the whole machine since it started.
        cards: by NVML's index.
        memory_bytes: of the machine, in all.
    """

    at: float
    resident_bytes: int
    available_bytes: int
    cpu_percent: float
    major_faults: int | None
    swapped_in_bytes: int | None
    cards: tuple[CardSample, ...] = ()
    memory_bytes: int | None = None

    @property
    def fullest(self) -> float | None:
        """Share of the fullest memory in use, the machine's or a card's, 0 to 1."""
        shares = [card.used_bytes / card.total_bytes for card in self.cards if card.used_bytes and card.total_bytes]
        if self.memory_bytes:
            shares.append(1.0 - self.available_bytes / self.memory_bytes)
        return max(shares, default=None)


class Sampler:
    """Samples in a thread of its own, from `start` (or `with`) to `stop`.

    Args:
        interval: seconds between two looks.
        connect: opens NVML.
    """

    def __init__(self, interval: float = INTERVAL, connect: Callable[[], Nvml] = Nvml) -> None:
        self._interval = interval
        self._connect = connect
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = psutil.Process()

    def start(self) -> Sampler:
        """Begin; returns itself."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="llamaspec-sampler", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End, with a last look. The samples stay."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Every sample kept, oldest first."""
        return tuple(self._samples)

    @property
    def latest(self) -> Sample | None:
        """The newest sample; None before the first."""
        return self._samples[-1] if self._samples else None

    def _run(self) -> None:
        with self._connect() as cards:
            while True:
                self._samples.append(look(self._process, cards))
                if self._stop.wait(self._interval):
                    break
            self._samples.append(look(self._process, cards))


def look(process: psutil.Process, cards: Nvml) -> Sample:
    """One sample, now."""
    memory = psutil.virtual_memory()
    return Sample(
        at=time.monotonic(),
        resident_bytes=process.memory_info().rss,
        available_bytes=memory.available,
        cpu_percent=process.cpu_percent(),
        major_faults=_major_faults(),
        swapped_in_bytes=_swapped_in(),
        cards=tuple(_card(cards, index) for index in range(cards.count)) if cards.error is None else (),
        memory_bytes=memory.total,
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a stretch of samples adds up to. None: not reported.

    Attributes:
        seconds: between the first and the last.
        peak_resident_bytes, least_available_bytes: over it.
        major_faults, swapped_in_bytes: within it.
        peak_card_bytes, mean_utilization_percent: by card.
        throttles: every reason seen, in the order they came.
        fullest: share of the fullest memory in use, the machine's or a card's, 0 to 1.
    """

    seconds: float
    peak_resident_bytes: int
    least_available_bytes: int
    major_faults: int | None
    swapped_in_bytes: int | None
    peak_card_bytes: tuple[int | None, ...]
    mean_utilization_percent: tuple[float | None, ...]
    throttles: tuple[str, ...]
    fullest: float | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Usage | None:
        """The usage over `samples`, oldest first; None for fewer than two."""
        if len(samples) < 2:
            return None
        first, last = samples[0], samples[-1]
        columns = list(zip(*(sample.cards for sample in samples), strict=False))
        used = [[card.used_bytes for card in column if card.used_bytes is not None] for column in columns]
        busy = [[c.utilization_percent for c in column if c.utilization_percent is not None] for column in columns]
        reasons = (reason for sample in samples for card in sample.cards for reason in card.throttles or ())
        return cls(
            seconds=last.at - first.at,
            peak_resident_bytes=max(sample.resident_bytes for sample in samples),
            least_available_bytes=min(sample.available_bytes for sample in samples),
            major_faults=_difference(first.major_faults, last.major_faults),
            swapped_in_bytes=_difference(first.swapped_in_bytes, last.swapped_in_bytes),
            peak_card_bytes=tuple(max(column, default=None) for column in used),
            mean_utilization_percent=tuple(sum(column) / len(column) if column else None for column in busy),
            throttles=tuple(dict.fromkeys(reasons)),
            fullest=max((sample.fullest for sample in samples if sample.fullest is not None), default=None),
        )

    @property
    def pages(self) -> bool:
        """Memory came from disk while it worked, at a rate that costs time."""
        if self.seconds <= 0:
            return False
        faults, swapped = (self.major_faults or 0) / self.seconds, (self.swapped_in_bytes or 0) / self.seconds
        return faults > _FEW_FAULTS_PER_SECOND or swapped > _MANY_SWAPPED_BYTES_PER_SECOND


def slowdown(samples: Sequence[Sample], tokens: Sequence[tuple[float, int]]) -> str | None:
    """Name what went with a sudden fall of speed: one sentence, or None when there was no fall, or nothing to blame.

    Args:
        samples: of the time of the answer, oldest first.
        tokens: (time.monotonic() when they came, how many) of every round, oldest first.
    """
    fall = _fall(tokens)
    if fall is None:
        return None
    since, before, after = fall
    usage = Usage.of([sample for sample in samples if sample.at >= since - INTERVAL])
    if usage is None:
        return None
    causes = []
    if usage.pages:
        causes.append(
            f"memory was read back from disk ({usage.major_faults or 0} major faults, "
            f"{(usage.swapped_in_bytes or 0) / 2**20:.0f} MiB swapped in)"
        )
    if usage.throttles:
        causes.append(f"the GPU was throttled ({', '.join(usage.throttles)})")
    full = [
        index
        for index, card in enumerate(samples[-1].cards)
        if card.used_bytes and card.total_bytes and card.used_bytes > 0.98 * card.total_bytes
    ]
    if full:
        causes.append(f"the memory of GPU {full[0]} is full, and may spill into system memory")
    if not causes:
        return None
    return f"the speed fell from {before:.1f} to {after:.1f} tokens/s while {' and '.join(causes)}"


def _fall(tokens: Sequence[tuple[float, int]]) -> tuple[float, float, float] | None:
    """When the speed fell for good, and the speeds before and after; None when it did not.

    The rounds are cut in two where the halves differ most; each half must have eight rounds.
    """
    least = 8
    worst: tuple[float, float, float] | None = None
    counts = [0]
    for _, count in tokens:
        counts.append(counts[-1] + count)
    for cut in range(least, len(tokens) - least):
        middle = tokens[cut - 1][0]
        early, late = middle - tokens[0][0], tokens[-1][0] - middle
        if early <= 0 or late <= 0:
            continue
        before, after = (counts[cut] - counts[1]) / early, (counts[-1] - counts[cut]) / late
        if before > 0 and after < _FALL * before and (worst is None or after / before < worst[2] / worst[1]):
            worst = (middle, before, after)
    return worst


def _card(cards: Nvml, index: int) -> CardSample:
    card = cards.pulse(index)
    return CardSample(
        card.memory_used,
        card.memory_total,
        card.utilization_percent,
        card.sm_clock_mhz,
        card.temperature_c,
        card.throttles,
    )


def _major_faults() -> int | None:
    """Field 12 of /proc/self/stat (proc(5)), counted behind the name in brackets, which may hold anything."""
    try:
        text = (system.PROC / "self" / "stat").read_text()
        return int(text.rpartition(")")[2].split()[9])
    except (OSError, ValueError, IndexError):
        return None


def _swapped_in() -> int | None:
    """From /proc/vmstat, which counts pages."""
    try:
        for row in (system.PROC / "vmstat").read_text().splitlines():
            if row.startswith("pswpin "):
                return int(row.split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        pass
    return None


def _difference(first: int | None, last: int | None) -> int | None:
    return last - first if first is not None and last is not None else None
