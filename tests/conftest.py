"""Tiny models, written once per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import llamaspec
from llamaspec import LoadOptions, Pair
from tests.tiny import write_tiny


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own, for programs they start as well."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for GGUF files."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def target(models: Path) -> Path:
    """A tiny target that never ends by itself."""
    return write_tiny(models / "target.gguf")


@pytest.fixture(scope="session")
def near_draft(models: Path) -> Path:
    """A draft that mostly agrees with `target`."""
    return write_tiny(models / "near.gguf", mix=(1, 0.03), layers=2)


@pytest.fixture(scope="session")
def far_draft(models: Path) -> Path:
    """A draft that knows nothing of `target` but its vocabulary."""
    return write_tiny(models / "far.gguf", seed=7, layers=1)


LoadPair = Callable[..., Pair]


@pytest.fixture
def load_pair() -> Iterator[LoadPair]:
    """`llamaspec.load` for the length of one test; keywords make LoadOptions."""
    opened: list[Pair] = []

    def load(target: Path, draft: Path | None = None, chat_template: str | None = None, **options: object) -> Pair:
        options.setdefault("threads", 1)
        pair = llamaspec.load(target, draft, options=LoadOptions(**options), chat_template=chat_template)  # type: ignore[arg-type]
        opened.append(pair)
        return pair

    yield load
    for pair in opened:
        pair.close()
