"""`llamaspec rm`: remove a model from the Hugging Face cache."""

from __future__ import annotations

import sys

import click

from llamaspec.cli import output
from llamaspec.cli.output import human_bytes
from llamaspec.errors import UnfitError, UsageError


@click.command("rm", short_help="Remove a model.")
@click.argument("name", metavar="MODEL")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def command(name: str, yes: bool) -> None:
    """Remove MODEL from the Hugging Face cache, which other programs share; a pair of models.toml means its target.

    Files of llama.cpp, LM Studio, Ollama and of your own folders are left alone.
    """
    from llamaspec import hub
    from llamaspec.find import model_here

    path = model_here(name)
    paths, freed = hub.remove(path)
    output.narrate(f"The Hugging Face cache is shared with other programs. This goes, and {human_bytes(freed)} come free:")
    for one in paths:
        output.narrate(f"  {one}")
    if not yes:
        if not output.is_terminal(sys.stdin):
            raise UsageError("nobody is here to be asked", "-y removes without asking")
        if not click.confirm("Remove it?", err=True):
            raise UnfitError("nothing was removed")
    hub.delete(paths)
    output.narrate(f"Removed; {human_bytes(freed)} are free.")
