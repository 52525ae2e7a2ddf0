"""Which draft temperature is fastest: what is accepted at each, and the speed it leads to.

    python -m llamaspec.bench.draft_temperature -m target.gguf -md draft.gguf [--temp 0.7] [--kinds code,story]

The target writes each prompt's answer alone, and both models are asked at every position of it. For each draft temperature that
gives the acceptance there, exactly: 1 - TV(p, q), or p(token) where the draft takes its likeliest. The speed is worked out
from the costs measured at the start, by walking along the text with drafts that end where too little is left of the chance
that all is accepted, for the end that suits each draft temperature best; the chance is looked up by how sure the draft is. A
warmer draft is accepted more often and foreseen less well: acceptance alone does not tell which is faster.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import click
import numpy as np
from numpy.typing import NDArray

import llamaspec
from llamaspec import LoadOptions, Pair, Sampling, Speculation
from llamaspec.bench.auto import PROMPTS, messages
from llamaspec.decoding.acceptance import acceptance_rate
from llamaspec.decoding.draft_length import Costs
from llamaspec.errors import LlamaspecError
from llamaspec.llama.sampler import DraftSampler, TargetSampler

SHARES = (0.0, 0.5, 0.7, 1.0)
"""Draft temperatures tried, as shares of the target's."""

ENDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CLASSES = 10
LONGEST = 16
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Positions:
    """One answer, position by position.

    Attributes:
        confidence: how sure the draft is, shape (n,).
        accepted: by draft temperature: the chance that its token is accepted, shape (n,).
    """

    confidence: Numbers
    accepted: dict[float, Numbers]


def ask(pair: Pair, prompt: list[int], sampling: Sampling, tokens: int) -> Positions:
    """Let the target answer, and compare the two models along the answer."""
    pair.reset()
    alone = pair.generate(prompt, sampling=sampling, speculation=Speculation("none"), max_tokens=tokens)
    answer = [token for one in alone for token in one.tokens]
    pair.reset()
    return pair._worker.run(_compare, pair, prompt, answer, sampling)


def _compare(pair: Pair, prompt: list[int], answer: list[int], sampling: Sampling) -> Positions:
    target, draft = pair._context, pair._draft_context
    assert draft is not None
    assert pair.vocabulary is not None
    theirs = TargetSampler(target.model, sampling, 1, pair.n_ctx)
    ours = {t: DraftSampler(draft.model, t * sampling.temperature, pair.vocabulary.undraftable) for t in SHARES}
    confidence: list[float] = []
    accepted: dict[float, list[float]] = {share: [] for share in SHARES}
    unread = prompt
    for token in answer:
        target.decode(unread, "last")
        draft.decode(unread, "last")
        p = theirs.choice(target.logits()[0])
        for share, sampler in ours.items():
            q, sure = sampler.choice(draft.logits()[0])
            accepted[share].append(acceptance_rate(p, q))
        confidence.append(sure)
        unread = [token]
    return Positions(np.array(confidence), {share: np.array(values) for share, values in accepted.items()})


def foreseen(confidence: Numbers, accepted: Numbers) -> Numbers:
    """The acceptance that would be expected at each position: the mean of those that are about as sure."""
    ends = np.quantile(confidence, np.linspace(0, 1, CLASSES + 1)[1:-1])
    classes = np.searchsorted(ends, confidence, side="right")
    sums, counts = np.bincount(classes, accepted, CLASSES), np.bincount(classes, minlength=CLASSES)
    expected: Numbers = (sums / np.maximum(counts, 1))[classes]
    return expected


def speedup(expected: Sequence[float], accepted: Sequence[float], costs: Costs, end: float) -> float:
    """Tokens per plain token's time along one text; a draft ends before the chance of all of it falls under `end`."""
    size = len(accepted)
    seconds = [0.0] * (size + LONGEST + 1)  # from each position to the end
    for at in range(size - 1, -1, -1):
        reach, length, steps = 1.0, 0, 0
        while at + length < size and length < LONGEST:
            steps += 1
            reach *= expected[at + length]
            if reach < end:
                break
            length += 1
        total, alive = costs.verify(1 + length) + steps * costs.step, 1.0
        for offset in range(length):
            total += alive * (1 - accepted[at + offset]) * seconds[at + offset + 1]
            alive *= accepted[at + offset]
        seconds[at] = total + alive * seconds[at + length + 1]
    return size / seconds[0]


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False), help="Target.")
@click.option("-md", "--model-draft", required=True, type=click.Path(exists=True, dir_okay=False), help="Draft model.")
@click.option("--temp", type=click.FloatRange(min=0.01), default=0.7, show_default=True, help="The target's temperature.")
@click.option("--kinds", default="", help="Prompts, by the names of their files without ending. [default: all]")
@click.option("-n", "--max-tokens", type=int, default=96, show_default=True)
def main(model: str, model_draft: str, temp: float, kinds: str, max_tokens: int) -> None:
    """Compare draft temperatures."""
    paths = sorted(path for path in PROMPTS.iterdir() if not kinds or path.stem in kinds.split(","))
    try:
        pair = llamaspec.load(model, model_draft, options=LoadOptions(n_ctx=2048, remember=False))
    except LlamaspecError as error:
        raise click.ClickException(error.message) from error
    with pair:
        costs = pair._worker.run(pair._decide, []).costs
        texts = [ask(pair, pair.tokenize(messages(path)), Sampling(temperature=temp, seed=1), max_tokens) for path in paths]
    click.echo(
        f"temperature {temp:g}; a draft step costs {costs.step:.2f}, a pass over 4 tokens {costs.verify(4):.2f} of one over one"
    )
    click.echo(f"{'draft temperature':18}{'accepted':>9}{'speed':>7}   by prompt: {', '.join(path.stem for path in paths)}")
    confidence = np.concatenate([text.confidence for text in texts])
    cuts = np.cumsum([len(text.confidence) for text in texts])[:-1]
    for share in SHARES:
        accepted = np.concatenate([text.accepted[share] for text in texts])
        expected = np.split(foreseen(confidence, accepted), cuts)
        best: list[float] = [1.0] * len(texts)
        for end in ENDS:
            speeds = [
                max(1.0, speedup(list(chances), list(text.accepted[share]), costs, end))
                for chances, text in zip(expected, texts, strict=True)
            ]
            best = max(best, speeds, key=_mean)
        by = "  ".join(f"{speed:.2f}" for speed in best)
        click.echo(f"{share * temp:<18.2f}{accepted.mean():9.3f}{_mean(best):7.3f}   {by}")


def _mean(speeds: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, speeds)))


if __name__ == "__main__":
    main()
