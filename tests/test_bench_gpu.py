"""What the GPU benchmark does that needs no GPU: its models, its rows, its table, its script's syntax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from llamaspec import Sampling, Speculation, Stats
from llamaspec.bench.gpu import measure, models, table
from llamaspec.gguf_header import read_model
from tests.conftest import LoadPair

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu" / "run.sh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.parametrize(("make", "kind"), [(models.q4_k, "Q4_K"), (models.q6_k, "Q6_K")])
def test_random_blocks_have_the_deviation_asked_for(make: object, kind: str) -> None:
    raw = make(400, 0.02, np.random.default_rng(1))  # type: ignore[operator]
    weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert weights.size == 400 * 256
    assert weights.mean() == pytest.approx(0, abs=0.03 * 0.02)
    assert weights.std() == pytest.approx(0.02, rel=0.02)


def test_silent_blocks_are_zero() -> None:
    weights = gguf.quants.dequantize(models.q4_k(4, 0.0, np.random.default_rng(1)), gguf.GGMLQuantizationType.Q4_K)
    assert not weights.any()


def test_the_sizes_are_those_of_real_models() -> None:
    for name, parameters in (("7b", 7.3e9), ("27b", 27e9)):
        shape = models.SHAPES[name]
        count = sum(np.prod(size, dtype=np.int64) for _, size, _, _ in models._tensors(shape, shape.layers, 1, 0.0))
        assert count == pytest.approx(parameters, rel=0.1)


def test_a_draft_agrees_with_its_deepened_target(folder: Path, load_pair: LoadPair) -> None:
    target, draft = models.write_pair(folder, "tiny", 0.25)
    assert read_model(target).block_count == 8
    assert read_model(draft).block_count == 2
    written = target.stat().st_mtime_ns
    assert models.write_pair(folder, "tiny", 0.25) == (target, draft)
    assert target.stat().st_mtime_ns == written
    pair = load_pair(target, draft, n_ctx=256)
    plain, drafted = (
        Stats.of(pair.generate(measure.PROMPT, sampling=Sampling(temperature=0), speculation=speculation, max_tokens=24))
        for speculation in (Speculation("none"), Speculation("model", n_draft=3))
    )
    assert plain.generated_tokens == drafted.generated_tokens == 24
    assert drafted.acceptance_rate == 1.0


def test_a_noisy_target_disagrees(folder: Path) -> None:
    target, _ = models.write_pair(folder, "tiny", 0.25, noise=0.5)
    quiet, _ = models.write_pair(folder, "tiny", 0.25)
    assert target.name == "tiny-2of8-noisy.gguf"
    assert target.stat().st_size == quiet.stat().st_size
    assert target.read_bytes() != quiet.read_bytes()


def test_rows_are_kept_one_by_one_and_become_a_table(folder: Path) -> None:
    target, draft = models.write_pair(folder, "tiny", 0.25)
    out = folder / "results.jsonl"
    arguments = [
        str(target),
        str(draft),
        "--out",
        str(out),
        "-n",
        "8",
        "-c",
        "256",
        "--lengths",
        "2",
        "--label",
        "here",
        "-t",
        "1",
    ]
    done = CliRunner().invoke(measure.main, arguments)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["memory", "roofline", "speed", "speed", "speed", "usage"]
    assert [row["n_draft"] for row in rows if row["kind"] == "speed"] == [0, 2, None]
    shown = CliRunner().invoke(table.main, [str(out)]).output
    assert "## tiny-2of8.gguf with tiny-draft2.gguf (here)" in shown
    assert "| 0 (baseline) |" in shown
    assert "Roofline " in shown


def test_a_run_cut_short_has_its_table() -> None:
    common = {"label": "", "target": "t", "draft": "d"}
    rows = [
        {"kind": "memory", **common, "plan_bytes": {"CPU": 1, "CUDA0": 110 << 20}, "taken_bytes": {"CUDA0": 100 << 20}},
        {"kind": "roofline", **common, "tokens_per_second": 100.0, "draft_cost": 0.1, "sources": ["CUDA0 1000 GB/s"]},
        {"kind": "speed", **common, "n_draft": 0, "tokens_per_second": 80.0, "acceptance_rate": None, "tokens_per_round": 1.0,
         "outside_decode": 0.02},
        {"kind": "speed", **common, "n_draft": 4, "tokens_per_second": 160.0, "acceptance_rate": 0.9, "tokens_per_round": 4.2,
         "outside_decode": 0.04},
        {"kind": "cut", **common, "n_draft": 5},
        {"kind": "usage", **common, "throttles": ["power cap"], "mean_utilization_percent": [90.0]},
    ]  # fmt: skip
    lines = list(table.markdown(rows))
    assert "Memory of CUDA0: planned 110 MiB, taken 100 MiB (+10.0 %)." in lines
    assert "| 4 | 160.0 | 160 % | 2.00 | 90 % | 4.20 | 4.0 % |" in lines
    assert "Cut short: the time was up." in lines
    assert "Throttled meanwhile: power cap." in lines
    assert list(table.markdown([])) == []


def test_the_script_measures_and_keeps_what_it_has(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    (work / "venv").symlink_to(sys.prefix)  # what the first step would have built
    settings = {"WORK": str(work), "SIZES": "tiny tiny", "MEASURE": "-t 1 -n 6 -c 256 --lengths 2"}
    done = subprocess.run([SCRIPT, tmp_path, out], env=os.environ | settings, capture_output=True, text=True)
    assert done.stdout.count("status 0") == 8, done.stdout + (out / "log").read_text()
    shown = (out / "table.md").read_text()
    assert shown.count("| 0 (baseline) |") == 4
    assert "(graphs-off)" in shown
    assert "tiny-1of8-noisy.gguf" in shown
    late = subprocess.run([SCRIPT, tmp_path, out], env=os.environ | settings | {"MINUTES": "0"}, capture_output=True, text=True)
    assert "no time left" in late.stdout
    assert (out / "table.md").read_text() == shown


def test_the_script_explains_itself() -> None:
    assert SCRIPT.stat().st_mode & 0o111
    refused = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "usage: run.sh WHEELS OUT" in refused.stderr
