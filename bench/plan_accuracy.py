"""The memory plan against real memory: llama.cpp's own buffers, and the process's resident set.

    python -m llamaspec.bench.plan_accuracy MODEL.gguf ... [--ctx 1024 --ctx 4096] [--kv f16 --kv q8_0] [--json]

Each line loads one model with one context in a process of its own, decodes a batch and every row of logits that the context
was made for, and compares. "buffers" is what llama.cpp logs (weights, repacked weights, caches, states, compute) with its
output buffer at full size; "resident" is how much the process grew, vocabulary and library included, as the plan beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import psutil

from llamaspec.footprint import BATCH, RUNTIME_BYTES, ContextShape, footprint
from llamaspec.gguf_header import read_model

ROWS = 33
MIB = 2**20


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--ctx", "contexts", type=int, multiple=True, default=(1024, 4096, 16384), show_default=True)
@click.option("--kv", "kinds", multiple=True, default=("f16", "q8_0"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--one", is_flag=True, hidden=True)
def main(models: tuple[str, ...], contexts: tuple[int, ...], kinds: tuple[str, ...], as_json: bool, one: bool) -> None:
    """Compare predicted with real memory."""
    if one:
        click.echo(json.dumps(measure(models[0], contexts[0], kinds[0])))
        return
    if not as_json:
        click.echo(
            f"{'model':42}{'context':>8}{'KV':>6}{'plan':>10}{'buffers':>10}{'error':>8}{'resident':>10}{'error':>8}  MiB"
        )
    for model in models:
        for n_ctx in contexts:
            for kind in kinds:
                command = [sys.executable, "-m", __spec__.name, model, "--one", "--ctx", str(n_ctx), "--kv", kind]
                result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                click.echo(json.dumps(result) if as_json else line(result))


def measure(path: str, n_ctx: int, kind: Any) -> dict[str, Any]:
    """Predict, load, decode, read off. Bytes."""
    from llamaspec.llama import devices, library, log
    from llamaspec.llama.cancel import CancelFlag
    from llamaspec.llama.context import Context, ContextOptions
    from llamaspec.llama.model import Model, Placement

    info = read_model(path)
    library.load()
    process = psutil.Process()
    before = process.memory_info().rss
    buffers = log.Buffers()
    ours = footprint(info, ContextShape(n_ctx, ROWS, kind, kind), devices.repacked_types())
    held = Context(Model(info, Placement(gpu_layers=0)), ContextOptions(n_ctx, ROWS, 2, type_k=kind, type_v=kind), CancelFlag())
    held.decode([1] * min(BATCH, n_ctx - ROWS), "none")
    held.decode([1] * ROWS, "all")
    resident = process.memory_info().rss - before
    sizes = buffers.sizes()
    real = sum(sum(places.values()) for part, places in sizes.items() if part != "output") + ours.logits
    parts = {
        "weights_bytes": ours.weights,
        "repacked_bytes": sum(ours.repacked_layers) + ours.repacked_output,
        "cache_bytes": sum(ours.cache) + sum(ours.state),
        "compute_bytes": ours.compute,
        "output_bytes": ours.logits,
    }
    return {
        "model": Path(path).name,
        "n_ctx": n_ctx,
        "cache_type": kind,
        "predicted_bytes": sum(parts.values()),
        "buffers_bytes": real,
        "predicted_resident_bytes": sum(parts.values()) + ours.vocabulary + RUNTIME_BYTES,
        "resident_bytes": resident,
        "predicted": parts,
        "buffers": sizes,
    }


def line(result: dict[str, Any]) -> str:
    """One row of the table."""
    cells = ""
    for plan, real in (("predicted", "buffers"), ("predicted_resident", "resident")):
        expected, found = result[f"{plan}_bytes"], result[f"{real}_bytes"]
        cells += f"{expected / MIB:10.1f}{found / MIB:10.1f}{100 * (expected / found - 1):+8.2f} %"
    return f"{result['model'][:41]:42}{result['n_ctx']:8}{result['cache_type']:>6}{cells}"


if __name__ == "__main__":
    main()
