"""The models that are on this machine already, whichever tool brought them.

Looked for in the Hugging Face cache, in llama.cpp's, LM Studio's and Ollama's folders, and in those of LLAMASPEC_MODELS.
Headers are read once: what they say is kept in the user's cache folder, by path, size and time of change.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import platformdirs

from llamaspec.errors import LlamaspecError, UsageError
from llamaspec.gguf_header import ModelInfo, read_model
from llamaspec.gguf_names import RepoFile, quant_of, variants
from llamaspec.vocab import Vocabulary, compare

VERSION = 1
"""Of the file of what headers say. Another one's is not read."""

USEFUL_PARTS = (1 / 20, 1 / 10)
"""A draft's share of its target's bytes that mostly pays."""

_LARGEST_PART = 0.6
_LARGEST_SIZE_DIFFERENCE = 0.1


@dataclass(frozen=True, slots=True)
class Facts:
    """What a model's headers say.

    Attributes:
        total_bytes: of all its files.
        fingerprint: the same for the same texts and types of all tokens; "" without a vocabulary.
        vocab_size: rows of the vocabulary.
        tokenizer: the kind of tokenizer.
        problem: why it cannot be run, or None; the other fields are then empty.
    """

    total_bytes: int
    quantization: str = ""
    parameters: int = 0
    architecture: str = ""
    family: str | None = None
    fingerprint: str = ""
    vocab_size: int = 0
    tokenizer: str = ""
    problem: str | None = None

    @classmethod
    def of(cls, path: Path) -> Facts:
        """Read the headers of the model whose first file is `path`."""
        try:
            model = read_model(path)
            model.require_runnable()
        except LlamaspecError as error:
            return cls(_size(path), problem=error.message)
        return cls(
            total_bytes=model.total_bytes,
            quantization=model.quantization,
            parameters=model.parameters,
            architecture=model.architecture,
            family=model.named_family,
            fingerprint=fingerprint(model),
            vocab_size=model.vocab_size,
            tokenizer=model.tokenizer_model,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A model on this machine.

    Attributes:
        name: what users may call it; several may have one name.
        path: its first file.
        place: who keeps it: "Hugging Face", "llama.cpp", "LM Studio", "Ollama", or a folder of LLAMASPEC_MODELS.
        facts: of its headers.
    """

    name: str
    path: Path
    place: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft for a target, and why it is where it is in the order.

    Attributes:
        model: the draft.
        part: its share of the target's bytes.
        reason: a sentence for people.
    """

    model: Found
    part: float
    reason: str


def fingerprint(model: ModelInfo) -> str:
    """Twelve hexadecimal digits that two vocabularies share when all texts and types of their tokens are equal."""
    vocabulary = Vocabulary.of(model)
    if not vocabulary.tokens:
        return ""
    digest = hashlib.sha256(f"{vocabulary.model}\0{len(vocabulary.tokens)}\0".encode())
    digest.update(b"\0".join(vocabulary.tokens))
    digest.update(bytes(kind & 0xFF for kind in vocabulary.types))
    return digest.hexdigest()[:12]


class Shelf:
    """The models here.

    Args:
        on_progress: called with the number of headers that were read and of those to read.
    """

    def __init__(self, on_progress: Callable[[int, int], None] = lambda _done, _all: None) -> None:
        self._memory = _Memory()
        known: dict[Path, Found] = {}
        for name, path, place in _files():
            with suppress(OSError):
                known.setdefault(path.resolve(), Found(name, path, place, Facts(0)))
        unread = sum(self._memory.facts(found.path) is None for found in known.values())
        done = 0
        self.models: list[Found] = []
        for found in known.values():
            facts = self._memory.facts(found.path)
            if facts is None:
                facts = self._memory.read(found.path)
                done += 1
                on_progress(done, unread)
            self.models.append(replace(found, facts=facts))
        self.models.sort(key=lambda found: (found.name.casefold(), str(found.path)))
        self._memory.keep({found.path for found in self.models})

    def find(self, name: str) -> Found | None:
        """The model of this name; or the only one whose name, or file's name, begins so. None when there is none.

        Raises:
            UsageError: several begin so; they are named.
        """
        wanted = name.casefold()
        runnable = [found for found in self.models if found.facts.problem is None]
        exact = [found for found in runnable if wanted in _labels(found)]
        if exact:
            return exact[0]
        begun = [found for found in runnable if any(label.startswith(wanted) for label in _labels(found))]
        if len(begun) > 1:
            names = dict.fromkeys(found.name for found in begun)
            raise UsageError(f"{name} may be {', '.join(names)}", "give the whole name, or the path")
        return begun[0] if begun else None

    def drafts_for(self, target: Path) -> list[Candidate]:
        """The models here that can draft for `target`, the best first."""
        facts = self._memory.facts(target) or self._memory.read(target)
        if facts.problem is not None or not facts.fingerprint or not facts.total_bytes:
            return []
        here = target.resolve()
        found = []
        for model in self.models:
            part = model.facts.total_bytes / facts.total_bytes
            if model.facts.problem is None and part <= _LARGEST_PART and model.path.resolve() != here:
                verdict = self._verdict(target, facts, model)
                if verdict is not None:
                    found.append(Candidate(model, part, f"{verdict}, {_size_reason(part)}"))
        self._memory.keep()
        return sorted(found, key=lambda one: (rank(one.part), one.model.name))

    def _verdict(self, target: Path, facts: Facts, draft: Found) -> str | None:
        """The vocabulary verdict for people; None for a mismatch."""
        other = draft.facts
        if facts.fingerprint == other.fingerprint:
            return "the same vocabulary"
        sizes = facts.vocab_size, other.vocab_size
        if facts.tokenizer != other.tokenizer or abs(sizes[0] - sizes[1]) > _LARGEST_SIZE_DIFFERENCE * max(sizes):
            return None
        key = f"{facts.fingerprint}:{other.fingerprint}"
        if key not in self._memory.verdicts:
            try:
                report = compare(read_model(target), read_model(draft.path))
            except LlamaspecError:
                return None
            self._memory.verdicts[key] = report.usable
        return "a compatible vocabulary" if self._memory.verdicts[key] else None


def rank(part: float) -> float:
    """How far a draft of this share of its target's bytes is from what mostly pays; 0 is best."""
    low, high = USEFUL_PARTS
    return low / part - 1 if part < low else part / high - 1 if part > high else 0.0


def _size_reason(part: float) -> str:
    low, high = USEFUL_PARTS
    said = f"{part:.0%} of the target's bytes" if part >= 0.01 else f"{part:.1%} of the target's bytes"
    if part > high * 1.5:
        return f"{said}: large for a draft"
    return f"{said}: small, it may seldom agree" if part < low / 2 else said


def places() -> dict[str, list[Path]]:
    """The folders that are searched, by who keeps them; also those that do not exist."""
    home = Path.home()
    env = os.environ
    hugging = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface")
    hugging = Path(env["HF_HUB_CACHE"]) if env.get("HF_HUB_CACHE") else hugging / "hub"
    llama = Path(env["LLAMA_CACHE"]) if env.get("LLAMA_CACHE") else platformdirs.user_cache_path("llama.cpp")
    studio = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    ollama = [Path(env["OLLAMA_MODELS"])] if env.get("OLLAMA_MODELS") else [home / ".ollama" / "models"]
    if sys.platform == "linux" and not env.get("OLLAMA_MODELS"):
        ollama.append(Path("/usr/share/ollama/.ollama/models"))
    own = [Path(part).expanduser() for part in env.get("LLAMASPEC_MODELS", "").split(os.pathsep) if part]
    return {
        "Hugging Face": [hugging.expanduser()],
        "llama.cpp": [llama],
        "LM Studio": studio,
        "Ollama": ollama,
        "LLAMASPEC_MODELS": own,
    }


def _files() -> Iterator[tuple[str, Path, str]]:
    """Name, first file and place of each model, in the order in which names count."""
    where = places()
    for folder in where["LLAMASPEC_MODELS"]:
        for path in _firsts(folder):
            yield path.name.removesuffix(".gguf"), path, str(folder)
    for folder in where["Hugging Face"]:
        for repo in _listed(folder):
            if repo.name.startswith("models--") and repo.name.count("--") >= 2:
                title = repo.name.removeprefix("models--").replace("--", "/", 1)
                for snapshot in sorted(_listed(repo / "snapshots"), key=_age):
                    for path in _firsts(snapshot):
                        yield f"{title}:{quant_of(path.name) or path.name}", path, "Hugging Face"
    for folder in where["llama.cpp"]:
        for path in _firsts(folder):
            yield path.name.removesuffix(".gguf"), path, "llama.cpp"
    for folder in where["LM Studio"]:
        for path in _firsts(folder):
            publisher = path.relative_to(folder).parent.as_posix()
            yield f"{publisher}:{quant_of(path.name) or path.name}", path, "LM Studio"
    for folder in where["Ollama"]:
        yield from _ollama(folder)


def _ollama(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Ollama's models, by its manifests: a JSON file for each tag names the blob of the weights by its digest."""
    manifests = folder / "manifests"
    for file in _walk(manifests):
        parts = file.relative_to(manifests).parts  # host, namespace, model, tag
        try:
            layers = json.loads(file.read_bytes())["layers"]
            digests = [one["digest"] for one in layers if one["mediaType"].endswith("image.model")]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if len(parts) < 3 or not digests or not isinstance(digests[0], str):
            continue
        algorithm, _, digest = digests[0].partition(":")
        blob = folder / "blobs" / f"{algorithm}-{digest}"
        if algorithm == "sha256" and digest.isalnum() and blob.is_file():
            owner = "" if parts[-3] == "library" else f"{parts[-3]}/"
            yield f"{owner}{parts[-2]}:{parts[-1]}", blob, "Ollama"


def _firsts(folder: Path) -> Iterator[Path]:
    """The first file of each whole model under a folder."""
    paths = {path.relative_to(folder).as_posix(): path for path in _walk(folder) if path.name.lower().endswith(".gguf")}
    for variant in variants(RepoFile(name, 0) for name in paths):
        if not variant.missing:
            yield paths[variant.path]


def _walk(folder: Path) -> Iterator[Path]:
    """The files under a folder; links to folders are not followed."""
    for where, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(where, name) for name in sorted(names))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _labels(found: Found) -> Iterable[str]:
    file = found.path.name.removesuffix(".gguf").casefold()
    return {found.name.casefold(), found.name.rpartition("/")[2].casefold()} | ({file} if found.place != "Ollama" else set())


class _Memory:
    """What headers say, by path, size and time of change; and which two vocabularies can draft for each other."""

    def __init__(self) -> None:
        self.path = platformdirs.user_cache_path("llamaspec") / "shelf.json"
        self._known: dict[str, Any] = {}
        self.verdicts: dict[str, bool] = {}
        self._changed = False
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            data = json.loads(self.path.read_bytes())
            if data["version"] == VERSION and isinstance(data["files"], dict):
                self._known = data["files"]
                self.verdicts = {str(key): bool(value) for key, value in data["verdicts"].items()}
        self._kept = len(self.verdicts)

    def facts(self, path: Path) -> Facts | None:
        """What is known of a file that has not changed."""
        try:
            state = path.stat()
            entry = self._known[str(path)]
            if entry["size"] != state.st_size or entry["mtime_ns"] != state.st_mtime_ns:
                return None
            return Facts(**entry["facts"])
        except (OSError, KeyError, TypeError):
            return None

    def read(self, path: Path) -> Facts:
        """Read the headers, and remember."""
        facts = Facts.of(path)
        with suppress(OSError):
            state = path.stat()
            self._known[str(path)] = {"size": state.st_size, "mtime_ns": state.st_mtime_ns, "facts": asdict(facts)}
            self._changed = True
        return facts

    def keep(self, paths: set[Path] | None = None) -> None:
        """Write it down if something is new; forget files that are gone. Not being able to costs time only."""
        if not self._changed and len(self.verdicts) == self._kept:
            return
        if paths is not None:
            names = {str(path) for path in paths}
            self._known = {name: entry for name, entry in self._known.items() if name in names or os.path.exists(name)}
        data: Mapping[str, Any] = {"version": VERSION, "files": self._known, "verdicts": self.verdicts}
        name = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.path.parent, suffix=".part", delete=False) as file:
                name = file.name
                json.dump(data, file)
            os.replace(name, self.path)
            self._changed, self._kept = False, len(self.verdicts)
        except OSError:
            if name is not None:
                Path(name).unlink(missing_ok=True)
