"""models.toml: pairs by name, the packaged ones first, then the user's own, which replace them key by key.

A mistake in a file is told with the file, the line and the key; a typo with the name that was probably meant.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import platformdirs

from llamaspec.errors import ConfigError, NotFoundError, UsageError

PACKAGED = Path(__file__).with_name("models.toml")

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_URL = re.compile(r"(?:https?://[^/]+/|(?:hf\.co|huggingface\.co)/)(?P<rest>.+)")
_IN_REPO = re.compile(r"(?P<repo>[^/]+/[^/]+)/(?:resolve|blob|tree)/(?P<revision>[^/]+)(?:/(?P<file>[^?]+))?(?:\?.*)?")
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


@dataclass(frozen=True, slots=True)
class HubRef:
    """A model on the Hub.

    Attributes:
        repo: as "user/name".
        quant: the quantization wanted; None for the default, or where `file` is given.
        file: the file's path in the repository, or its name.
        revision: a branch, a tag or a commit; None for the newest.
    """

    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        """As `pull` takes it: "user/repo:QUANT"."""
        choice = self.file or self.quant
        return f"{self.repo}:{choice}" if choice else self.repo


@dataclass(frozen=True, slots=True)
class Tuned:
    """Settings for a pair, None where they are left to llamaspec, and what was measured with them."""

    n_draft: int | None = None
    p_min: float | None = None
    draft_temperature: float | None = None
    n_ctx: int | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    machine: str | None = None
    date: str | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that are given, by the names of the fields that they fill in `Speculation` and `LoadOptions`."""
        names = ("n_draft", "p_min", "draft_temperature", "n_ctx", "cache_type_k", "cache_type_v")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True)
class PairEntry:
    """One pair of models.toml.

    Attributes:
        name: what users call it.
        target: on the Hub, or a file.
        drafts: in order of preference; none where lookup drafts.
        source: the file that names it last.
    """

    name: str
    target: HubRef | Path
    drafts: tuple[HubRef | Path, ...] = ()
    aliases: tuple[str, ...] = ()
    family: str | None = None
    licence: str | None = None
    parameters_b: float | None = None
    vocabulary: str | None = None
    notes: str | None = None
    tuned: Tuned = field(default_factory=Tuned)
    source: Path = PACKAGED


@dataclass(frozen=True)
class Catalog:
    """All pairs that are known by name."""

    pairs: Mapping[str, PairEntry]

    def find(self, name: str) -> PairEntry | None:
        """The pair of this name, alias or unambiguous beginning of a name, in any case; None when there is none.

        Raises:
            UsageError: several begin so; they are named.
        """
        wanted = name.casefold()
        for entry in self.pairs.values():
            if wanted in (entry.name.casefold(), *(alias.casefold() for alias in entry.aliases)):
                return entry
        if not _NAME.fullmatch(name):
            return None
        begun = [entry for entry in self.pairs.values() if entry.name.casefold().startswith(wanted)]
        if len(begun) > 1:
            raise UsageError(f"{name} may be {', '.join(entry.name for entry in begun)}", "give the whole name")
        return begun[0] if begun else None

    def near(self, name: str) -> list[str]:
        """Names like `name`, the likest first."""
        names = [known for entry in self.pairs.values() for known in (entry.name, *entry.aliases)]
        return get_close_matches(name.casefold(), names, n=3, cutoff=0.6)

    def drafts_for(self, target: HubRef) -> tuple[HubRef | Path, ...]:
        """The drafts of the first pair whose target is of the same repository; none when there is none."""
        for entry in self.pairs.values():
            if isinstance(entry.target, HubRef) and entry.target.repo.casefold() == target.repo.casefold():
                return entry.drafts
        return ()


def user_file() -> Path:
    """Where the user's own models.toml is looked for."""
    return platformdirs.user_config_path("llamaspec") / "models.toml"


def load_catalog() -> Catalog:
    """Read the packaged models.toml and the user's own.

    Raises:
        ConfigError: a file cannot be read, is no TOML, or has a key or a value that means nothing.
    """
    pairs = dict(_packaged())
    own = user_file()
    try:
        text = own.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{own} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if text:
        pairs.update(read_pairs(text, own, pairs))
    return Catalog(pairs)


@cache
def _packaged() -> Mapping[str, PairEntry]:
    return read_pairs(PACKAGED.read_text(encoding="utf-8"), PACKAGED, {})


def parse_hub(text: str, revision: str | None = None) -> HubRef | None:
    """A model on the Hub as people write it: "user/repo", "user/repo:QUANT", "user/repo:file.gguf", with "hf:" or an
    address before it, or the address of a file; None for anything else.

    Args:
        revision: the one given apart; one in an address counts more.
    """
    rest = text.removeprefix("hf:")
    url = _URL.fullmatch(rest)
    if url is not None:
        rest = url["rest"].rstrip("/")
        inside = _IN_REPO.fullmatch(rest)
        if inside is not None and _REPO.fullmatch(inside["repo"]):
            return HubRef(inside["repo"], file=inside["file"], revision=inside["revision"])
    repo, _, choice = rest.partition(":")
    if not _REPO.fullmatch(repo) or ".." in repo or (not choice and rest.endswith(":")):
        return None
    if choice.lower().endswith(".gguf"):
        return HubRef(repo, file=choice, revision=revision)
    return HubRef(repo, quant=choice or None, revision=revision)


def is_path(text: str) -> bool:
    """Whether a word names a file rather than a pair or a repository: it exists, or looks like nothing else."""
    if text.startswith("hf:") or _URL.fullmatch(text):
        return False
    if text.startswith(("/", "./", "../", "~")) or os.path.lexists(text):
        return True
    return text.lower().endswith(".gguf") and ":" not in text


def read_pairs(text: str, source: Path, known: Mapping[str, PairEntry]) -> dict[str, PairEntry]:
    """The pairs of a models.toml; those of a name that is known already keep what they do not give.

    Raises:
        ConfigError: with the file, the line and the key.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is no TOML: {error}") from None
    reader = _PairReader(source, text)
    for key in document:
        if key != "pairs":
            raise reader.mistake((key,), f"unknown key {key}", ["pairs"])
    pairs = document.get("pairs", {})
    if not isinstance(pairs, dict):
        raise reader.mistake(("pairs",), "pairs is no table")
    found = {name: reader.entry(name, values, known.get(name)) for name, values in pairs.items()}
    owners: dict[str, str] = {}
    for entry in {**known, **found}.values():
        for label in (entry.name, *entry.aliases):
            other = owners.setdefault(label.casefold(), entry.name)
            if other != entry.name:
                path = ("pairs", entry.name if entry.name in found else other, "aliases")
                raise reader.mistake(path, f"{label} already stands for {other}")
    return found


_KEYS = ("target", "drafts", "aliases", "family", "licence", "parameters_b", "vocabulary", "notes", "tuned")
_REVISIONS = ("revision", "draft_revision")


class _PairReader:
    """Checks the values of one file."""

    def __init__(self, source: Path, text: str) -> None:
        self._source = source
        self._text = text

    def mistake(self, path: tuple[str, ...], said: str, names: list[str] | None = None) -> ConfigError:
        """The error for a key: the file, the line, the key, and a near name."""
        near = get_close_matches(path[-1], names or [], n=1, cutoff=0.5)
        where = ".".join(key if _BARE.fullmatch(key) else f'"{key}"' for key in path)
        line = line_of(self._text, path)
        at = f"{self._source}:{line}" if line is not None else str(self._source)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}" if names else None
        return ConfigError(f"{at}: {where}: {said}", hint)

    def entry(self, name: str, values: Any, base: PairEntry | None) -> PairEntry:
        """One pair."""
        at: tuple[str, ...] = ("pairs", name)
        if not _NAME.fullmatch(name):
            raise self.mistake(at, "a name has letters, digits and . _ + - only")
        if not isinstance(values, dict):
            raise self.mistake(at, "is no table")
        for key in values:
            if key not in (*_KEYS, *_REVISIONS):
                raise self.mistake((*at, key), "unknown key", [*_KEYS, *_REVISIONS])
        for key in _REVISIONS:
            if key in values:
                self._text_of((*at, key), values[key])
        given: dict[str, Any] = {"source": self._source}
        if "target" in values:
            given["target"] = self._ref((*at, "target"), values["target"], values.get("revision"))
        elif base is None:
            raise self.mistake(at, "has no target")
        if "drafts" in values:
            drafts = self._texts((*at, "drafts"), values["drafts"])
            given["drafts"] = tuple(self._ref((*at, "drafts"), text, values.get("draft_revision")) for text in drafts)
        if "aliases" in values:
            given["aliases"] = self._texts((*at, "aliases"), values["aliases"])
        for key in ("family", "licence", "vocabulary", "notes"):
            if key in values:
                given[key] = self._text_of((*at, key), values[key])
        if "parameters_b" in values:
            given["parameters_b"] = self._number((*at, "parameters_b"), values["parameters_b"])
        if "tuned" in values:
            given["tuned"] = self._tuned((*at, "tuned"), values["tuned"])
        return replace(base, **given) if base is not None else PairEntry(name, **given)

    def _tuned(self, at: tuple[str, ...], values: Any) -> Tuned:
        if not isinstance(values, dict):
            raise self.mistake(at, "is no table")
        hints = get_type_hints(Tuned)
        names = [known.name for known in fields(Tuned)]
        given: dict[str, Any] = {}
        for key, value in values.items():
            where = (*at, key)
            if key not in names:
                raise self.mistake(where, "unknown key", names)
            if key == "n_draft" and value == "auto":
                continue
            kind = get_args(hints[key])[0]
            if kind is float:
                given[key] = self._number(where, value)
            elif kind is int:
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise self.mistake(where, f"{value!r} is no whole number")
                given[key] = value
            else:
                given[key] = value.isoformat() if isinstance(value, date) else self._text_of(where, value)
            if key.startswith("cache_type") and value not in _CACHE_TYPES:
                raise self.mistake(where, f"{value!r} is none of {', '.join(_CACHE_TYPES)}")
        return Tuned(**given)

    def _ref(self, at: tuple[str, ...], value: Any, revision: str | None) -> HubRef | Path:
        text = self._text_of(at, value)
        if is_path(text):
            return Path(text).expanduser()
        ref = parse_hub(text, revision)
        if ref is None:
            raise self.mistake(at, f'{text!r} is neither "user/repo:QUANT" nor a path')
        return ref

    def _text_of(self, at: tuple[str, ...], value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise self.mistake(at, f"{value!r} is no text")
        return value

    def _texts(self, at: tuple[str, ...], value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise self.mistake(at, f"{value!r} is no list of texts")
        return tuple(self._text_of(at, item) for item in value)

    def _number(self, at: tuple[str, ...], value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            raise self.mistake(at, f"{value!r} is no number of 0 or more")
        return float(value)


_BARE = re.compile(r"[\w-]+")
_HEADER = re.compile(r"\s*\[\[?(.+?)\]\]?\s*(?:#.*)?")
_ASSIGNED = re.compile(r"\s*((?:\"[^\"]*\"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:\"[^\"]*\"|'[^']*'|[\w-]+))*)\s*=")


def line_of(text: str, path: tuple[str, ...]) -> int | None:
    """The line, from 1, on which a key of a TOML text stands; that of its table where it has no line of its own."""
    best: tuple[int, int] | None = None
    for number, keys in _key_lines(text):
        shared = min(len(keys), len(path))
        if keys[:shared] == path[:shared] and (best is None or shared > best[0]):
            best = (shared, number)
    return best[1] if best else None


def _key_lines(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The lines that open a table or assign a key, with the whole key. Lines within a text of several lines are passed over."""
    table: tuple[str, ...] = ()
    within: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        quotes = [mark for mark in ('"""', "'''") if line.count(mark) % 2]
        if within is not None:
            within = None if within in quotes else within
            continue
        header, assigned = _HEADER.fullmatch(line), _ASSIGNED.match(line)
        if header is not None:
            table = _keys(header[1])
            yield number, table
        elif assigned is not None:
            yield number, table + _keys(assigned[1])
        within = quotes[0] if quotes else None


def _keys(text: str) -> tuple[str, ...]:
    """A dotted key as its parts."""
    try:
        value: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    parts: list[str] = []
    while isinstance(value, dict):
        key, value = next(iter(value.items()))
        parts.append(key)
    return tuple(parts)


def unknown(name: str, catalog: Catalog) -> NotFoundError:
    """The error for a word that is neither a file, nor a pair, nor a repository."""
    near = catalog.near(name)
    hint = f"did you mean {near[0]}?" if near else "llamaspec list shows what is here, llamaspec pairs what can be pulled"
    return NotFoundError(f"there is no model {name} here, and no pair of that name", hint)
