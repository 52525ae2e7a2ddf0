"""Drafting with a second, smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from llamaspec.decoding.acceptance import Choice, draw
from llamaspec.drafting import Draft
from llamaspec.llama.context import Context
from llamaspec.llama.sampler import DraftSampler


class ModelDrafter:
    """Proposes what the draft model would write.

    Its cache follows the text lazily: accepted tokens are kept, rejected ones forgotten, and whatever it has not seen
    (the prompt, a token the target chose itself) is decoded with the next proposal, not before.

    Args:
        context: the draft's own, used by nobody else.
        sampler: how it picks tokens.
        rng: for a sampler that draws.
        p_min: stop before a position whose likeliest token is less probable than this. The decision never looks at the
            token drawn, which would bias the text.
    """

    name = "model"

    def __init__(self, context: Context, sampler: DraftSampler, rng: Random, p_min: float = 0.0) -> None:
        self._context = context
        self._sampler = sampler
        self._rng = rng
        self._p_min = p_min
        self._text: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self._text = self._readable(tokens)
        # The last token is decoded again in any case: its logits are what the first proposal is drawn from.
        self._context.keep_common_prefix(self._text[:-1])

    def propose(self, limit: int) -> Draft:
        tokens: list[int] = []
        choices: list[Choice] = []
        confidences: list[float] = []
        unseen = self._text[len(self._context.tokens) :]
        limit = min(limit, self._context.room - len(unseen) + 1)
        while len(tokens) < limit:
            self._context.decode(unseen, "last")
            choice, confidence = self._sampler.choice(self._context.logits()[0])
            if confidence < self._p_min:
                break
            token = draw(choice, self._rng)
            tokens.append(token)
            choices.append(choice)
            confidences.append(confidence)
            if self._context.model.is_end(token):
                break
            unseen = [token]
        return Draft(tuple(tokens), tuple(choices), tuple(confidences))

    def settle(self, tokens: Sequence[int]) -> None:
        followed = self._readable(tokens)
        known = len(self._text)
        for drafted, real in zip(self._context.tokens[known:], followed, strict=False):
            if drafted != real:
                break
            known += 1
        self._context.truncate(known)
        self._text += followed

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        """The target may have ids beyond the draft's vocabulary (padding rows): llama.cpp refuses to decode those."""
        size = self._context.model.n_vocab
        return [token if token < size else 0 for token in tokens]
