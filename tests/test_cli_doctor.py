"""`llamaspec doctor`, on the machine the tests run on."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from llamaspec.cli import cli


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, arguments)])


def test_the_report_for_people() -> None:
    done = doctor()
    assert done.exit_code in (0, 4)
    lines = done.stdout.splitlines()
    assert all(line.startswith(("ok ", "warning ", "failure ", "           try: ")) for line in lines)
    assert (done.exit_code == 4) == any(line.startswith("failure") for line in lines)
    assert any("llama-cpp-python" in line for line in lines)


def test_json_has_raw_units() -> None:
    report = json.loads(doctor("--json").stdout)
    assert report["machine"]["memory_total_bytes"] > 2**28
    assert report["machine"]["backend"]["devices"]
    assert {check["status"] for check in report["checks"]} <= {"ok", "warning", "failure"}


def test_a_pair(target: Path, near_draft: Path) -> None:
    assert "vocabulary: identical" in doctor(target, near_draft).stdout
    conflict = doctor("-m", target, "-md", near_draft, "-fa", "off", "-ctv", "q8_0")
    assert conflict.exit_code == 4
    assert "try: -fa auto, or -ctv f16" in conflict.stdout


def test_bad_requests(target: Path, tmp_path: Path) -> None:
    assert doctor("-md", target).exit_code == 2
    assert doctor(target, target, target).exit_code == 2
    assert doctor(tmp_path / "none.gguf").exit_code == 3
