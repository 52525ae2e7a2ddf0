"""The models that are here: where they are looked for, what is remembered, which can draft for which, and what a word means."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest

import llamaspec
from llamaspec import shelf
from llamaspec.errors import NotFoundError, NotPulledError, UsageError
from llamaspec.find import meaning, model_here, pair_here
from llamaspec.shelf import Shelf
from tests.tiny import letters, write_tiny


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS", "LLAMASPEC_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    return tmp_path


def put(source: Path, *where: Path) -> None:
    for path in where:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, path)


def in_hub(home: Path, source: Path, repo: str, name: str) -> Path:
    """A file as huggingface_hub lays it down."""
    folder = home / ".cache" / "huggingface" / "hub" / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / hashlib.sha256(source.read_bytes()).hexdigest()
    put(source, blob)
    link = folder / "snapshots" / ("c" * 40) / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(Path("../../blobs") / blob.name)
    return link


def in_ollama(home: Path, source: Path, name: str, tag: str) -> Path:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    blob = home / ".ollama" / "models" / "blobs" / f"sha256-{digest}"
    put(source, blob)
    manifest = home / ".ollama" / "models" / "manifests" / "registry.example" / "library" / name / tag
    manifest.parent.mkdir(parents=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


@pytest.fixture(scope="module")
def big(models: Path) -> Path:
    return write_tiny(models / "big.gguf", width=64, layers=8)


def test_every_tools_models_are_found(home: Path, target: Path, near_draft: Path, far_draft: Path, big: Path) -> None:
    in_hub(home, target, "you/tiny-GGUF", "tiny-Q8_0.gguf")
    blob = in_ollama(home, near_draft, "llama3.2", "1b")
    put(far_draft, home / ".cache" / "llama.cpp" / "you_far_far-Q4_K_M.gguf")
    put(big, home / ".lmstudio" / "models" / "them" / "big-GGUF" / "big-Q4_K_M.gguf")
    put(big, home / "own" / "deep" / "mmproj-big-f16.gguf")  # no model by its name
    found = Shelf().models
    assert [(one.name, one.place) for one in found] == [
        ("llama3.2:1b", "Ollama"),
        ("them/big-GGUF:Q4_K_M", "LM Studio"),
        ("you/tiny-GGUF:Q8_0", "Hugging Face"),
        ("you_far_far-Q4_K_M", "llama.cpp"),
    ]
    assert found[0].path == blob
    facts = found[2].facts
    assert (facts.architecture, facts.vocab_size, facts.total_bytes) == ("llama", 281, target.stat().st_size)
    assert len({one.facts.fingerprint for one in found}) == 1


def test_own_folders_and_what_is_no_model(home: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(target, home / "own" / "sub" / "mine.gguf")
    (home / "own" / "page.gguf").write_text("<html>not found</html>")
    monkeypatch.setenv("LLAMASPEC_MODELS", f"{home / 'own'}{os.pathsep}{home / 'nowhere'}")
    mine, page = Shelf().models
    assert (mine.name, mine.facts.problem) == ("mine", None)
    assert "page.gguf" in (page.facts.problem or "")
    assert Shelf().find("page") is None


def test_broken_ollama_manifests_are_passed_over(home: Path, target: Path) -> None:
    in_ollama(home, target, "good", "latest")
    folder = home / ".ollama" / "models" / "manifests" / "registry.example" / "library" / "bad"
    folder.mkdir()
    for name, text in {
        "a": "{",
        "b": '{"layers": 3}',
        "c": '{"layers": [{"mediaType": "x.image.model", "digest": "sha256:../x"}]}',
    }.items():
        (folder / name).write_text(text)
    assert [one.name for one in Shelf().models] == ["good:latest"]


def test_headers_are_read_once(home: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASPEC_MODELS", str(home / "own"))
    for i in range(5):
        put(target, home / "own" / f"m{i}.gguf")
    read: list[tuple[int, int]] = []
    Shelf(lambda done, of: read.append((done, of)))
    assert read == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    read.clear()
    assert len(Shelf(lambda done, of: read.append((done, of))).models) == 5
    assert read == []
    later = time.time() + 10
    os.utime(home / "own" / "m2.gguf", (later, later))
    Shelf(lambda done, of: read.append((done, of)))
    assert read == [(1, 1)]


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 0}', b'{"version": 1, "files": {"x": 3}, "verdicts": {}}', b"[]"])
def test_a_damaged_memory_costs_time_only(content: bytes, home: Path, target: Path) -> None:
    put(target, home / ".cache" / "llama.cpp" / "t.gguf")
    memory = home / ".cache" / "llamaspec" / "shelf.json"
    memory.parent.mkdir(parents=True)
    memory.write_bytes(content)
    assert [one.name for one in Shelf().models] == ["t"]
    assert json.loads(memory.read_bytes())["version"] == shelf.VERSION


def test_which_can_draft_for_which(home: Path, big: Path, target: Path, monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    monkeypatch.setenv("LLAMASPEC_MODELS", str(home / "own"))
    padded = write_tiny(models / "shelf-padded.gguf", words=[*letters(20), b"<unused0>"], layers=1, width=16)
    other = write_tiny(models / "shelf-other.gguf", words=[*letters(18), b"y", b"z"], layers=1)
    for name, source in {"big": big, "small": target, "padded": padded, "other": other}.items():
        put(source, home / "own" / f"{name}.gguf")
    found = Shelf().drafts_for(home / "own" / "big.gguf")
    assert {one.model.name: one.reason.split(",")[0] for one in found} == {
        "small": "the same vocabulary",
        "padded": "a compatible vocabulary",
    }
    monkeypatch.setattr(shelf, "compare", None)  # the verdict is remembered
    assert len(Shelf().drafts_for(home / "own" / "big.gguf")) == 2
    assert Shelf().drafts_for(home / "own" / "small.gguf") == [] or all(
        one.part <= 0.6 for one in Shelf().drafts_for(home / "own" / "small.gguf")
    )


@pytest.mark.parametrize(("better", "worse"), [(0.07, 0.2), (0.1, 0.02), (0.05, 0.11), (0.12, 0.3)])
def test_a_tenth_to_a_twentieth_is_best(better: float, worse: float) -> None:
    assert shelf.rank(better) < shelf.rank(worse)


def test_words(home: Path, target: Path, near_draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = in_hub(home, target, "you/tiny-GGUF", "tiny-Q8_0.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / ".cache" / "huggingface" / "hub"))
    put(near_draft, home / ".cache" / "llama.cpp" / "nearby-one.gguf", home / ".cache" / "llama.cpp" / "nearby-two.gguf")
    assert model_here("you/tiny-GGUF:q8_0") == link
    assert model_here("hf:you/tiny-GGUF") == link
    assert model_here("tiny-Q8_0") == link
    assert model_here(str(target)) == target
    with pytest.raises(UsageError, match="nearby may be nearby-one, nearby-two"):
        model_here("nearby")
    with pytest.raises(NotPulledError, match="qwen3-8b") as error:
        model_here("qwen3-8b")
    assert (error.value.hint, error.value.missing) == ("llamaspec pull qwen3-8b", ("qwen3-8b",))
    with pytest.raises(NotFoundError) as unknown:
        model_here("qwen3-8")
    assert unknown.value.hint == "llamaspec pull qwen3-8b"  # the only pair that begins so
    with pytest.raises(NotFoundError, match="no model qwem3-8b here") as unknown:
        meaning("qwem3-8b")
    assert unknown.value.hint == "did you mean qwen3-8b?"


def test_a_pair_brings_its_draft(home: Path, target: Path, near_draft: Path) -> None:
    config = home / ".config" / "llamaspec" / "models.toml"
    config.parent.mkdir(parents=True)
    config.write_text(
        f'[pairs.mine]\ntarget = "{target}"\ndrafts = ["no/such:Q8_0", "{near_draft}"]\ntuned = {{n_draft = 2}}\n'
    )
    here = pair_here("mine")
    assert (here.target, here.draft) == (target, near_draft)
    assert pair_here("mine", wants_draft=False).draft is None
    with llamaspec.load("mine") as pair:
        assert pair.draft is not None
        assert pair.draft.path == near_draft
    config.write_text(f'[pairs.mine]\ntarget = "{target}"\ndrafts = ["no/such:Q8_0"]\n')
    said: list[str] = []
    assert pair_here("mine", note=said.append).draft is None
    assert said == ["the draft of mine is not here: llamaspec pull mine brings it"]
