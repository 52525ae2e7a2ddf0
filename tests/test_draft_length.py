"""How far to draft, against every fixed length and against one who knows more: a simulation, without any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import pytest

from llamaspec.calibration import PASSES
from llamaspec.decoding.draft_length import LEAST_WINDOW, PATIENCE, STOP, Costs, DraftLength, Move

LIMIT = 16
TOKENS = 4000


@dataclass(frozen=True)
class Curve:
    """What a machine takes, in plain tokens: a pass over m tokens, a draft step."""

    name: str
    verify: Callable[[int], float]
    step: float

    def table(self) -> list[float]:
        return [0.0, *(self.verify(m) for m in range(1, LIMIT + 2))]


def _between(points: dict[int, float]) -> Callable[[int], float]:
    costs = Costs(points)
    return costs.verify


CURVES = (
    Curve("flat, as on a GPU, with a small draft", lambda m: 1 + 0.01 * (m - 1), 0.05),
    Curve("flat, with a draft of a tenth", lambda m: 1 + 0.015 * (m - 1), 0.12),
    # BF16 1.5B and its draft of 0.5B on two cores
    Curve("bound by memory, on a CPU", _between({1: 1.0, 2: 1.35, 4: 1.6, 8: 2.0, 16: 2.9}), 0.22),
    # Q4_K_M on two cores
    Curve("bound by arithmetic", _between({1: 1.0, 2: 1.75, 4: 2.9, 8: 6.8, 16: 7.9}), 0.12),
    # kernels change at 2, 5 and 9 tokens
    Curve("a staircase", lambda m: 1.0 if m < 2 else 1.3 if m < 5 else 1.35 if m < 9 else 2.2, 0.1),
)


@dataclass(frozen=True)
class Text:
    """How a draft fares on a text: at every place, how sure it is, and the chance that it is right."""

    name: str
    place: Callable[[Random, int], tuple[float, float]]

    def places(self, seed: int, length: int) -> Iterator[tuple[float, float]]:
        rng = Random(seed)
        return (self.place(rng, at) for at in range(length))


def even(chance: float) -> Text:
    """Equally likely everywhere, and the draft knows how likely."""
    return Text(f"even {chance:g}", lambda _rng, _at: (chance, chance))


def mixed(mean: float, boast: float = 0.0) -> Text:
    """Sure of most, at a loss at some, as real drafts are; `boast` overstates its confidence."""
    sure, unsure = 0.96, 0.2
    share = (mean - unsure) / (sure - unsure)

    def place(rng: Random, _at: int) -> tuple[float, float]:
        chance = sure if rng.random() < share else unsure
        return min(0.999, chance + boast * (1 - chance)), chance

    return Text(f"mixed {mean:g}" + (f", boasting {boast:g}" if boast else ""), place)


def liar(chance: float) -> Text:
    """Always sure, and right by chance."""
    return Text(f"sure, right {chance:g}", lambda _rng, _at: (0.97, chance))


def drifting(before: float, after: float) -> Text:
    """Easy at first, hard later, or the other way round."""
    first, second = mixed(before), mixed(after)
    return Text(f"from {before:g} to {after:g}", lambda rng, at: (first if at < TOKENS // 2 else second).place(rng, at))


class World:
    """A text that is written over a machine: outcomes are fixed beforehand, so that every policy meets the same."""

    def __init__(self, curve: Curve, text: Text, seed: int = 0) -> None:
        self.curve = curve
        self.verify = curve.table()
        rng = Random(seed + 1)
        # A draft's fate depends on the place in the text alone.
        self.places = [(said, true, rng.random() < true) for said, true in text.places(seed, TOKENS + LIMIT + 1)]

    def fixed(self, length: int) -> float:
        """Tokens per unit of time with always the same draft length."""
        at, time = 0, 0.0
        while at < TOKENS:
            accepted = 0
            while accepted < length and self.places[at + accepted][2]:
                accepted += 1
            at += accepted + 1
            time += self.verify[1 + length] + length * self.curve.step
        return at / time

    def best_fixed(self) -> float:
        return max(map(self.fixed, range(LIMIT + 1)))

    def threshold(self, p_min: float, length: int) -> float:
        """Tokens per unit of time of one who knows every chance, and stops before one under `p_min`."""
        at, time = 0, 0.0
        while at < TOKENS:
            drafted = 0
            while drafted < length and self.places[at + drafted][1] >= p_min:
                drafted += 1
            stopped_short = drafted < length
            accepted = 0
            while accepted < drafted and self.places[at + accepted][2]:
                accepted += 1
            at += accepted + 1
            time += self.verify[1 + drafted] + (drafted + stopped_short) * self.curve.step
        return at / time

    def informed(self) -> float:
        """The best that any threshold and length reach."""
        chances = sorted({true for _, true, _ in self.places})
        return max(self.threshold(p_min, length) for p_min in (0.0, *chances) for length in range(LIMIT + 1))

    def clairvoyant(self) -> float:
        """The best of one who knows which tokens will be accepted, and drafts no others."""
        best = 1.0
        for _ in range(8):
            at, time = 0, 0.0
            while at < TOKENS:
                run = 0
                while run < LIMIT and self.places[at + run][2]:
                    run += 1
                gains = [(k - best * (self.verify[1 + k] - 1 + k * self.curve.step), k) for k in range(run + 1)]
                drafted = max(gains)[1]
                at += drafted + 1
                time += self.verify[1 + drafted] + drafted * self.curve.step
            best = at / time
        return best

    def auto(self, policy: DraftLength) -> float:
        """Tokens per unit of time that the policy reaches; what it tells the policy of the costs is noisy."""
        noise = Random(99)
        at, time = 0, 0.0
        while at < TOKENS:
            policy.start(LIMIT, TOKENS - at)
            kept: list[tuple[float, bool]] = []
            spent = 0.0
            while policy.next((), 1) != STOP:
                said, _, right = self.places[at + len(kept)]
                spent += self.curve.step
                policy.costs.drafted(1, self.curve.step * noise.uniform(0.9, 1.1))
                if not policy.keeps(said):
                    break
                kept.append((said, right))
            accepted = 0
            for said, right in kept:
                policy.model.observe(said, float(right))
                if not right:
                    break
                accepted += 1
            cost = self.verify[1 + len(kept)]
            policy.costs.verified(1 + len(kept), cost * noise.uniform(0.9, 1.1))
            policy.settle(accepted + 1)
            at += accepted + 1
            time += cost + spent
        return at / time


def measured(curve: Curve) -> Costs:
    """What the measurement at first use knows of it."""
    return Costs({tokens: curve.verify(tokens) for tokens in PASSES}, curve.step)


EVENS = [even(chance) for chance in (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)]
MIXED = [mixed(mean) for mean in (0.3, 0.45, 0.6, 0.7, 0.8, 0.9)]
BOASTING = [mixed(0.45, 0.6), mixed(0.7, 0.6), liar(0.0), liar(0.3), liar(0.6), liar(0.9)]
DRIFTING = [drifting(0.9, 0.3), drifting(0.3, 0.9), drifting(0.8, 0.5)]


@pytest.mark.parametrize("text", [*EVENS, *MIXED, *BOASTING, *DRIFTING], ids=lambda text: text.name)
@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_within_three_percent_of_the_best_fixed_length(curve: Curve, text: Text) -> None:
    world = World(curve, text)
    assert world.auto(DraftLength(measured(curve))) >= 0.97 * world.best_fixed()


@pytest.mark.parametrize(
    "text", [mixed(0.6), mixed(0.75), mixed(0.9), even(0.6), even(0.8), even(0.9)], ids=lambda text: text.name
)
@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_within_ten_percent_of_one_who_knows_every_chance(curve: Curve, text: Text) -> None:
    world = World(curve, text, seed=5)
    assert world.auto(DraftLength(measured(curve))) >= 0.9 * world.informed()


@pytest.mark.parametrize("text", [mixed(0.45), mixed(0.7), mixed(0.9)], ids=lambda text: text.name)
def test_it_beats_every_fixed_length_where_confidence_tells(text: Text) -> None:
    world = World(CURVES[1], text, seed=3)
    assert world.auto(DraftLength(measured(CURVES[1]))) >= 1.03 * world.best_fixed()


def test_nobody_who_does_not_know_the_future_can_pass_who_does() -> None:
    # The yardstick itself: what is reached lies between the best fixed length and the clairvoyant's.
    for curve in CURVES:
        world = World(curve, mixed(0.8), seed=2)
        assert world.best_fixed() <= world.informed() + 1e-9 <= world.clairvoyant() + 1e-9


def test_useless_drafts_cost_no_more_than_the_probes() -> None:
    for curve in CURVES:
        for text in (even(0.0), liar(0.0)):
            assert World(curve, text, seed=4).auto(DraftLength(measured(curve))) >= 0.98


def test_a_text_that_cannot_be_afforded_is_not_read() -> None:
    policy = DraftLength(Costs({1: 1.0, 2: 1.3, 8: 1.9, 32: 4.0}, 0.2, 0.05))
    policy.start(8, 6)
    assert policy.next((), 2000) == STOP
    policy.start(8, 2000)
    assert policy.next((), 2000) == STOP
    for _ in range(PATIENCE):
        policy.settle(1)
        policy.start(8, 2000)
    move = policy.next((), 2000)
    assert move.kind == "step"
    assert move.window is not None
    assert LEAST_WINDOW <= move.window < 2000
    policy.start(8, 2000)
    assert policy.next((), 20).window is None


def test_lookup_and_model_share_a_draft() -> None:
    policy = DraftLength(Costs({1: 1.0, 32: 1.1}, 0.05))
    policy.start(20, 500)
    move = policy.next((0.9,) * 6, 1)
    assert (move.kind, move.count) == ("copy", 6)
    policy.copied((0.9,) * 6)
    assert policy.next((), 7).kind == "step"
    assert policy.keeps(0.99)
    assert not policy.keeps(0.01)


def test_a_full_round_drafts_nothing_more() -> None:
    policy = DraftLength(Costs({1: 1.0, 32: 1.1}, 0.05))
    policy.start(2, 500)
    assert policy.next((0.99, 0.99, 0.99), 1) == Move("copy", 2)
    policy.copied((0.99, 0.99))
    assert policy.next((0.99,), 3) == STOP
    policy.start(0, 500)
    assert policy.next((0.99,), 1) == STOP


def test_a_sure_target_lets_the_model_try_and_an_unsure_one_does_not() -> None:
    def first_move(certainty: float, likeness: float = 1.0) -> str:
        policy = DraftLength(Costs({1: 1.0, 2: 1.45, 4: 1.8, 8: 2.2, 32: 5.0}, 0.25, 0.04), likeness=likeness)
        for _ in range(12):
            policy.start(8, 120)
            assert policy.next((), None) == STOP
            policy.overheard(certainty)
            policy.settle(1)
        policy.start(8, 120)
        return policy.next((), 100).kind

    assert first_move(0.97) == "step"
    assert first_move(0.4) == "stop"
    # A draft that is never sure where the target is has nothing to offer.
    assert first_move(0.97, likeness=0.05) == "stop"
