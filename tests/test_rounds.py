"""The loop over real (tiny) models: what comes out, and what the cache holds, whatever the drafter does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from llamaspec import Pair, Round, Sampling, Speculation, Stats
from llamaspec.errors import Cancelled, ContextFullError, RuntimeFailure
from llamaspec.llama.cancel import CancelFlag
from llamaspec.llama.context import Context, ContextOptions
from llamaspec.llama.model import Model, Placement
from tests.conftest import LoadPair
from tests.tiny import END, letters, write_tiny

GREEDY = Sampling(temperature=0)
PROMPT = "abcabcabdefabcab"
DRAFTERS = ("model", "ngram")


def _run(
    pair: Pair, prompt: str | Sequence[int] = PROMPT, drafter: str = "none", n: int | None = None, **more: object
) -> list[Round]:
    more.setdefault("sampling", GREEDY)
    more.setdefault("max_tokens", 60)
    n = {"model": 5, "ngram": 8}.get(drafter) if n is None else n
    speculation = Speculation(drafter=drafter, n_draft=n, ngram_min=2)  # type: ignore[arg-type]
    return list(pair.generate(prompt, speculation=speculation, **more))  # type: ignore[arg-type]


def _text(rounds: Sequence[Round]) -> str:
    return "".join(one.text for one in rounds)


def _tokens(rounds: Sequence[Round]) -> list[int]:
    return [token for one in rounds for token in one.tokens]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("n_draft", range(9))
def test_greedy_text_equals_the_target_alone(
    load_pair: LoadPair, target: Path, near_draft: Path, drafter: str, n_draft: int
) -> None:
    pair = load_pair(target, near_draft)
    for prompt in (PROMPT, "a", "tsrqponmlkjihgfedcba"):
        alone = _run(pair, prompt)
        pair.reset()
        drafted = _run(pair, prompt, drafter, n_draft)
        assert _tokens(drafted) == _tokens(alone)
        assert _text(drafted) == _text(alone)
        assert len(_tokens(drafted)) == 60
        pair.reset()


def test_drafting_did_accept_and_reject(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    """The equality above would be worth nothing if every draft were right, or every one wrong."""
    pair = load_pair(target, near_draft)
    for drafter in DRAFTERS:
        stats = Stats.of(_run(pair, drafter=drafter))
        assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("n_draft", [1, 3, 8])
def test_a_draft_equal_to_the_target_is_accepted_whole(load_pair: LoadPair, target: Path, n_draft: int) -> None:
    pair = load_pair(target, target)
    rounds = _run(pair, drafter="model", n=n_draft, max_tokens=1 + 3 * (n_draft + 1) + 2)
    assert [one.accepted for one in rounds] == [0, n_draft, n_draft, n_draft, 1]
    assert [one.drafted for one in rounds] == [0, n_draft, n_draft, n_draft, 1]
    assert rounds[-1].finish_reason == "length"


def test_a_sampling_draft_equal_to_the_target_is_accepted_whole(load_pair: LoadPair, target: Path) -> None:
    """p equals q, so sum min(p, q) is 1: only the tail that the draft's top-k cuts off can be missed."""
    pair = load_pair(target, target)
    sampling = Sampling(temperature=0.7, top_k=20, top_p=1, min_p=0, seed=1)
    speculation = Speculation("model", 4, draft_temperature=0.7)
    stats = Stats.of(pair.generate(PROMPT, sampling=sampling, speculation=speculation, max_tokens=200))
    assert stats.acceptance_rate is not None
    assert stats.acceptance_rate > 0.97


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_between_rounds_the_cache_holds_all_but_the_last_token(
    load_pair: LoadPair, target: Path, near_draft: Path, drafter: str
) -> None:
    pair = load_pair(target, near_draft)
    said = pair.tokenize(PROMPT)
    speculation = Speculation(drafter=drafter, n_draft=4, ngram_min=2)  # type: ignore[arg-type]
    for one in pair.generate(PROMPT, sampling=GREEDY, speculation=speculation, max_tokens=50):
        said += one.tokens
        assert list(pair.cached_tokens) == said[:-1]


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_stopping_early_and_going_on_gives_the_text_of_one_go(
    load_pair: LoadPair, target: Path, near_draft: Path, drafter: str
) -> None:
    pair = load_pair(target, near_draft)
    whole = _tokens(_run(pair, drafter=drafter))
    pair.reset()
    for stop_after in (1, 3, 6):
        said = pair.tokenize(PROMPT)
        start = len(said)
        while len(said) - start < 60:
            speculation = Speculation(drafter=drafter, n_draft=5, ngram_min=2)  # type: ignore[arg-type]
            stream = pair.generate(said, sampling=GREEDY, speculation=speculation, max_tokens=60 - (len(said) - start))
            for number, one in enumerate(stream):
                said = [*said, *one.tokens]
                if number == stop_after:
                    break
            stream.close()  # type: ignore[attr-defined]
        assert said[start:] == whole


def test_a_second_turn_reads_only_what_is_new(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    pair = load_pair(target, near_draft)
    prompt = pair.tokenize(PROMPT)
    rounds = _run(pair, prompt, drafter="model")
    assert rounds[0].prefill is not None
    assert rounds[0].prefill.prompt_tokens == len(prompt)
    assert rounds[0].prefill.reused_tokens == 0
    second = [*prompt, *_tokens(rounds), *pair.tokenize("xyz")[1:]]
    again = _run(pair, second, max_tokens=1)
    assert again[0].prefill is not None
    assert again[0].prefill.reused_tokens == len(prompt) + 59  # the last token was emitted, never decoded
    assert Stats.of(again).reused_tokens == len(prompt) + 59
    same = _run(pair, second, max_tokens=1)
    assert same[0].prefill is not None
    assert same[0].prefill.reused_tokens == len(second) - 1
    assert _tokens(same) == _tokens(again)


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_inside_a_round(load_pair: LoadPair, target: Path, near_draft: Path, drafter: str, max_tokens: int) -> None:
    pair = load_pair(target, near_draft)
    rounds = _run(pair, "ababababab", drafter, 5, max_tokens=max_tokens)
    assert len(_tokens(rounds)) == max_tokens
    assert rounds[-1].finish_reason == "length"
    assert len(pair.cached_tokens) == len(pair.tokenize("ababababab")) + max_tokens - 1


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_a_stop_string_inside_a_round(load_pair: LoadPair, target: Path, drafter: str) -> None:
    pair = load_pair(target, target)
    whole = _text(_run(pair))
    for at in (5, 11, 17, 30):
        stop = whole[at : at + 3]
        expected = whole[: whole.index(stop)]
        pair.reset()
        rounds = _run(pair, drafter=drafter, n=6, stop=[stop])
        assert _text(rounds) == expected
        assert rounds[-1].finish_reason == "stop"
        # One letter is one token here: the tokens end with the stop string, and the cache one before.
        assert len(_tokens(rounds)) == len(expected) + 3
        assert len(pair.cached_tokens) == len(pair.tokenize(PROMPT)) + len(expected) + 2


@pytest.fixture(scope="module")
def ending(models: Path) -> Path:
    """A target that ends after a while."""
    return write_tiny(models / "ending.gguf", seed=5, ends=True)


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_an_end_token_inside_a_round(load_pair: LoadPair, ending: Path, drafter: str) -> None:
    pair = load_pair(ending, ending)
    endings = 0
    for prompt in ("a", "bb", "cde", "fgh", "hello", "stop", "tact", "kick"):
        pair.reset()
        alone = _run(pair, prompt, max_tokens=200)
        pair.reset()
        rounds = _run(pair, prompt, drafter, 7, max_tokens=200)
        assert _tokens(rounds) == _tokens(alone)
        assert rounds[-1].finish_reason == alone[-1].finish_reason
        assert END not in _tokens(rounds)[:-1]
        if rounds[-1].finish_reason == "stop":
            endings += 1
            assert _tokens(rounds)[-1] == END
            assert END not in pair.cached_tokens
            assert rounds[-1].pieces[-1] == ""
    assert endings >= 2


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_a_full_context_ends_with_that_reason(load_pair: LoadPair, target: Path, near_draft: Path, drafter: str) -> None:
    pair = load_pair(target, near_draft, n_ctx=48)
    rounds = _run(pair, drafter=drafter, max_tokens=None)
    assert rounds[-1].finish_reason == "context"
    assert len(pair.cached_tokens) == 48
    assert len(pair.tokenize(PROMPT)) + len(_tokens(rounds)) == 49  # the last one needs no place


def test_a_prompt_may_fill_the_context_and_no_more(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target, n_ctx=32)
    rounds = _run(pair, [5 + 97] * 32, max_tokens=None)
    assert len(_tokens(rounds)) == 1
    assert rounds[-1].finish_reason == "context"
    with pytest.raises(ContextFullError, match="33 tokens, the context 32"):
        _run(pair, [5 + 97] * 33)


def test_utf8_split_over_tokens_and_rounds(load_pair: LoadPair, models: Path) -> None:
    """A model whose every token is a byte of one character: no round prints half of it."""
    parts = [bytes([byte]) for byte in "🦙é".encode()]
    path = write_tiny(models / "bytes.gguf", words=[*parts, *letters(3)], seed=3, with_bytes=False)
    pair = load_pair(path)
    bias = dict.fromkeys(range(6, 6 + len(parts)), 50.0)
    sampling = Sampling(temperature=0, logit_bias=bias)
    rounds = _run(pair, [6, 7, 8, 9, 10, 11], drafter="ngram", sampling=sampling, max_tokens=100)
    raw = b"".join(parts[token - 6] for token in _tokens(rounds))
    assert raw.decode("utf-8", "replace").startswith(_text(rounds))
    assert len(raw) - len(_text(rounds).encode()) <= 3 or "�" in _text(rounds)


PENALTIES = (
    Sampling(temperature=0, repeat_penalty=1.3, penalty_last_n=16),
    Sampling(temperature=0, frequency_penalty=0.4, presence_penalty=0.3),
    Sampling(temperature=0, dry_multiplier=1.5, dry_base=1.75, dry_allowed_length=2),
    Sampling(temperature=0, logit_bias={262: 2.0, 263: -2.0}),
    Sampling(temperature=0, grammar='root ::= ("abc" | "bd" | "efg"){8,12} "t"'),
    Sampling(temperature=0, grammar='root ::= [a-f]+ "t" [g-k]{5}', repeat_penalty=1.5),
)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", PENALTIES, ids=["repeat", "frequency", "dry", "bias", "grammar", "both"])
def test_stateful_samplers_give_the_same_text_as_without_drafting(
    load_pair: LoadPair, target: Path, near_draft: Path, sampling: Sampling, drafter: str
) -> None:
    pair = load_pair(target, near_draft)
    alone = _run(pair, sampling=sampling)
    assert _tokens(alone) != _tokens(_run(pair)), "the setting changes nothing: the test would prove nothing"
    pair.reset()
    drafted = _run(pair, sampling=sampling, drafter=drafter)
    assert _tokens(drafted) == _tokens(alone)
    assert Stats.of(drafted).drafted_tokens > 0


def test_a_grammar_holds(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    import re

    pair = load_pair(target, near_draft)
    for seed in range(5):
        sampling = Sampling(temperature=1.5, top_k=0, seed=seed, grammar='root ::= "a" [b-d]{3,9} "!" [0-9]{2}')
        rounds = _run(pair, drafter="model", sampling=sampling)
        assert re.fullmatch(r"a[b-d]{3,9}![0-9]{2}", _text(rounds))
        assert rounds[-1].finish_reason == "stop"


def test_a_grammar_this_vocabulary_cannot_write_is_an_error(load_pair: LoadPair, models: Path) -> None:
    path = write_tiny(models / "few.gguf", words=letters(4), with_bytes=False)
    pair = load_pair(path)
    with pytest.raises(RuntimeFailure, match="allows no token"):
        _run(pair, "ab", sampling=Sampling(temperature=0, grammar='root ::= "z"'))
    assert _tokens(_run(pair, "ab"))  # and the pair goes on


def test_the_same_seed_gives_the_same_text(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    pair = load_pair(target, near_draft)
    texts = set()
    for seed in (1, 1, 2):
        sampling = Sampling(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.05, seed=seed)
        pair.reset()
        texts.add(_text(_run(pair, drafter="model", sampling=sampling)))
    assert len(texts) == 2


def test_p_min_stops_the_draft_early(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    pair = load_pair(target, near_draft)
    alone = _tokens(_run(pair))
    drafted = {}
    for p_min in (0.0, 0.5, 1.0):
        pair.reset()
        speculation = Speculation("model", 6, p_min=p_min)
        rounds = list(pair.generate(PROMPT, sampling=GREEDY, speculation=speculation, max_tokens=60))
        assert _tokens(rounds) == alone
        drafted[p_min] = Stats.of(rounds).drafted_tokens
    assert drafted[0.0] > drafted[0.5] > drafted[1.0] == 0


# --- the cache itself


@pytest.fixture
def contexts(target: Path) -> Iterator[tuple[Context, Context]]:
    from llamaspec.gguf_header import read_model

    model = Model(read_model(target), Placement())
    made = [Context(model, ContextOptions(256, 64, 1), CancelFlag()) for _ in range(2)]
    yield made[0], made[1]
    for context in made:
        context.close()
    model.close()


def test_a_rolled_back_cache_equals_a_fresh_one(contexts: tuple[Context, Context]) -> None:
    """After random accept patterns the next logits are those of a context that never saw the rejected tokens."""
    used, fresh = contexts
    random = Random(4)
    partition: list[list[int]] = []
    for _ in range(25):
        batch = [random.randrange(261, 281) for _ in range(random.randrange(1, 7))]
        kept = random.randrange(1, len(batch) + 1)
        used.decode(batch, "all")
        used.truncate(len(used.tokens) - len(batch) + kept)
        partition.append(batch[:kept])
    used.decode([270], "last")
    for batch in partition:
        fresh.decode(batch, "all")
    fresh.decode([270], "last")
    assert used.tokens == fresh.tokens
    np.testing.assert_allclose(used.logits(), fresh.logits(), rtol=0, atol=1e-4)


def test_a_cancelled_decode_leaves_the_cache_as_it_was(contexts: tuple[Context, Context]) -> None:
    context, _ = contexts
    context.decode([261, 262], "last")
    context._cancel.set()
    with pytest.raises(Cancelled):
        context.decode([263], "last")
    context._cancel.clear()
    assert context.tokens == [261, 262]
    context.decode([263], "last")
    assert context.tokens == [261, 262, 263]


def test_what_would_abort_the_process_is_an_error(contexts: tuple[Context, Context]) -> None:
    context, _ = contexts
    with pytest.raises(RuntimeFailure, match="do not fit"):
        context.decode([261] * 257, "none")
    with pytest.raises(RuntimeFailure, match="rows of logits"):
        context.decode([261] * 65, "all")
    with pytest.raises(RuntimeFailure, match="could not decode"):
        context.decode([-5], "last")
    assert context.tokens == []
