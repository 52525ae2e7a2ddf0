"""Every error that llamaspec raises on purpose.

    LlamaspecError
    ├── UsageError            a request that cannot mean anything: a bad option, prompt, template or grammar
    │   ├── ContextFullError  the prompt does not fit the context
    │   └── ConfigError       a models.toml that says what cannot be meant
    ├── NotFoundError         a file, a pair or a repository that is not there
    │   └── NotPulledError    a model that is known and can be pulled
    ├── DownloadError         a model could not be brought here
    ├── ModelFileError        a file that is here but is no model that can be loaded
    ├── UnfitError            this machine or this pair cannot do it
    │   ├── VocabularyMismatchError   the two models do not speak the same tokens
    │   └── OutOfMemoryError          it does not fit into memory
    ├── RuntimeFailure        llama.cpp refused or failed while working
    └── Cancelled             the caller asked to stop while a model was loading

Each carries what went wrong (its message, one sentence) and, where there is one, what to do about it (`hint`, one line).
"""

from __future__ import annotations

from collections.abc import Sequence


class LlamaspecError(Exception):
    """The base of all errors raised on purpose.

    Args:
        message: what went wrong, one line.
        hint: what to try, one line, or None.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LlamaspecError):
    """The request cannot mean anything: an option out of range, a grammar that does not parse."""


class ContextFullError(UsageError):
    """The prompt has more tokens than the context has room for."""


class ConfigError(UsageError):
    """A models.toml has a mistake: the message names the file, the line and the key."""


class NotFoundError(LlamaspecError):
    """A file, a pair or a repository that was named is not there."""


class NotPulledError(NotFoundError):
    """A model that is known is not on this machine.

    Args:
        missing: what is to be pulled, as `llamaspec pull` takes it.
    """

    def __init__(self, message: str, hint: str | None = None, missing: Sequence[str] = ()) -> None:
        super().__init__(message, hint)
        self.missing = tuple(missing)


class DownloadError(LlamaspecError):
    """A model could not be brought here: the network, the server, the disk, or no right to it."""


class ModelFileError(LlamaspecError):
    """The file is here but no model can be loaded from it: damaged, of another format, of a kind that writes no text."""


class UnfitError(LlamaspecError):
    """This machine, or this pair of models, cannot do what was asked."""


class VocabularyMismatchError(UnfitError):
    """The draft's tokens mean other text than the target's."""


class OutOfMemoryError(UnfitError):
    """The models and their caches need more memory than there is.

    Args:
        table: lines that show what needs how much; empty where that is not known.
    """

    def __init__(self, message: str, hint: str | None = None, table: Sequence[str] = ()) -> None:
        super().__init__(message, hint)
        self.table = tuple(table)


class RuntimeFailure(LlamaspecError):
    """llama.cpp failed while it worked."""


class Cancelled(LlamaspecError):
    """The caller asked to stop."""
