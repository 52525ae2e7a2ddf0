"""One pair measured on whatever it runs on: memory against the plan, speed against the roofline, each draft length.

    python -m llamaspec.bench.gpu.measure TARGET DRAFT --out results.jsonl [--label NAME]

Every row is appended to the file as soon as it is there, so that a run cut short keeps what it has. `table` turns the file into
Markdown:

    python -m llamaspec.bench.gpu.table results.jsonl
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

import llamaspec
from llamaspec import LoadOptions, Pair, Sampling, Speculation, Stats
from llamaspec.gguf_header import read_model
from llamaspec.hardware import room
from llamaspec.hardware.sampler import Sampler, Usage
from llamaspec.llama import devices
from llamaspec.options import MAX_DRAFT
from llamaspec.plan import CPU, Wishes, propose

PROMPT = [1, *range(300, 364)]
GREEDY = Sampling(temperature=0, logit_bias={2: float("-inf")})


@click.command()
@click.argument("target")
@click.argument("draft")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--label", default="", help="Written into every row, as graphs-off.")
@click.option("-n", "--tokens", type=int, default=128, show_default=True)
@click.option("-c", "--ctx", "n_ctx", type=int, default=4096, show_default=True)
@click.option("-t", "--threads", type=int, help="CPU threads. [default: the physical cores]")
@click.option("--lengths", default="1,2,3,4,5,6,7,8", show_default=True, help="Draft lengths.")
@click.option("--seconds", type=float, default=120.0, show_default=True, help="Begin no further row after this long.")
def main(
    target: str, draft: str, out: Path, label: str, tokens: int, n_ctx: int, threads: int | None, lengths: str, seconds: float
) -> None:
    """Measure a pair."""
    until = time.monotonic() + seconds
    common = {"label": label, "target": Path(target).name, "draft": Path(draft).name}

    def keep(kind: str, values: dict[str, Any]) -> None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **common, **values}) + "\n")

    here = room.here()
    plan = propose(read_model(target), read_model(draft), Wishes(n_ctx=n_ctx, outputs=MAX_DRAFT + 1), here)
    free = {gpu.name: gpu.memory_free for gpu in devices.gpus()}
    with Sampler() as sampler, llamaspec.load(target, draft, options=LoadOptions(n_ctx=n_ctx, threads=threads)) as pair:
        settings = pair.settings()
        generate(pair, 0, 16)  # kernels are compiled and buffers grown before anything is counted
        taken = {gpu.name: free[gpu.name] - gpu.memory_free for gpu in devices.gpus()}
        keep("memory", {"plan_bytes": {d: plan.used(d) for d in (CPU, *free)}, "taken_bytes": taken})
        limit = plan.roofline(filled=len(PROMPT) + tokens // 2)
        keep(
            "roofline",
            {
                "tokens_per_second": limit.tokens_per_second,
                "draft_cost": limit.draft_cost,
                "sources": list(limit.sources),
                "gpu_layers": settings["gpu_layers"],
                "draft_gpu_layers": settings["draft_gpu_layers"],
            },
        )
        for n_draft in [0, *map(int, lengths.split(",")), None]:
            if time.monotonic() > until:
                keep("cut", {"n_draft": n_draft})
                break
            keep("speed", {"n_draft": n_draft, **generate(pair, n_draft, tokens)})
    usage = Usage.of(sampler.samples)
    if usage is not None:
        keep("usage", {"throttles": list(usage.throttles), "mean_utilization_percent": list(usage.mean_utilization_percent)})


def generate(pair: Pair, n_draft: int | None, tokens: int) -> dict[str, Any]:
    """One answer from cold caches; `n_draft` None is the default. Seconds are wall time."""
    pair.reset()
    busy = pair.busy_seconds
    speculation = Speculation("none") if n_draft == 0 else Speculation("model", n_draft=n_draft)
    began = time.perf_counter()
    stats = Stats.of(pair.generate(PROMPT, sampling=GREEDY, speculation=speculation, max_tokens=tokens))
    seconds = time.perf_counter() - began
    return {
        "tokens_per_second": stats.tokens_per_second,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_round": stats.tokens_per_round,
        "outside_decode": 1 - (pair.busy_seconds - busy) / seconds,
        "tokens": stats.generated_tokens,
    }


if __name__ == "__main__":
    main()
