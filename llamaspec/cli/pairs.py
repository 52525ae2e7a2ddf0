"""`llamaspec pairs`: what can draft for a target, here and in models.toml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaspec.cli import output
from llamaspec.cli.list import columns, open_shelf
from llamaspec.errors import NotPulledError

if TYPE_CHECKING:
    from llamaspec.catalog import Catalog, PairEntry
    from llamaspec.find import Meant


@click.command("pairs", short_help="What can draft for a target.")
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(target: str | None, as_json: bool) -> None:
    """Name the models that can draft for TARGET, best first: those on this machine, by their vocabularies and sizes, then
    those of models.toml. Without TARGET: all pairs of models.toml.
    """
    from llamaspec.catalog import load_catalog

    catalog = load_catalog()
    if target is None:
        _all(catalog, as_json)
        return
    from llamaspec.find import locate, meaning

    meant = meaning(target)
    path = locate(meant.target)
    found: list[dict[str, Any]] = []
    if path is not None:
        from llamaspec.gguf_header import read_model

        model = read_model(path)
        found += [
            {"name": one.model.name, "path": str(one.model.path), "reason": one.reason, "pull": None}
            for one in open_shelf().drafts_for(path)
        ]
        family = model.named_family
    else:
        family = meant.entry.family if meant.entry is not None else None
    for place, reason in _known(catalog, meant, family):
        if not any(place in (one["name"], one["path"]) for one in found):
            found.append({"name": place, "path": None, "reason": reason, "pull": f"llamaspec pull {place}"})
    if path is None and not found and meant.entry is None:
        message = f"{target} is not here, and models.toml knows no draft for it"
        raise NotPulledError(message, f"llamaspec pull {target}", [target])
    if as_json:
        output.write_json({"target": str(path or meant.target), "drafts": found})
    elif found:
        output.write_lines(columns([(output.one_line(one["name"]), one["reason"]) for one in found]))
    else:
        output.narrate("Nothing here or in models.toml shares this vocabulary; n-gram lookup drafts without a model.")


def _known(catalog: Catalog, meant: Meant, family: str | None) -> list[tuple[str, str]]:
    """The drafts that models.toml has, and why: of this pair, or of one of the same family."""
    known = [(str(place), "models.toml names it for this target") for place in meant.drafts if not isinstance(place, Path)]
    for entry in catalog.pairs.values():
        if family is not None and entry.family == family:
            known += [(str(p), f"models.toml names it for {entry.name}") for p in entry.drafts if not isinstance(p, Path)]
    return list({name: (name, reason) for name, reason in reversed(known)}.values())[::-1]


def _all(catalog: Catalog, as_json: bool) -> None:
    entries = list(catalog.pairs.values())
    if as_json:
        output.write_json({"pairs": [_plain(entry) for entry in entries]})
        return
    rows: list[tuple[str, ...]] = [("name", "target", "drafts")]
    rows += [(entry.name, str(entry.target), ", ".join(map(str, entry.drafts)) or "lookup") for entry in entries]
    output.write_lines(output.one_line(line) for line in columns(rows))


def _plain(entry: PairEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "target": str(entry.target),
        "drafts": [str(place) for place in entry.drafts],
        "family": entry.family,
        "licence": entry.licence,
        "parameters_b": entry.parameters_b,
        "vocabulary": entry.vocabulary,
        "notes": entry.notes,
        "tuned": entry.tuned.settings() or None,
        "source": str(entry.source),
    }
