"""What a GGUF file says about itself, checked against its size before llama.cpp sees it.

llama.cpp ends the whole process on some damaged files, and a header tells nearly everything a user wants to know before
gigabytes are loaded. This module reads the header alone: `parse_header` takes bytes, `read_header` a file, `read_model`
a whole model with all of its parts. Every length and count is checked before it is used; whatever the input,
nothing but ModelFileError and NotFoundError is raised.

The layout and the limits are those of llama.cpp's own reader (ggml/src/gguf.cpp and src/llama-model.cpp, build of
llama-cpp-python 0.3.36); where llama.cpp would refuse or abort, this module refuses first and names the key.
Files are little-endian, as llama.cpp wants them on every common machine.
"""

from __future__ import annotations

import array
import difflib
import math
import os
import re
import stat
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn, TypeAlias

from llamaspec.errors import ModelFileError, NotFoundError, UsageError

MetaValue: TypeAlias = "int | float | bool | str | list[bytes] | array.array[int] | array.array[float]"

# ggml type number -> (name, elements per block, bytes per block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}

# general.file_type -> the name people use
FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}
_FILE_TYPE_GUESSED = 1024

# the special tokens that llama.cpp knows: our name -> key
SPECIAL_TOKEN_KEYS: dict[str, str] = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "eot": "tokenizer.ggml.eot_token_id",
    "eom": "tokenizer.ggml.eom_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "cls": "tokenizer.ggml.cls_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
    "fim_pre": "tokenizer.ggml.fim_pre_token_id",
    "fim_suf": "tokenizer.ggml.fim_suf_token_id",
    "fim_mid": "tokenizer.ggml.fim_mid_token_id",
    "fim_pad": "tokenizer.ggml.fim_pad_token_id",
    "fim_rep": "tokenizer.ggml.fim_rep_token_id",
    "fim_sep": "tokenizer.ggml.fim_sep_token_id",
}

# a wrong id here changes where a text starts or ends; other wrong ids llama.cpp ignores, and so does this module
_ENDS = frozenset(SPECIAL_TOKEN_KEYS[name] for name in ("bos", "eos", "eot", "eom"))

_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type number -> (name, struct format, array typecode); strings and arrays apart
_SCALARS: dict[int, tuple[str, struct.Struct, str]] = {
    0: ("uint8", struct.Struct("<B"), "B"),
    1: ("int8", struct.Struct("<b"), "b"),
    2: ("uint16", struct.Struct("<H"), "H"),
    3: ("int16", struct.Struct("<h"), "h"),
    4: ("uint32", struct.Struct("<I"), "I"),
    5: ("int32", struct.Struct("<i"), "i"),
    6: ("float32", struct.Struct("<f"), "f"),
    7: ("bool", struct.Struct("<b"), "b"),
    10: ("uint64", struct.Struct("<Q"), "Q"),
    11: ("int64", struct.Struct("<q"), "q"),
    12: ("float64", struct.Struct("<d"), "d"),
}
_INTEGERS = frozenset({"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"})
_INTEGER_ARRAYS = frozenset({"array of uint32", "array of int32"})
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_FIRST_READ_BYTES = 8 << 20
_MAX_HEADER_BYTES = 128 << 20
_MAX_DIMENSIONS = 4
_MAX_TENSOR_NAME_BYTES = 63
_MAX_ELEMENTS = 2**63 - 1
_MIN_KEY_BYTES = 14
_MIN_TENSOR_BYTES = 24
_DEFAULT_ALIGNMENT = 32
_MAX_LAYERS = 512
_MAX_EXPERTS = 1024
_MAX_PARTS_NAMED = 20
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

_AGAIN = "download it again"
_PART_NAME = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)

_TYPE_REFUSALS = {
    "mmproj": "a vision or audio projector (mmproj), which goes with a model and is none itself",
    "imatrix": "an importance matrix, made for quantizing a model",
    "adapter": "a LoRA adapter, which goes with a model and is none itself",
}
_ENCODERS = frozenset(
    {
        "bert",
        "nomic-bert",
        "nomic-bert-moe",
        "jina-bert-v2",
        "jina-bert-v3",
        "neo-bert",
        "modern-bert",
        "eurobert",
        "t5encoder",
        "gemma-embedding",
        "llama-embed",
    }
)
_ARCHITECTURE_REFUSALS = {
    "clip": _TYPE_REFUSALS["mmproj"],
    "t5": "an encoder-decoder model; speculative decoding here needs a decoder-only one",
    "wavtokenizer-dec": "a speech decoder: it writes no text",
    "qwen3tts": "a speech model: it writes no text",
    "pockettts": "a speech model: it writes no text",
    **dict.fromkeys(_ENCODERS, "an embedding or encoder model: it writes no text"),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), "a diffusion model: it does not write one token after another"),
}
_PREFIX_REFUSALS = {
    "diffusion": _ARCHITECTURE_REFUSALS["dream"],
    "nomic-bert": _ARCHITECTURE_REFUSALS["bert"],
    "jina-bert": _ARCHITECTURE_REFUSALS["bert"],
}
_HEAD_ARCHITECTURES = frozenset({"eagle3", "dflash", "gemma4-assistant"})
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
# every n-th layer of these has attention, the others a recurrent state: architecture -> n when the file does not say
_ATTENTION_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
_GEMMA3N_KV_LAYERS = 20
# layers with a sliding window where the file gives no pattern: architecture -> (one layer in how many sees everything, is it
# the first of them, the window when the file gives none: 0 for none). From load_arch_hparams in src/models/*.cpp.
_WINDOW_PATTERNS: dict[str, tuple[int, bool, int]] = {
    "afmoe": (4, False, 0),
    "cohere2": (4, False, 0),
    "cohere2moe": (4, True, 0),
    "exaone-moe": (4, False, 128),
    "exaone4": (4, False, 0),
    "gemma2": (2, False, 4096),
    "gemma3": (6, False, 0),
    "gemma3n": (5, False, 0),
    "gpt-oss": (2, False, 0),
    "laguna": (4, True, 0),
    "llama4": (4, False, 8192),
    "mellum": (4, False, 0),
    "muse-glimmer": (4, False, 0),
    "olmo2": (4, False, 0),
    "plamo3": (8, False, 0),
    "smallthinker": (4, True, 0),
}

# the first pattern found in the lower-case name, with "-" for space and "_", names the family
_FAMILIES: tuple[tuple[str, str], ...] = (
    ("DeepSeek-R1-Distill-Qwen", r"deepseek-r1-distill-qwen"),
    ("DeepSeek-R1-Distill-Llama", r"deepseek-r1-distill-llama"),
    ("DeepSeek-Coder", r"deepseek-coder(?!-v2)"),
    ("DeepSeek", r"deepseek"),
    ("Qwen3.5", r"qwen-?3\.5"),
    ("Qwen3-Next", r"qwen-?3-(coder-)?next"),
    ("Qwen3", r"qwen-?3"),
    ("QwQ", r"\bqwq"),
    ("Qwen2.5", r"qwen-?2\.5"),
    ("Qwen2", r"qwen-?2"),
    ("Qwen1.5", r"qwen-?1\.5"),
    ("CodeLlama", r"code-?llama"),
    ("TinyLlama", r"tiny-?llama"),
    ("Llama 4", r"llama-?4"),
    ("Llama 3", r"llama-?3"),
    ("Llama 2", r"llama-?2"),
    ("CodeGemma", r"code-?gemma"),
    ("Gemma 4", r"gemma-?4"),
    ("Gemma 3n", r"gemma-?3n"),
    ("Gemma 3", r"gemma-?3"),
    ("Gemma 2", r"gemma-?2"),
    ("Gemma", r"\bgemma"),
    ("Devstral", r"devstral"),
    ("Ministral", r"ministral"),
    ("Mixtral", r"mixtral"),
    ("Mistral", r"mistral"),
    ("Phi-4", r"\bphi-?4"),
    ("Phi-3", r"\bphi-?3"),
    ("Phi-2", r"\bphi-?2"),
    ("SmolLM3", r"smollm-?3"),
    ("SmolLM2", r"smollm-?2"),
    ("SmolLM", r"smollm"),
    ("GPT-OSS", r"gpt-?oss"),
    ("GLM-4", r"\bglm-?4"),
    ("Granite 4", r"granite-?4"),
    ("Granite 3", r"granite-?3"),
    ("EXAONE", r"exaone"),
    ("Falcon", r"falcon"),
    ("OLMo 2", r"olmo-?2"),
    ("StarCoder2", r"starcoder-?2"),
    ("StableLM", r"stablelm"),
    ("Yi", r"\byi-"),
)


class HeaderIncomplete(ModelFileError):
    """The bytes given end before the header does, although the file goes on.

    Attributes:
        needed: the file must be read at least up to this many bytes, counted from its start.
    """

    def __init__(self, name: str, needed: int) -> None:
        super().__init__(f"the header of {name} goes on past the bytes that were read; {needed} or more are needed")
        self.needed = needed


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        name: its name, at most 63 bytes.
        shape: elements per dimension, ggml's order: the first is a row's length.
        type: ggml's name of its type, as "Q4_K".
        offset: bytes from the start of the file's tensor data.
        n_bytes: bytes of its data, padding not counted.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    n_bytes: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """One layer's part of the key-value cache.

    Attributes:
        index: the layer, counted from 0.
        bytes_per_token: of its keys and values.
        windowed: it attends to the last `ModelInfo.sliding_window` tokens only.
    """

    index: int
    bytes_per_token: int
    windowed: bool


@dataclass(frozen=True)
class GGUFHeader:
    """The header of one GGUF file, read and checked.

    Attributes:
        path: the file, or the name that was given for it.
        version: 2 or 3.
        metadata: key -> value. Text is a str (bytes that are no UTF-8 replaced), arrays of text a list of raw bytes,
            arrays of numbers an array.array (bools in it as 0 and 1).
        types: key -> the type in the file, as "uint32" or "array of string".
        tensors: in the file's order.
        data_offset: where tensor data starts, in bytes from the start of the file.
        file_bytes: the size of the whole file.
        alignment: of tensor data, in bytes; a power of two.
    """

    path: Path
    version: int
    metadata: dict[str, MetaValue]
    types: dict[str, str]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_bytes: int
    alignment: int


@dataclass(frozen=True, slots=True, eq=False)
class _ReadList:
    """A list of strings that was read, and the bytes it was read from. Nobody changes it."""

    raw: bytes
    items: list[bytes]


_LONG_LIST = 10_000
_LISTS: deque[_ReadList] = deque(maxlen=6)


class _Reader:
    """A position in the bytes of a header; refuses every step past their end."""

    def __init__(self, data: bytes, total_bytes: int, name: str) -> None:
        self.data = data
        self.end = min(len(data), total_bytes)
        self.total = total_bytes
        self.name = name
        self.at = 0

    def short(self, stop: int, what: str) -> NoReturn:
        """Raise what it means that `what` ends at byte `stop`, past the bytes there are."""
        if stop > self.total:
            raise ModelFileError(
                f"{self.name} is cut short or damaged: {what} runs past the end of the file ({self.total} bytes)",
                _AGAIN,
            )
        if stop > _MAX_HEADER_BYTES:
            raise ModelFileError(
                f"{self.name} is damaged: {what} ends at byte {stop}, and no header is longer than {_MAX_HEADER_BYTES}",
                _AGAIN,
            )
        raise HeaderIncomplete(self.name, stop)

    def take(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they start."""
        start = self.at
        if start + size > self.end:
            self.short(start + size, what)
        self.at = start + size
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def text(self, what: str) -> str:
        size = self.u64(what)
        start = self.take(size, what)
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def texts(self, count: int, what: str) -> list[bytes]:
        """`count` strings. The one loop that runs hundreds of thousands of times: locals only.

        Models of one family hold the same lists; one that was just read is recognised by its bytes.
        """
        if self.at + 8 * count > self.total:
            self.short(self.at + 8 * count, what)
        if count >= _LONG_LIST:
            for known in _LISTS:
                if len(known.items) == count and self.data.startswith(known.raw, self.at, self.end):
                    self.at += len(known.raw)
                    return known.items
        first = self.at
        data, end, at, unpack = self.data, self.end, self.at, _U64.unpack_from
        items: list[bytes] = []
        append = items.append
        for _ in range(count):
            start = at + 8
            if start > end:
                self.short(start, what)
            at = start + unpack(data, start - 8)[0]
            if at > end:
                self.short(at, what)
            append(data[start:at])
        self.at = at
        if count >= _LONG_LIST:
            _LISTS.append(_ReadList(data[first:at], items))
        return items

    def value(self, key: str) -> tuple[str, MetaValue]:
        """A value with the name of its type."""
        what = f"the value of {_show(key)}"
        kind = self.u32(what)
        if kind == _STRING:
            return "string", self.text(what)
        if kind == _ARRAY:
            return self._array(key, what)
        if kind not in _SCALARS:
            raise ModelFileError(f"{self.name} is damaged: {_show(key)} has the unknown type {kind}", _AGAIN)
        name, form, _ = _SCALARS[kind]
        number: int | float = form.unpack_from(self.data, self.take(form.size, what))[0]
        return name, bool(number) if kind == _BOOL else number

    def _array(self, key: str, what: str) -> tuple[str, MetaValue]:
        kind = self.u32(what)
        count = self.u64(what)
        if kind == _STRING:
            return "array of string", self.texts(count, what)
        if kind not in _SCALARS:
            raise ModelFileError(
                f"{self.name} is damaged: {_show(key)} is an array of the type {kind}, which llama.cpp does not read",
                _AGAIN,
            )
        name, form, code = _SCALARS[kind]
        start = self.take(count * form.size, what)
        return f"array of {name}", array.array(code, self.data[start : self.at])

    def tensor(self, number: int) -> TensorInfo:
        """One entry of the tensor list; its offset is checked by the caller."""
        what = f"the entry of tensor {number}"
        size = self.u64(what)
        start = self.take(size, what)
        name = self.data[start : self.at].decode("utf-8", errors="replace")
        if size > _MAX_TENSOR_NAME_BYTES:
            raise ModelFileError(f"{self.name} is damaged: the name of tensor {number} has {size} bytes", _AGAIN)
        dimensions = self.u32(what)
        if dimensions > _MAX_DIMENSIONS:
            raise ModelFileError(f"{self.name} is damaged: tensor {_show(name)} has {dimensions} dimensions", _AGAIN)
        shape = tuple(self.u64(what) for _ in range(dimensions))
        if min(shape, default=1) < 1 or math.prod(shape) > _MAX_ELEMENTS:
            raise ModelFileError(f"{self.name} is damaged: tensor {_show(name)} has the shape {list(shape)}", _AGAIN)
        kind = self.u32(what)
        if kind not in TENSOR_TYPES:
            raise ModelFileError(
                f"{self.name}: tensor {_show(name)} has the type {kind}, which this llama.cpp does not know",
                "the file is damaged, or made for another version of llama.cpp",
            )
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        row = shape[0] if shape else 1
        if row % block:
            raise ModelFileError(
                f"{self.name} is damaged: tensor {_show(name)} has rows of {row} elements, not a multiple of "
                f"{type_name}'s {block}",
                _AGAIN,
            )
        n_bytes = math.prod(shape) // block * block_bytes
        return TensorInfo(name, shape, type_name, self.u64(what), n_bytes)


def parse_header(buffer: bytes | bytearray | memoryview, total_bytes: int, name: str | os.PathLike[str]) -> GGUFHeader:
    """Read the header of a GGUF file from its first bytes.

    Args:
        buffer: the file's first bytes, at least the header; more is not looked at.
        total_bytes: the size of the whole file.
        name: what messages call the file.

    Raises:
        HeaderIncomplete: the header goes on past `buffer`, and so does the file.
        ModelFileError: this is no GGUF file, or it is damaged, cut short, or of a version that is not read.
    """
    label = os.fspath(name)
    reader = _Reader(bytes(buffer), total_bytes, label)
    _check_magic(reader)
    version = _read_version(reader)
    n_tensors = reader.u64("the tensor count")
    n_keys = reader.u64("the key count")
    if n_keys * _MIN_KEY_BYTES + n_tensors * _MIN_TENSOR_BYTES > total_bytes:
        raise ModelFileError(
            f"{label} is cut short or damaged: it claims {n_keys} keys and {n_tensors} tensors in {total_bytes} bytes",
            _AGAIN,
        )

    metadata: dict[str, MetaValue] = {}
    types: dict[str, str] = {}
    for number in range(n_keys):
        key = reader.text(f"key {number}")
        if not key or key in metadata:
            raise ModelFileError(f"{label} is damaged: key {number} is {f'{_show(key)} again' if key else 'empty'}", _AGAIN)
        types[key], metadata[key] = reader.value(key)

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or types.get("general.alignment", "uint32") != "uint32":
        raise _wrong_type(label, "general.alignment", types["general.alignment"], alignment, "a uint32")
    if alignment < 1 or alignment & (alignment - 1):
        raise ModelFileError(f"{label} is damaged: general.alignment is {alignment}, not a power of two", _AGAIN)

    tensors: list[TensorInfo] = []
    names: set[str] = set()
    expected = 0
    for number in range(n_tensors):
        tensor = reader.tensor(number)
        if tensor.name in names:
            raise ModelFileError(f"{label} is damaged: it has tensor {_show(tensor.name)} twice", _AGAIN)
        if tensor.offset != expected:
            raise ModelFileError(
                f"{label} is damaged: tensor {_show(tensor.name)} starts at byte {tensor.offset} of the tensor data, "
                f"expected {expected}",
                _AGAIN,
            )
        names.add(tensor.name)
        tensors.append(tensor)
        expected = _padded(tensor.offset + tensor.n_bytes, alignment)

    data_offset = _padded(reader.at, alignment)
    if tensors:
        needed = data_offset + tensors[-1].offset + tensors[-1].n_bytes
        if needed > total_bytes:
            raise ModelFileError(f"{label} is cut short: it needs {needed} bytes and has {total_bytes}", _AGAIN)
    return GGUFHeader(Path(label), version, metadata, types, tuple(tensors), data_offset, total_bytes, alignment)


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read the header of the GGUF file at `path`: only as much of the file as the header takes.

    Raises:
        NotFoundError: there is no such file; the hint names files in the same folder with nearly that name.
        ModelFileError: it cannot be read, or see `parse_header`.
    """
    path = Path(path)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _not_found(path) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(status.st_mode):
        inside = _gguf_names(path)
        hint = f"name a file in it, such as {inside[0]}" if inside else "name a .gguf file"
        raise ModelFileError(f"{path} is a folder, not a GGUF file", hint)
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path} is not a regular file")
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            data = file.read(_FIRST_READ_BYTES)
            while True:
                try:
                    return parse_header(data, total, path)
                except HeaderIncomplete as incomplete:
                    more = file.read(max(3 * len(data), incomplete.needed - len(data)))
                if not more:
                    raise ModelFileError(f"{path} shrank while it was read", _AGAIN)
                data += more
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {_reason(error)}") from None


def part_paths(header: GGUFHeader) -> tuple[Path, ...]:
    """The files of the model whose first part `header` is: one, unless the model is split.

    Raises:
        ModelFileError: it is a later part, or its name and its header do not agree.
    """
    path = header.path
    count = _integer(header, "split.count", ("uint16",)) or 1
    if count == 1:
        return (path,)
    number = _integer(header, "split.no", ("uint16",))
    if number is None:
        raise ModelFileError(f"{path} is one of {count} parts, but has no split.no to say which", _AGAIN)
    if number >= count:
        raise ModelFileError(f"{path} is damaged: split.no is {number} with split.count {count}", _AGAIN)
    match = _PART_NAME.fullmatch(path.name)
    base = match["base"] if match else path.stem
    names = [f"{base}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    if number != 0:
        raise ModelFileError(
            f"{path} is part {number + 1} of {count}; a model is named by its first part",
            f"give {path.with_name(names[0])}",
        )
    if path.name.lower() != names[0].lower():
        raise ModelFileError(
            f"{path} is part 1 of {count} by its header, but its name does not say so", f"rename it {names[0]}"
        )
    return (path, *(path.with_name(name) for name in names[1:]))


def read_model(path: str | os.PathLike[str]) -> ModelInfo:
    """Read the headers of a model: one file, or all parts of a split one, given the first.

    Raises:
        NotFoundError: the file, or some of its parts, are not there.
        ModelFileError: it is damaged, cut short, or no decoder-only text model. See `model_from_headers`.
    """
    first = read_header(path)
    paths = part_paths(first)
    missing = [part.name for part in paths[1:] if not part.is_file()]
    if missing:
        more = len(missing) - _MAX_PARTS_NAMED
        names = ", ".join(missing[:_MAX_PARTS_NAMED]) + (f" and {more} more" if more > 0 else "")
        raise NotFoundError(
            f"{first.path} is part 1 of {len(paths)}, and {len(missing)} of the others are not beside it: {names}",
            "download the missing parts into the same folder",
        )
    return model_from_headers([first, *(read_header(part) for part in paths[1:])])


def model_from_headers(headers: Sequence[GGUFHeader]) -> ModelInfo:
    """Check that `headers`, one for each file in order, make one model that a user may have meant.

    Vocabulary-only files and draft heads pass; `ModelInfo.require_runnable` refuses them.

    Raises:
        ModelFileError: a part is of another model; a key that is needed is missing, of the wrong type or out of range;
            or it is no decoder-only text model (a projector, an adapter, an encoder, a diffusion model, ...).
    """
    first = headers[0]
    if len(headers) > 1:
        _check_parts(headers)
    _refuse_other_kinds(first)
    model = ModelInfo(first.path, tuple(header.path for header in headers), tuple(headers))
    _check_numbers(first, model.architecture)
    _check_tokenizer(first, optional=model.is_draft_head)
    for key in ("general.name", "general.basename", "general.license", "tokenizer.chat_template"):
        _string(first, key)
    return model


@dataclass(frozen=True)
class ModelInfo:
    """A model as its files' headers describe it; made by `read_model`.

    Texts in it come from the file: escape them before they reach a terminal.

    Attributes:
        path: the file that names the model (the first part of a split one).
        files: all of its files.
        headers: one for each file.
    """

    path: Path
    files: tuple[Path, ...]
    headers: tuple[GGUFHeader, ...]

    @property
    def metadata(self) -> dict[str, MetaValue]:
        """All keys and values of the first file."""
        return self.headers[0].metadata

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, as "qwen2"."""
        return str(self.metadata["general.architecture"])

    @property
    def name(self) -> str:
        """The name in the file, or else the file's own without its ending."""
        return self._text("general.name") or self.path.stem

    @property
    def licence(self) -> str | None:
        """The licence the file names."""
        return self._text("general.license")

    @property
    def named_family(self) -> str | None:
        """The family its names show, as "Qwen2.5"; None when they show none that is known here."""
        for text in (self._text("general.basename"), self._text("general.name"), self.path.stem):
            slug = re.sub(r"[\s_]+", "-", (text or "").lower())
            for family, pattern in _FAMILIES:
                if re.search(pattern, slug):
                    return family
        return None

    @property
    def family(self) -> str:
        """The family its names show, or else its architecture."""
        return self.named_family or self.architecture

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(header.file_bytes for header in self.headers)

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """The tensors of all files."""
        return (tensor for header in self.headers for tensor in header.tensors)

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, padding not counted."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @cached_property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @cached_property
    def quantization(self) -> str:
        """As "Q4_K_M": what the file says, or else the tensor type that most bytes have; "none" without tensors."""
        file_type = self.metadata.get("general.file_type")
        if isinstance(file_type, int) and (name := FILE_TYPES.get(file_type & ~_FILE_TYPE_GUESSED)):
            return name
        by_type: dict[str, int] = {}
        for tensor in self.tensors:
            by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.n_bytes
        return max(by_type, key=lambda name: by_type[name], default="none")

    @property
    def split_count(self) -> int:
        """The number of files."""
        return len(self.files)

    @property
    def has_weights(self) -> bool:
        """False for a vocabulary-only file."""
        return any(header.tensors for header in self.headers)

    @cached_property
    def is_draft_head(self) -> bool:
        """It drafts from another model's hidden states and cannot run alone: EAGLE-3, DFlash, or MTP layers alone."""
        if self.architecture in _HEAD_ARCHITECTURES:
            return True
        trunk = "blk.0.attn_norm.weight"
        return self.nextn_layers > 0 and self.has_weights and all(tensor.name != trunk for tensor in self.tensors)

    def require_runnable(self) -> None:
        """Refuse what can be looked at but not run on its own.

        Raises:
            ModelFileError: it has no weights, no vocabulary, or is a draft head.
        """
        if self.is_draft_head:
            kind = self.architecture if self.architecture in _HEAD_ARCHITECTURES else "MTP layers"
            raise ModelFileError(
                f"{self.path} is a draft head ({kind}), not a model: it works only inside the model it was made for",
                "give a whole model of the same family",
            )
        if not self.has_weights:
            raise ModelFileError(f"{self.path} holds a vocabulary and no weights", "give the model itself")
        if not self.tokens:
            raise ModelFileError(f"{self.path} has no vocabulary, so it can read and write no text")

    @property
    def context_length(self) -> int:
        """The context it was trained for, in tokens."""
        return self._architecture_int("context_length")

    @property
    def block_count(self) -> int:
        """The number of layers, MTP layers included."""
        return self._architecture_int("block_count")

    @property
    def nextn_layers(self) -> int:
        """The number of MTP (next-token prediction) layers among `block_count`."""
        return self._architecture_int("nextn_predict_layers")

    @property
    def embedding_length(self) -> int:
        """The width of the hidden state."""
        return self._architecture_int("embedding_length")

    @property
    def head_count(self) -> int:
        """Attention heads; the most of any layer; 0 without attention."""
        return max(self._per_layer("attention.head_count"))

    @property
    def head_count_kv(self) -> int:
        """Key and value heads; the most of any layer; 0 without attention."""
        return max(self._kv_heads)

    @property
    def expert_count(self) -> int:
        """Experts per layer; 0 for a dense model."""
        return self._architecture_int("expert_count")

    @property
    def expert_used_count(self) -> int:
        """Experts a token uses in a layer; the most of any layer; 0 for a dense model."""
        return max(self._per_layer("expert_used_count"))

    @property
    def sliding_window(self) -> int | None:
        """The attention window of the layers that have one, in tokens; None without."""
        default = _WINDOW_PATTERNS.get(self.architecture, (0, False, 0))[2]
        stated = self.metadata.get(f"{self.architecture}.attention.sliding_window", default)
        return stated if isinstance(stated, int) and stated > 0 else None

    @property
    def tokens(self) -> list[bytes]:
        """The text of each token as the tokenizer writes it; empty without a vocabulary."""
        value = self.metadata.get("tokenizer.ggml.tokens")
        return value if isinstance(value, list) else []

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.tokens) or self._architecture_int("vocab_size")

    @property
    def tokenizer_model(self) -> str:
        """The kind of tokenizer, as "llama" (SentencePiece) or "gpt2" (BPE); "none" without."""
        return self._text("tokenizer.ggml.model") or "none"

    @property
    def tokenizer_pre(self) -> str | None:
        """The name of the pre-tokenizer, as "qwen2"."""
        return self._text("tokenizer.ggml.pre")

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens the file names, inside the vocabulary: "bos", "eos", "eot", ..., as in
        SPECIAL_TOKEN_KEYS."""
        found = {name: self.metadata.get(key) for name, key in SPECIAL_TOKEN_KEYS.items()}
        return {name: value for name, value in found.items() if isinstance(value, int) and value < self.vocab_size}

    @property
    def chat_template(self) -> str | None:
        """The chat template (Jinja)."""
        return self._text("tokenizer.chat_template")

    @property
    def chat_templates(self) -> dict[str, str]:
        """The other chat templates, by name."""
        prefix = "tokenizer.chat_template."
        return {
            key.removeprefix(prefix): value
            for key, value in self.metadata.items()
            if key.startswith(prefix) and isinstance(value, str)
        }

    def kv_bytes_per_token(self, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes that one token takes in the key-value cache, over all layers.

        Counted as llama.cpp lays the cache out: layers without attention or that share another's cache take none,
        multi-head latent attention stores keys only. Left out: sliding windows (those layers keep only
        `sliding_window` tokens), MTP layers (they have a cache of their own), indexer caches of sparse attention, and
        recurrent state, which does not grow with the text.

        Args:
            type_k: the type of the keys, as "f16" or "q8_0".
            type_v: the type of the values.

        Raises:
            UsageError: there is no such type.
        """
        return sum(layer.bytes_per_token for layer in self.cache_layers(type_k, type_v))

    def cache_layers(self, type_k: str = "f16", type_v: str = "f16") -> list[CacheLayer]:
        """The layers that keep keys and values of their own, and what a token takes in each.

        Args, what is left out, and errors: as for `kv_bytes_per_token`.
        """
        block_k, bytes_k = _cache_type(type_k)
        block_v, bytes_v = _cache_type(type_v)
        latent = bool(
            self._architecture_int("attention.key_length_mla") and self._architecture_int("attention.value_length_mla")
        )
        head = self.embedding_length // max(self.head_count, 1)
        key = self._architecture_int("attention.key_length") or head
        value = self._architecture_int("attention.value_length") or head
        window_key = self._architecture_int("attention.key_length_swa") or key
        window_value = self._architecture_int("attention.value_length_swa") or value
        layers = []
        for layer in () if self.architecture in _RECURRENT else self._attention_layers():
            heads = self._kv_heads[layer]
            windowed = self._windowed_layers[layer]
            size = -(-heads * (window_key if windowed else key) // block_k) * bytes_k
            if not latent:
                size += -(-heads * (window_value if windowed else value) // block_v) * bytes_v
            layers.append(CacheLayer(layer, size, windowed))
        return layers

    def _attention_layers(self) -> Iterator[int]:
        """The layers that keep keys and values of their own."""
        arch = self.architecture
        count = self.block_count - self.nextn_layers or self.block_count
        if arch == "gemma3n":
            count = min(count, _GEMMA3N_KV_LAYERS)
        count -= min(count, self._architecture_int("attention.shared_kv_layers"))
        recurrent = self.metadata.get(f"{arch}.attention.recurrent_layers")
        interval = self._architecture_int("full_attention_interval") or _ATTENTION_INTERVALS.get(arch, 1)
        for layer in range(count):
            if arch not in _ATTENTION_INTERVALS:
                yield layer
            elif isinstance(recurrent, array.array) and layer < len(recurrent):
                if not recurrent[layer]:
                    yield layer
            elif (layer + 1) % interval == 0:
                yield layer

    @cached_property
    def _kv_heads(self) -> list[int]:
        key = "attention.head_count_kv"
        return self._per_layer(key if f"{self.architecture}.{key}" in self.metadata else "attention.head_count")

    @cached_property
    def _windowed_layers(self) -> list[bool]:
        """As llama.cpp's load_swa_pattern: an array of flags, or a period, or the architecture's own period."""
        trunk = self.block_count - self.nextn_layers
        stated = self.metadata.get(f"{self.architecture}.attention.sliding_window_pattern")
        if isinstance(stated, array.array):
            known = [bool(flag) for flag in stated]
        elif self.architecture in _WINDOW_PATTERNS and self.sliding_window:
            period, full_first, _ = _WINDOW_PATTERNS[self.architecture]
            period = stated if isinstance(stated, int) else period
            full = 0 if full_first else period - 1
            known = [period == 0 or layer % period != full for layer in range(trunk)]
        else:
            known = []
        return known + [False] * (self.block_count - len(known))

    def _per_layer(self, suffix: str) -> list[int]:
        """A number for each layer; the file gives one for all or an array."""
        value = self.metadata.get(f"{self.architecture}.{suffix}")
        if isinstance(value, array.array):
            return [int(number) for number in value]
        return [value if isinstance(value, int) else 0] * self.block_count

    def _architecture_int(self, suffix: str) -> int:
        value = self.metadata.get(f"{self.architecture}.{suffix}")
        return value if isinstance(value, int) else 0

    def _text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None


def _padded(size: int, alignment: int) -> int:
    return (size + alignment - 1) // alignment * alignment


def _cache_type(name: str) -> tuple[int, int]:
    for type_name, block, block_bytes in TENSOR_TYPES.values():
        if type_name == name.upper():
            return block, block_bytes
    raise UsageError(f"there is no cache type {_show(name)}", "f16, bf16, q8_0 and q4_0 are usual")


def _show(value: object) -> str:
    """A value from a file as one short, printable text."""
    text = repr(value) if isinstance(value, int | float) else ascii(str(value)[:200])
    return text if len(text) <= 80 else f"{text[:76]}...{text[0]}"


def _reason(error: OSError | ValueError) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text[:1].lower() + text[1:]


def _gguf_names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() == ".gguf")
    except OSError:
        return []


def _not_found(path: Path) -> NotFoundError:
    if path.is_symlink():
        return NotFoundError(f"{path} is a link to a file that is gone", _AGAIN)
    near = difflib.get_close_matches(path.name, _gguf_names(path.parent), n=3)
    return NotFoundError(f"there is no file {path}", f"in the same folder: {', '.join(near)}" if near else None)


def _check_magic(reader: _Reader) -> None:
    data, total, name = reader.data[: min(reader.end, 512)], reader.total, reader.name
    if data.startswith(b"GGUF"):
        return
    if total == 0:
        raise ModelFileError(f"{name} is empty (0 bytes)", _AGAIN)
    if b"GGUF".startswith(data[:4]) or total < 4:
        if total >= 4:
            reader.short(4, "the first four bytes")
        raise ModelFileError(f"{name} is too short to be a GGUF file ({total} bytes)", _AGAIN)
    if data.startswith(b"version https://git-lfs"):
        raise ModelFileError(
            f"{name} is a Git LFS pointer ({total} bytes), not the model itself",
            "run git lfs pull, or download the file itself",
        )
    kind, hint = _looks_like(data)
    raise ModelFileError(f"{name} is not a GGUF file ({total} bytes): it {kind}", hint)


_CONVERT = "download the model in GGUF, or convert it with llama.cpp's convert_hf_to_gguf.py"
_UNPACK = "unpack it first"
# first bytes -> what the file looks like, what to do
_LOOKS: tuple[tuple[tuple[bytes, ...], str, str], ...] = (
    ((b"PK\x03\x04", b"PK\x05\x06"), "looks like a ZIP archive, perhaps a PyTorch checkpoint", _CONVERT),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04"), "looks like a Python pickle, perhaps a PyTorch checkpoint", _CONVERT),
    ((b"lmgg", b"fmgg", b"tjgg", b"algg"), "is in the old GGML format (.bin) from before GGUF", _CONVERT),
    ((b"\x89HDF",), "looks like an HDF5 file", _CONVERT),
    ((b"\x1f\x8b",), "looks like a gzip archive", _UNPACK),
    ((b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf", b"BZh"), "looks like a compressed archive", _UNPACK),
)


def _looks_like(data: bytes) -> tuple[str, str]:
    """What a file with these first bytes (512 at most) seems to be, and what to do about it."""
    for starts, kind, hint in _LOOKS:
        if data.startswith(starts):
            return kind, hint
    text = data.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")):
        return "looks like a web page (HTML), perhaps an error or login page", _AGAIN
    if data[8:9] == b"{" and 2 <= _U64.unpack_from(data)[0] <= _MAX_HEADER_BYTES:
        return "looks like a safetensors file", _CONVERT
    if text.startswith((b"{", b"[")):
        return "looks like JSON text", _AGAIN
    if not any(data):
        return "starts with zeros, as an unfinished download does", _AGAIN
    return f"starts with the bytes {data[:4].hex(' ')}", _AGAIN


def _read_version(reader: _Reader) -> int:
    reader.at = 4
    if reader.total < 24:
        raise ModelFileError(f"{reader.name} is too short to be a GGUF file ({reader.total} bytes)", _AGAIN)
    version = reader.u32("the version")
    if version == 1:
        raise ModelFileError(
            f"{reader.name} is GGUF version 1 of 2023, which llama.cpp no longer reads", "download a newer conversion"
        )
    if version and version & 0xFFFF == 0:
        raise ModelFileError(
            f"{reader.name} is a big-endian GGUF file, made for another kind of processor",
            "download the usual, little-endian file",
        )
    if version not in (2, 3):
        raise ModelFileError(f"{reader.name} is GGUF version {version}; versions 2 and 3 are read", _AGAIN)
    return version


def _wrong_type(label: object, key: str, kind: str, value: MetaValue, wanted: str) -> ModelFileError:
    shown = "" if kind.startswith("array") else f" {_show(value)}"
    return ModelFileError(
        f"{label}: {_show_key(key)} must be {wanted}, and is the {kind}{shown}", "download another conversion"
    )


def _bad_value(header: GGUFHeader, key: str, value: object, wanted: str) -> ModelFileError:
    return ModelFileError(
        f"{header.path}: {_show_key(key)} is {_show(value)}, and must be {wanted}", "download another conversion"
    )


def _missing(header: GGUFHeader, key: str) -> ModelFileError:
    return ModelFileError(f"{header.path} has no {_show_key(key)}", "download another conversion")


def _show_key(key: str) -> str:
    return key if key.isprintable() and len(key) <= 100 else _show(key)


def _integer(header: GGUFHeader, key: str, kinds: Sequence[str] = ("uint32",)) -> int | None:
    """The integer under `key`, of one of the types `kinds`; None when the key is absent."""
    if key not in header.metadata:
        return None
    value, kind = header.metadata[key], header.types[key]
    if not isinstance(value, int) or kind not in kinds:
        raise _wrong_type(header.path, key, kind, value, f"a {kinds[0]}" if len(kinds) == 1 else "an integer")
    return value


def _string(header: GGUFHeader, key: str) -> str | None:
    value = header.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong_type(header.path, key, header.types[key], value, "a string")
    return value


def _refuse_other_kinds(header: GGUFHeader) -> None:
    """Refuse what is no decoder-only text model."""
    kind = _string(header, "general.type")
    if kind in _TYPE_REFUSALS:
        raise ModelFileError(f"{header.path} is {_TYPE_REFUSALS[kind]}")
    arch = _string(header, "general.architecture")
    if not arch:
        raise _missing(header, "general.architecture")
    refusal = _ARCHITECTURE_REFUSALS.get(arch) or next(
        (text for prefix, text in _PREFIX_REFUSALS.items() if arch.startswith(prefix)), None
    )
    if refusal:
        raise ModelFileError(f"{header.path} ({_show_key(arch)}) is {refusal}")
    if _integer(header, f"{arch}.pooling_type", tuple(_INTEGERS)):
        raise ModelFileError(
            f"{header.path} is an embedding or reranking model ({_show_key(arch)}.pooling_type is set): it writes no text"
        )
    if header.metadata.get(f"{arch}.attention.causal") is False:
        raise ModelFileError(
            f"{header.path} is no causal model ({_show_key(arch)}.attention.causal is false): "
            "it does not write one token after another"
        )


def _check_numbers(header: GGUFHeader, arch: str) -> None:
    """Check the numbers that a model's shape and memory are computed from."""
    for suffix in ("context_length", "block_count", "embedding_length"):
        key = f"{arch}.{suffix}"
        value = _integer(header, key)
        if value is None:
            raise _missing(header, key)
        if value < 1:
            raise _bad_value(header, key, value, "at least 1")
    layers = int(header.metadata[f"{arch}.block_count"])  # type: ignore[arg-type]  # _integer checked it
    if layers > _MAX_LAYERS:
        raise _bad_value(header, f"{arch}.block_count", layers, f"at most {_MAX_LAYERS}")
    for suffix in (
        "vocab_size",
        "nextn_predict_layers",
        "expert_count",
        "expert_group_count",
        "full_attention_interval",
        "attention.sliding_window",
        "attention.shared_kv_layers",
        "attention.key_length",
        "attention.value_length",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "attention.key_length_swa",
        "attention.value_length_swa",
    ):
        _integer(header, f"{arch}.{suffix}")
    nextn = _integer(header, f"{arch}.nextn_predict_layers") or 0
    if nextn > layers:
        raise _bad_value(header, f"{arch}.nextn_predict_layers", nextn, f"at most block_count, {layers}")
    for suffix in ("attention.head_count", "attention.head_count_kv", "expert_used_count"):
        _check_per_layer(header, f"{arch}.{suffix}", layers)
    _check_experts(header, arch)
    scaling = _string(header, f"{arch}.rope.scaling.type")
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        raise _bad_value(header, f"{arch}.rope.scaling.type", scaling, f"one of {', '.join(_ROPE_SCALINGS)}")


def _check_per_layer(header: GGUFHeader, key: str, layers: int) -> None:
    value = header.metadata.get(key)
    if value is None:
        return
    if not isinstance(value, array.array):
        _integer(header, key)
        return
    if header.types[key] not in _INTEGER_ARRAYS:
        raise _wrong_type(header.path, key, header.types[key], value, "a uint32 or an array of them")
    if len(value) != layers:
        raise ModelFileError(f"{header.path}: {_show_key(key)} has {len(value)} entries for {layers} layers", _AGAIN)
    if min(value) < 0:
        raise _bad_value(header, key, min(value), "at least 0 for every layer")


def _check_experts(header: GGUFHeader, arch: str) -> None:
    """llama.cpp aborts on numbers of experts that do not fit together."""
    experts = _integer(header, f"{arch}.expert_count") or 0
    if experts > _MAX_EXPERTS:
        raise _bad_value(header, f"{arch}.expert_count", experts, f"at most {_MAX_EXPERTS}")
    if arch.startswith("hunyuan") and experts <= 1:
        return
    used = header.metadata.get(f"{arch}.expert_used_count", 0)
    most = max(used) if isinstance(used, array.array) else used
    if not isinstance(most, int) or most > experts or (experts and not most):
        wanted = f"between 1 and expert_count, {experts}" if experts else "0 without expert_count"
        raise _bad_value(header, f"{arch}.expert_used_count", most, wanted)
    groups = _integer(header, f"{arch}.expert_group_count") or 0
    if groups and (groups >= experts or experts % groups):
        raise _bad_value(header, f"{arch}.expert_group_count", groups, f"a divisor of expert_count, {experts}")


def _check_tokenizer(header: GGUFHeader, optional: bool) -> None:
    """Check the vocabulary: present, of the right types, all lengths equal, no text twice, ids inside."""
    model = _string(header, "tokenizer.ggml.model")
    if model is None:
        if optional:
            return
        raise _missing(header, "tokenizer.ggml.model")
    _string(header, "tokenizer.ggml.pre")
    if model in ("none", "no_vocab"):
        return
    key = "tokenizer.ggml.tokens"
    tokens = header.metadata.get(key)
    if tokens is None:
        raise _missing(header, key)
    if not isinstance(tokens, list):
        raise _wrong_type(header.path, key, header.types[key], tokens, "an array of strings")
    if not tokens:
        raise ModelFileError(f"{header.path}: {key} is empty", _AGAIN)
    for key, kinds in (
        ("tokenizer.ggml.token_type", ("array of int32",)),
        ("tokenizer.ggml.scores", ("array of float32", "array of int32")),
    ):
        value = header.metadata.get(key)
        if value is None:
            continue
        if not isinstance(value, array.array) or header.types[key] not in kinds:
            raise _wrong_type(header.path, key, header.types[key], value, f"an {' or '.join(kinds)}")
        if len(value) != len(tokens):
            raise ModelFileError(f"{header.path}: {key} has {len(value)} entries for {len(tokens)} tokens", _AGAIN)
    merges = header.metadata.get("tokenizer.ggml.merges")
    if merges is not None and not isinstance(merges, list):
        raise _wrong_type(
            header.path, "tokenizer.ggml.merges", header.types["tokenizer.ggml.merges"], merges, "an array of strings"
        )
    for key in SPECIAL_TOKEN_KEYS.values():
        token = _integer(header, key)
        if key in _ENDS and token is not None and token >= len(tokens):
            raise _bad_value(header, key, token, f"below the vocabulary's size, {len(tokens)}")
    _check_unique(header, tokens)


def _check_unique(header: GGUFHeader, tokens: list[bytes]) -> None:
    """llama.cpp aborts when two tokens have the same text; empty ones it renames."""
    empty = tokens.count(b"")
    if len(set(tokens)) + max(empty - 1, 0) == len(tokens):
        return
    seen: dict[bytes, int] = {}
    for i, text in enumerate(tokens):
        if text and seen.setdefault(text, i) != i:
            raise ModelFileError(
                f"{header.path}: tokenizer.ggml.tokens has {_show(text.decode('utf-8', 'replace'))} twice, "
                f"as token {seen[text]} and as token {i}",
                "download another conversion",
            )


def _check_parts(headers: Sequence[GGUFHeader]) -> None:
    """Check that the files are the parts of one model, each in its place."""
    first, count = headers[0], len(headers)
    seen: dict[str, GGUFHeader] = {}
    total = _integer(first, "split.tensors.count", tuple(_INTEGERS))
    arch = first.metadata.get("general.architecture")
    layers = first.metadata.get(f"{arch}.block_count")
    width = _norm_widths(first)
    for number, header in enumerate(headers):
        other = f"{header.path} is not part {number + 1} of {first.path}"
        claimed = (_integer(header, "split.no", ("uint16",)), _integer(header, "split.count", ("uint16",)))
        if claimed != (number, count):
            raise ModelFileError(
                f"{other}: split.no is {claimed[0]} and split.count {claimed[1]}, expected {number} and {count}", _AGAIN
            )
        declared = _integer(header, "split.tensors.count", tuple(_INTEGERS))
        if declared != total:
            raise ModelFileError(f"{other}: split.tensors.count is {declared} there and {total} here", _AGAIN)
        for key in ("general.architecture", "general.name"):
            there, here = _string(header, key), _string(first, key)
            if there not in (None, here):
                raise ModelFileError(f"{other}: {key} is {_show(there)} there and {_show(here)} here", _AGAIN)
        if width and _norm_widths(header) - width:
            raise ModelFileError(f"{other}: its layers have another width", _AGAIN)
        for tensor in header.tensors:
            if tensor.name in seen:
                raise ModelFileError(f"{other}: tensor {_show(tensor.name)} is also in {seen[tensor.name].path.name}", _AGAIN)
            seen[tensor.name] = header
            layer = re.match(r"blk\.(\d{1,6})\.", tensor.name)
            if layer and isinstance(layers, int) and int(layer[1]) >= layers:
                raise ModelFileError(f"{other}: it has layer {int(layer[1])} of a model of {layers} layers", _AGAIN)
    if total is not None and total != len(seen):
        raise ModelFileError(
            f"the {count} parts of {first.path} have {len(seen)} tensors together, split.tensors.count says {total}",
            _AGAIN,
        )


def _norm_widths(header: GGUFHeader) -> set[tuple[int, ...]]:
    return {tensor.shape for tensor in header.tensors if tensor.name.endswith(".attn_norm.weight")}
