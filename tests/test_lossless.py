"""Sampling through drafting follows the target's distribution: over 20,000 tokens of real decoding.

For every generated token the target's own distribution at its context is computed again, without any drafting. Under a right
rule the observed counts differ from the summed probabilities only by chance; the covariance of that chance is known, so the
squared distance is a chi-square variable (a martingale's central limit). Tokens are counted by their rank in the target's
distribution, where a wrong rule shows, and by their id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from llamaspec import Pair, Sampling, Speculation, Stats
from llamaspec.decoding import rounds
from llamaspec.decoding.acceptance import Choice, Distribution, draw
from llamaspec.gguf_header import read_model
from llamaspec.llama.cancel import CancelFlag
from llamaspec.llama.context import Context, ContextOptions
from llamaspec.llama.model import Model, Placement
from llamaspec.llama.sampler import TargetSampler
from tests.conftest import LoadPair
from tests.tiny import letters, write_tiny

TOKENS = 20_000
ANSWER = 400
WORDS = 8
FIRST = 6  # the id of the first word
PROMPT = [1, 6, 7, 8, 6, 7]
WORDS_ONLY = dict.fromkeys(range(FIRST), -math.inf)  # the others all have the logit 0, and ties are cut off as it comes
FULL = Sampling(temperature=1.0, top_k=0, top_p=1, min_p=0, logit_bias=WORDS_ONLY)
CUT = Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, logit_bias=WORDS_ONLY)


@pytest.fixture(scope="module")
def flat_target(models: Path) -> Path:
    return write_tiny(models / "flat.gguf", words=letters(WORDS), with_bytes=False, sharpness=2.5, layers=1, width=16)


@pytest.fixture(scope="module")
def flat_draft(models: Path) -> Path:
    return write_tiny(
        models / "flat-draft.gguf", words=letters(WORDS), with_bytes=False, sharpness=2.5, layers=1, width=16, mix=(1, 0.2)
    )


@dataclass
class Oracle:
    """The target alone, asked for the distribution behind every token of a text."""

    context: Context

    def distributions(self, tokens: Sequence[int], sampling: Sampling) -> NDArray[np.float64]:
        """Shape (len(tokens) - len(PROMPT), n_vocab)."""
        sampler = TargetSampler(self.context.model, sampling, 0, self.context.n_ctx)
        self.context.clear()
        self.context.decode(tokens[:-1], "all")
        table = np.zeros((len(tokens) - len(PROMPT), self.context.model.n_vocab))
        for row, logits in zip(table, self.context.logits()[len(PROMPT) - 1 :], strict=True):
            p = sampler.choice(logits)
            assert isinstance(p, Distribution)
            row[p.ids] = p.probs
        return table


@pytest.fixture(scope="module")
def oracle(flat_target: Path) -> Iterator[Oracle]:
    model = Model(read_model(flat_target), Placement())
    context = Context(model, ContextOptions(512, 512, 1, "off", "f32", "f32"), CancelFlag())
    yield Oracle(context)
    context.close()
    model.close()


@pytest.fixture
def pair(load_pair: LoadPair, flat_target: Path, flat_draft: Path) -> Pair:
    # Full precision: with half-precision caches the logits of the same text differ by 0.04 with the size of the batch, and a
    # token at the edge of a truncation is then in for one and out for the other.
    exact = {"flash_attention": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    return load_pair(flat_target, flat_draft, n_ctx=512, **exact)


def _chi_square(
    oracle: Oracle, pair: Pair, sampling: Sampling, speculation: Speculation, amount: int = TOKENS
) -> tuple[float, float, Stats]:
    """Chi-square per degree of freedom, in standard deviations, by rank and by id; and what happened."""
    n = oracle.context.model.n_vocab
    surplus = {"rank": np.zeros(n), "id": np.zeros(n)}
    covariance = {"rank": np.zeros((n, n)), "id": np.zeros((n, n))}
    stats = Stats()
    for seed in range(amount // ANSWER):
        tokens = list(PROMPT)
        for one in pair.generate(PROMPT, sampling=replace(sampling, seed=seed), speculation=speculation, max_tokens=ANSWER):
            tokens += one.tokens
            stats = stats.add(one)
        table = oracle.distributions(tokens, sampling)
        emitted = np.array(tokens[len(PROMPT) :])
        assert (table[np.arange(len(emitted)), emitted] > 0).all(), "a token the target cannot write"
        order = np.argsort(-table, axis=1, kind="stable")
        by_rank = np.take_along_axis(table, order, axis=1)
        ranks = np.argmax(order == emitted[:, None], axis=1)
        for kind, probs, seen in (("rank", by_rank, ranks), ("id", table, emitted)):
            surplus[kind] += np.bincount(seen, minlength=n) - probs.sum(0)
            covariance[kind] += np.diag(probs.sum(0)) - probs.T @ probs
    deviations = []
    for kind in ("rank", "id"):
        # Ranks and ids that are hardly ever written make no normal variable: they are left to the others' sum.
        often = np.diag(covariance[kind]) > 25
        inverse = np.linalg.pinv(covariance[kind][np.ix_(often, often)], rcond=1e-6)
        freedom = int(often.sum()) - 1
        value = surplus[kind][often] @ inverse @ surplus[kind][often]
        deviations.append(float((value - freedom) / np.sqrt(2 * freedom)))
    return deviations[0], deviations[1], stats


SETTINGS = {
    "model, argmax draft": (FULL, Speculation("model", 4, draft_temperature=0)),
    "model, cold draft": (FULL, Speculation("model", 4, draft_temperature=0.3)),
    "model, hot draft": (FULL, Speculation("model", 4, draft_temperature=1.5)),
    "model, cold draft, truncated target": (CUT, Speculation("model", 4, draft_temperature=0.3)),
    "model, hot draft, p_min": (CUT, Speculation("model", 4, draft_temperature=1.5, p_min=0.3)),
    "ngram": (FULL, Speculation("ngram", 4, ngram_min=1)),
    "ngram, truncated target": (CUT, Speculation("ngram", 8, ngram_min=2)),
}


@pytest.mark.parametrize(("sampling", "speculation"), SETTINGS.values(), ids=SETTINGS.keys())
def test_the_text_follows_the_target(pair: Pair, oracle: Oracle, sampling: Sampling, speculation: Speculation) -> None:
    by_rank, by_id, stats = _chi_square(oracle, pair, sampling, speculation)
    assert stats.generated_tokens >= TOKENS
    assert 0.1 * stats.drafted_tokens < stats.accepted_tokens < 0.9 * stats.drafted_tokens
    assert by_rank < 4
    assert by_id < 4


def _accept_whatever_is_possible(p: Choice, token: int, q: Choice, rng: Random) -> tuple[int, bool]:
    assert isinstance(p, Distribution)
    return (token, True) if p.of(token) > 0.05 else (draw(p, rng), False)


def _replace_from_the_whole_target(p: Choice, token: int, q: Choice, rng: Random) -> tuple[int, bool]:
    assert isinstance(p, Distribution)
    q_token = 1.0 if isinstance(q, int) else q.of(token)
    return (token, True) if rng.random() * q_token < p.of(token) else (draw(p, rng), False)


@pytest.mark.parametrize("wrong", [_accept_whatever_is_possible, _replace_from_the_whole_target])
@pytest.mark.parametrize("name", ["model, argmax draft", "model, cold draft", "ngram"])
def test_the_check_notices_a_wrong_acceptance(
    pair: Pair,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[Choice, int, Choice, Random], tuple[int, bool]],
    name: str,
) -> None:
    monkeypatch.setattr(rounds, "settle", wrong)
    by_rank, by_id, _ = _chi_square(oracle, pair, *SETTINGS[name], amount=4000)
    assert max(by_rank, by_id) > 8
