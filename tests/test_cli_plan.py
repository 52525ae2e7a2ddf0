"""`llamaspec plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llamaspec.cli import cli


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def test_the_report_for_people(target: Path, near_draft: Path) -> None:
    done = plan(target, near_draft)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("It fits.\n")
    for part in ("target weights", "draft KV cache", "roofline", "(measured)", "pays from", "settings"):
        assert part in done.stdout
    assert "pays from" not in plan("-m", target).stdout


def test_json_has_raw_units(target: Path, near_draft: Path) -> None:
    report = json.loads(plan("-m", target, "-md", near_draft, "-c", 256, "-ngl", 0, "-ngld", 0, "--json").stdout)
    assert report["fits"]
    assert report["n_ctx"] == 256
    cache = next(p for p in report["parts"] if p["model"] == "target" and p["kind"] == "KV cache")
    assert cache == {"model": "target", "kind": "KV cache", "device": "CPU", "bytes": 128 * 256, "mapped": False}
    assert report["roofline"]["target"][0]["bandwidth_source"] == "measured"
    assert len(report["roofline"]["drafting"]["lengths"]) == 16


def test_a_card_that_is_not_here(target: Path, near_draft: Path) -> None:
    report = json.loads(plan(target, near_draft, "--vram", "24GB", "--bandwidth", "1008GB/s", "--json").stdout)
    assert report["devices"]["GPU0"]["limit_bytes"] == round(24 * 2**30 * 0.92)
    assert report["gpu_layers"] == 3
    assert {load["device"] for load in report["roofline"]["target"]} == {"GPU0"}
    assert report["roofline"]["target"][0]["bandwidth_bytes_per_second"] == 1008e9
    two = json.loads(plan(target, "--vram", "8GiB", "--vram", "16G", "--utilization", "1", "--json").stdout)
    assert two["devices"]["GPU1"]["limit_bytes"] == 16 * 2**30
    assert two["roofline"]["target"][0]["bandwidth_source"] == "assumed"


def test_what_does_not_fit_has_its_own_exit_code(target: Path) -> None:
    done = plan(target, "-c", 0, "--ram", "1MB")
    assert done.exit_code == 4
    assert done.stdout.startswith("It does not fit. ")
    assert "MiB too much on CPU" in done.stdout


@pytest.mark.parametrize(
    "arguments", [[], ["--vram", "much"], ["--vram", "1GB/s"], ["--bandwidth", "3GB/s"], ["b.gguf", "c.gguf"], ["-c", "3"]]
)
def test_bad_requests(target: Path, arguments: list[str]) -> None:
    assert plan(*([target] if arguments else []), *arguments).exit_code == 2


def test_a_file_that_is_not_here(tmp_path: Path) -> None:
    assert plan(tmp_path / "none.gguf").exit_code == 3
