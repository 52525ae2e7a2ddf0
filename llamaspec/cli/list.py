"""`llamaspec list`: the models that are on this machine, and which can draft for which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llamaspec.cli import output
from llamaspec.cli.output import human_bytes

if TYPE_CHECKING:
    from llamaspec.shelf import Found, Shelf


@click.command("list", short_help="The models that are here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List the models on this machine: those of the Hugging Face cache, llama.cpp, LM Studio and Ollama, and those in the
    folders of LLAMASPEC_MODELS; and how many of them can draft for each.
    """
    shelf = open_shelf()
    if as_json:
        output.write_json({"models": [_plain(found, shelf) for found in shelf.models]})
        return
    runnable = [found for found in shelf.models if found.facts.problem is None]
    if not runnable:
        output.narrate("No models here. llamaspec pull demo brings a small one; llamaspec pairs names larger ones.")
    else:
        rows: list[tuple[str, ...]] = [("name", "size", "quant", "parameters", "vocabulary", "drafts", "place")]
        for found in runnable:
            facts = found.facts
            rows.append(
                (
                    output.one_line(found.name),
                    human_bytes(facts.total_bytes),
                    facts.quantization,
                    parameters(facts.parameters),
                    facts.fingerprint[:6] or "none",
                    str(len(shelf.drafts_for(found.path))),
                    output.one_line(found.place),
                )
            )
        output.write_lines(columns(rows))
    for found in shelf.models:
        if found.facts.problem is not None:
            output.notice(f"no model to run: {found.facts.problem}")


def open_shelf() -> Shelf:
    """All models here; headers that must be read first are counted on the terminal."""
    from llamaspec.shelf import Shelf

    with output.Progress(True) as progress:
        return Shelf(lambda done, of: progress.show(f"reading headers: {done} of {of}"))


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def parameters(count: int) -> str:
    """As "7.6B" or "135M"."""
    return f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.0f}M"


def _plain(found: Found, shelf: Shelf) -> dict[str, Any]:
    facts = found.facts
    return {
        "name": found.name,
        "path": str(found.path),
        "place": found.place,
        "problem": facts.problem,
        "total_bytes": facts.total_bytes,
        "quantization": facts.quantization or None,
        "parameters": facts.parameters or None,
        "architecture": facts.architecture or None,
        "family": facts.family,
        "vocabulary": facts.fingerprint or None,
        "vocab_size": facts.vocab_size or None,
        "drafts": [one.model.name for one in shelf.drafts_for(found.path)],
    }
