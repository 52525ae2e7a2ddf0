"""What file names say: which files of a folder or repository are models, in which quantization, in how many parts.

Pure. The names of quantizations are those of llama.cpp's `llama_ftype`, as publishers write them into file names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath

from llamaspec.errors import NotFoundError

DEFAULT_QUANT = "Q4_K_M"

_PART = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.IGNORECASE)
_QUANT = re.compile(
    r"(?:^|[-._ ])(?P<quant>(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F(?:P)?16|F(?:P)?32|MXFP4(?:_MOE)?|NVFP4))$",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix|projector|vocab|lora)(?:[-._]|$)", re.IGNORECASE)
_BITS = re.compile(r"(\d+)")
_ORDER = ("XXS", "XS", "S", "M", "L", "XL")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """One file: its path with "/" between folders, its size in bytes, its SHA-256 where it is stated."""

    path: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One model of a repository: a file, or all the parts of a split one, in order.

    Attributes:
        quant: the quantization in its name, upper case, or "" where the name does not tell.
        files: its files.
        missing: parts that are not there.
    """

    quant: str
    files: tuple[RepoFile, ...]
    missing: int = 0

    @property
    def path(self) -> str:
        """The path of the first file, by which the model is named."""
        return self.files[0].path

    @property
    def total_bytes(self) -> int:
        """The size of all its files."""
        return sum(file.size for file in self.files)


def quant_of(path: str) -> str:
    """The quantization that a file name ends in, upper case; "" where it tells none."""
    stem = _stem(path)
    part = _PART.fullmatch(stem)
    match = _QUANT.search(part["base"] if part else stem)
    return match["quant"].upper() if match else ""


def is_model(path: str) -> bool:
    """Whether a file is a model by its name: a GGUF, and neither a projector, nor an importance matrix, nor an adapter."""
    return path.lower().endswith(".gguf") and not _NO_MODEL.search(_stem(path))


def variants(files: Iterable[RepoFile]) -> list[Variant]:
    """The models among `files`, smallest first; parts of a split model make one."""
    whole: list[Variant] = []
    split: dict[tuple[str, int], dict[int, RepoFile]] = {}
    for file in files:
        if not is_model(file.path):
            continue
        part = _PART.fullmatch(_stem(file.path))
        if part is None:
            whole.append(Variant(quant_of(file.path), (file,)))
        else:
            base = str(PurePosixPath(file.path).with_name(part["base"]))
            split.setdefault((base, int(part["count"])), {})[int(part["number"])] = file
    for (_, count), parts in split.items():
        ordered = tuple(parts[number] for number in sorted(parts))
        whole.append(Variant(quant_of(ordered[0].path), ordered, count - len(parts)))
    return sorted(whole, key=lambda variant: (variant.total_bytes, variant.path))


def choose(
    found: Sequence[Variant], where: str, *, quant: str | None = None, file: str | None = None, memory: int | None = None
) -> Variant:
    """The model that is meant.

    Args:
        found: what there is.
        where: what messages call the place.
        quant: the quantization asked for, in any case; or `file`, a path or a file name. Neither: Q4_K_M, else the largest
            below it that fits `memory`, else the smallest.
        memory: bytes that a model may take; None when that is not known.

    Raises:
        NotFoundError: there is none; near names are the hint.
    """
    if not found:
        raise NotFoundError(f"{where} has no GGUF models", "name a repository whose files end in .gguf")
    if file is not None:
        match = [v for v in found if any(file in (part.path, PurePosixPath(part.path).name) for part in v.files)]
        names = [variant.path for variant in found]
        if not match:
            raise NotFoundError(f"{where} has no file {file}", _near(file, names))
    elif quant is not None:
        match = [v for v in found if v.quant == quant.upper()] or [v for v in found if v.quant == f"UD-{quant.upper()}"]
        if not match:
            known = dict.fromkeys(v.quant or v.path for v in found)
            raise NotFoundError(f"{where} has no {quant}", f"there is {', '.join(sorted(known, key=order))}")
    else:
        match = [v for v in found if v.quant == DEFAULT_QUANT] or [_default(found, memory)]
    if len(match) > 1:
        raise NotFoundError(
            f"{where} has {len(match)} models that this may mean: {', '.join(v.path for v in match[:6])}", "name the file"
        )
    if match[0].missing:
        raise NotFoundError(f"{where}: {match[0].path} lacks {match[0].missing} of its parts")
    return match[0]


def order(quant: str) -> tuple[int, int, str]:
    """Sorts quantizations from the smallest to the largest, as Q4_K_S < Q4_K_M < Q5_0 < Q8_0 < F16."""
    bits = _BITS.search(quant)
    size = quant.rsplit("_", 1)[-1]
    return int(bits[1]) if bits else 99, _ORDER.index(size) if size in _ORDER else 2, quant


def _default(found: Sequence[Variant], memory: int | None) -> Variant:
    below = [v for v in found if v.quant and order(v.quant) <= order(DEFAULT_QUANT) and not v.missing]
    below.sort(key=lambda v: order(v.quant), reverse=True)
    fitting = [v for v in below if memory is None or v.total_bytes <= memory]
    return next(iter(fitting or below[-1:] or [v for v in found if not v.missing] or found))


def _near(name: str, names: Sequence[str]) -> str:
    """A hint with the names most like `name`, or all of a few."""
    distinct = list(dict.fromkeys(names))
    near = get_close_matches(name, distinct, n=5, cutoff=0.5) or distinct[:12]
    return f"there is {', '.join(near)}"


def _stem(path: str) -> str:
    name = PurePosixPath(path).name
    return name[:-5] if name.lower().endswith(".gguf") else name
