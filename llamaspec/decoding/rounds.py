"""The loop: draft, verify, accept, roll back.

Contract. `rounds` yields one `Round` after another until the answer ends. Every token in them is a token of the target's own
distribution (see acceptance.py), whatever the drafter proposes. Between two rounds, and after the last, the target's cache
holds the prompt and every emitted token but the last one, never more: a caller may stop at any point and continue later from
what it has. It works on tokens; text appears only where it can end the answer (stop strings). It knows no drafter by name.
It runs in one thread, the same for both models.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from llamaspec.decoding.acceptance import Choice, draw, settle
from llamaspec.decoding.draft_length import Decisions
from llamaspec.drafting import Draft, Drafter, Outcome
from llamaspec.llama.context import Context
from llamaspec.llama.sampler import Logits
from llamaspec.text import TextStream

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class Prefill:
    """How the prompt was read.

    Attributes:
        prompt_tokens: tokens of the prompt.
        reused_tokens: of these, tokens whose keys and values were still in the cache.
        seconds: wall time until the first token was there.
    """

    prompt_tokens: int
    reused_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """One drafting and one verifying pass of the target.

    The first round of an answer reads the prompt instead: it has `prefill`, one token, and no draft.

    Attributes:
        tokens: the tokens emitted, at least one; a token that ends the generation included.
        pieces: the text that became certain with each token, aligned with `tokens`; "" where a character or a possible stop
            string is incomplete.
        drafters: who proposed each token of the draft, in order; empty when nothing was drafted.
        accepted: proposed tokens emitted. They are the first of `tokens`.
        draft_seconds: wall time spent drafting.
        verify_seconds: wall time of the target's pass, until its logits were there.
        seconds: wall time of the whole round: drafting, the target's pass, sampling and acceptance.
        finish_reason: on the last round: "stop" (an end token or a stop string), "length" (max_tokens), "context" (it is full).
        prefill: on the first round.
        notices: what the user should be told before this round's text: messages dropped, a template that needed help.
        decisions: on the last round, when the draft length was decided as it went: what the decisions rested on.
    """

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    drafters: tuple[str, ...] = ()
    accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    finish_reason: FinishReason | None = None
    prefill: Prefill | None = None
    notices: tuple[str, ...] = ()
    decisions: Decisions | None = None

    @property
    def text(self) -> str:
        """The text of this round."""
        return "".join(self.pieces)

    @property
    def drafted(self) -> int:
        """Tokens proposed."""
        return len(self.drafters)

    @property
    def drafter(self) -> str:
        """Who drafted: "model", "ngram", both in their order as "ngram+model", or "none"."""
        return "+".join(dict.fromkeys(self.drafters)) or "none"


class Sampler(Protocol):
    """What the loop needs of the target's sampler."""

    def choice(self, row: Logits) -> Choice: ...

    def accept(self, token: int) -> None: ...


@dataclass(slots=True)
class Answer:
    """An answer in the making: what outlives a round, and a change of prompt in the middle.

    Attributes:
        sampler: what the target draws from.
        text: tokens to text.
        rng: the uniform numbers of drawing and accepting.
        n_draft: tokens to propose in a round.
        max_tokens: tokens to generate at most; None for no limit.
        generated: tokens generated so far.
    """

    sampler: Sampler
    text: TextStream
    rng: Random
    n_draft: int = 0
    max_tokens: int | None = None
    generated: int = 0


def rounds(target: Context, drafter: Drafter | None, prompt: Sequence[int], answer: Answer) -> Iterator[Round]:
    """Generate until the answer ends.

    Args:
        target: its context; what its cache shares with the prompt is reused.
        drafter: who proposes, or None.
        prompt: at least one token, at most `target.n_ctx`.
        answer: the state of the answer, changed as it grows.

    Raises:
        Cancelled: the target's or the draft's cancel flag was set. The caches stay as they were after the last round.
        RuntimeFailure: llama.cpp failed, or a grammar allows no token.
    """
    # 1) Read the prompt. Its last token is decoded even when cached: the first token is drawn from its logits.
    started = time.perf_counter()
    reused = target.keep_common_prefix(prompt[:-1])
    target.decode(prompt[reused:], "last")

    # 2) The first token comes before the drafter has seen the prompt, so it comes as soon as it can.
    token = draw(answer.sampler.choice(target.logits()[0]), answer.rng)
    pieces = [_emit(token, answer)]
    finish = _finish(token, pieces, target.room, target, answer)
    seconds = time.perf_counter() - started
    yield Round((token,), tuple(pieces), seconds=seconds, finish_reason=finish, prefill=Prefill(len(prompt), reused, seconds))
    if drafter is not None and finish is None:
        drafter.begin([*prompt, token])

    while finish is None:
        drafting = time.perf_counter()

        # 3) Draft. The target adds a token of its own to what it accepts, so one place is left for that; and the pass must
        #    fit the context and the rows of logits it was made for.
        limit = min(answer.n_draft, target.room - 1, target.options.max_outputs - 1)
        remaining = None
        if answer.max_tokens is not None:
            remaining = answer.max_tokens - answer.generated
            limit = min(limit, remaining - 1)
        draft = drafter.propose(limit, remaining) if drafter is not None and limit > 0 else Draft()

        # 4) Verify: one pass over the last token, which the cache lacks, and the draft. Row i says what follows token i.
        verifying = time.perf_counter()
        before = len(target.tokens)
        target.decode([token, *draft.tokens], "all")
        rows = target.logits()
        verified = time.perf_counter()

        # 5) Accept from the front until the target disagrees; its own choice then replaces the draft's. If it never does, the
        #    last row gives one token more. The sampler sees every token in order, so penalties and grammars hold inside a
        #    round, too.
        tokens: list[int] = []
        choices: list[Choice] = []
        pieces = []
        accepted = 0
        try:
            for row in rows:
                choice = answer.sampler.choice(row)
                if accepted < len(draft.tokens):
                    token, agreed = settle(choice, draft.tokens[accepted], draft.choices[accepted], answer.rng)
                else:
                    token, agreed = draw(choice, answer.rng), False
                tokens.append(token)
                choices.append(choice)
                pieces.append(_emit(token, answer))
                accepted += agreed
                finish = _finish(token, pieces, target.n_ctx - before - len(tokens), target, answer)
                if finish is not None or not agreed:
                    break
        finally:
            # 6) Roll back: the cache keeps the last round's token and the accepted ones, not what stands behind them.
            target.truncate(before + len(tokens))

        # 7) Everybody learns what was really said.
        if drafter is not None:
            drafter.settle(Outcome(tuple(tokens), tuple(choices), verified - verifying, rows[0]))
        yield Round(
            tokens=tuple(tokens),
            pieces=tuple(pieces),
            drafters=draft.drafters,
            accepted=accepted,
            draft_seconds=verifying - drafting,
            verify_seconds=verified - verifying,
            seconds=time.perf_counter() - drafting,
            finish_reason=finish,
        )


def _emit(token: int, answer: Answer) -> str:
    """Count a token, show it to the samplers with a memory; the text that became certain."""
    answer.generated += 1
    answer.sampler.accept(token)
    return answer.text.push(token)


def _finish(token: int, pieces: list[str], room: int, target: Context, answer: Answer) -> FinishReason | None:
    """Does the answer end with `token`? `room` is what the context has left for decoding it.

    At a real end the text held back is released. A full context may yet be made room in, so it is held on to then.
    """
    reason: FinishReason | None = None
    if target.model.is_end(token) or answer.text.stopped:
        reason = "stop"
    elif answer.max_tokens is not None and answer.generated >= answer.max_tokens:
        reason = "length"
    elif room < 1:
        reason = "context"
    if reason in ("stop", "length"):
        pieces[-1] += answer.text.finish()
    return reason
