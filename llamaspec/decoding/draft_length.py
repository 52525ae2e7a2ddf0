"""How far to draft, and by whom: numbers in, a decision out.

Everything is counted in the time of one plain token of the target. A round that drafts k tokens yields one token and
P1 + P1·P2 + … more, Pi being the chance that the i-th is accepted, and costs its drafting and a pass over 1 + k tokens.
The most tokens per unit of time come from the round that maximises

    expected tokens - R · cost

with R the rate that is reached in the long run (Dinkelbach, "On nonlinear fractional programming", 1967). R is at least 1: the
target alone. So a draft is worth one token more as long as some number of further tokens raises this; the number matters,
because the cost of a pass is a staircase. Nothing here knows a model: costs and outcomes are told by whoever measures them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal

CONFIDENCES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995, 1.0)
"""Upper ends of the classes of confidence in which acceptance is counted."""

_USUAL = (0.01, 0.01, 0.04, 0.06, 0.08, 0.08, 0.08, 0.08, 0.08, 0.1, 0.08, 0.08, 0.08, 0.14)
"""How often each is met, as long as that is not known: what a draft of the target's family says of an answer in a chat."""

LOOKAHEAD = 16
"""Tokens a decision looks ahead."""

HOPE = 0.75
"""Standard deviations in favour of a first step of the model: what is tried is found out, what is not stays unknown."""

CAUTION = 1.0
"""Standard deviations against lookup, which is found out whether it is tried or not."""

PROBE_SHARE = 0.01
"""Share of the time that may go into trying what does not seem to pay."""

PROBE_WINDOW = 32
"""Tokens of the text a draft model reads at most for a probe."""

LEAST_WINDOW = 48
"""With fewer tokens of the text than this a draft model is no judge of how it goes on."""

PATIENCE = 5
"""Rounds of an answer before the draft model may read a text that takes longer to read than the target takes for a token: how
sure the target is, and whether it copies, shows by then."""

HORIZON = 48
"""Rounds over which the reading of a text by the draft model is written off."""

RETURN = 3.0
"""Times that what is read by the draft model has to be expected to pay back."""

UNKNOWN_LENGTH = 256
"""Tokens an answer is taken to have yet, when no limit is set."""


class Costs:
    """What a pass and a draft step cost, learnt from each one that is made.

    A time is the cost and whatever else the machine did meanwhile, so none moves what is believed by more than a little. A slow
    spell hits all passes alike: the time of a plain token is followed quickly, the ratios to it slowly.

    Attributes:
        plain_seconds: wall time of a pass over one token.
    """

    def __init__(self, verify_seconds: Mapping[int, float], step_seconds: float = 0.0, read_seconds: float = 0.0) -> None:
        """Args:
        verify_seconds: wall time of a pass over m tokens, for 1 and any other m measured.
        step_seconds: wall time of one token of the draft model; 0 when there is none.
        read_seconds: of each further token in one pass of the draft model.
        """
        self.plain_seconds = self._first_plain_seconds = verify_seconds[1]
        # More tokens never take less time; where that was measured, the machine was busy with something else.
        self._verify = {m: max(1.0, seconds / self.plain_seconds) for m, seconds in sorted(verify_seconds.items())}
        self._first_verify = dict(self._verify)
        self._step = self._first_step = step_seconds / self.plain_seconds
        self._read = read_seconds / self.plain_seconds

    @property
    def doubtful(self) -> bool:
        """Is a plain token's time far less than when all was measured? Then something else kept the machine busy there."""
        return self.plain_seconds < 0.6 * self._first_plain_seconds

    @property
    def step(self) -> float:
        """One token drafted by the model."""
        return self._step

    @property
    def read(self) -> float:
        """One token of the text more that the draft model reads along with its first step."""
        return self._read

    @property
    def measured(self) -> dict[int, float]:
        """The passes measured: tokens to cost."""
        return dict(self._verify)

    def verify(self, tokens: int) -> float:
        """A pass over `tokens` tokens: measured, or on the line between the nearest two that are."""
        return _between(self._verify, tokens)

    def verified(self, tokens: int, seconds: float) -> None:
        """A pass over `tokens` tokens took `seconds`."""
        if tokens not in self._verify:
            self._verify[tokens] = self.verify(tokens)  # where it was believed to be, so one outlier does not fix it
            self._verify = dict(sorted(self._verify.items()))
        self.plain_seconds = _towards(self.plain_seconds, seconds / self._verify[tokens], 0.2 if tokens == 1 else 0.05)
        if tokens > 1:
            self._verify[tokens] = max(1.0, _towards(self._verify[tokens], seconds / self.plain_seconds, 0.2))

    def drafted(self, tokens: int, seconds: float) -> None:
        """A pass of the draft model over `tokens` tokens took `seconds`."""
        units = seconds / self.plain_seconds
        if tokens < 8:
            self._step = _towards(self._step, units - (tokens - 1) * self._read, 0.2)
        else:
            self._read = _towards(self._read, (units - self._step) / (tokens - 1), 0.4)

    def rest(self) -> None:
        """A round went by: what it did not measure is believed a little less, and the first measurement a little more."""
        self._step += 0.005 * (self._first_step - self._step)
        for tokens, cost in self._verify.items():
            self._verify[tokens] = cost + 0.005 * (_between(self._first_verify, tokens) - cost)

    def to_dict(self) -> dict[str, Any]:
        """To be remembered."""
        scale = self.plain_seconds
        verify = {str(m): cost * scale for m, cost in self._verify.items()}
        return {"verify_seconds": verify, "step_seconds": self._step * scale, "read_seconds": self._read * scale}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """What `to_dict` gave."""
        verify = {int(m): float(seconds) for m, seconds in data["verify_seconds"].items()}
        step, read = float(data["step_seconds"]), float(data["read_seconds"])
        if not all(0 < seconds < inf for seconds in verify.values()) or not (0 <= step < inf and 0 <= read < inf):
            raise ValueError("no costs")
        return cls(verify, step, read)


class Acceptance:
    """How often the tokens of one drafter are accepted, by how sure it was of them.

    A drafter's word is taken for it at first, corrected by how it did on the whole; then each class of confidence counts for
    itself. Old outcomes fade, because texts change.
    """

    _PRIOR = 8.0  # outcomes that the drafter's word is worth
    _FADING = 0.995

    def __init__(self) -> None:
        size = len(CONFIDENCES)
        self._tried = [0.0] * size
        self._taken = [0.0] * size
        self._said = self._PRIOR
        self._came = self._PRIOR
        # How often each confidence is met: at the first token of a draft, and at the later ones.
        self._first, self._later = list(_USUAL), list(_USUAL)

    def chance(self, confidence: float, hope: float = 0.0) -> float:
        """The chance that a token of this confidence is accepted, raised by `hope` standard deviations of what is known."""
        return self._chance_in(_class_of(confidence), confidence, hope)

    def _chance_in(self, index: int, confidence: float, hope: float = 0.0) -> float:
        word = min(confidence * self._came / self._said, 1.0)
        known = self._tried[index] + self._PRIOR
        mean = (self._taken[index] + self._PRIOR * word) / known
        if not hope:
            return mean
        deviation = sqrt(max(mean, 0.02) * max(1.0 - mean, 0.02) / known)
        return min(max(mean + hope * deviation, 0.0), 1.0)

    def observe(self, confidence: float, accepted: float) -> None:
        """A token of this confidence came to be judged; `accepted` is 0 or 1, or its chance where that is known."""
        index = _class_of(confidence)
        self._tried[index] = self._tried[index] * self._FADING + 1.0
        self._taken[index] = self._taken[index] * self._FADING + accepted
        self._said = self._said * self._FADING + confidence
        self._came = self._came * self._FADING + accepted

    def met(self, confidence: float, *, first: float, later: float) -> None:
        """A draft step came out this sure; how much that tells of first steps, and of later ones, 0 to 1."""
        index = _class_of(confidence)
        for counts, weight in ((self._first, first), (self._later, later)):
            for other in range(len(counts)):
                counts[other] *= 1 - 0.03 * weight
            counts[index] += weight

    def expect_anything(self) -> None:
        """Another text begins: what confidences the last one had tells little of it."""
        for counts in (self._first, self._later):
            scale = _EXPECTED / max(sum(counts), _EXPECTED)
            counts[:] = [count * scale for count in counts]

    def outlook(self, *, first: bool, hope: float = 0.0) -> list[tuple[float, float]]:
        """What a draft step may come out as: (how likely, the chance that its token is accepted).

        `hope` is the number of standard deviations by which the chances are raised.
        """
        counts = self._first if first else self._later
        total = sum(counts)
        return [(n / total, self._chance_in(i, _middle(i), hope)) for i, n in enumerate(counts)]

    def fade(self, most: float) -> None:
        """Let no class of confidence count for more than `most` outcomes."""
        for index, tried in enumerate(self._tried):
            if tried > most:
                self._taken[index] *= most / tried
                self._tried[index] = most

    def table(self) -> list[tuple[float, float, float, float]]:
        """What was counted: (lowest confidence, highest, share accepted, outcomes that count), classes without any left out."""
        lows = (0.0, *CONFIDENCES[:-1])
        rows = zip(lows, CONFIDENCES, self._taken, self._tried, strict=True)
        return [(low, high, taken / tried, tried) for low, high, taken, tried in rows if tried >= 0.5]

    def to_dict(self) -> dict[str, Any]:
        """To be remembered."""
        names = ("tried", "taken", "first", "later", "said", "came")
        return {name: getattr(self, f"_{name}") for name in names}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Acceptance:
        """What `to_dict` gave."""
        loaded = cls()
        for name in ("tried", "taken", "first", "later"):
            values = [float(value) for value in data[name]]
            if len(values) != len(CONFIDENCES) or not all(0 <= value < inf for value in values):
                raise ValueError(f"no outcomes by confidence: {values}")
            setattr(loaded, f"_{name}", values)
        loaded._said, loaded._came = float(data["said"]), float(data["came"])
        if not (0 < loaded._said < inf and 0 <= loaded._came < inf and sum(loaded._first) > 0 and sum(loaded._later) > 0):
            raise ValueError("no outcomes")
        return loaded


@dataclass(frozen=True, slots=True)
class Move:
    """What to do next in a draft.

    Attributes:
        kind: "stop" drafting; "copy" the next `count` tokens that lookup offers; "step": draft a token by the model.
        count: tokens to copy.
        window: tokens of the text the model should have read at most, the last ones; None for all.
    """

    kind: Literal["stop", "copy", "step"]
    count: int = 0
    window: int | None = None


STOP = Move("stop")

_EXPECTED = 2.0  # draft steps that what is usual, or was so in the text before, counts for
_RATE_WEIGHT = 4.0  # plain tokens' time that the rate expected at a text's beginning counts for


@dataclass(frozen=True, slots=True)
class Decisions:
    """What the decisions rested on, at one moment.

    Attributes:
        plain_seconds: wall time of the target's pass over one token.
        verify: cost of its pass over m tokens, in plain tokens, for each m measured.
        step: cost of a token drafted by the model, in plain tokens; 0 without one.
        read: of each further token of the text that the model reads.
        acceptance: by drafter: (lowest confidence, highest, share accepted, outcomes that count).
    """

    plain_seconds: float
    verify: Mapping[int, float]
    step: float
    read: float
    acceptance: Mapping[str, Sequence[tuple[float, float, float, float]]]


class DraftLength:
    """Decides round by round: `start`, then `next` until it says stop, then `settle`.

    Attributes:
        costs: what passes cost.
        model, lookup: how the two drafters' tokens fare.
        likeness: how sure the draft model is where the target is sure, as a ratio.
        rate: tokens per plain token's time, in the long run.
    """

    def __init__(
        self, costs: Costs, model: Acceptance | None = None, lookup: Acceptance | None = None, likeness: float = 1.0
    ) -> None:
        self.costs = costs
        self.likeness = likeness
        self.model = model or Acceptance()
        self.lookup = lookup or Acceptance()
        self._time = _RATE_WEIGHT
        self._tokens = self._time * self._attainable()
        self._allowance = 0.0
        self._limit = self._remaining = self._drafted = self._steps = self._copied = 0
        self._rounds = 0
        self._copied_share = 0.0
        self._reach = 1.0
        self._probing = False

    def begin(self) -> None:
        """Another text begins: what the last one taught counts for less."""
        self.model.fade(40.0)
        self.model.expect_anything()
        self._rounds, self._copied_share = 0, 0.0
        self.lookup.fade(6.0)  # what can be copied depends on the text more than on anything
        self._time = _RATE_WEIGHT
        self._tokens = self._time * self._attainable()

    @property
    def rate(self) -> float:
        """Tokens per plain token's time over the last rounds; never less than 1, which the target alone reaches."""
        return max(1.0, self._tokens / self._time)

    def start(self, limit: int, remaining: int | None) -> None:
        """A round begins.

        Args:
            limit: tokens that can be drafted at most.
            remaining: tokens the answer may yet have; None when unknown.
        """
        self._limit = limit
        self._remaining = UNKNOWN_LENGTH if remaining is None else remaining
        self._drafted = self._steps = self._copied = 0
        self._reach = 1.0  # the chance that everything drafted so far is accepted
        self._probing = False

    def next(self, offered: Sequence[float], unread: int | None) -> Move:
        """What to do next.

        Args:
            offered: confidences of the tokens that lookup offers as the continuation, in order.
            unread: tokens of the text, drafted ones included, that the draft model would read before its next token, at least
                1; None when there is no draft model.
        """
        room = self._limit - self._drafted
        if room <= 0 or self._probing:
            return STOP
        count, copy_gain = self._best_copy(offered[:room])
        step_gain, window = (-inf, None) if unread is None else self._step_gain(unread)
        if step_gain > max(copy_gain, 0.0):
            return Move("step", window=window)
        if copy_gain > 0.0:
            return Move("copy", count)
        if unread is not None and self._may_probe(unread):
            self._probing = True
            return Move("step", window=PROBE_WINDOW)
        return STOP

    def copied(self, confidences: Iterable[float]) -> None:
        """Tokens of lookup were taken into the draft."""
        for confidence in confidences:
            self._reach *= self.lookup.chance(confidence, -CAUTION)
            self._drafted += 1
            self._copied += 1

    def keeps(self, confidence: float) -> bool:
        """A step of the model came out this sure: is its token worth a place in the draft?"""
        # Where drafts end after their first token, it is the first tokens that tell what later ones would be like.
        if self._drafted:
            self.model.met(confidence, first=0.0, later=1.0)
        else:
            self.model.met(confidence, first=1.0, later=0.1)
        self._steps += 1
        hoped = self.model.chance(confidence, 0.0 if self._drafted else HOPE)
        kept = self._probing or self._value(hoped, self._expected_later()) > 0.0
        if kept:
            self._drafted += 1
            self._reach *= self.model.chance(confidence)
        return kept

    def overheard(self, certainty: float) -> None:
        """The target was this sure of a token that the model did not draft: the draft would have been about as sure.

        Of one family the two are sure and unsure of the same tokens, so this tells, for nothing, how a text would be drafted.
        """
        self.model.met(certainty * self.likeness, first=0.5, later=0.5)

    def settle(self, emitted: int) -> None:
        """The round is over: `emitted` tokens came out of it."""
        time = self.costs.verify(1 + self._drafted) + self._steps * self.costs.step
        self._rounds += 1
        copied = min(self._copied, emitted)
        self._copied_share += (1 - 0.95**emitted) * (copied / emitted - self._copied_share)
        self._tokens = 0.98 * self._tokens + emitted
        self._time = 0.98 * self._time + time
        self._allowance = min(self._allowance + PROBE_SHARE * time, 4.0)
        self.costs.rest()

    def decisions(self) -> Decisions:
        """What it rests on now."""
        costs = self.costs
        return Decisions(
            plain_seconds=costs.plain_seconds,
            verify=costs.measured,
            step=costs.step,
            read=costs.read,
            acceptance={name: table.table() for name, table in (("model", self.model), ("ngram", self.lookup))},
        )

    def to_dict(self) -> dict[str, Any]:
        """What it has learnt, to be remembered."""
        tables = {"model": self.model.to_dict(), "lookup": self.lookup.to_dict()}
        return {"costs": self.costs.to_dict(), "likeness": self.likeness, **tables}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DraftLength:
        """What `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError, ArithmeticError: it is something else.
        """
        model, lookup = (Acceptance.from_dict(data[name]) for name in ("model", "lookup"))
        likeness = float(data["likeness"])
        if not 0 <= likeness < inf:
            raise ValueError("no likeness")
        return cls(Costs.from_dict(data["costs"]), model, lookup, likeness)

    # --- values, in tokens

    def _attainable(self) -> float:
        """The rate of the best fixed length, as things look: where the true rate starts from."""
        costs, later = self.costs, self._expected_later()
        best, tokens, power = 1.0, 1.0, 1.0
        for drafted in range(1, LOOKAHEAD + 1 if costs.step else 1):
            power *= later
            tokens += power
            best = max(best, tokens / (costs.verify(1 + drafted) + drafted * costs.step))
        return best

    def _best_copy(self, offered: Sequence[float]) -> tuple[int, float]:
        """How many of the offered tokens to take, and what that gains."""
        base = self.costs.verify(1 + self._drafted)
        best, best_gain, gain, reach, rate = 0, 0.0, 0.0, self._reach, self.rate
        for count, confidence in enumerate(offered, 1):
            reach *= self.lookup.chance(confidence, -CAUTION)
            gain += reach
            net = gain - rate * (self.costs.verify(1 + self._drafted + count) - base)
            if net > best_gain:
                best, best_gain = count, net
        return best, best_gain

    def _value(self, chance: float, later: float) -> float:
        """What taking a token of this chance into the draft gains, with the best number of further ones behind it."""
        return max(self._reach * chance * sum_ - self.rate * cost for sum_, cost in self._ahead(later))

    def _ahead(self, later: float) -> list[tuple[float, float]]:
        """For each number of tokens ahead: what they yield if the first is accepted, what they cost beyond its own step."""
        costs, drafted = self.costs, self._drafted
        base = costs.verify(1 + drafted)
        ahead, sum_, power = [], 0.0, 1.0
        for count in range(1, max(2, min(LOOKAHEAD, self._limit - drafted) + 1)):
            sum_ += power
            power *= later
            ahead.append((sum_, costs.verify(1 + drafted + count) - base + (count - 1) * costs.step))
        return ahead

    def _expected_later(self) -> float:
        return sum(share * chance for share, chance in self.model.outlook(first=False))

    def _step_gain(self, unread: int) -> tuple[float, int | None]:
        """What one step of the model is expected to gain, and how much of the text it should read for it.

        Its token is only taken when it comes out sure enough, so the gain is the mean over what it may come out as.
        """
        rate, read = self.rate, self.costs.read
        ahead = self._ahead(self._expected_later())
        first = self._drafted == 0
        outlook = self.model.outlook(first=first, hope=HOPE if first else 0.0)
        gain = -rate * self.costs.step
        for share, chance in outlook:
            if share > 0.002:
                scale = self._reach * chance
                gain += share * max(0.0, max(scale * sum_ - rate * cost for sum_, cost in ahead))
        behind = rate * read * (unread - 1)
        if self._drafted or behind <= 0.0:
            return gain - behind, None
        # What is read now serves the rounds to come as well, as far as lookup leaves any. Where all of it would cost too much,
        # the end of the text may do. In the first rounds it is too early to tell.
        if behind > 1.0 and self._rounds < PATIENCE:
            return -inf, None
        rounds = max(1.0, min(HORIZON, self._remaining / (1.0 + gain)) * (1.0 - self._copied_share))
        if behind / rounds > gain / RETURN:
            window = int(gain / RETURN * rounds / (rate * read))
            return (gain - gain / RETURN, window) if window >= LEAST_WINDOW else (-inf, None)
        return gain - behind / rounds, None

    def _may_probe(self, unread: int) -> bool:
        costs = self.costs
        # What would not pay even if everything were accepted needs no trial.
        if self._drafted or self._value(1.0, 1.0) <= self.rate * costs.step:
            return False
        cost = costs.step + costs.read * (min(unread, PROBE_WINDOW) - 1) + costs.verify(2) - 1.0
        if cost > self._allowance:
            return False
        self._allowance -= cost
        return True


def _towards(value: float, seen: float, weight: float) -> float:
    """`value` moved towards `seen` by a share of the way, of which no more than a third of `value` counts."""
    return value + weight * min(max(seen - value, -value / 3), value / 3)


def _between(points: Mapping[int, float], at: int) -> float:
    """The value at `at`: of the point there, or on the line through the nearest two."""
    known = points.get(at)
    if known is not None:
        return known
    places = list(points)
    if len(places) == 1:
        return points[places[0]] * (1.0 + 0.25 * (at - places[0]))
    right = min(max(bisect_left(places, at), 1), len(places) - 1)
    low, high = places[right - 1], places[right]
    return max(1.0, points[low] + (points[high] - points[low]) / (high - low) * (at - low))


def _class_of(confidence: float) -> int:
    return min(bisect_right(CONFIDENCES, confidence), len(CONFIDENCES) - 1)


def _middle(index: int) -> float:
    return (CONFIDENCES[index] + (CONFIDENCES[index - 1] if index else 0.0)) / 2
