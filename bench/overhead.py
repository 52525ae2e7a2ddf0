"""What llamaspec itself costs: time outside llama_decode, and plain decoding against its peers.

    python -m llamaspec.bench.overhead -m target.gguf [-md draft.gguf] [--n-draft 3] [-n 128] [--runs 3]

Everything comes from one run: the contenders take turns, so that a drifting machine hits all of them. Speeds are medians,
counted over the tokens after the first. Caches are cleared before every turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import llamaspec
from llamaspec import LoadOptions, Pair, Sampling, Speculation, Stats
from llamaspec.errors import LlamaspecError

GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.0, seed=1)
PROMPT = Path(__file__).parent / "prompts" / "code.md"


@dataclass(frozen=True)
class Turn:
    """One contender's run. Seconds of wall time; `busy` is the part inside llama.cpp's decodes, None where unknown."""

    tokens: int
    seconds: float
    busy: float | None = None
    rounds: int = 0
    stats: Stats | None = None


def generate(pair: Pair, prompt: list[int], sampling: Sampling, speculation: Speculation, n: int) -> Turn:
    """llamaspec, timed from the first token to the last by the caller's clock."""
    pair.reset()
    stats = Stats()
    began = busy = 0.0
    for one in pair.generate(prompt, sampling=sampling, speculation=speculation, max_tokens=n):
        stats = stats.add(one)
        if one.prefill is not None:
            began, busy = time.perf_counter(), pair.busy_seconds
    wall = time.perf_counter() - began
    return Turn(stats.generated_tokens - 1, wall, pair.busy_seconds - busy, stats.rounds, stats)


def tight_loop(pair: Pair, prompt: list[int], n: int) -> Turn:
    """Plain greedy decoding with nothing around it: the most that the bindings can give."""
    pair.reset()
    context = pair._context

    def loop() -> Turn:
        context.decode(prompt, "last")
        token = int(context.logits()[0].argmax())
        busy, began, tokens = context.busy_seconds, time.perf_counter(), 0
        while tokens < n - 1 and not context.model.is_end(token):
            context.decode([token], "last")
            token = int(context.logits()[0].argmax())
            tokens += 1
        return Turn(tokens, time.perf_counter() - began, context.busy_seconds - busy, tokens)

    return pair._worker.run(loop)


def high_level(llama: Any, prompt: list[int], n: int) -> Turn:
    """`llama_cpp.Llama.generate`, greedy: that class's own token loop, without its text and its JSON around it."""
    llama.reset()
    began, tokens = 0.0, -1
    for token in llama.generate(prompt, temp=0.0, top_k=1):
        tokens += 1
        if tokens == 0:
            began = time.perf_counter()
        if tokens == n - 1 or token == llama.token_eos():
            break
    return Turn(tokens, time.perf_counter() - began)


def _peer(model: str, threads: int) -> Any:
    from llama_cpp import Llama

    return Llama(model, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False)


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False), help="Target.")
@click.option(
    "-md", "--model-draft", type=click.Path(exists=True, dir_okay=False), help="Draft model; without it, n-gram lookup."
)
@click.option(
    "--prompt", type=click.Path(exists=True, dir_okay=False), default=str(PROMPT), help="File with the user's message."
)
@click.option("--n-draft", type=int, default=3, show_default=True)
@click.option("-n", "--max-tokens", type=int, default=128, show_default=True)
@click.option("-t", "--threads", type=int, help="Default: the physical cores.")
@click.option("--runs", type=int, default=3, show_default=True)
@click.option("--peer/--no-peer", default=True, help="Measure llama_cpp.Llama, too.")
def main(
    model: str, model_draft: str | None, prompt: str, n_draft: int, max_tokens: int, threads: int | None, runs: int, peer: bool
) -> None:
    """Measure llamaspec's own cost on one prompt."""
    try:
        pair = llamaspec.load(model, model_draft, options=LoadOptions(n_ctx=2048, threads=threads))
    except LlamaspecError as error:
        raise click.ClickException(error.message) from error
    with pair:
        text = Path(prompt).read_text()
        tokens = pair.tokenize([{"role": "user", "content": text}])
        drafted = Speculation(n_draft=n_draft)
        drafter = pair.drafters(drafted)[0]
        contenders: dict[str, Callable[[], Turn]] = {
            "tight loop, greedy": lambda: tight_loop(pair, tokens, max_tokens),
            "no draft, greedy": lambda: generate(pair, tokens, GREEDY, Speculation("none"), max_tokens),
            "no draft, sampled": lambda: generate(pair, tokens, SAMPLED, Speculation("none"), max_tokens),
            f"{drafter} n={n_draft}, greedy": lambda: generate(pair, tokens, GREEDY, drafted, max_tokens),
            f"{drafter} n={n_draft}, sampled": lambda: generate(pair, tokens, SAMPLED, drafted, max_tokens),
        }
        if peer:
            # In the pair's own thread: a second thread that computes would slow both down (OpenMP keeps a team for each).
            llama = pair._worker.run(_peer, model, pair.threads)
            contenders["llama_cpp.Llama, greedy"] = lambda: pair._worker.run(high_level, llama, tokens, max_tokens)
        for run in contenders.values():
            run()  # the first turn of each warms caches and the processor up; it is not counted
        turns: dict[str, list[Turn]] = {name: [] for name in contenders}
        for _ in range(runs):
            for name, run in contenders.items():
                turns[name].append(run())
        click.echo(
            f"target {Path(model).name}, draft {Path(model_draft).name if model_draft else drafter}, {pair.threads} threads"
        )
        click.echo(f"prompt of {len(tokens)} tokens, up to {max_tokens} generated, {runs} interleaved runs, medians\n")
        _print(turns)


def _print(turns: dict[str, list[Turn]]) -> None:
    baseline = statistics.median(t.tokens / t.seconds for t in turns["no draft, greedy"])
    click.echo(
        f"{'':26}{'tokens/s':>9}{'of base':>9}{'outside decode':>16}{'per round':>11}{'acceptance':>12}{'tok/round':>11}"
    )
    for name, runs in turns.items():
        speed = statistics.median(t.tokens / t.seconds for t in runs)
        row = f"{name:26}{speed:9.2f}{speed / baseline:8.2f}x"
        if runs[0].busy is not None:
            outside = statistics.median((t.seconds - (t.busy or 0.0)) / t.seconds for t in runs)
            each = statistics.median((t.seconds - (t.busy or 0.0)) / max(t.rounds, 1) for t in runs)
            row += f"{100 * outside:14.2f} %{1e6 * each:8.0f} us"
        stats = runs[0].stats
        if stats is not None and stats.acceptance_rate is not None:
            row += f"{100 * stats.acceptance_rate:10.0f} %{stats.tokens_per_round or 0:11.2f}"
        click.echo(row)


if __name__ == "__main__":
    main()
