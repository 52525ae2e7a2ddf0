"""What speed to expect: the bytes a token reads over the bandwidth they come through, and what drafting can add.

The roofline is the most tokens per second without drafting: no kernel reads the weights faster than the memory gives them.
Drafting is reckoned by the formula of Leviathan et al. (arXiv 2211.17192): a draft of n tokens of which each is accepted with
probability α yields (1 - α^(n+1)) / (1 - α) tokens for the time of n draft steps and one pass over n + 1 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["measured", "specified", "assumed"]
DRAFT_LENGTHS = range(1, 17)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)

# Cost of a pass over m tokens, as a multiple of a pass over one. On the CPU: measured with llama.cpp on two AVX-512 cores, a
# 1.5B in Q4_K_M and in BF16. On a GPU: four percent more per token, the usual shape while memory is the limit; not measured.
_VERIFY_QUANTIZED = {1: 1.0, 2: 1.74, 4: 2.94, 8: 6.9, 16: 7.9}
_VERIFY_FLOAT = {1: 1.0, 2: 1.55, 4: 1.95, 8: 2.5, 16: 3.7}
_VERIFY_GPU = {1: 1.0, 16: 1.6}


@dataclass(frozen=True, slots=True)
class Rate:
    """A bandwidth in bytes per second, and how it is known."""

    bytes_per_second: float
    source: Source


@dataclass(frozen=True, slots=True)
class Load:
    """What one token of one model reads through one device.

    Attributes:
        device: its name.
        read_bytes: weights, keys, values and states.
        rate: of the device's memory.
        gpu: whether it is one.
    """

    device: str
    read_bytes: int
    rate: Rate
    gpu: bool

    @property
    def seconds(self) -> float:
        """The least time that takes."""
        return self.read_bytes / self.rate.bytes_per_second


@dataclass(frozen=True, slots=True)
class Roofline:
    """A pair's speed limits.

    Attributes:
        target, draft: what a token reads, by device; the devices work one after the other. `draft` is empty without one.
        quantized: most of the target's weights are, which makes passes over several tokens dearer on a CPU.
    """

    target: tuple[Load, ...]
    draft: tuple[Load, ...]
    quantized: bool

    @property
    def seconds(self) -> float:
        """The least time of one token of the target alone."""
        return sum(load.seconds for load in self.target)

    @property
    def tokens_per_second(self) -> float:
        """The most tokens per second without drafting."""
        return 1 / self.seconds

    @property
    def draft_cost(self) -> float | None:
        """A draft step's time as a share of the target's; None without a draft."""
        return sum(load.seconds for load in self.draft) / self.seconds if self.draft else None

    @property
    def sources(self) -> tuple[str, ...]:
        """Every device's bandwidth and how it is known."""
        rates = {load.device: load.rate for load in (*self.target, *self.draft)}
        return tuple(f"{device} {rate.bytes_per_second / 1e9:.0f} GB/s ({rate.source})" for device, rate in rates.items())

    def verify_cost(self, tokens: int) -> float:
        """A pass over `tokens` as a multiple of a pass over one: assumed, see the module."""
        on_gpu = sum(load.seconds for load in self.target if load.gpu) / self.seconds
        on_cpu = _curve(_VERIFY_QUANTIZED if self.quantized else _VERIFY_FLOAT, tokens)
        return on_gpu * _curve(_VERIFY_GPU, tokens) + (1 - on_gpu) * on_cpu

    def gain(self, n_draft: int, acceptance: float) -> float:
        """How many times the tokens per second of the target alone to expect, at this draft length and acceptance (0 to 1)."""
        cost = n_draft * (self.draft_cost or 0.0) + self.verify_cost(n_draft + 1)
        return _tokens_per_round(n_draft, acceptance) / cost

    def best(self, acceptance: float) -> tuple[int, float]:
        """The best draft length at this acceptance and its gain; (0, 1.0) where drafting cannot pay."""
        best = max(((n, self.gain(n, acceptance)) for n in DRAFT_LENGTHS), key=lambda found: found[1])
        return best if best[1] > 1 else (0, 1.0)

    def needed_acceptance(self, n_draft: int) -> float | None:
        """The acceptance above which drafting `n_draft` tokens pays; None where even certainty does not."""
        if self.gain(n_draft, 1.0) <= 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if self.gain(n_draft, middle) > 1 else (middle, high)
        return high


def _tokens_per_round(n_draft: int, acceptance: float) -> float:
    return float(sum(acceptance**i for i in range(n_draft + 1)))


def _curve(points: dict[int, float], at: int) -> float:
    """Straight lines between the points, and on beyond the last."""
    known = sorted(points)
    upper = next((i for i, x in enumerate(known) if x >= at), len(known) - 1)
    if known[upper] == at:
        return points[at]
    left, right = known[max(upper - 1, 0)], known[upper]
    return points[left] + (points[right] - points[left]) * (at - left) / (right - left)
