"""`llamaspec show`."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import gguf
import pytest
from click.testing import CliRunner, Result

from llamaspec.cli import cli
from tests.tiny import TEMPLATE, write_tiny


def show(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["show", *map(str, arguments)])


def rows(done: Result) -> dict[str, str]:
    return {label.strip(): value for label, value in (line.split("  ", 1) for line in done.stdout.splitlines())}


def test_the_report_for_people(target: Path) -> None:
    done = show(target)
    assert (done.exit_code, done.stderr) == (0, "")
    shown = {label: value.strip() for label, value in rows(done).items()}
    assert shown["architecture"] == "llama"
    assert shown["quantization"] == "F32"
    assert shown["context"] == "512 tokens"
    assert shown["layers"] == "2, 32 wide"
    assert shown["heads"] == "4, 2 for keys and values"
    assert shown["vocabulary"] == "281 tokens (llama)"
    assert shown["KV cache"] == "128 bytes per token in f16: 64.0 KiB for 512"
    assert shown["special"].startswith("bos 1 '<s>', eos 2 '</s>', eot 4 '<|end|>'")
    assert shown["template"].startswith("1 line, begins {{ bos_token }}")
    assert shown["MTP layers"] == "none"
    assert str(target.stat().st_size) in shown["size"]


def test_json_has_raw_units(target: Path) -> None:
    report = json.loads(show("--json", target).stdout)
    assert report["total_bytes"] == target.stat().st_size
    assert report["kv_bytes_per_token"] == 128
    assert report["kv_bytes_full_context"] == 128 * 512
    assert report["special_tokens"]["bos"] == {"id": 1, "text": "<s>"}
    assert report["chat_template"] == TEMPLATE
    assert "metadata" not in report


def test_metadata_when_asked_for(target: Path) -> None:
    assert "tokenizer.ggml.tokens" in show("-v", target).stdout
    metadata = json.loads(show("-v", "--json", target).stdout)["metadata"]
    assert metadata["llama.block_count"] == 2
    assert metadata["tokenizer.ggml.tokens"] == {"type": "array of string", "length": 281}


def test_the_template_alone(target: Path, tmp_path: Path) -> None:
    assert show("--template", target).stdout == TEMPLATE + "\n"
    plain = write_tiny(tmp_path / "plain.gguf", template=None)
    assert show("--template", plain).exit_code == 1
    assert rows(show(plain))["template"].strip() == "none"


def test_parts_of_a_sharded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "GGUFWriter", functools.partial(gguf.GGUFWriter, split_max_tensors=12))
    write_tiny(tmp_path / "split.gguf")
    done = show(tmp_path / "split-00001-of-00002.gguf")
    assert done.exit_code == 0
    assert "split-00001-of-00002.gguf\n" in done.stdout
    assert "split-00002-of-00002.gguf\n" in done.stdout
    (tmp_path / "split-00002-of-00002.gguf").unlink()
    assert show(tmp_path / "split-00001-of-00002.gguf").exit_code == 3


def test_texts_from_the_file_are_cleaned(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "hostile.gguf", name="evil\x1b]0;x\x07\nname", template="{{\x1b[31m}}\nb")
    done = show(path, "-v")
    assert "\x1b" not in done.stdout
    assert rows(show(path))["name"].strip() == r"evil\u001b]0;x\u0007\nname"


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<!doctype html><html></html>")
    assert show(tmp_path / "none.gguf").exit_code == 3
    done = show(tmp_path / "page.gguf")
    assert done.exit_code == 1
    assert "web page" in done.stderr
    assert done.stdout == ""
    assert show().exit_code == 2
