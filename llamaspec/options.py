"""What a caller can ask for: how the target samples, how far to draft."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from llamaspec.errors import UsageError

DrafterName = Literal["auto", "model", "ngram", "none"]

MAX_DRAFT = 32
"""Longest draft a pair can verify: buffers for this many rows of logits are reserved when it loads."""


DRAFT_OUTPUTS = 32
"""Rows of logits that a draft's context is made for: so many tokens both models are compared on when a pair is measured."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target picks its tokens. Names, meaning and defaults are llama.cpp's.

    The order is: logit bias, penalties, DRY, then the truncations top-k, typical, top-p, min-p, XTC, then the temperature.
    A grammar forbids tokens after that, and where it forbids all that are left, before it.

    Attributes:
        temperature: 0 takes the most likely token (greedy; truncations then have no say).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set with at least this probability; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one; 0 drops none.
        typical_p: locally typical sampling; 1 is off.
        xtc_probability, xtc_threshold: exclude top choices; probability 0 is off.
        repeat_penalty, frequency_penalty, presence_penalty: 1, 0, 0 are off.
        penalty_last_n: tokens the penalties look back on; 0 is off, -1 the whole context.
        dry_multiplier: strength of the DRY repetition penalty; 0 is off.
        dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers: DRY's other settings.
        logit_bias: token id to a number added to its logit; -inf forbids the token.
        seed: of the random numbers; None takes a new one. The same seed and settings give the same text.
        grammar: GBNF; the text follows its rule `root`.
        json_schema: a JSON schema (parsed); the text is JSON that follows it. Not together with `grammar`.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    grammar: str | None = None
    json_schema: Mapping[str, Any] | bool | None = None

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, math.inf)
        if 0 < self.temperature < 1e-6:
            raise UsageError(f"temperature is {self.temperature}: it takes 0, which is greedy, or 1e-06 or more")
        _within("top_k", self.top_k, 0, math.inf)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("typical_p", self.typical_p, 0.0, 1.0)
        _within("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _within("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        _within("repeat_penalty", self.repeat_penalty, 1e-6, math.inf)
        _within("frequency_penalty", self.frequency_penalty, -1e6, 1e6)
        _within("presence_penalty", self.presence_penalty, -1e6, 1e6)
        _within("penalty_last_n", self.penalty_last_n, -1, math.inf)
        _within("dry_multiplier", self.dry_multiplier, 0.0, 1e6)
        _within("dry_base", self.dry_base, 1.0, 1e6)
        _within("dry_allowed_length", self.dry_allowed_length, 0, 2**31 - 1)
        _within("dry_penalty_last_n", self.dry_penalty_last_n, -1, math.inf)
        if self.seed is not None:
            _within("seed", self.seed, 0, 2**63 - 1)
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit_bias of token {token} is {bias}: it takes a number, or -inf to forbid the token")
        if self.grammar is not None and self.json_schema is not None:
            raise UsageError("grammar and json_schema exclude each other: give one")

    @property
    def greedy(self) -> bool:
        """Always the most likely token?"""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to draft. Nothing here can change what the text's distribution is, only how fast it comes.

    Attributes:
        drafter: "model" (the pair's draft model), "ngram" (lookup in the prompt, the answer and `reference`), "auto"
            (whichever pays, both in one draft where that pays), "none" (the target alone).
        n_draft: tokens proposed in a round; None decides round by round, as far as it pays; 0 drafts nothing. A fixed length
            with "auto" is drafted by the model when the pair has one, else by lookup.
        p_min: stop drafting before a token whose draft probability is under this. Where the draft samples
            (`draft_temperature` > 0) the probability of its likeliest token decides: looking at the drawn token's own
            would bias the text.
        draft_temperature: of the draft's own sampling; 0 takes its likeliest token.
        ngram_min: tokens that must match before lookup proposes a continuation; None takes 2 where the length is decided
            round by round, which weighs short matches by how they fare, else 3.
        reference: text that the answer may copy from, for lookup, besides the prompt.
    """

    drafter: DrafterName = "auto"
    n_draft: int | None = None
    p_min: float = 0.0
    draft_temperature: float = 0.0
    ngram_min: int | None = None
    reference: str | None = None

    def __post_init__(self) -> None:
        if self.drafter not in get_args(DrafterName):
            raise UsageError(f"no drafter {self.drafter!r}", f"one of: {', '.join(get_args(DrafterName))}")
        if self.n_draft is not None:
            _within("n_draft", self.n_draft, 0, MAX_DRAFT)
        _within("p_min", self.p_min, 0.0, 1.0)
        _within("draft_temperature", self.draft_temperature, 0.0, math.inf)
        if self.ngram_min is not None:
            _within("ngram_min", self.ngram_min, 1, 64)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or math.isnan(value) or math.isinf(value) or not low <= value <= high:
        span = f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
        raise UsageError(f"{name} is {value}: it takes {span}")
