"""Whole characters, and nothing of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamaspec.text import TextStream


def _stream(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = TextStream(pieces.__getitem__, stops)
    out = []
    for token in range(len(pieces)):
        out.append(stream.push(token))
        if stream.stopped:
            break
    out.append(stream.finish())
    return out, stream.stopped


def test_a_character_split_over_tokens_appears_whole() -> None:
    parts = [bytes([byte]) for byte in "a€🦙é".encode()]
    out, _ = _stream(parts)
    assert "".join(out) == "a€🦙é"
    assert all("�" not in piece for piece in out)


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    assert "".join(_stream([b"ok", "🦙".encode()[:2]])[0]) == "ok"


def test_invalid_bytes_become_the_replacement_character() -> None:
    assert "".join(_stream([b"\xff", b"a"])[0]) == "�a"


def test_a_stop_string_ends_the_text_before_it() -> None:
    out, stopped = _stream([b"one\n", b"\n", b"two"], ("\n\n",))
    assert stopped
    assert out == ["one", "", ""]


def test_what_only_looked_like_a_stop_string_is_released() -> None:
    assert _stream([b"a<", b"b"], ("<end>",)) == (["a", "<b", ""], False)


def test_held_text_is_released_at_the_end() -> None:
    assert _stream([b"a<en"], ("<end>",)) == (["a", "<en"], False)


def test_the_first_of_two_stop_strings_wins() -> None:
    assert "".join(_stream([b"abXcdY"], ("Y", "X"))[0]) == "ab"


@given(st.lists(st.text("ab<", max_size=4)), st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3))
def test_streaming_equals_cutting_the_whole_text(parts: list[str], stops: list[str]) -> None:
    whole = "".join(parts)
    # The text ends at the first stop string to be complete; among those complete with the same piece, at the earliest.
    expected, stopped = whole, False
    for upto in range(len(parts) + 1):
        seen = "".join(parts[:upto])
        found = [seen.find(stop) for stop in stops if stop in seen]
        if found:
            expected, stopped = seen[: min(found)], True
            break
    out, did_stop = _stream([part.encode() for part in parts], tuple(stops))
    assert ("".join(out), did_stop) == (expected, stopped)
