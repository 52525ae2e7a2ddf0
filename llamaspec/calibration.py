"""What passes cost and how far the two models agree, measured once when a pair is first used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from llamaspec.decoding.draft_length import Acceptance, Costs, DraftLength
from llamaspec.errors import UsageError
from llamaspec.llama.context import Context
from llamaspec.llama.sampler import DraftSampler, certainty
from llamaspec.options import DRAFT_OUTPUTS

PASSES = (1, 2, 4, 8, DRAFT_OUTPUTS)
"""Tokens of the passes that are timed. Their costs are a staircase; the steps between are learnt as they are used."""

TEXT = """To make a pot of tea, boil some water. Warm the pot with hot water, put the tea into the pot, and pour the boiling \
water over the tea. Wait three minutes. Pour the tea into the cups."""

_TURNS = 5
_SKIPPED = 4  # the first tokens of a text have too little before them to be guessed


def measure(target: Context, draft: Context | None, undraftable: Sequence[int]) -> DraftLength:
    """Time a few passes of both models, and compare what they would say of one short text. Empties both caches.

    Takes about twenty times as long as the target takes for a token, longer while the machine is busy.

    Raises:
        Cancelled: the cancel flag was set.
        RuntimeFailure: llama.cpp failed.
    """
    try:
        tokens = target.model.tokenize(TEXT, add_special=True, parse_special=False)
    except UsageError:
        tokens = [max(target.model.bos, 0)]  # a vocabulary that cannot spell it
    span = min(DRAFT_OUTPUTS, target.n_ctx, target.options.max_outputs)
    while len(tokens) < span:
        tokens = tokens + tokens
    tokens = tokens[:span]
    readable = [token if draft is None or token < draft.model.n_vocab else 0 for token in tokens]
    step = _Pass(draft, readable[:1], "last") if draft is not None else None
    read = _Pass(draft, readable, "last") if draft is not None else None
    passes = [_Pass(target, tokens[:size], "all", before=step) for size in PASSES[1:] if size <= span]
    plain = _Pass(target, tokens[:1], "all")
    _time([plain, *passes, *([read] if read is not None else [])])
    seconds = {1: plain.best} | {len(one.tokens): one.best for one in passes}
    decider = DraftLength(Costs(seconds))
    if draft is not None and step is not None and read is not None:
        further = max(read.best - step.best, 0.0) / max(span - 1, 1)
        agreement, likeness = _agreement(target, draft, tokens, readable, undraftable)
        decider = DraftLength(Costs(seconds, step.best, further), agreement, likeness=likeness)
        draft.clear()
    target.clear()
    return decider


def measure_again(decider: DraftLength, target: Context, draft: Context | None, undraftable: Sequence[int]) -> DraftLength:
    """New costs for what is known of acceptance. As `measure`."""
    return DraftLength(measure(target, draft, undraftable).costs, decider.model, decider.lookup, decider.likeness)


class _Pass:
    """One kind of pass, and the wall times it took, in seconds.

    A pass is timed as it is met in use, where it costs more than when it follows others of its kind: checking a draft after
    two steps of the draft model, those one after the other, and plain tokens likewise.
    """

    def __init__(
        self, context: Context, tokens: Sequence[int], outputs: Literal["all", "last"], before: _Pass | None = None
    ) -> None:
        self._context = context
        self.tokens = tokens
        self._outputs: Literal["all", "last"] = outputs
        self._before = before
        self._seconds: list[float] = []

    def run(self) -> None:
        if self._before is not None:
            self._before.run()
            self._before.run()
        self._context.clear()
        began = time.perf_counter()
        self._context.decode(self.tokens, self._outputs)
        self._context.logits()
        self._seconds.append(time.perf_counter() - began)

    @property
    def best(self) -> float:
        return min(self._seconds)

    @property
    def settled(self) -> bool:
        """Do the two best agree? If not, the machine was busy with something else at one of them, or at both."""
        first, second = sorted(self._seconds)[:2]
        return second < 1.2 * first


def _time(passes: Sequence[_Pass]) -> None:
    """Run all of them in turn, at least twice, those that differ from time to time up to five times."""
    for turn in range(_TURNS):
        for one in passes:
            if turn < 2 or not one.settled:
                one.run()
                if len(one.tokens) == 1:
                    one.run()


def _agreement(
    target: Context, draft: Context, tokens: Sequence[int], readable: Sequence[int], undraftable: Sequence[int]
) -> tuple[Acceptance, float]:
    """How often the draft's likeliest token is the target's, by confidence; and its sureness as a share of the target's."""
    for context, text in ((target, tokens), (draft, readable)):
        context.clear()
        context.decode(text, "all")
    acceptance, sampler = Acceptance(), DraftSampler(draft.model, 0.0, undraftable)
    ours_sure = theirs_sure = 1e-6
    for row, theirs in list(zip(draft.logits(), target.logits(), strict=True))[_SKIPPED:]:
        ours, confidence = sampler.choice(row)
        acceptance.observe(confidence, float(ours == int(theirs.argmax())))
        acceptance.met(confidence, first=0.15, later=0.15)
        ours_sure += confidence
        theirs_sure += certainty(theirs)
    return acceptance, min(ours_sure / theirs_sure, 1.0)
