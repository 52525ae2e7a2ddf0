"""The roofline against measured speed, in one run: bandwidth and plain decoding in turns.

    python -m llamaspec.bench.roofline MODEL.gguf ... [-n 64] [--runs 3]

Greedy, without drafting, on the physical cores or where `load` puts the model. The speed is the median of the runs, counted
over the tokens after the first; the roofline is reckoned for the middle of the answer, with the best of the bandwidths.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import click

import llamaspec
from llamaspec import LoadOptions, Sampling, Speculation, Stats
from llamaspec.gguf_header import read_model
from llamaspec.hardware import room
from llamaspec.plan import Room, Wishes, propose

PROMPT = "Explain in a few sentences how a suspension bridge carries its load."
N_CTX = 1024


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("-n", "--tokens", type=int, default=64, show_default=True)
@click.option("--runs", type=int, default=3, show_default=True)
def main(models: tuple[str, ...], tokens: int, runs: int) -> None:
    """Compare the most a machine's memory allows with what it does."""
    rooms, measured = [room.here()], {}
    for model in models:
        measured[model] = speed(model, tokens, runs)
        rooms.append(room.here())
    best = max(rooms, key=lambda one: one.ram_rate.bytes_per_second)
    rates = ", ".join(f"{one.ram_rate.bytes_per_second / 1e9:.0f}" for one in rooms)
    click.echo(f"CPU memory, before, between and behind: {rates} GB/s; median of {runs} runs of {tokens} tokens\n")
    click.echo(f"{'model':46}{'read/token':>12}{'roofline':>10}{'measured':>10}{'of it':>8}")
    for model, seen in measured.items():
        click.echo(row(model, seen, tokens, best))


def speed(model: str, tokens: int, runs: int) -> float:
    """Tokens per second of the target alone."""
    options = LoadOptions(n_ctx=N_CTX)
    with llamaspec.load(model, options=options) as pair:
        speeds = []
        for _ in range(runs + 1):  # the first warms up
            pair.reset()
            stats = Stats.of(
                pair.generate(
                    [{"role": "user", "content": PROMPT}],
                    sampling=Sampling(temperature=0),
                    speculation=Speculation("none"),
                    max_tokens=tokens,
                )
            )
            speeds.append(stats.tokens_per_second or 0.0)
        return statistics.median(speeds[1:])


def row(model: str, seen: float, tokens: int, here: Room) -> str:
    """One line of the table."""
    plan = propose(read_model(model), None, Wishes(n_ctx=N_CTX), here)
    limit = plan.roofline(filled=tokens // 2)
    read = sum(load.read_bytes for load in limit.target) / 1e6
    most = limit.tokens_per_second
    return f"{Path(model).name[:45]:46}{read:9.0f} MB{most:10.1f}{seen:10.1f}{100 * seen / most:6.0f} %"


if __name__ == "__main__":
    main()
