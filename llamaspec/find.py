"""Which file a word means: a path, a pair of models.toml, a repository of the Hub, or the name of a model that is here.

Nothing is downloaded here. A model that is known and not here raises NotPulledError, which says how to pull it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llamaspec.catalog import HubRef, PairEntry, is_path, load_catalog, parse_hub, unknown
from llamaspec.errors import NotFoundError, NotPulledError

Place = HubRef | Path


@dataclass(frozen=True, slots=True)
class Meant:
    """What a word for a target means, before anything is looked for.

    Attributes:
        target: a file, or a model on the Hub.
        drafts: those that models.toml knows for it, the best first.
        entry: the pair of models.toml; None where the word is something else.
    """

    target: Place
    drafts: tuple[Place, ...] = ()
    entry: PairEntry | None = None


@dataclass(frozen=True, slots=True)
class PairHere:
    """The files of a pair.

    Attributes:
        target: the target's first file.
        draft: the draft's, or None.
        entry: the pair of models.toml that was named, or None.
    """

    target: Path
    draft: Path | None
    entry: PairEntry | None = None


def meaning(word: str, revision: str | None = None) -> Meant:
    """What a word for a target means. A word that is a path means that file, whether or not it is there.

    Raises:
        NotFoundError: it means nothing; a near name is the hint.
        UsageError: it may mean several things; they are named.
        ConfigError: the user's models.toml has a mistake.
    """
    if is_path(word):
        return Meant(Path(word).expanduser())
    catalog = load_catalog()
    entry = catalog.find(word)
    if entry is not None:
        return Meant(entry.target, entry.drafts, entry)
    ref = parse_hub(word, revision)
    if ref is not None:
        return Meant(ref, catalog.drafts_for(ref))
    from llamaspec.shelf import Shelf

    found = Shelf().find(word)
    if found is None:
        raise unknown(word, catalog)
    return Meant(found.path)


def locate(place: Place) -> Path | None:
    """The first file of a model; None for one on the Hub that is not in the cache. A path is not looked at."""
    if isinstance(place, Path):
        return place
    from llamaspec import hub

    return hub.cached(place)


def model_here(word: str) -> Path:
    """The file that a word for one model means; a pair means its target.

    Raises:
        NotPulledError: it is known, and not here.
        NotFoundError, UsageError, ConfigError: see `meaning`.
    """
    meant = meaning(word)
    path = locate(meant.target)
    if path is None:
        raise _not_pulled(word, [meant.target], meant)
    return path


def pair_here(
    target: str, draft: str | None = None, *, wants_draft: bool = True, note: Callable[[str], None] = lambda _text: None
) -> PairHere:
    """The files of a target and its draft. A pair of models.toml brings its own draft, the first that is here.

    Args:
        target, draft: words; see `meaning`.
        wants_draft: take the draft that models.toml knows where none is given.
        note: told one sentence when a pair's draft is not here.

    Raises:
        NotPulledError: the target, or the draft that was asked for, is known and not here.
        NotFoundError, UsageError, ConfigError: see `meaning`.
    """
    meant = meaning(target)
    path = locate(meant.target)
    if path is None:
        raise _not_pulled(target, [meant.target], meant)
    if draft is not None:
        return PairHere(path, model_here(draft), meant.entry)
    if not wants_draft or meant.entry is None or not meant.drafts:
        return PairHere(path, None, meant.entry)
    found = next((here for here in map(locate, meant.drafts) if here is not None and here.exists()), None)
    if found is None:
        note(f"the draft of {meant.entry.name} is not here: llamaspec pull {meant.entry.name} brings it")
    return PairHere(path, found, meant.entry)


def _not_pulled(word: str, places: list[Place], meant: Meant) -> NotFoundError:
    name = meant.entry.name if meant.entry is not None else word
    label = f"{word} ({', '.join(map(str, places))})" if meant.entry is not None else word
    return NotPulledError(f"{label} is not on this machine", f"llamaspec pull {name}", [name])
