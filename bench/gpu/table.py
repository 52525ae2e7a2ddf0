"""The rows of `measure`, as Markdown.

python -m llamaspec.bench.gpu.table results.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

Row = dict[str, Any]


@click.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(results: Path) -> None:
    """Print the tables of one results file."""
    click.echo("\n".join(markdown(map(json.loads, filter(str.strip, results.read_text(encoding="utf-8").splitlines())))))


def markdown(rows: Iterable[Row]) -> Iterator[str]:
    """Lines: for each pair and label its memory, its roofline and its speeds, in the order of the file."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["draft"], row["label"]), []).append(row)
    for (target, draft, label), found in groups.items():
        yield f"## {target} with {draft}{f' ({label})' if label else ''}"
        yield ""
        for row in found:
            if row["kind"] == "roofline":
                cost = f", draft step {row['draft_cost']:.2f} of a target's" if row["draft_cost"] is not None else ""
                yield f"Roofline {row['tokens_per_second']:.1f} tokens/s ({'; '.join(row['sources'])}){cost}."
            elif row["kind"] == "memory":
                yield from _memory(row)
            elif row["kind"] == "usage" and row["throttles"]:
                yield f"Throttled meanwhile: {', '.join(row['throttles'])}."
            elif row["kind"] == "cut":
                yield "Cut short: the time was up."
        yield from _speeds([row for row in found if row["kind"] == "speed"], found)
        yield ""


def _memory(row: Row) -> Iterator[str]:
    for device, taken in row["taken_bytes"].items():
        planned = row["plan_bytes"][device]
        error = f" ({100 * (planned / taken - 1):+.1f} %)" if taken > 0 else ""
        yield f"Memory of {device}: planned {planned / 2**20:,.0f} MiB, taken {taken / 2**20:,.0f} MiB{error}."


def _speeds(speeds: list[Row], found: list[Row]) -> Iterator[str]:
    limit = next((row["tokens_per_second"] for row in found if row["kind"] == "roofline"), None)
    baseline = next((row["tokens_per_second"] for row in speeds if row["n_draft"] == 0), None)
    if not speeds:
        return
    yield ""
    yield "| n_draft | tokens/s | of the roofline | speedup | acceptance | tokens per round | outside decode |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in speeds:
        name = {0: "0 (baseline)", None: "default"}.get(row["n_draft"], str(row["n_draft"]))
        speed = row["tokens_per_second"]
        cells = [
            name,
            _number(speed, "{:.1f}"),
            _number(speed / limit if speed and limit else None, "{:.0%}"),
            _number(speed / baseline if speed and baseline else None, "{:.2f}"),
            _number(row["acceptance_rate"], "{:.0%}"),
            _number(row["tokens_per_round"], "{:.2f}"),
            _number(row["outside_decode"], "{:.1%}"),
        ]
        yield f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value).replace("%", " %")


if __name__ == "__main__":
    main()
