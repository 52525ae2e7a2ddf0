"""`llamaspec check`: can this draft draft for this target?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llamaspec.cli import arguments, output
from llamaspec.cli.output import ExitCode
from llamaspec.errors import UsageError

if TYPE_CHECKING:
    from llamaspec.gguf_header import ModelInfo
    from llamaspec.vocab import VocabReport

_RANGES_NAMED = 8


@click.command("check", short_help="Whether a draft fits a target.")
@click.argument("target", metavar="TARGET")
@click.argument("draft", metavar="[DRAFT]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(target: str, draft: str | None, as_json: bool) -> ExitCode:
    """Compare the vocabularies of TARGET and DRAFT, two models, token by token; a pair of models.toml brings its DRAFT.

    A draft is of use only where its token ids stand for the same text as the target's. The headers alone are read, on the
    Hugging Face Hub where a model is not here (user/repo:QUANT). Exit code 0: the pair can draft; 4: it cannot.
    """
    from llamaspec.vocab import compare, pair_warnings

    ours, known = arguments.target_header(target)
    theirs = arguments.header(draft) if draft is not None else known()
    if theirs is None:
        raise UsageError("no draft to compare with", f"name it behind the target; llamaspec pairs {target} knows some")
    models = ours, theirs
    for model in models:
        if model.is_draft_head:
            model.require_runnable()
    report = compare(*models)
    warnings = pair_warnings(*models) if report.usable else ()
    if as_json:
        paths = {"target": str(models[0].path), "draft": str(models[1].path)}
        output.write_json(paths | report.to_dict() | {"warnings": warnings})
    else:
        output.write_lines(_lines(*models, report, warnings))
    return ExitCode.OK if report.usable else ExitCode.UNFIT


def _lines(target: ModelInfo, draft: ModelInfo, report: VocabReport, warnings: tuple[str, ...]) -> list[str]:
    if report.reason:
        verdict = f"Mismatch: this draft cannot draft for this target, {report.reason}."
    elif report.undraftable:
        verdict = f"Compatible: this draft can draft for this target, but for {_tokens(len(report.undraftable))}."
    elif report.verdict == "identical":
        verdict = "Identical: this draft can draft every token of this target."
    else:
        verdict = "Compatible: this draft can draft for this target."
    rows = [
        ("target", f"{output.one_line(str(target.path))}: {_tokens(report.target_size)}"),
        ("draft", f"{output.one_line(str(draft.path))}: {_tokens(report.draft_size)}"),
        ("shared", f"{_tokens(report.shared)} with the same text under the same id"),
    ]
    if report.differing:
        few = report.differing if report.shared else report.differing[:3]  # where nothing agrees, a list says little
        shown = [f"{d.id}: {d.target_text!r} in the target, {d.draft_text!r} in the draft" for d in few]
        if report.differing_total > len(shown):
            shown.append(f"and {report.differing_total - len(shown)} more")
        rows.append(("differing", "\n".join(shown)))
    if report.undraftable and report.usable:
        rows.append(("not drafted", _ranges(report.to_dict()["undraftable_ranges"])))
    rows += [("note", note) for note in report.notes]
    rows += [("warning", warning) for warning in warnings]
    if report.suggestion:
        rows.append(("try", report.suggestion))
    return [verdict, "", *output.table(rows)]


def _tokens(count: int) -> str:
    return f"{count:,} token" if count == 1 else f"{count:,} tokens"


def _ranges(ranges: list[list[int]]) -> str:
    named = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[:_RANGES_NAMED]]
    more = len(ranges) - len(named)
    return f"ids {', '.join(named)}" + (f", and {more} more ranges" if more else "")
