"""What `--explain` says: what was chosen, on which figures, and what limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamaspec.decoding.explain import explain

if TYPE_CHECKING:
    from llamaspec import Stats
    from llamaspec.decoding.draft_length import Decisions

_NAMES = {"model": "the draft model", "ngram": "n-gram lookup", "none": "nobody"}
_CLASSES = ((0.0, 0.3), (0.3, 0.6), (0.6, 0.8), (0.8, 0.95), (0.95, 1.0))


def lines(stats: Stats, decisions: Decisions, *, has_model: bool) -> list[str]:
    """The explanation, for people."""
    said = ["how far to draft was decided on this:"]
    costs = ", ".join(f"{tokens}: {cost:.2f}" for tokens, cost in decisions.verify.items() if tokens > 1)
    said.append(f"  a token of the target alone: {decisions.plain_seconds * 1e3:.1f} ms; of that, a pass over {costs}")
    if has_model:
        said.append(
            f"  a token of the draft model: {decisions.step:.2f} of it, "
            f"and {decisions.read:.3f} for each further token of the text it reads"
        )
    for name, table in decisions.acceptance.items():
        rows = [row for row in (_merged(span, table) for span in _CLASSES) if row]
        if rows and (has_model or name != "model"):
            said.append(f"  accepted of {_NAMES[name]}'s tokens, by its confidence: {', '.join(rows)}")
    by = ", ".join(f"{_who(name)} {count / stats.rounds:.0%}" for name, count in _sorted(stats.rounds_by))
    said.append(f"  rounds drafted by {by}".replace("%", " %"))
    explanation = explain(stats, decisions, has_model=has_model)
    if explanation is not None:
        said.append(
            f"  by the time of a plain token {explanation.speedup:.2f} times the target alone (--baseline measures it); with "
            f"drafting and checking free, this acceptance would give {explanation.roofline:.2f}"
        )
        said.append(f"  what limits most: {explanation.limit}")
    return said


def _merged(span: tuple[float, float], table: Sequence[tuple[float, float, float, float]]) -> str:
    rows = [row for row in table if span[0] <= row[0] < span[1]]
    outcomes = sum(row[3] for row in rows)
    if outcomes < 1:
        return ""
    share = sum(row[2] * row[3] for row in rows) / outcomes
    return f"{span[0]:g} to {span[1]:g} {share:.0%}".replace("%", " %")


def _who(name: str) -> str:
    return " with ".join(_NAMES[part] for part in name.split("+"))


def _sorted(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])
