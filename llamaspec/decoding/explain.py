"""Why drafting was as fast as it was: the figures behind it, and the one thing that limits most."""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.decoding.draft_length import Costs, Decisions
from llamaspec.decoding.stats import Stats
from llamaspec.options import Speculation

SELDOM = 0.3
"""Acceptance under which a text is not one for drafting."""

_MISSING = 0.01  # of the target's tokens: more than this that cannot be drafted is felt
_NEARLY_FULL = 0.97


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an answer's speed was made of, in plain tokens of the target.

    Attributes:
        speedup: tokens per plain token's time that were reached, by the cost of a plain token measured along the way; not a
            comparison with a measured baseline.
        free_drafting: what they would have been had drafting cost nothing.
        free_checking: had a pass over several tokens cost what one over a single token costs.
        all_accepted: had every drafted token been accepted.
        roofline: had both cost nothing: the tokens per pass, which no cheaper draft or machine can pass at this acceptance.
        limit: the one thing that limits most, in words.
    """

    speedup: float
    free_drafting: float
    free_checking: float
    all_accepted: float
    roofline: float
    limit: str


def explain(stats: Stats, decisions: Decisions, *, has_model: bool) -> Explanation | None:
    """The explanation of an answer; None before there was a round.

    Args:
        stats: of the answer.
        decisions: what the draft lengths were decided on.
        has_model: whether a draft model could have drafted.
    """
    tokens, plain = stats.generated_tokens - 1, decisions.plain_seconds
    if not stats.rounds or tokens < 1 or plain <= 0:
        return None
    other = max(stats.other_seconds, 0.0) / plain
    draft, verify = stats.draft_seconds / plain, stats.verify_seconds / plain
    total = draft + verify + other
    wasted = stats.drafted_tokens - stats.accepted_tokens
    flat = min(verify, float(stats.rounds))
    speedup = tokens / total
    figures = {
        "draft": tokens / (total - draft),
        "verify": tokens / (total - verify + flat),
        "acceptance": (tokens + wasted) / total,
    }
    return Explanation(
        speedup=speedup,
        free_drafting=figures["draft"],
        free_checking=figures["verify"],
        all_accepted=figures["acceptance"],
        roofline=tokens / stats.rounds,
        limit=_limit(stats, decisions, has_model, figures, tokens / (total - draft / 2)),
    )


def causes(stats: Stats, speculation: Speculation, *, undraftable: float, memory_used: float | None) -> list[str]:
    """What else keeps drafting slow, of what people who tune by hand look for: a sentence each, none when nothing applies.

    Args:
        stats: of the answer.
        speculation: what was asked for.
        undraftable: share of the vocabulary that the draft model may not propose, 0 to 1.
        memory_used: share of the fullest memory, the system's or a card's, that was in use, 0 to 1; None: not reported.
    """
    said = []
    by_model = "model" in stats.drafted_by
    if by_model and undraftable > _MISSING:
        said.append(f"{_percent(undraftable)} of the vocabulary cannot be drafted by this model: one of the same family would")
    if by_model and speculation.draft_temperature > 0:
        said.append(
            f"the draft samples at temperature {speculation.draft_temperature:g}: more may be accepted than of its likeliest "
            "tokens, but what will be is harder to foresee, which costs more; leave --draft-temp out"
        )
    if speculation.n_draft is not None:
        pairs = zip(stats.accepted_at, stats.drafted_at, strict=True)
        late = next(((n, taken / tried) for n, (taken, tried) in enumerate(pairs, 1) if n > 1 and taken < SELDOM * tried), None)
        if late is not None:
            said.append(
                f"a fixed draft of {speculation.n_draft} is long for this text: its token {late[0]} was accepted in "
                f"{_percent(late[1])} of the rounds; without --draft-length it is decided round by round"
            )
    if memory_used is not None and memory_used > _NEARLY_FULL:
        said.append("memory is nearly full: what no longer fits is read from disk again and again, or spills out of the GPU")
    return said


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _limit(stats: Stats, decisions: Decisions, has_model: bool, figures: dict[str, float], half_draft: float) -> str:
    costs = decisions.verify
    several = min((m for m in costs if m >= 4), default=max(costs))
    checking = f"a pass over {several} tokens costs {costs[several]:.1f} of one over a single token on this machine"
    if not stats.drafted_tokens:
        if not has_model:
            return "the text repeats nothing that lookup could copy: a draft model (-md) may help"
        if decisions.step + Costs(dict(costs)).verify(2) - 1 >= 1:
            return (
                f"drafting by this model cannot pay here: a draft step costs {decisions.step:.2f} of a target token, {checking}"
            )
        return "the draft model is right too seldom on this text for drafting to pay"
    if stats.acceptance_rate is not None and stats.acceptance_rate < SELDOM:
        return f"this text is hard to draft: {_percent(stats.acceptance_rate)} of the drafted tokens were accepted"
    most = max(figures, key=lambda name: figures[name])
    if most == "draft":
        return f"a draft step costs {decisions.step:.2f} of a target token: half of that would give {half_draft:.2f} times"
    if most == "verify":
        return f"{checking}: were they equal, it would be {figures['verify']:.2f} times"
    rate = _percent(stats.acceptance_rate or 0.0)
    best = figures["acceptance"]
    return f"{rate} of the drafted tokens were accepted: a draft nearer to the target would give up to {best:.2f} times"
