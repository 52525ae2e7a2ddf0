"""The rules alone: what comes out is distributed as p, whatever q is."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.decoding import acceptance
from llamaspec.decoding.acceptance import Choice, Distribution, acceptance_rate, draw, settle

P = Distribution(np.array([3, 1, 7, 4], np.int32), np.array([0.5, 0.3, 0.15, 0.05]))
DRAFTS: dict[str, Choice] = {
    "the same": P,
    "overlapping": Distribution(np.array([9, 7, 3], np.int32), np.array([0.4, 0.4, 0.2])),
    "disjoint": Distribution(np.array([8, 9], np.int32), np.array([0.5, 0.5])),
    "one point inside": 1,
    "one point outside": 8,
    "sharper": Distribution(np.array([3, 1], np.int32), np.array([0.9, 0.1])),
}
ROUNDS = 30_000
# 99.99 % quantiles of chi-square: a right rule fails one seed in ten thousand, and the seed is fixed.
CRITICAL = {1: 15.1, 2: 18.4, 3: 21.1}


def _chi_square(counts: dict[int, int], p: Distribution) -> float:
    expected = dict(zip(p.ids.tolist(), (p.probs * sum(counts.values())).tolist(), strict=True))
    assert set(counts) <= set(expected), "a token the target cannot write"
    return float(sum((counts.get(token, 0) - e) ** 2 / e for token, e in expected.items()))


def _run(rule: Callable[[Choice, int, Choice, Random], tuple[int, bool]], q: Choice) -> tuple[dict[int, int], int]:
    rng, draft_rng = Random(1), Random(2)
    counts: dict[int, int] = {}
    accepted = 0
    for _ in range(ROUNDS):
        token, ok = rule(P, draw(q, draft_rng), q, rng)
        counts[token] = counts.get(token, 0) + 1
        accepted += ok
    return counts, accepted


@pytest.mark.parametrize("q", DRAFTS.values(), ids=DRAFTS.keys())
def test_what_comes_out_follows_the_target(q: Choice) -> None:
    counts, accepted = _run(settle, q)
    assert _chi_square(counts, P) < CRITICAL[3]
    assert accepted / ROUNDS == pytest.approx(acceptance_rate(P, q), abs=0.015)


def test_the_check_notices_a_wrong_rule() -> None:
    def always_accept_what_is_possible(p: Choice, token: int, q: Choice, rng: Random) -> tuple[int, bool]:
        assert isinstance(p, Distribution)
        return (token, True) if p.of(token) > 0 else (draw(p, rng), False)

    def replace_from_p_itself(p: Choice, token: int, q: Choice, rng: Random) -> tuple[int, bool]:
        chosen, ok = settle(p, token, q, rng)
        return (chosen, ok) if ok else (draw(p, rng), False)

    for wrong in (always_accept_what_is_possible, replace_from_p_itself):
        for name in ("overlapping", "sharper", "one point inside"):
            counts, _ = _run(wrong, DRAFTS[name])
            assert _chi_square(counts, P) > CRITICAL[3], (wrong.__name__, name)


def test_greedy_accepts_the_argmax_only() -> None:
    rng = Random(0)
    assert settle(5, 5, 5, rng) == (5, True)
    assert settle(5, 6, 6, rng) == (5, False)
    assert settle(5, 6, DRAFTS["overlapping"], rng) == (5, False)


@st.composite
def _distributions(draw_: st.DrawFn) -> Distribution:
    ids = draw_(st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True))
    weights = np.array(draw_(st.lists(st.floats(0.01, 1), min_size=len(ids), max_size=len(ids))))
    return Distribution(np.array(ids, np.int32), weights / weights.sum())


@given(_distributions(), _distributions())
@settings(deadline=None)
def test_accepting_and_replacing_add_up_to_p(p: Distribution, q: Distribution) -> None:
    """min(p, q) + (1 - sum min(p, q)) · residual = p, token by token."""
    accepted = {t: min(p.of(t), q.of(t)) for t in p.ids.tolist()}
    rate = sum(accepted.values())
    assert rate == pytest.approx(acceptance_rate(p, q))
    residual = acceptance._residual(p, q)
    for token in p.ids.tolist():
        assert accepted[token] + (1 - rate) * residual.of(token) == pytest.approx(p.of(token), abs=1e-9)


@given(_distributions(), st.integers(0, 2**32))
@settings(deadline=None)
def test_draws_stay_within_the_support(p: Distribution, seed: int) -> None:
    assert draw(p, Random(seed)) in p.ids
