"""What the rounds of an answer add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llamaspec.decoding.draft_length import Decisions
from llamaspec.decoding.rounds import Round


@dataclass(frozen=True, slots=True)
class Stats:
    """A fold over Rounds: `Stats.of(rounds)`, or `stats = stats.add(round)` as they arrive.

    The first token comes out of the prompt's own pass. As llama-server does, speed is counted over the tokens after it.

    Attributes:
        rounds: drafting-and-verifying rounds, the prompt's pass not among them.
        generated_tokens: all tokens of the answer, the first one included.
        drafted_tokens, accepted_tokens: proposed, and of these emitted.
        drafted_by, accepted_by: the same by drafter.
        rounds_by: rounds by who drafted: "model", "ngram", both in their order as "ngram+model", "none".
        drafted_at, accepted_at: the same by position in the draft, first position first.
        draft_seconds, verify_seconds: wall time of drafting, and of the target's passes.
        seconds: wall time of the rounds.
        prompt_tokens, reused_tokens, prefill_seconds: of the prompt; tokens that were still in the cache.
        finish_reason: why it ended; None while it has not.
        decisions: what the draft lengths were decided on, at the end; None when they were fixed, or there is no end yet.
    """

    rounds: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    rounds_by: dict[str, int] = field(default_factory=dict)
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    finish_reason: str | None = None
    decisions: Decisions | None = None

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> Stats:
        """The stats of all `rounds`."""
        stats = cls()
        for one in rounds:
            stats = stats.add(one)
        return stats

    def add(self, one: Round) -> Stats:
        """These stats with one round more."""
        if one.prefill is not None:
            return replace(
                self,
                generated_tokens=self.generated_tokens + len(one.tokens),
                # A prompt read again in the middle of an answer (the oldest turns were dropped) is time of the answer.
                seconds=self.seconds + (one.seconds if self.generated_tokens else 0.0),
                prompt_tokens=self.prompt_tokens or one.prefill.prompt_tokens,
                reused_tokens=self.reused_tokens if self.generated_tokens else one.prefill.reused_tokens,
                prefill_seconds=self.prefill_seconds if self.generated_tokens else one.prefill.seconds,
                finish_reason=one.finish_reason,
                decisions=one.decisions,
            )
        return replace(
            self,
            rounds=self.rounds + 1,
            generated_tokens=self.generated_tokens + len(one.tokens),
            drafted_tokens=self.drafted_tokens + one.drafted,
            accepted_tokens=self.accepted_tokens + one.accepted,
            drafted_by=_plus(self.drafted_by, one.drafters),
            accepted_by=_plus(self.accepted_by, one.drafters[: one.accepted]),
            rounds_by=_plus(self.rounds_by, (one.drafter,)),
            drafted_at=_count(self.drafted_at, one.drafted, one.drafted),
            accepted_at=_count(self.accepted_at, one.accepted, one.drafted),
            draft_seconds=self.draft_seconds + one.draft_seconds,
            verify_seconds=self.verify_seconds + one.verify_seconds,
            seconds=self.seconds + one.seconds,
            finish_reason=one.finish_reason,
            decisions=one.decisions,
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first per second of the rounds; None before there is one."""
        return (self.generated_tokens - 1) / self.seconds if self.seconds > 0 else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens; None when none was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def tokens_per_round(self) -> float | None:
        """Mean tokens a round yields; None before there is one."""
        return (self.generated_tokens - 1) / self.rounds if self.rounds else None

    @property
    def other_seconds(self) -> float:
        """Wall time of the rounds that is neither drafting nor the target's passes: sampling, acceptance, the caller's wait."""
        return self.seconds - self.draft_seconds - self.verify_seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything under the names above, for JSON."""
        names = [f for f in self.__slots__ if f not in ("finish_reason", "decisions")]
        derived = ("tokens_per_second", "acceptance_rate", "tokens_per_round", "other_seconds")
        values = {name: getattr(self, name) for name in (*derived, *names)}
        values["decisions"] = asdict(self.decisions) if self.decisions is not None else None
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _plus(counts: dict[str, int], names: Iterable[str]) -> dict[str, int]:
    more = dict(counts)
    for name in names:
        more[name] = more.get(name, 0) + 1
    return more


def _count(counts: tuple[int, ...], upto: int, positions: int) -> tuple[int, ...]:
    padded = counts + (0,) * (positions - len(counts))
    return tuple(n + 1 if i < upto else n for i, n in enumerate(padded))
