"""auto against the target alone and against every fixed setting, over kinds of prompts, in one interleaved run.

    python -m llamaspec.bench.auto -m target.gguf [-md draft.gguf] [--temp 0] [--fixed model:2,model:3,model:5,ngram:8]

For each prompt the contenders take turns, in another order in each run, and every speed is divided by the baseline's of the
same turn; what is printed is the median. Speeds are of the tokens after the first. The prompt cache is emptied before every
turn; what auto learns it keeps, from prompt to prompt, as it does in use. `--forget` makes it start anew at each turn.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import click

import llamaspec
from llamaspec import LoadOptions, Pair, Sampling, Speculation, Stats
from llamaspec.errors import LlamaspecError

PROMPTS = Path(__file__).parent / "prompts"
BASELINE = "none"


@dataclass
class Turns:
    """What one contender did on one prompt: a figure for each run."""

    speeds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def speculation(name: str) -> Speculation:
    """The settings that a contender's name means: none, auto, model:3, ngram:8."""
    drafter, _, length = name.partition(":")
    if drafter not in ("none", "auto", "model", "ngram"):
        raise click.BadParameter(f"{name} is none of: auto, none, model:N, ngram:N")
    return Speculation(drafter, int(length) if length else None)  # type: ignore[arg-type]


def messages(path: Path) -> list[dict[str, str]]:
    """A prompt file as messages: JSON holds them, any other file is the user's one message."""
    if path.suffix == ".json":
        loaded: list[dict[str, str]] = json.loads(path.read_text())
        return loaded
    return [{"role": "user", "content": path.read_text().rstrip("\n")}]


def turn(pair: Pair, prompt: list[int], sampling: Sampling, name: str, tokens: int) -> Stats:
    pair.reset()
    return Stats.of(pair.generate(prompt, sampling=sampling, speculation=speculation(name), max_tokens=tokens))


def measure(
    pair: Pair, prompt: list[int], sampling: Sampling, contenders: list[str], tokens: int, runs: int, forget: bool
) -> dict[str, Turns]:
    """All contenders on one prompt."""
    turns = {name: Turns() for name in contenders}
    turn(pair, prompt, sampling, BASELINE, 8)  # warms caches and the processor up
    for run in range(runs):
        order = contenders[run % len(contenders) :] + contenders[: run % len(contenders)]
        speeds: dict[str, float] = {}
        for name in order:
            if forget:
                pair.forget()
            stats = turn(pair, prompt, sampling, name, tokens)
            turns[name].stats = stats
            speeds[name] = stats.tokens_per_second or math.nan
        for name, speed in speeds.items():
            turns[name].speeds.append(speed)
            turns[name].ratios.append(speed / speeds[BASELINE])
    return turns


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False), help="Target.")
@click.option("-md", "--model-draft", type=click.Path(exists=True, dir_okay=False), help="Draft model.")
@click.option("--temp", type=float, default=0.0, show_default=True)
@click.option("--fixed", default="", help="Fixed settings to compare with: model:3,ngram:8.")
@click.option("--kinds", default="", help="Prompts, by the names of their files without ending. [default: all]")
@click.option("-n", "--max-tokens", type=int, default=128, show_default=True)
@click.option("-t", "--threads", type=int, help="Default: the physical cores.")
@click.option("--runs", type=int, default=3, show_default=True)
@click.option("--forget", is_flag=True, help="Let auto start anew at each turn.")
@click.option("--explain", is_flag=True, help="Print what auto's last decisions rested on.")
def main(
    model: str,
    model_draft: str | None,
    temp: float,
    fixed: str,
    kinds: str,
    max_tokens: int,
    threads: int | None,
    runs: int,
    forget: bool,
    explain: bool,
) -> None:
    """Measure auto."""
    contenders = [BASELINE, "auto", *filter(None, fixed.split(","))]
    for name in contenders:
        speculation(name)
    paths = sorted(PROMPTS.iterdir())
    if kinds:
        paths = [path for kind in kinds.split(",") for path in paths if path.stem == kind]
    sampling = Sampling(temperature=temp, seed=1)
    try:
        pair = llamaspec.load(model, model_draft, options=LoadOptions(n_ctx=2048, threads=threads, remember=False))
    except LlamaspecError as error:
        raise click.ClickException(error.message) from error
    with pair:
        draft = Path(model_draft).name if model_draft else "n-gram lookup alone"
        click.echo(f"target {Path(model).name}, draft {draft}, {pair.threads} threads, temperature {temp:g}")
        click.echo(
            f"up to {max_tokens} tokens, {runs} interleaved runs, medians of the ratios to the baseline of the same run\n"
        )
        click.echo(f"{'':14}{'baseline':>9}" + "".join(f"{name:>10}" for name in contenders[1:]) + "   auto: lowest, rounds by")
        rows: list[dict[str, Turns]] = []
        for path in paths:
            turns = measure(pair, pair.tokenize(messages(path)), sampling, contenders, max_tokens, runs, forget)
            rows.append(turns)
            auto = turns["auto"]
            cells = "".join(f"{turns[name].ratio:10.2f}" for name in contenders[1:])
            by = ", ".join(f"{name} {count}" for name, count in sorted(auto.stats.rounds_by.items()))
            speed = statistics.median(turns[BASELINE].speeds)
            click.echo(f"{path.stem:14}{speed:9.2f}{cells}   {min(auto.ratios):.2f}, {by}")
        means = {name: math.exp(statistics.fmean(math.log(row[name].ratio) for row in rows)) for name in contenders[1:]}
        click.echo(f"{'geometric mean':23}" + "".join(f"{mean:10.2f}" for mean in means.values()))
        if len(contenders) > 2:
            best = [max(row[name].ratio for name in contenders[2:]) for row in rows]
            hindsight = math.exp(statistics.fmean(map(math.log, best)))
            click.echo(f"the best fixed setting of each prompt, chosen with hindsight: {hindsight:.2f}")
        if explain:
            click.echo(json.dumps(rows[-1]["auto"].stats.to_dict()["decisions"], indent=1))


if __name__ == "__main__":
    main()
