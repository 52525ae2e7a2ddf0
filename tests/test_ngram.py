"""Lookup: against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamaspec.drafting import Outcome
from llamaspec.drafting.ngram import MAX_CANDIDATES, NgramDrafter, NgramIndex


def _drafter(shortest: int, tokens: list[int], reference: list[int] | None = None) -> NgramDrafter:
    drafter = NgramDrafter(shortest, reference or [])
    drafter.begin(tokens)
    return drafter


def test_it_proposes_what_followed_before() -> None:
    assert _drafter(2, [1, 2, 3, 4, 5, 1, 2]).propose(3, None).tokens == (3, 4, 5)


def test_the_longest_match_wins_over_the_latest() -> None:
    # "1 2 3" was followed by 9; the later "2 3" by 7.
    assert _drafter(2, [1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3]).propose(1, None).tokens == (9,)


def test_among_equals_the_latest_wins() -> None:
    assert _drafter(2, [1, 2, 5, 1, 2, 6, 1, 2]).propose(1, None).tokens == (6,)


def test_a_repetition_goes_on_beyond_the_text() -> None:
    assert _drafter(2, [1, 2, 3, 1, 2, 3]).propose(7, None).tokens == (1, 2, 3, 1, 2, 3, 1)


def test_nothing_without_a_match() -> None:
    assert _drafter(3, [1, 2, 3, 4, 2, 3]).propose(5, None).tokens == ()
    assert _drafter(3, []).propose(5, None).tokens == ()


def test_a_reference_is_copied_from_and_not_run_over() -> None:
    drafter = _drafter(2, [7, 8], reference=[5, 7, 8, 9])
    assert drafter.propose(5, None).tokens == (9,)
    drafter.settle(Outcome((9,), (9,), 0.0))
    assert drafter.propose(5, None).tokens == ()


def test_settled_tokens_are_found_later() -> None:
    drafter = _drafter(2, [1, 2, 3])
    drafter.settle(Outcome((4, 1, 2), (4, 1, 2), 0.0))
    assert drafter.propose(2, None).tokens == (3, 4)


def test_begin_forgets_the_text_before() -> None:
    drafter = _drafter(2, [1, 2, 3])
    drafter.begin([1, 2])
    assert drafter.propose(1, None).tokens == ()


@given(st.integers(1, 3), st.lists(st.integers(0, 2), max_size=30))
def test_the_match_is_the_longest_there_is(shortest: int, tokens: list[int]) -> None:
    index = NgramIndex(shortest)
    index.extend(tokens)
    place, length = index.longest_match()
    best = 0
    for end in range(1, len(tokens)):
        n = 0
        while n < end and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        best = max(best, n)
    if best < shortest:
        assert (place, length) == (0, 0)
    else:
        assert tokens[place - length : place] == tokens[len(tokens) - length :]
        assert length == best or len(tokens) > MAX_CANDIDATES


def test_a_question_looks_at_a_bounded_number_of_places() -> None:
    index = NgramIndex(2)
    index.extend([9, 1, 2, 5] + [0, 1, 2] * MAX_CANDIDATES + [9, 1, 2])
    assert index.longest_match()[1] == 2  # the match of length 3 lies one place too far back


@given(st.integers(1, 3), st.lists(st.integers(0, 2), max_size=25), st.lists(st.integers(0, 2), max_size=6))
def test_what_is_taken_back_leaves_no_trace(shortest: int, tokens: list[int], taken: list[int]) -> None:
    index, fresh = NgramIndex(shortest), NgramIndex(shortest)
    for one in (index, fresh):
        one.extend(tokens)
    index.extend(taken)
    index.retract(len(taken))
    for _ in range(2):
        assert index.tokens == fresh.tokens
        assert index.longest_match() == fresh.longest_match()
        assert (index._last, index._before) == (fresh._last, fresh._before)
        for one in (index, fresh):
            one.extend([1, 0, 2, 1])


def test_an_offer_goes_on_behind_what_was_taken_and_forgets_it() -> None:
    drafter = _drafter(2, [1, 2, 3, 4, 5, 6, 1, 2])
    assert drafter.offer(5)[0] == (3, 4)  # as many as have matched
    drafter.take([3, 4])
    assert drafter.offer(5)[0] == (5, 6, 1, 2)
    drafter.drop()
    assert drafter.offer(5)[0] == (3, 4)
    drafter.take([9])
    drafter.settle(Outcome((3, 4, 7), (3, 4, 7), 0.0))
    assert drafter.offer(5)[0] == ()
