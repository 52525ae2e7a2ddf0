"""Drafting as far as it pays: the same text, and what is learnt is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamaspec import Pair, Round, Sampling, Speculation, Stats
from llamaspec.decoding.draft_length import Acceptance, Costs, DraftLength
from llamaspec.decoding.explain import causes, explain
from llamaspec.drafting import Outcome
from llamaspec.drafting.auto import AutoDrafter
from llamaspec.drafting.ngram import NgramDrafter
from llamaspec.remembered import Memory
from tests.conftest import LoadPair
from tests.tiny import write_tiny

PROMPT = "abcabcabcabc hello hello"
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=0, repeat_penalty=1.3, dry_multiplier=0.5),
    Sampling(temperature=0.9, top_k=0, top_p=1.0, min_p=0.0, seed=11),
    Sampling(temperature=0.7, seed=3, grammar='root ::= ([a-f]+ "t" [g-k]{5})+'),
)


def _tokens(rounds: Iterator[Round]) -> list[int]:
    return [token for one in rounds for token in one.tokens]


def _eager(pair: Pair) -> None:
    """As on a machine where drafting and checking cost next to nothing, so that it is done all the time."""
    pair.forget()
    pair._decider = DraftLength(Costs({1: 1.0, 8: 1.01, 32: 1.02}, 0.01))
    pair._decider.costs.verified = lambda tokens, seconds: None  # type: ignore[method-assign]
    pair._decider.costs.drafted = lambda tokens, seconds: None  # type: ignore[method-assign]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "penalties", "sampled", "grammar"])
@pytest.mark.parametrize("drafter", ["auto", "model", "ngram"])
def test_the_text_is_the_targets_own_with_the_same_seed(
    load_pair: LoadPair, target: Path, near_draft: Path, sampling: Sampling, drafter: str
) -> None:
    pair = load_pair(target, near_draft, cache_type_k="f32", cache_type_v="f32", flash_attention="off", remember=False)
    alone = _tokens(pair.generate(PROMPT, sampling=sampling, speculation=Speculation("none"), max_tokens=120))
    _eager(pair)
    pair.reset()
    rounds = list(pair.generate(PROMPT, sampling=sampling, speculation=Speculation(drafter), max_tokens=120))  # type: ignore[arg-type]
    assert _tokens(iter(rounds)) == alone
    assert Stats.of(rounds).drafted_tokens > 20


def test_both_draft_in_one_round(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    pair = load_pair(target, near_draft, remember=False)
    _eager(pair)
    stats = Stats.of(pair.generate(PROMPT, sampling=SAMPLINGS[0], max_tokens=200))
    assert set(stats.drafted_by) == {"model", "ngram"}
    assert stats.accepted_tokens > 40
    assert sum(stats.rounds_by.values()) == stats.rounds


def test_a_closed_answer_goes_on(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    pair = load_pair(target, near_draft, remember=False)
    _eager(pair)
    whole = _tokens(pair.generate(PROMPT, sampling=SAMPLINGS[0], max_tokens=60))
    said = pair.tokenize(PROMPT)
    start = len(said)
    while len(said) - start < 60:
        stream = pair.generate(said, sampling=SAMPLINGS[0], max_tokens=60 - (len(said) - start))
        for number, one in enumerate(stream):
            said = [*said, *one.tokens]
            if number == 2:
                break
        stream.close()  # type: ignore[attr-defined]
    assert said[start:] == whole


def test_a_useless_draft_is_left_alone(load_pair: LoadPair, target: Path, far_draft: Path) -> None:
    pair = load_pair(target, far_draft, remember=False)
    pair._decider = DraftLength(Costs({1: 1.0, 2: 1.3, 8: 2.0, 32: 4.0}, 0.3, 0.05))
    pair._decider.costs.verified = lambda tokens, seconds: None  # type: ignore[method-assign]
    pair._decider.costs.drafted = lambda tokens, seconds: None  # type: ignore[method-assign]
    stats = Stats.of(pair.generate("abc", sampling=SAMPLINGS[0], speculation=Speculation("model"), max_tokens=400))
    assert stats.rounds_by["none"] > 0.9 * stats.rounds


def test_what_was_learnt_is_remembered_and_used(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    first = load_pair(target, near_draft)
    stats = Stats.of(first.generate(PROMPT, sampling=SAMPLINGS[0], max_tokens=60))
    learnt = first.decisions()
    assert learnt == stats.decisions
    first.close()
    second = load_pair(target, near_draft)
    assert second.decisions() is None
    next(second.generate(PROMPT, sampling=SAMPLINGS[0], max_tokens=2))
    assert second.decisions() is not None
    assert set(second.decisions().verify) == set(learnt.verify)  # type: ignore[union-attr]


def test_a_file_that_is_not_ours_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    policy = DraftLength(Costs({1: 0.1, 4: 0.2}, 0.01, 0.001))
    memory = Memory({"target": ["a.gguf", 5]})
    assert memory.recall() is None
    assert memory.keep(policy)
    recalled = memory.recall()
    assert recalled is not None
    assert recalled.costs.measured == pytest.approx(policy.costs.measured)
    assert recalled.model.to_dict() == policy.model.to_dict()
    assert Memory({"target": ["a.gguf", 6]}).recall() is None
    good = json.loads(memory.path.read_text())
    damages: tuple[dict[str, Any], ...] = (
        {"version": 0},
        {"saved": 0},
        {"saved": "yesterday"},
        {"identity": {}},
        {"learnt": {}},
        {"learnt": None},
        {"learnt": good["learnt"] | {"costs": {"verify_seconds": {"2": 1.0}, "step_seconds": 0, "read_seconds": 0}}},
        {"learnt": good["learnt"] | {"costs": good["learnt"]["costs"] | {"step_seconds": float("nan")}}},
        {"learnt": good["learnt"] | {"model": good["learnt"]["model"] | {"tried": [1.0]}}},
    )
    for damage in damages:
        memory.path.write_text(json.dumps(good | damage))
        assert memory.recall() is None, damage
    for text in ("", "[]", "{", "\0", "1e999"):
        memory.path.write_text(text)
        assert memory.recall() is None, text
    memory.path.unlink()
    memory.path.mkdir()
    assert memory.recall() is None
    assert not memory.keep(policy)
    assert [path.name for path in memory.path.parent.iterdir()] == [memory.path.name]


def test_a_cache_folder_that_cannot_be_made_costs_nothing_but_memory(
    load_pair: LoadPair, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    pair = load_pair(target)
    assert len(_tokens(pair.generate("abc", sampling=SAMPLINGS[0], max_tokens=5))) == 5
    pair.close()


def test_a_context_of_a_few_tokens_can_be_measured(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    pair = load_pair(target, near_draft, n_ctx=12, remember=False)
    assert Stats.of(pair.generate("abc", sampling=SAMPLINGS[0])).finish_reason == "context"


def test_a_vocabulary_that_cannot_spell_the_text_is_measured_all_the_same(load_pair: LoadPair, models: Path) -> None:
    pair = load_pair(write_tiny(models / "spare.gguf", with_bytes=False), remember=False)
    assert len(_tokens(pair.generate("abc", sampling=SAMPLINGS[0], max_tokens=5))) == 5


def test_lookup_is_judged_whether_it_drafts_or_not() -> None:
    # Checking costs too much for anything to be drafted.
    policy = DraftLength(Costs({1: 1.0, 2: 9.0, 32: 90.0}))
    drafter = AutoDrafter(policy, None, NgramDrafter(2))
    drafter.begin([1, 2, 3, 4, 5, 1, 2])
    for token in (3, 4, 5, 9):
        assert drafter.propose(8, None).tokens == ()
        drafter.settle(Outcome((token,), (token,), 1.0))
    assert sum(tried for *_, tried in policy.lookup.table()) == pytest.approx(4, abs=0.1)
    assert sum(share * tried for *_, share, tried in policy.lookup.table()) == pytest.approx(3, abs=0.1)


def test_a_hiccup_or_an_impossible_measurement_does_not_stick() -> None:
    costs = Costs({1: 1.0, 2: 0.4, 4: 1.5})
    assert costs.verify(2) == 1.0
    for _ in range(20):
        costs.verified(4, 1.5)
    costs.verified(4, 500.0)
    assert costs.verify(4) < 2.0
    assert costs.plain_seconds < 1.2


def test_costs_follow_a_machine_that_changes() -> None:
    costs = Costs({1: 1.0, 4: 1.5}, step_seconds=0.2)
    for _ in range(60):
        costs.verified(1, 2.0)
        costs.verified(4, 6.0)
        costs.drafted(1, 0.2)
    assert costs.plain_seconds == pytest.approx(2.0, rel=0.05)
    assert costs.verify(4) == pytest.approx(3.0, rel=0.05)
    assert costs.step == pytest.approx(0.1, rel=0.05)


def test_an_explanation_names_what_limits_most() -> None:
    def limit(drafted: int, accepted: int, draft: float, verify: float, has_model: bool = True, step: float = 0.2) -> str:
        stats = Stats(
            rounds=40,
            generated_tokens=101,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            draft_seconds=draft,
            verify_seconds=verify,
            seconds=draft + verify,
        )
        decisions = DraftLength(Costs({1: 1.0, 2: 1.3, 4: 1.6}, step), Acceptance()).decisions()
        explanation = explain(stats, decisions, has_model=has_model)
        assert explanation is not None
        assert explanation.roofline == pytest.approx(2.5)
        return explanation.limit

    assert "a draft step costs 0.20" in limit(65, 60, 60.0, 44.0)
    assert "a pass over 4 tokens costs 1.6" in limit(65, 60, 2.0, 90.0)
    assert "50 % of the drafted tokens" in limit(120, 60, 2.0, 41.0)
    assert "hard to draft: 10 %" in limit(100, 10, 2.0, 41.0)
    assert "a draft model (-md) may help" in limit(0, 0, 0.0, 100.0, has_model=False)
    assert "cannot pay here" in limit(0, 0, 0.0, 100.0, step=0.8)
    assert "too seldom" in limit(0, 0, 0.0, 100.0)
    assert explain(Stats(), DraftLength(Costs({1: 1.0})).decisions(), has_model=True) is None


def test_causes_name_what_people_who_tune_by_hand_look_for() -> None:
    stats = Stats(rounds=20, drafted_by={"model": 60}, drafted_at=(20, 20, 20), accepted_at=(16, 8, 3))

    def said(speculation: Speculation, undraftable: float = 0.0, memory: float | None = 0.5, of: Stats = stats) -> str:
        return "|".join(causes(of, speculation, undraftable=undraftable, memory_used=memory))

    assert said(Speculation()) == ""
    assert "token 3 was accepted in 15 % of the rounds" in said(Speculation("model", 3))
    assert said(Speculation("model", 3), of=replace(stats, accepted_at=(16, 12, 8))) == ""
    assert "temperature 0.7" in said(Speculation(draft_temperature=0.7))
    assert "5 % of the vocabulary cannot be drafted" in said(Speculation(), undraftable=0.05)
    assert "memory is nearly full" in said(Speculation(), memory=0.99)
    assert said(Speculation(), memory=None) == ""
    lookup = replace(stats, drafted_by={"ngram": 60})
    assert said(Speculation(draft_temperature=0.7), undraftable=0.5, of=lookup) == ""


def test_costs_measured_on_a_busy_machine_are_measured_again(
    load_pair: LoadPair, target: Path, near_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = load_pair(target, near_draft)
    disturbed = DraftLength(Costs({1: 9.0, 2: 45.0}, 40.0))
    pair._decider = disturbed
    disturbed.model.observe(0.9, 1.0)
    list(pair.generate("abc", sampling=SAMPLINGS[0], max_tokens=30))
    assert disturbed.costs.doubtful
    list(pair.generate("abc", sampling=SAMPLINGS[0], max_tokens=2))
    assert pair._decider is not disturbed
    assert pair._decider.model is disturbed.model
    assert pair._decider.costs.plain_seconds < 1.0
    assert not pair._decider.costs.doubtful


def test_forgetting_reaches_what_was_kept(load_pair: LoadPair, target: Path) -> None:
    first = load_pair(target, n_ctx=256)
    list(first.generate("abc", sampling=SAMPLINGS[0], max_tokens=5))
    first.close()
    second = load_pair(target, n_ctx=256)
    second.forget()
    second._decider = None
    recalled: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "recall", lambda self: recalled.append(self))
        list(second.generate("abc", sampling=SAMPLINGS[0], max_tokens=5))
    assert not recalled
    assert second.decisions() is not None
