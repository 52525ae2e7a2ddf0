"""Where everything the commands say goes: data to stdout, narration to stderr, errors to exit codes.

Model output, file names and metadata are text from strangers: nothing in them reaches a terminal as a control sequence.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, TextIO

import click

from llamaspec.errors import Cancelled, LlamaspecError, NotFoundError, OutOfMemoryError, RuntimeFailure, UnfitError, UsageError

JSON_SCHEMA = 1
"""The version of the JSON objects; it changes when a key changes its name or its meaning."""

DIM, DRAFTED = "2", "32"

# C0 without tab and line feed, DEL, C1, and the marks, embeddings, overrides and isolates that reorder text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_HERE = 3
    UNFIT = 4
    INTERRUPTED = 130


class _OutputClosed(Exception):
    """Whoever read stdout has gone."""


# --- stdout


def write(text: str, style: str | None = None) -> None:
    """Write data to stdout, in UTF-8 whatever the locale, and flush.

    Args:
        style: an SGR code. Styled text, and all text to a terminal, has its control characters escaped; other text goes out
            as it is.
    """
    stream = sys.stdout
    if style is not None or is_terminal(stream):
        text = clean(text)
    try:
        _put(stream, _styled(text, style))
    except OSError as error:
        _abandon_stdout()
        if isinstance(error, BrokenPipeError):
            raise _OutputClosed from None
        raise RuntimeFailure(f"the output cannot be written: {error.strerror}") from None


def write_lines(lines: Iterable[str]) -> None:
    """Write lines of a report to stdout."""
    write("".join(f"{line}\n" for line in lines))


def write_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object, the schema's version first."""
    content = _plain({"schema": JSON_SCHEMA, **value})
    write(json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no infinities: they become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- stderr


def narrate(text: str, style: str | None = None) -> None:
    """Write a line of narration to stderr."""
    _to_stderr(_styled(clean(text), style if has_colour(sys.stderr) else None) + "\n")


def notice(text: str) -> None:
    """Tell the user one thing to know, on stderr."""
    narrate(f"llamaspec: note: {one_line(text)}")


def error(message: str, hint: str | None = None, details: Iterable[str] = ()) -> None:
    """Say what went wrong, the details, and what to try, on stderr."""
    narrate(f"llamaspec: error: {one_line(message)}")
    for line in details:
        narrate(one_line(line))
    if hint:
        narrate(f"try: {one_line(hint)}")


class Progress:
    """One line about something that takes time, on a terminal; gone when it is over. Used as a context manager.

    `show` may be called from any thread.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled and is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._enabled and text != self._shown:
            self._shown = text
            _to_stderr(f"\r\x1b[K{one_line(text)}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            _to_stderr("\r\x1b[K")


# --- text


def clean(text: str) -> str:
    """The text with control characters made visible, as \\u001b. Carriage returns are dropped; tabs and line feeds stay."""
    return _CONTROL.sub(_escape, text.replace("\r", ""))


def one_line(text: str) -> str:
    """The text on one line, cleaned."""
    return clean(text.replace("\r", "\\r").replace("\n", "\\n"))


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of a label and a value each, values aligned; further lines of a value are indented."""
    width = max(len(label) for label, _ in rows) + 2
    return [f"{label:<{width}}{value}".replace("\n", "\n" + " " * width) for label, value in rows]


def human_bytes(count: int) -> str:
    """As "1.0 GiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def is_terminal(stream: TextIO | None) -> bool:
    """Does a person read this stream?"""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def has_colour(stream: TextIO | None) -> bool:
    """May this stream be coloured? NO_COLOR and FORCE_COLOR have their say, in this order."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") != "0":
        return True
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _styled(text: str, style: str | None) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


def _put(stream: TextIO | None, text: str) -> None:
    if stream is not None:  # None: the process was started with the descriptor closed
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "replace"))
        stream.buffer.flush()


def _to_stderr(text: str) -> None:
    with suppress(OSError):  # narration that nobody can read is no reason to fail
        _put(sys.stderr, text)


def _abandon_stdout() -> None:
    """What is still buffered would fail once more when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


# --- errors and interrupts


def exit_code_of(work: Callable[[], object]) -> ExitCode:
    """Run a command; report what goes wrong; how it ended."""
    try:
        result = work()
    except (KeyboardInterrupt, click.Abort, Cancelled):
        return ExitCode.INTERRUPTED
    except _OutputClosed:
        return ExitCode.FAILED
    except Exception as failure:
        if os.environ.get("LLAMASPEC_DEBUG", "0") not in ("", "0"):
            narrate(traceback.format_exc().rstrip())
        message, hint, code = _explained(failure)
        error(message, hint, failure.table if isinstance(failure, OutOfMemoryError) else ())
        return code
    return ExitCode(result) if isinstance(result, int) else ExitCode.OK


def _explained(failure: Exception) -> tuple[str, str | None, ExitCode]:
    """The message of an error, its hint, its exit code."""
    if isinstance(failure, LlamaspecError):
        kinds = {UsageError: ExitCode.USAGE, NotFoundError: ExitCode.NOT_HERE, UnfitError: ExitCode.UNFIT}
        code = next((code for kind, code in kinds.items() if isinstance(failure, kind)), ExitCode.FAILED)
        return failure.message, failure.hint, code
    if isinstance(failure, click.UsageError):
        message = failure.format_message().rstrip(".")
        hint = f"{failure.ctx.command_path} --help" if failure.ctx else None
        return message[:1].lower() + message[1:], hint, ExitCode.USAGE
    if isinstance(failure, click.ClickException):
        return failure.format_message(), None, ExitCode.FAILED
    return f"{type(failure).__name__}: {failure}", "LLAMASPEC_DEBUG=1 shows where it happened", ExitCode.FAILED


def handle_interrupts() -> None:
    """Make Ctrl+C raise KeyboardInterrupt once: what follows it (stopping, the summary) is not to be interrupted again.

    The second is ignored (some launchers pass one Ctrl+C on twice), the third ends the process where it stands.
    """
    count = 0

    def on_interrupt(_signal: int, _frame: object) -> None:
        nonlocal count
        count += 1
        if count == 1:
            raise KeyboardInterrupt
        if count > 2:
            os._exit(ExitCode.INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in a shell's background jobs
        signal.signal(signal.SIGINT, on_interrupt)
