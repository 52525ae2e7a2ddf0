"""Tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """Turns tokens into text, and notices stop strings.

    A character whose bytes are spread over tokens appears with the last of them; text that may be the beginning of a stop
    string is held back until that is decided.

    Args:
        piece: the bytes a token adds to the text.
        stops: strings that end the text; it ends before the first one. Empty strings are ignored.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._piece = piece
        self._stops = tuple(stop for stop in stops if stop)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now that `token` is there. Sets `stopped` when a stop string is complete."""
        text = self._decode(self._piece(token))
        if not self._stops:
            return text
        text = self._held + text
        matches = [at for at in map(text.find, self._stops) if at >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            return text[: min(matches)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, now that no token follows. An incomplete character is dropped."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
