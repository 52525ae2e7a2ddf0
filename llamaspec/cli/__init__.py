"""The command line: one module per verb, imported when the verb is asked for.

Nothing heavy (llama_cpp, numpy, jinja2) is imported before a verb really runs, so that help and completion are quick.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from llamaspec._version import __version__
from llamaspec.cli import output

VERBS = ("run", "pull", "list", "pairs", "show", "check", "plan", "doctor", "rm")
_ALIASES = {"ls": "list"}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = _ALIASES.get(cmd_name, cmd_name)
        if verb not in VERBS:
            return None
        command: click.Command = import_module(f"llamaspec.cli.{verb}").command
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(standalone_mode=False, prog_name="llamaspec")
        sys.exit(output.exit_code_of(lambda: super(_Verbs, self).main(*args, **kwargs)))


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 not here, 4 machine or pair unfit, 130 interrupted.",
)
@click.version_option(__version__, message="llamaspec %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Speculative decoding for llama.cpp: faster local models, the same text."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """The `llamaspec` program."""
    output.handle_interrupts()
    cli.main()
