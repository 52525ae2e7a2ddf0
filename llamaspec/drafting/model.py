"""Drafting with a second, smaller model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from llamaspec.decoding.acceptance import Choice, draw
from llamaspec.drafting import Draft, Outcome
from llamaspec.llama.context import Context
from llamaspec.llama.sampler import DraftSampler


@dataclass(frozen=True, slots=True)
class Step:
    """One token of the draft model.

    Attributes:
        token: the token.
        choice: what it was drawn from.
        confidence: the probability of the likeliest token there, 0 to 1, which the drawn one need not be.
        ends: whether the token ends a text: nothing is drafted behind it.
        read: tokens that were decoded for it.
        seconds: wall time.
    """

    token: int
    choice: Choice
    confidence: float
    ends: bool
    read: int
    seconds: float


class ModelDrafter:
    """Proposes what the draft model would write.

    Its cache follows the text lazily: accepted tokens are kept, rejected ones forgotten, and whatever it has not seen
    (the prompt, a token the target chose itself) is decoded with the next proposal, not before.

    Args:
        context: the draft's own, used by nobody else.
        sampler: how it picks tokens.
        rng: for a sampler that draws.
        p_min: `propose` stops before a position whose likeliest token is less probable than this. The decision never looks
            at the token drawn, which would bias the text.
    """

    name = "model"

    def __init__(self, context: Context, sampler: DraftSampler, rng: Random, p_min: float = 0.0) -> None:
        self._context = context
        self._sampler = sampler
        self._rng = rng
        self._p_min = p_min
        self._text: list[int] = []
        self._start = 0  # where in the text the cache begins
        self._draft: list[int] = []  # tokens behind the text, for this round

    def begin(self, tokens: Sequence[int]) -> None:
        self._text = self._readable(tokens)
        self._start, self._draft = 0, []
        # The last token is decoded again in any case: its logits are what the first proposal is drawn from.
        self._context.keep_common_prefix(self._text[:-1])

    def propose(self, limit: int, remaining: int | None) -> Draft:
        steps: list[Step] = []
        while len(steps) < limit and self.unread is not None:
            step = self.step()
            if step.confidence < self._p_min:
                break
            steps.append(step)
            self.take([step.token])
            if step.ends:
                break
        return Draft(
            tuple(step.token for step in steps),
            tuple(step.choice for step in steps),
            tuple(step.confidence for step in steps),
            (self.name,) * len(steps),
        )

    @property
    def unread(self) -> int | None:
        """Tokens of the text and the draft that the next step has to read first, at least 1; None when they do not fit."""
        size = len(self._text) - self._start + len(self._draft)
        return size - len(self._context.tokens) if size <= self._context.n_ctx else None

    def step(self, window: int | None = None) -> Step:
        """The token that would follow the text and what was taken into the draft so far.

        Args:
            window: when more of the text than this is unread, read only its last `window` tokens, and forget the others.
        """
        began = time.perf_counter()
        if window is not None and len(self._text) - self._start - len(self._context.tokens) > window:
            self._start = len(self._text) - window
            self._context.clear()
        unread = (self._text[self._start :] + self._draft)[len(self._context.tokens) :]
        self._context.decode(unread, "last")
        choice, confidence = self._sampler.choice(self._context.logits()[0])
        token = draw(choice, self._rng)
        seconds = time.perf_counter() - began
        return Step(token, choice, confidence, self._context.model.is_end(token), len(unread), seconds)

    def take(self, tokens: Sequence[int]) -> None:
        """Put tokens into the draft, whoever proposed them: the next step goes on behind them."""
        self._draft += self._readable(tokens)

    def settle(self, outcome: Outcome) -> None:
        followed = self._readable(outcome.tokens)
        known = len(self._text) - self._start
        for drafted, real in zip(self._context.tokens[known:], followed, strict=False):
            if drafted != real:
                break
            known += 1
        self._context.truncate(known)
        self._text += followed
        self._draft.clear()

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        """The target may have ids beyond the draft's vocabulary (padding rows): llama.cpp refuses to decode those."""
        size = self._context.model.n_vocab
        return [token if token < size else 0 for token in tokens]
