"""The rules that make drafting lossless: numbers in, a token out.

Whatever the drafter proposed and however it drew it, the token that comes out of `settle` is distributed as the target's own
`p`. Greedy decoding is the case where `p` is one point.

Source of the method: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023),
and Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution over a few tokens; all others have probability 0.

    Attributes:
        ids: token ids, shape (k,), each once.
        probs: their probabilities, shape (k,), summing to 1.
    """

    ids: NDArray[np.int32]
    probs: NDArray[np.float64]

    def of(self, token: int) -> float:
        """The probability of `token`."""
        hit = np.flatnonzero(self.ids == token)
        return float(self.probs[hit[0]]) if hit.size else 0.0


Choice = int | Distribution
"""What a token is drawn from: one certain token, or a distribution."""


def draw(choice: Choice, rng: Random) -> int:
    """A token drawn from `choice`, by one uniform number and the inverse of the cumulative distribution."""
    if isinstance(choice, int):
        return choice
    cumulative = np.cumsum(choice.probs)
    index = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return int(choice.ids[min(index, len(choice.ids) - 1)])


def settle(p: Choice, token: int, q: Choice, rng: Random) -> tuple[int, bool]:
    """Decide on a drafted token.

    Args:
        p: what the target would draw from at this position.
        token: what was drafted.
        q: what it was drawn from. A deterministic drafter's q is the token itself.
        rng: the source of the uniform numbers.

    Returns:
        The token to emit, distributed as `p` when `token` was drawn from `q`; and whether it is the drafted one, accepted.
    """
    if isinstance(p, int):
        return p, p == token
    if isinstance(q, int):
        # Min(1, p/q) and the residual come to this: draw from p, and see whether it is the token. One number is used, as
        # without a draft, so that a seed gives the same text however far and by whatever certain drafter it was drafted.
        drawn = draw(p, rng)
        return drawn, drawn == token
    if rng.random() * q.of(token) < p.of(token):
        return token, True
    return draw(_residual(p, q), rng), False


def acceptance_rate(p: Choice, q: Choice) -> float:
    """The probability that a token drawn from `q` is accepted against `p`: sum of min(p, q), that is 1 - TV(p, q)."""
    if isinstance(q, int):
        return (1.0 if p == q else 0.0) if isinstance(p, int) else p.of(q)
    if isinstance(p, int):
        return q.of(p)
    return float(np.minimum(p.probs, _on_support(p, q)).sum())


def _residual(p: Distribution, q: Distribution) -> Distribution:
    """norm(max(0, p - q)): what is left of the target once the drafter's share is taken out."""
    rest = np.maximum(p.probs - _on_support(p, q), 0.0)
    total = rest.sum()
    # p equals q up to rounding: a rejection then has probability zero, and any of p is right.
    return Distribution(p.ids, rest / total) if total > 0 else p


def _on_support(p: Distribution, q: Distribution) -> NDArray[np.float64]:
    """q's probabilities of p's tokens, in p's order."""
    order = np.argsort(q.ids)
    place = np.minimum(np.searchsorted(q.ids, p.ids, sorter=order), len(q.ids) - 1)
    found = order[place]
    probs: NDArray[np.float64] = np.where(q.ids[found] == p.ids, q.probs[found], 0.0)
    return probs
