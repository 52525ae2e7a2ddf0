"""The draft model and lookup together, round by round as far as each pays."""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec.decoding.acceptance import Choice, acceptance_rate
from llamaspec.decoding.draft_length import Acceptance, Decisions, DraftLength
from llamaspec.drafting import Draft, Outcome
from llamaspec.drafting.model import ModelDrafter
from llamaspec.drafting.ngram import NgramDrafter
from llamaspec.llama.sampler import certainty


class AutoDrafter:
    """Lets `DraftLength` decide who drafts and how far, and tells it what came of it.

    Lookup costs nothing, so what it offers is judged in every round, taken into the draft or not.

    Args:
        policy: who decides; it keeps what it learns.
        model: the draft model, if there is one.
        lookup: n-gram lookup, if allowed.
        p_min: the model's tokens are not taken from a position whose likeliest token is less probable than this.
    """

    def __init__(
        self, policy: DraftLength, model: ModelDrafter | None, lookup: NgramDrafter | None, p_min: float = 0.0
    ) -> None:
        self._policy = policy
        self._model = model
        self._lookup = lookup
        self._p_min = p_min
        self._draft = Draft()
        self._offer: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
        self._stepped = False
        self._alone = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._alone = 0
        if self._model is not None:
            self._model.begin(tokens)
        if self._lookup is not None:
            self._lookup.begin(tokens)

    def propose(self, limit: int, remaining: int | None) -> Draft:
        policy, model = self._policy, self._model
        policy.start(limit, remaining)
        self._stepped = False
        self._offer = tokens, sure = self._look_up(limit)
        parts: list[tuple[int, Choice, float, str]] = []
        while True:
            move = policy.next(sure, model.unread if model is not None else None)
            if move.kind == "stop":
                break
            if move.kind == "copy":
                taken = tokens[: move.count]
                policy.copied(sure[: move.count])
                parts += [(token, token, s, NgramDrafter.name) for token, s in zip(taken, sure, strict=False)]
                tokens, sure = tokens[move.count :], sure[move.count :]
                self._take(taken)
                continue
            assert model is not None
            step = model.step(move.window)
            self._stepped = True
            policy.costs.drafted(step.read, step.seconds)
            if step.confidence < self._p_min or not policy.keeps(step.confidence):
                break  # where the model does not know, a match of a few tokens knows less
            parts.append((step.token, step.choice, step.confidence, ModelDrafter.name))
            self._take((step.token,))
            if step.ends:
                break
            if tokens and tokens[0] == step.token:
                tokens, sure = tokens[1:], sure[1:]
            else:
                tokens, sure = self._look_up(limit - len(parts))
        if self._lookup is not None:
            self._lookup.drop()
        self._draft = Draft(*zip(*parts, strict=True)) if parts else Draft()
        return self._draft

    def settle(self, outcome: Outcome) -> None:
        policy, draft = self._policy, self._draft
        tables = {ModelDrafter.name: policy.model, NgramDrafter.name: policy.lookup}
        offered, sure = self._offer
        judged = _judge(outcome, offered, offered, sure, [policy.lookup] * len(offered))
        # What lookup offered at the round's beginning is judged already.
        told = [None if n < judged and by == NgramDrafter.name else tables[by] for n, by in enumerate(draft.drafters)]
        _judge(outcome, draft.tokens, draft.choices, draft.confidence, told)
        policy.costs.verified(1 + len(draft.tokens), outcome.seconds)
        if self._model is not None and not self._stepped and outcome.logits is not None and self._looks():
            policy.overheard(certainty(outcome.logits))
        policy.settle(len(outcome.tokens))
        self._draft = Draft()
        self._offer = (), ()
        if self._model is not None:
            self._model.settle(outcome)
        if self._lookup is not None:
            self._lookup.settle(outcome)

    @property
    def decisions(self) -> Decisions:
        """What the next decision would rest on."""
        return self._policy.decisions()

    def _look_up(self, limit: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self._lookup.offer(limit) if self._lookup is not None and limit > 0 else ((), ())

    def _looks(self) -> bool:
        """Is it time to look how sure the target is? A look at 150,000 logits takes half a millisecond."""
        self._alone += 1
        return self._alone <= 16 or self._alone % 4 == 0

    def _take(self, tokens: Sequence[int]) -> None:
        if self._model is not None:
            self._model.take(tokens)
        if self._lookup is not None:
            self._lookup.take(tokens)


def _judge(
    outcome: Outcome,
    tokens: Sequence[int],
    choices: Sequence[Choice],
    confidences: Sequence[float],
    tables: Sequence[Acceptance | None],
) -> int:
    """Tell each token's table whether the target would accept it, up to the first that differs; how many came to be judged."""
    judged = 0
    for token, q, confidence, table, real, p in zip(
        tokens, choices, confidences, tables, outcome.tokens, outcome.choices, strict=False
    ):
        if table is not None:
            table.observe(confidence, acceptance_rate(p, q))
        judged += 1
        if token != real:
            break
    return judged
