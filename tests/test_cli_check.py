"""`llamaspec check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llamaspec.cli import cli
from tests.tiny import letters, write_tiny


def check(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["check", *map(str, arguments)])


@pytest.fixture(scope="module")
def padded(models: Path) -> Path:
    return write_tiny(models / "padded.gguf", words=[*letters(20), b"<unused0>", b"<unused1>"])


@pytest.fixture(scope="module")
def other(models: Path) -> Path:
    return write_tiny(models / "other.gguf", words=[*letters(18), b"y", b"z"])


def test_identical(target: Path, near_draft: Path) -> None:
    done = check(target, near_draft)
    assert done.exit_code == 0
    assert done.stdout.startswith("Identical: this draft can draft every token of this target.\n\n")
    assert str(target) in done.stdout
    assert done.stderr == ""


def test_compatible_names_what_is_never_drafted(target: Path, padded: Path) -> None:
    done = check(target, padded)
    assert done.exit_code == 0
    assert done.stdout.startswith("Compatible: this draft can draft for this target, but for 2 tokens.")
    assert "ids 281 to 282" in done.stdout


def test_mismatch(target: Path, other: Path) -> None:
    done = check(target, other)
    assert done.exit_code == 4
    assert done.stdout.startswith("Mismatch: this draft cannot draft for this target, token 279 is 's' in the target")
    assert "280: 't' in the target, 'z' in the draft" in done.stdout


@pytest.mark.parametrize("verdict", ["identical", "compatible", "mismatch"])
def test_json_is_one_object(verdict: str, target: Path, near_draft: Path, padded: Path, other: Path) -> None:
    draft = {"identical": near_draft, "compatible": padded, "mismatch": other}[verdict]
    done = check("--json", target, draft)
    report = json.loads(done.stdout)
    assert report["verdict"] == verdict
    assert (report["target"], report["draft"]) == (str(target), str(draft))
    assert isinstance(report["warnings"], list)
    assert done.exit_code == (4 if verdict == "mismatch" else 0)


def test_warnings_are_told(target: Path) -> None:
    assert "warning  the draft is the target" in check(target, target).stdout
    assert "the draft is the target" in json.loads(check("--json", target, target).stdout)["warnings"][0]


def test_bad_input(target: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"hello world")
    assert check(target, tmp_path / "none.gguf").exit_code == 3
    assert check(broken, target).exit_code == 1
    assert check(target).exit_code == 2
    assert check(target, target, "--nonsense").exit_code == 2
