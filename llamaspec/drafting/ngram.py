"""Drafting by lookup: what followed the last time the text ended like this.

The idea is prompt lookup decoding (Apoorv Saxena, 2023); the index is the hash chain that deflate compressors use to find
repetitions (RFC 1951, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec.drafting import Draft, Outcome

MAX_CANDIDATES = 32
MAX_MATCH = 64
_BREAK = -1  # stands between two texts; matches nothing and is never proposed


class NgramIndex:
    """Finds the longest earlier occurrence of a sequence's end. Constant work per token added and per question.

    A table holds, for every run of `shortest` tokens, where it last ended; a chain leads from each place to the one before.
    A question walks at most MAX_CANDIDATES places of one chain and compares at most MAX_MATCH tokens at each.
    """

    def __init__(self, shortest: int) -> None:
        self.tokens: list[int] = []
        self._shortest = shortest
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []  # for each end, the end of the same run before it; -1 for none

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the sequence."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            run = tuple(self.tokens[end - self._shortest :]) if end >= self._shortest else ()
            if not run or _BREAK in run:
                self._before.append(-1)
                continue
            self._before.append(self._last.get(run, -1))
            self._last[run] = end

    def retract(self, count: int) -> None:
        """Take the last `count` tokens back."""
        for _ in range(count):
            end = len(self.tokens)
            before = self._before.pop()
            run = tuple(self.tokens[end - self._shortest :]) if end >= self._shortest else ()
            if self._last.get(run) == end:
                if before < 0:
                    del self._last[run]
                else:
                    self._last[run] = before
            self.tokens.pop()

    def longest_match(self) -> tuple[int, int]:
        """Where the sequence's end occurred before, as (position after it, length of the match); (0, 0) for nowhere.

        Among equally long ones the latest wins.
        """
        best, best_length = 0, 0
        end = self._before[-1] if self._before else -1
        for _ in range(MAX_CANDIDATES):
            if end < 0:
                break
            length = self._match_length(end)
            if length > best_length:
                best, best_length = end, length
                if length == MAX_MATCH:
                    break
            end = self._before[end - 1]
        return best, best_length

    def _match_length(self, end: int) -> int:
        tokens, length = self.tokens, 0
        while length < min(MAX_MATCH, end):
            token = tokens[end - 1 - length]
            if token == _BREAK or token != tokens[-1 - length]:
                break
            length += 1
        return length


class NgramDrafter:
    """Proposes what followed the longest earlier occurrence of the text's end.

    Args:
        shortest: tokens that must match at least.
        reference: tokens of a text the answer may copy from, besides its own beginning.
    """

    name = "ngram"

    def __init__(self, shortest: int, reference: Sequence[int] = ()) -> None:
        self._shortest = shortest
        self._reference = tuple(reference)
        self._index = NgramIndex(shortest)
        self._taken = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._index = NgramIndex(self._shortest)
        self._taken = 0
        if self._reference:
            self._index.extend((*self._reference, _BREAK))
        self._index.extend(tokens)

    def propose(self, limit: int, remaining: int | None) -> Draft:
        tokens, confidences = self._follow(*self._index.longest_match(), limit)
        return Draft(tokens, tokens, confidences, (self.name,) * len(tokens))

    def offer(self, limit: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """At most `limit` tokens that followed the last time, and how sure each is; none when there was no such time.

        Never more than have matched: what is being copied matches at length soon, and what matches by chance ends soon.
        """
        place, length = self._index.longest_match()
        return self._follow(place, length, min(limit, length))

    def _follow(self, place: int, length: int, limit: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """What stands from `place` on, behind a match of `length` tokens; nothing without a match."""
        tokens: list[int] = []
        source = self._index.tokens
        size = len(source)
        for offset in range(place, place + limit if length else place):
            # A copy that reaches the text's end goes on with what it has proposed itself: a repetition repeats.
            token = source[offset] if offset < size else tokens[offset - size]
            if token == _BREAK:
                break
            tokens.append(token)
        # The longer the match, those drafted before it counted in, the surer; two tokens match by chance all the time.
        confidences = ((length + i - 1) / (length + i + 1) for i in range(len(tokens)))
        return tuple(tokens), tuple(confidences)

    def take(self, tokens: Sequence[int]) -> None:
        """Put tokens into the draft, whoever proposed them: the next offer goes on behind them."""
        self._index.extend(tokens)
        self._taken += len(tokens)

    def drop(self) -> None:
        """Forget the draft."""
        self._index.retract(self._taken)
        self._taken = 0

    def settle(self, outcome: Outcome) -> None:
        self.drop()
        self._index.extend(outcome.tokens)
