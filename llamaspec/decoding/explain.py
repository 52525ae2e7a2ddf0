"""Why drafting was as fast as it was: the figures behind it, and the one thing that limits most."""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.decoding.draft_length import Costs, Decisions
from llamaspec.decoding.stats import Stats

SELDOM = 0.3
"""Acceptance under which a text is not one for drafting."""


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
        return f"this text is hard to draft: {stats.acceptance_rate:.0%} of the drafted tokens were accepted".replace("%", " %")
    most = max(figures, key=lambda name: figures[name])
    if most == "draft":
        return f"a draft step costs {decisions.step:.2f} of a target token: half of that would give {half_draft:.2f} times"
    if most == "verify":
        return f"{checking}: were they equal, it would be {figures['verify']:.2f} times"
    rate = f"{stats.acceptance_rate or 0:.0%}".replace("%", " %")
    return (
        f"{rate} of the drafted tokens were accepted: a draft nearer to the target would give up to {figures[most]:.2f} times"
    )
