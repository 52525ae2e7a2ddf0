"""What `run` says about an answer: who drafted, how fast it was, against what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamaspec.options import Sampling, Speculation

if TYPE_CHECKING:
    from llamaspec import Pair, Stats

# The samplers to name when they are on: field of Sampling, its name here, the value that is off.
_SAMPLERS = (
    ("top_k", "top-k", 0),
    ("typical_p", "typical", 1),
    ("top_p", "top-p", 1),
    ("min_p", "min-p", 0),
    ("xtc_probability", "XTC", 0),
    ("repeat_penalty", "repeat penalty", 1),
    ("frequency_penalty", "frequency penalty", 0),
    ("presence_penalty", "presence penalty", 0),
    ("dry_multiplier", "DRY", 0),
)
_NEEDS_TEMPERATURE = {"top_k", "typical_p", "top_p", "min_p", "xtc_probability"}


@dataclass(frozen=True, slots=True)
class Baseline:
    """The same prompt answered by the target alone, after the answer, in the same process.

    Attributes:
        stats: of the second answer.
        speedup: how many times as many tokens per second drafting gave; None where one of the two is too short to tell.
        differs_at: characters up to the first difference of the texts; None when they are the same.
        text: the second answer.
    """

    stats: Stats
    speedup: float | None
    differs_at: int | None
    text: str

    @classmethod
    def of(cls, stats: Stats, text: str, baseline_stats: Stats, baseline_text: str) -> Baseline:
        """Compare an answer with the baseline's."""
        ours, alone = stats.tokens_per_second, baseline_stats.tokens_per_second
        speedup = ours / alone if ours and alone else None
        return cls(baseline_stats, speedup, _first_difference(text, baseline_text), baseline_text)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "stats": self.stats.to_dict(),
            "speedup": self.speedup,
            "identical_text": self.differs_at is None,
            "first_difference_at_character": self.differs_at,
            "text": self.text,
        }


def lines(
    pair: Pair, sampling: Sampling, speculation: Speculation, stats: Stats, text: str, baseline: Baseline | None
) -> list[str]:
    """The summary of an answer, for people."""
    drafting = _drafting(pair, speculation)
    head = f"{drafting}, {_sampling(sampling)} | {_count(stats.generated_tokens, 'token')} in {_seconds(stats.seconds)}"
    rows = [
        (f"{_speed(stats)}   {_acceptance(pair, speculation, stats)}", _per_round(stats)),
        (
            f"prompt: {_count(stats.prompt_tokens, 'token')} ({stats.reused_tokens} from cache) "
            f"in {_seconds(stats.prefill_seconds)}",
            _shares(stats),
        ),
    ]
    width = max(len(left) for left, _ in rows)
    said = [head, *(f"{left:<{width}}   {right}".rstrip() for left, right in rows), _placement(pair)]
    if baseline is not None:
        said += _against(baseline, sampling, text)
    return said


def ending(pair: Pair, stats: Stats) -> str | None:
    """What cut the answer short, and which option changes that; None when it ended by itself."""
    if stats.finish_reason == "length":
        return f"the answer was cut at {_count(stats.generated_tokens, 'token')}, the limit set by -n"
    if stats.finish_reason == "context":
        trained = pair.target.context_length
        return f"the context of {pair.n_ctx} tokens is full: -c enlarges it (the model was trained on {trained})"
    return None


def _drafting(pair: Pair, speculation: Speculation) -> str:
    names = pair.drafters(speculation)
    if not pair.can_draft:
        return f"drafting off ({pair.target.architecture} cannot be rolled back)"
    if not names:
        return f"drafting off ({'as asked' if speculation.drafter == 'none' else 'draft length 0'})"
    draft = pair.draft.path.name if pair.draft is not None else ""
    by = " and ".join("n-gram lookup" if name == "ngram" else draft for name in names)
    said = f"drafted by {by}, " + ("as far as it pays" if speculation.n_draft is None else f"n_draft {speculation.n_draft}")
    if speculation.p_min and "model" in names:
        said += f", p_min {speculation.p_min:g}"
    if speculation.draft_temperature and "model" in names:
        said += f", draft temperature {speculation.draft_temperature:g}"
    return said


def _sampling(sampling: Sampling) -> str:
    said = ["greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"]
    for field, name, off in _SAMPLERS:
        value = getattr(sampling, field)
        if value != off and not (sampling.greedy and field in _NEEDS_TEMPERATURE):
            said.append(f"{name} {value:g}")
    if sampling.logit_bias:
        said.append("logit bias")
    if sampling.grammar is not None or sampling.json_schema is not None:
        said.append("grammar" if sampling.grammar is not None else "JSON schema")
    if not sampling.greedy:
        said.append(f"seed {sampling.seed}")
    return ", ".join(said)


def _acceptance(pair: Pair, speculation: Speculation, stats: Stats) -> str:
    if stats.acceptance_rate is not None:
        return f"acceptance {stats.acceptance_rate:.0%} ({stats.accepted_tokens} of {stats.drafted_tokens})".replace("%", " %")
    if not pair.drafters(speculation) or not stats.rounds:
        return "nothing drafted"
    return "nothing to draft was found" if speculation.n_draft is not None else "nothing drafted: it would not have paid"


def _per_round(stats: Stats) -> str:
    per_round = stats.tokens_per_round
    return "" if per_round is None else f"{per_round:.1f} tokens per round ({_count(stats.rounds, 'round')})"


def _shares(stats: Stats) -> str:
    if stats.seconds <= 0:
        return ""
    parts = (("draft", stats.draft_seconds), ("verify", stats.verify_seconds), ("other", stats.other_seconds))
    return ", ".join(f"{name} {seconds / stats.seconds:.0%}".replace("%", " %") for name, seconds in parts) + " of the time"


def _placement(pair: Pair) -> str:
    settings = pair.settings()
    layers, total = settings["gpu_layers"], pair.target.block_count + 1
    where = "the CPU" if not layers else "the GPU" if layers >= total else f"{layers} of {total} layers on the GPU"
    prefix = "" if layers and layers < total else "on "
    model = f"{pair.target.path.name} ({pair.target.quantization})"
    return f"{model} {prefix}{where}, {_count(pair.threads, 'thread')}, context {pair.n_ctx}"


def _against(baseline: Baseline, sampling: Sampling, text: str) -> list[str]:
    verdict = ""
    if baseline.speedup is not None:
        gain = "helped" if baseline.speedup > 1.02 else "cost time" if baseline.speedup < 0.98 else "made no difference"
        verdict = f"   speedup {baseline.speedup:.2f}: drafting {gain} here"
    said = [f"baseline: {_speed(baseline.stats)}, {_count(baseline.stats.generated_tokens, 'token')}{verdict}"]
    at = baseline.differs_at
    if at is None:
        said.append("its text is the same")
    elif sampling.greedy:
        ours, alone = (repr(t[at : at + 20]) if at < len(t) else "its end" for t in (text, baseline.text))
        said.append(f"its text differs from character {at} on: {alone} for {ours}; a near tie can do that (rounding)")
    else:
        said.append("its text differs, as it may: the seed is the same, drafting uses the random numbers otherwise")
    return said


def _speed(stats: Stats) -> str:
    speed = stats.tokens_per_second
    return "too short to time" if speed is None else f"{speed:.1f} tokens/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _first_difference(ours: str, theirs: str) -> int | None:
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
