"""Stats are a fold over Rounds."""

from __future__ import annotations

import json

import pytest

from llamaspec import Round, Stats
from llamaspec.decoding.rounds import Prefill

ROUNDS = [
    Round((1,), ("a",), seconds=9.0, prefill=Prefill(10, 4, 8.5)),
    Round((2, 3, 4), ("b", "c", "d"), ("model",) * 4, 2, 0.5, 1.0, 2.0),
    Round((5,), ("e",), ("ngram",) * 2, 0, 0.0, 0.5, 0.5),
    Round((6,), ("f",), (), 0, 0.0, 0.4, 0.5, "stop"),
]


def test_they_add_up() -> None:
    stats = Stats.of(ROUNDS)
    assert stats.rounds == 3
    assert stats.generated_tokens == 6
    assert (stats.drafted_tokens, stats.accepted_tokens) == (6, 2)
    assert stats.drafted_by == {"model": 4, "ngram": 2}
    assert stats.accepted_by == {"model": 2}
    assert stats.rounds_by == {"model": 1, "ngram": 1, "none": 1}
    assert stats.drafted_at == (2, 2, 1, 1)
    assert stats.accepted_at == (1, 1, 0, 0)
    assert stats.tokens_per_second == pytest.approx(5 / 3)
    assert stats.acceptance_rate == pytest.approx(1 / 3)
    assert stats.tokens_per_round == pytest.approx(5 / 3)
    assert stats.other_seconds == pytest.approx(3.0 - 0.5 - 1.9)
    assert (stats.prompt_tokens, stats.reused_tokens, stats.prefill_seconds) == (10, 4, 8.5)
    assert stats.finish_reason == "stop"


def test_nothing_is_claimed_before_it_happened() -> None:
    for stats in (Stats(), Stats.of(ROUNDS[:1])):
        assert stats.tokens_per_second is None
        assert stats.acceptance_rate is None
        assert stats.tokens_per_round is None


def test_a_prompt_read_again_is_time_of_the_answer() -> None:
    again = Round((7,), ("g",), seconds=1.0, prefill=Prefill(8, 0, 1.0))
    stats = Stats.of([*ROUNDS[:2], again])
    assert stats.prompt_tokens == 10
    assert stats.seconds == pytest.approx(3.0)
    assert stats.generated_tokens == 5
    assert stats.rounds == 1


def test_the_dictionary_is_plain_json() -> None:
    values = Stats.of(ROUNDS).to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["tokens_per_second"] == pytest.approx(5 / 3)
    assert "finish_reason" not in values
