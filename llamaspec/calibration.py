"""What passes cost and how far the two models agree, measured once when a pair is first used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from llamaspec.decoding.draft_length import Acceptance, Costs, DraftLength
from llamaspec.errors import UsageError
from llamaspec.llama.context import Context
from llamaspec.llama.sampler import DraftSampler

PASSES = (1, 2, 4, 8, 32)
"""Tokens of the passes that are timed. Their costs are a staircase; the steps between are learnt as they are used."""

SPAN = max(PASSES)

TEXT = """To make a pot of tea, boil some water. Warm the pot with hot water, put the tea into the pot, and pour the boiling \
water over the tea. Wait three minutes. Pour the tea into the cups."""

_SKIPPED = 4  # the first tokens of a text have too little before them to be guessed


def measure(target: Context, draft: Context | None, undraftable: Sequence[int]) -> DraftLength:
    """Time a few passes of both models, and compare what they would say of one short text. Empties both caches.

    Takes about ten times as long as the target takes for a token.

    Raises:
        Cancelled: the cancel flag was set.
        RuntimeFailure: llama.cpp failed.
    """
    try:
        tokens = target.model.tokenize(TEXT, add_special=True, parse_special=False)
    except UsageError:
        tokens = [max(target.model.bos, 0)]  # a vocabulary that cannot spell it
    span = min(SPAN, target.n_ctx, target.options.max_outputs)
    while len(tokens) < span:
        tokens = tokens + tokens
    seconds = {size: _timed(target, tokens[:size], 3 if size == 1 else 1) for size in PASSES if size <= span}
    policy = DraftLength(Costs(seconds))
    if draft is not None:
        theirs = [int(row.argmax()) for row in target.logits()]
        readable = [token if token < draft.model.n_vocab else 0 for token in tokens[: len(theirs)]]
        step = _timed(draft, readable[:1], 3)
        reading = _timed(draft, readable, 1, "last")
        read = max(reading - step, 0.0) / max(len(readable) - 1, 1)
        _timed(draft, readable, 1)
        policy = DraftLength(Costs(seconds, step, read), model=_agreement(draft, undraftable, theirs))
        draft.clear()
    target.clear()
    return policy


def _timed(context: Context, tokens: Sequence[int], times: int, outputs: Literal["all", "last"] = "all") -> float:
    """The least wall time of a pass, in seconds; the last one's logits stay."""
    best = float("inf")
    for _ in range(times):
        context.clear()
        began = time.perf_counter()
        context.decode(tokens, outputs)
        context.logits()
        best = min(best, time.perf_counter() - began)
    return best


def _agreement(draft: Context, undraftable: Sequence[int], theirs: Sequence[int]) -> Acceptance:
    """How often the draft's likeliest token is the target's, on the text it has just read."""
    acceptance = Acceptance()
    sampler = DraftSampler(draft.model, 0.0, undraftable)
    for place, (row, real) in enumerate(zip(draft.logits(), theirs, strict=True)):
        if place >= _SKIPPED:
            ours, confidence = sampler.choice(row)
            acceptance.observe(confidence, float(ours == real))
            acceptance.met(confidence, first=0.15, later=0.15)
    return acceptance
