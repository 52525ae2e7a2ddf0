"""Everything that proposes tokens. A drafter knows its own guesses and nothing of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamaspec.decoding.acceptance import Choice


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens.

    Attributes:
        tokens: the tokens, in order.
        choices: what each was drawn from: the token itself when the drafter is deterministic, else the distribution. Same
            length as `tokens`. Acceptance is lossless only if this is exactly what was drawn from.
        confidence: how sure the drafter was at each position, 0 to 1; same length as `tokens`.
        drafters: who proposed each; same length as `tokens`.
    """

    tokens: tuple[int, ...] = ()
    choices: tuple[Choice, ...] = ()
    confidence: tuple[float, ...] = ()
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the target made of a draft.

    Attributes:
        tokens: the tokens emitted: the accepted ones, then one of the target's own, unless the answer ended before.
        choices: what the target drew each from; same length as `tokens`.
        seconds: wall time of its pass.
        logits: of the token that followed the text, shape (n_vocab,); valid until the target's next pass. None where not known.
    """

    tokens: tuple[int, ...]
    choices: tuple[Choice, ...]
    seconds: float
    logits: NDArray[np.float32] | None = None


class Drafter(Protocol):
    """Proposes how a text goes on."""

    def begin(self, tokens: Sequence[int]) -> None:
        """The text so far, from its first token on. Whatever was known before is only a cache."""
        ...

    def propose(self, limit: int, remaining: int | None) -> Draft:
        """At most `limit` tokens that may follow; none when it has no guess. Does not change the text so far.

        `remaining` is the number of tokens the answer may yet have, None when there is no limit.
        """
        ...

    def settle(self, outcome: Outcome) -> None:
        """What really followed."""
        ...
