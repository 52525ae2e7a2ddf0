"""Where the command line's words go: terminals, pipes, errors, exit codes."""

from __future__ import annotations

import io
import json
import sys

import click
import pytest

from llamaspec import errors
from llamaspec.cli import output
from llamaspec.cli.output import ExitCode


class Screen(io.TextIOWrapper):
    """A stream that says it is a terminal, or not, and remembers what it was sent."""

    def __init__(self, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    @property
    def sent(self) -> bytes:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "LLAMASPEC_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def screen(monkeypatch: pytest.MonkeyPatch, name: str, terminal: bool) -> Screen:
    stream = Screen(terminal)
    monkeypatch.setattr(sys, name, stream)
    return stream


HOSTILE = "a\x1b]0;title\x07\x9b31m\u202eb\r\nc\td\x7f"


def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = screen(monkeypatch, "stdout", terminal=True)
    output.write(HOSTILE)
    assert stdout.sent == rb"a\u001b]0;title\u0007\u009b31m\u202eb" + b"\nc\td" + rb"\u007f"


def test_a_pipe_gets_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = screen(monkeypatch, "stdout", terminal=False)
    output.write(HOSTILE + "é\ud800")
    assert stdout.sent == HOSTILE.encode() + "é?".encode()


def test_json_stays_json_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = screen(monkeypatch, "stdout", terminal=True)
    output.write_json({"text": HOSTILE, "bias": {5: float("-inf")}})
    assert b"\x1b" not in stdout.sent
    assert b"\x9b" not in stdout.sent
    assert json.loads(stdout.sent) == {"schema": output.JSON_SCHEMA, "text": HOSTILE, "bias": {"5": "-inf"}}


def test_messages_are_one_clean_line_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = screen(monkeypatch, "stderr", terminal=False)
    output.error("no file a\nb\x1b[31m", "c\rd")
    assert stderr.sent == b"llamaspec: error: no file a\\nb\\u001b[31m\ntry: c\\rd\n"


@pytest.mark.parametrize(
    ("environment", "terminal", "coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colour(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], terminal: bool, coloured: bool) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert output.has_colour(Screen(terminal)) is coloured


def test_progress_is_for_terminals_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        stderr = screen(monkeypatch, "stderr", terminal)
        with output.Progress(True) as progress:
            progress.show("loading 5%")
            progress.show("loading 5%")
        assert stderr.sent == (b"\r\x1b[Kloading 5%\r\x1b[K" if terminal else b"")


def test_progress_can_be_off_and_knows_dumb_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = screen(monkeypatch, "stderr", terminal=True)
    with output.Progress(False) as progress:
        progress.show("a")
    monkeypatch.setenv("TERM", "dumb")
    with output.Progress(True) as progress:
        progress.show("a")
    assert stderr.sent == b""


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (errors.UsageError("a"), ExitCode.USAGE),
        (errors.ContextFullError("a"), ExitCode.USAGE),
        (errors.NotFoundError("a"), ExitCode.NOT_HERE),
        (errors.ModelFileError("a"), ExitCode.FAILED),
        (errors.RuntimeFailure("a"), ExitCode.FAILED),
        (errors.UnfitError("a"), ExitCode.UNFIT),
        (errors.VocabularyMismatchError("a"), ExitCode.UNFIT),
        (errors.OutOfMemoryError("a"), ExitCode.UNFIT),
        (errors.Cancelled("a"), ExitCode.INTERRUPTED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (click.Abort(), ExitCode.INTERRUPTED),
        (click.UsageError("a"), ExitCode.USAGE),
        (click.ClickException("a"), ExitCode.FAILED),
        (ZeroDivisionError("a"), ExitCode.FAILED),
    ],
)
def test_every_error_has_its_exit_code(failure: BaseException, code: ExitCode) -> None:
    def work() -> None:
        raise failure

    assert output.exit_code_of(work) is code


def test_a_result_is_the_exit_code() -> None:
    assert output.exit_code_of(lambda: None) is ExitCode.OK
    assert output.exit_code_of(lambda: ExitCode.UNFIT) is ExitCode.UNFIT


def test_an_unexpected_error_has_a_traceback_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise ZeroDivisionError("by nothing")

    output.exit_code_of(work)
    said = "llamaspec: error: ZeroDivisionError: by nothing\ntry: LLAMASPEC_DEBUG=1 shows where it happened\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("LLAMASPEC_DEBUG", "1")
    output.exit_code_of(work)
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


def test_closed_streams_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    output.write("a")
    output.error("a")


def test_table_aligns_and_indents() -> None:
    assert output.table([("a", "1\n2"), ("long", "3")]) == ["a     1\n      2", "long  3"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (98362432, "93.8 MiB"), (2**60, "1048576.0 TiB")]
)
def test_human_bytes(count: int, text: str) -> None:
    assert output.human_bytes(count) == text
