"""The GGUF header reader: what it reads, and what it refuses, by which sentence."""

from __future__ import annotations

import array
import ctypes
import dataclasses
import importlib
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.errors import ModelFileError, NotFoundError, UsageError
from llamaspec.gguf_header import (
    FILE_TYPES,
    SPECIAL_TOKEN_KEYS,
    TENSOR_TYPES,
    GGUFHeader,
    HeaderIncomplete,
    ModelInfo,
    model_from_headers,
    parse_header,
    part_paths,
    read_header,
    read_model,
)

NUMBERS = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<b"),
    "u64": (10, "<Q"),
    "i64": (11, "<q"),
    "f64": (12, "<d"),
}
Meta = dict[str, tuple[str, Any]]
Tensor = tuple[str, tuple[int, ...], int, int]  # name, shape, type, bytes

TOKENS = [b"<unk>", b"<s>", b"</s>", b"a", b"b", b"c"]
BASE: Meta = {
    "general.architecture": ("str", "llama"),
    "general.name": ("str", "Tiny"),
    "llama.context_length": ("u32", 128),
    "llama.block_count": ("u32", 2),
    "llama.embedding_length": ("u32", 8),
    "llama.attention.head_count": ("u32", 4),
    "llama.attention.head_count_kv": ("u32", 2),
    "tokenizer.ggml.model": ("str", "llama"),
    "tokenizer.ggml.tokens": ("[str]", TOKENS),
    "tokenizer.ggml.token_type": ("[i32]", [2, 3, 3, 1, 1, 1]),
    "tokenizer.ggml.scores": ("[f32]", [0.0] * 6),
    "tokenizer.ggml.bos_token_id": ("u32", 1),
    "tokenizer.ggml.eos_token_id": ("u32", 2),
}
TENSORS: list[Tensor] = [
    ("token_embd.weight", (8, 6), 0, 192),
    ("blk.0.attn_norm.weight", (8,), 0, 32),
    ("blk.1.attn_norm.weight", (8,), 0, 32),
    ("output.weight", (32, 3), 8, 102),
]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def encode(kind: str, value: Any) -> bytes:
    if kind == "str":
        return struct.pack("<I", 8) + text(value)
    if kind == "[str]":
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)
    if kind.startswith("["):
        number, form = NUMBERS[kind[1:-1]]
        return struct.pack("<IIQ", 9, number, len(value)) + b"".join(struct.pack(form, item) for item in value)
    number, form = NUMBERS[kind]
    return struct.pack("<I", number) + struct.pack(form, value)


def build(meta: Meta = BASE, tensors: list[Tensor] = TENSORS, version: int = 3, alignment: int = 32) -> bytes:
    """A whole file, byte by byte."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(meta))
    for key, (kind, value) in meta.items():
        head += text(key) + encode(kind, value)
    offset = 0
    for name, shape, kind_number, size in tensors:
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind_number, offset)
        offset += -(-size // alignment) * alignment
    if not tensors:
        return head
    head += bytes(-len(head) % alignment)
    body = b"".join(bytes(size) + bytes(-size % alignment) for _, _, _, size in tensors[:-1])
    return head + body + bytes(tensors[-1][3])


def changed(**values: Any) -> Meta:
    """BASE with keys replaced (a dot is written __); None removes one."""
    meta = dict(BASE)
    for name, value in values.items():
        key = name.replace("__", ".")
        meta.pop(key, None)
        if value is not None:
            meta[key] = value
    return meta


def parse(data: bytes) -> GGUFHeader:
    return parse_header(data, len(data), "x.gguf")


def model(meta: Meta = BASE, tensors: list[Tensor] = TENSORS) -> ModelInfo:
    return model_from_headers([parse(build(meta, tensors))])


def refusal(act: Callable[[], object], error: type[Exception] = ModelFileError) -> str:
    """The message of the error that `act` raises."""
    with pytest.raises(error) as caught:
        act()
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- reading --------------------------------------------------------------------------------------------------------


def test_reads_what_gguf_writes(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("Qwen2.5 Coder 0.5B")
    writer.add_license("apache-2.0")
    writer.add_context_length(1024)
    writer.add_block_count(3)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv([2, 0, 1])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["!", "é", "<|im_end|>"])
    writer.add_token_types([1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_chat_template([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    writer.add_float32("qwen2.rope.freq_base", 1e6)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_tensor("token_embd.weight", np.zeros((3, 64), dtype=np.float32))
    quantized = gguf.quants.quantize(np.zeros((3, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    info = read_model(path)
    assert (info.architecture, info.name, info.licence) == ("qwen2", "Qwen2.5 Coder 0.5B", "apache-2.0")
    assert (info.context_length, info.block_count, info.embedding_length) == (1024, 3, 64)
    assert (info.head_count, info.head_count_kv) == (4, 2)
    assert info.quantization == "Q8_0"
    assert info.family == info.named_family == "Qwen2.5"
    assert info.tokens == [b"!", "é".encode(), b"<|im_end|>"]
    assert info.metadata["tokenizer.ggml.token_type"] == array.array("i", [1, 1, 3])
    assert info.metadata["tokenizer.ggml.add_bos_token"] is False
    assert info.metadata["qwen2.rope.freq_base"] == 1e6
    assert info.headers[0].types["tokenizer.ggml.merges"] == "array of string"
    assert (info.tokenizer_model, info.tokenizer_pre, info.special_tokens) == ("gpt2", "qwen2", {"eos": 2})
    assert info.chat_template == "D"
    assert info.chat_templates == {"tool_use": "T"}
    assert info.parameters == 2 * 3 * 64
    assert info.tensor_bytes == 3 * 64 * 4 + 3 * 64 // 32 * 34
    assert info.total_bytes == path.stat().st_size
    assert info.files == (path,)
    assert info.split_count == 1
    assert info.has_weights
    assert not info.is_draft_head
    assert [(t.name, t.shape, t.type) for t in info.tensors] == [
        ("token_embd.weight", (64, 3), "F32"),
        ("output.weight", (64, 3), "Q8_0"),
    ]
    reader = gguf.GGUFReader(path)
    assert info.headers[0].data_offset == reader.data_offset
    info.require_runnable()


def test_reads_what_gguf_splits(tmp_path: Path) -> None:
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    writer.add_context_length(16)
    writer.add_block_count(1)
    writer.add_embedding_length(4)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    for name in ("token_embd.weight", "output.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros((2, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    info = read_model(tmp_path / "m-00001-of-00003.gguf")
    assert info.split_count == 3
    assert len(list(info.tensors)) == 3
    assert info.total_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_version_2_and_other_alignments_are_read() -> None:
    assert parse(build(version=2)).version == 2
    meta = changed(general__alignment=("u32", 64))
    header = parse(build(meta, alignment=64))
    assert (header.alignment, header.data_offset % 64) == (64, 0)


def test_every_kind_of_value() -> None:
    meta = dict(BASE)
    for kind, value in {
        "u8": 200, "i8": -3, "u16": 60000, "i16": -4, "u32": 4_000_000_000, "i32": -5, "u64": 2**63, "i64": -(2**40),
        "f32": 0.5, "f64": 0.1, "bool": 1, "str": "é",
    }.items():  # fmt: skip
        meta[f"x.{kind}"] = (kind, value)
        meta[f"x.list.{kind}"] = (f"[{kind}]", [value, value])
    header = parse(build(meta))
    assert header.metadata["x.bool"] is True
    for kind in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64", "str"):
        assert header.metadata[f"x.{kind}"] == meta[f"x.{kind}"][1]
        if kind != "str":
            values = header.metadata[f"x.list.{kind}"]
            assert isinstance(values, array.array)
            assert list(values) == [meta[f"x.{kind}"][1]] * 2
    assert header.metadata["x.list.str"] == ["é".encode()] * 2
    assert (header.types["x.u16"], header.types["x.list.f64"]) == ("uint16", "array of float64")


def test_text_that_is_no_utf8_is_read() -> None:
    assert model(changed(general__name=("str", b"\xff\xfe"))).name == "��"


def test_the_tables_agree_with_gguf() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":
            size = 36  # gguf still says 40; ggml has two half floats and 32 bytes, and never writes it to a file
        assert TENSOR_TYPES[kind.value] == (kind.name, block, size)
    for file_type in gguf.LlamaFileType:
        if file_type.name != "GUESSED":
            assert FILE_TYPES[file_type.value] == file_type.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    known = {value for name, value in vars(gguf.Keys.Tokenizer).items() if name.endswith("_ID")}
    deprecated = {f"tokenizer.ggml.{name}_token_id" for name in ("prefix", "suffix", "middle")}
    assert known - deprecated <= set(SPECIAL_TOKEN_KEYS.values())


def test_the_table_agrees_with_ggml() -> None:
    ggml = importlib.import_module("llama_cpp._ggml").libggml
    ggml.ggml_type_name.restype = ctypes.c_char_p
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    for kind in range(max(TENSOR_TYPES) + 1):
        block = ggml.ggml_blck_size(kind)
        if block == 0:
            assert kind not in TENSOR_TYPES
        else:
            name = ggml.ggml_type_name(kind).decode().upper()
            assert (name, block, ggml.ggml_type_size(kind)) == TENSOR_TYPES[kind]


def test_the_import_is_light() -> None:
    code = "import sys, llamaspec.vocab; print(sorted({'numpy', 'gguf', 'llama_cpp'} & set(sys.modules)))"
    root = Path(__file__).parent.parent
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert output.stdout.strip() == "[]"


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    tokens = [f"token{i}".encode() for i in range(152_000)]
    meta = changed(
        tokenizer__ggml__tokens=("[str]", tokens),
        tokenizer__ggml__token_type=("[i32]", [1] * len(tokens)),
        tokenizer__ggml__scores=None,
        tokenizer__ggml__merges=("[str]", tokens),
    )
    path = tmp_path / "large.gguf"
    path.write_bytes(build(meta))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        assert read_model(path).vocab_size == len(tokens)
        best = min(best, time.perf_counter() - start)
    assert best < 1.0


# --- parts of a buffer ----------------------------------------------------------------------------------------------


def test_a_header_is_read_from_the_first_bytes() -> None:
    data = build()
    whole = parse(data)
    assert parse_header(data[: whole.data_offset], len(data), "x.gguf") == whole
    for view in (bytearray(data), memoryview(data)):
        assert parse_header(view, len(data), "x.gguf") == whole


def test_every_prefix_asks_for_more_and_says_how_much() -> None:
    data = build()
    whole = parse(data)
    size, reads = 0, 0
    while size < whole.data_offset - 31:
        with pytest.raises(HeaderIncomplete, match="goes on past") as caught:
            parse_header(data[:size], len(data), "x.gguf")
        assert size < caught.value.needed <= len(data)
        size = caught.value.needed
        reads += 1
    assert parse_header(data[:size], len(data), "x.gguf") == whole
    assert 0 < reads < 200
    for size in range(whole.data_offset - 31):
        with pytest.raises(HeaderIncomplete):
            parse_header(data[:size], len(data), "x.gguf")


def test_a_long_header_is_read_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaspec.gguf_header._FIRST_READ_BYTES", 16)
    path = tmp_path / "x.gguf"
    path.write_bytes(build())
    assert dataclasses.replace(read_header(path), path=Path("x.gguf")) == parse(build())


# --- damaged files ---------------------------------------------------------------------------------------------------


def test_every_truncation_is_refused() -> None:
    data = build()
    for size in range(len(data)):
        message = refusal(lambda size=size: parse_header(data[:size], size, "x.gguf"))  # type: ignore[misc]
        assert any(words in message for words in ("is cut short", "too short", "is empty")), message


def test_truncated_tensor_data_says_how_much_is_missing() -> None:
    data = build()
    message = refusal(lambda: parse_header(data, len(data) - 1, "x.gguf"))
    assert message == f"x.gguf is cut short: it needs {len(data)} bytes and has {len(data) - 1}"


def survives(data: bytes) -> None:
    """Only a refusal or a model whose every property can be read."""
    try:
        info = model_from_headers([parse(data)])
        part_paths(info.headers[0])
    except ModelFileError as error:
        message = str(error)
    else:
        message = ""
        for name in dir(ModelInfo):
            if not name.startswith("_"):
                getattr(info, name)
        assert info.kv_bytes_per_token() >= 0
    assert "\n" not in message
    assert len(message) < 1000


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(build()) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_never_break_the_reader(changes: list[tuple[int, int]]) -> None:
    data = bytearray(build())
    for at, value in changes:
        data[at] = value
    survives(bytes(data))


def test_every_flipped_bit_is_survived_quickly() -> None:
    data = build()
    start = time.perf_counter()
    for at in range(parse(data).data_offset):
        for bit in (0, 3, 7):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            survives(bytes(flipped))
    assert time.perf_counter() - start < 60


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_survived(tail: bytes) -> None:
    survives(tail)
    survives(b"GGUF\x03\x00\x00\x00" + tail)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(BASE)), st.sampled_from([*sorted(NUMBERS), "str", "[str]", "[i32]", "[f32]", "[bool]"]))
def test_any_type_under_any_key_is_survived(key: str, kind: str) -> None:
    value: Any = {"str": "x", "[str]": [b"x"]}.get(kind, [1] if kind.startswith("[") else 1)
    survives(build({**BASE, key: (kind, value)}))


def test_random_garbage_in_the_counts() -> None:
    rng = random.Random(7)
    data = build()
    for _ in range(2000):
        garbage = bytearray(data)
        at = rng.randrange(8, len(data) - 8)
        garbage[at : at + 8] = struct.pack("<Q", rng.choice((2**63, 2**64 - 1, 2**32, 2**31, rng.getrandbits(64))))
        survives(bytes(garbage))


@pytest.mark.parametrize("count", [2**16, 2**32, 2**63, 2**64 - 1])
def test_huge_counts_cost_nothing(count: int) -> None:
    head = b"GGUF" + struct.pack("<I", 3)
    array_head = head + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<I", 9)
    start = time.perf_counter()
    for data in (
        head + struct.pack("<QQ", count, 0),
        head + struct.pack("<QQ", 0, count),
        head + struct.pack("<QQQ", 0, 1, count) + bytes(64),
        array_head + struct.pack("<IQ", 8, count) + bytes(64),
        array_head + struct.pack("<IQ", 5, count) + bytes(64),
    ):
        refusal(lambda data=data: parse(data))  # type: ignore[misc]
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("kind", [5, 8])
def test_a_huge_header_in_a_huge_file_is_not_waited_for(kind: int) -> None:
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<II", 9, kind)
    if kind == 5:
        message = refusal(lambda: parse_header(data + struct.pack("<Q", 2**36), 2**40, "x.gguf"))
    else:
        message = refusal(lambda: parse_header(data + struct.pack("<QQ", 2**20, 2**36), 2**40, "x.gguf"))
    assert "no header is longer" in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "x.gguf is empty (0 bytes)"),
        (b"GGU", "x.gguf is too short to be a GGUF file (3 bytes)"),
        (b"abc", "x.gguf is too short to be a GGUF file (3 bytes)"),
        (b"GGUF\x03\x00\x00\x00", "x.gguf is too short to be a GGUF file (8 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer (56 bytes)"),
        (b"<!DOCTYPE html><html>", "looks like a web page (HTML)"),
        (b"\n  <HTML><body>", "looks like a web page (HTML)"),
        (b'{"error":"Not found"}', "looks like JSON text"),
        (b"PK\x03\x04" + bytes(20), "looks like a ZIP archive, perhaps a PyTorch checkpoint"),
        (b"\x80\x02}q\x00.", "looks like a Python pickle"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}' + bytes(40), "looks like a safetensors file"),
        (struct.pack("<I", 0x67676D6C) + bytes(20), "the old GGML format (.bin)"),
        (struct.pack("<I", 0x67676D66) + bytes(20), "the old GGML format (.bin)"),
        (struct.pack("<I", 0x67676A74) + bytes(20), "the old GGML format (.bin)"),
        (b"\x1f\x8b\x08" + bytes(20), "looks like a gzip archive"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), "looks like a compressed archive"),
        (b"\x89HDF\r\n\x1a\n", "looks like an HDF5 file"),
        (bytes(100), "starts with zeros"),
        (b"\x01\x02\x03\x04rest", "starts with the bytes 01 02 03 04"),
    ],
)
def test_what_is_no_gguf_file_is_named(data: bytes, words: str) -> None:
    assert words in refusal(lambda: parse(data))


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (1, "GGUF version 1 of 2023"),
        (0x03000000, "a big-endian GGUF file"),
        (0x02000000, "a big-endian GGUF file"),
        (0, "GGUF version 0; versions 2 and 3 are read"),
        (4, "GGUF version 4; versions 2 and 3 are read"),
    ],
)
def test_other_versions_are_named(version: int, words: str) -> None:
    assert words in refusal(lambda: parse(build(version=version)))


def tensors_with(**changes: Any) -> list[Tensor]:
    name, shape, kind, size = TENSORS[0]
    one = {"name": name, "shape": shape, "kind": kind, "size": size, **changes}
    return [(one["name"], one["shape"], one["kind"], one["size"]), *TENSORS[1:]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (build(tensors=[*TENSORS, TENSORS[0]]), "has tensor 'token_embd.weight' twice"),
        (build(tensors=tensors_with(name="n" * 64)), "the name of tensor 0 has 64 bytes"),
        (build(tensors=tensors_with(shape=(1, 1, 1, 1, 48))), "has 5 dimensions"),
        (build(tensors=tensors_with(shape=(0, 4))), "has the shape [0, 4]"),
        (build(tensors=tensors_with(shape=(2**40, 2**40))), "has the shape"),
        (build(tensors=tensors_with(shape=(2**63,))), "has the shape"),
        (build(tensors=tensors_with(kind=4)), "has the type 4, which this llama.cpp does not know"),
        (build(tensors=tensors_with(kind=2)), "rows of 8 elements, not a multiple of Q4_0's 32"),
        (build(tensors=tensors_with(size=160)), "starts at byte 160 of the tensor data, expected 192"),
        (build(tensors=tensors_with(size=224)), "starts at byte 224 of the tensor data, expected 192"),
        (build(changed(general__alignment=("u32", 48))), "general.alignment is 48, not a power of two"),
        (build(changed(general__alignment=("u32", 0))), "general.alignment is 0, not a power of two"),
        (build(changed(general__alignment=("u64", 32))), "general.alignment must be a uint32, and is the uint64 32"),
        (build(changed(general__alignment=("str", "x"))), "general.alignment must be a uint32, and is the string 'x'"),
        (build({**BASE, "": ("u32", 1)}), "key 13 is empty"),
    ],
)  # fmt: skip
def test_damaged_headers_are_refused(data: bytes, words: str) -> None:
    assert words in refusal(lambda: parse(data))


def test_a_key_twice_an_unknown_type_and_nested_arrays_are_refused() -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    entry = text("k") + encode("u32", 1)
    assert "key 1 is 'k' again" in refusal(lambda: parse(head + entry + entry))
    assert "'k' has the unknown type 77" in refusal(lambda: parse(head + text("k") + struct.pack("<IQ", 77, 0)))
    nested = head + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(30)
    assert "'k' is an array of the type 9" in refusal(lambda: parse(nested))


def test_control_characters_of_a_file_are_escaped_in_messages() -> None:
    message = refusal(lambda: model(changed(llama__rope__scaling__type=("str", "\x1b[31m\nred"))))
    assert "\x1b" not in message
    assert r"\x1b[31m\nred" in message


# --- paths -----------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_told_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "qwen2.5-0.5b-q4_k_m.gguf").write_bytes(build())
    with pytest.raises(NotFoundError) as caught:
        read_model(tmp_path / "qwen2.5-0.5b-q4_k_s.gguf")
    assert str(caught.value) == f"there is no file {tmp_path}/qwen2.5-0.5b-q4_k_s.gguf"
    assert caught.value.hint == "in the same folder: qwen2.5-0.5b-q4_k_m.gguf"
    with pytest.raises(NotFoundError) as caught:
        read_model(tmp_path / "nowhere" / "else.gguf")
    assert caught.value.hint is None


def test_a_broken_link_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").symlink_to(tmp_path / "gone")
    message = refusal(lambda: read_model(tmp_path / "x.gguf"), NotFoundError)
    assert message.endswith("x.gguf is a link to a file that is gone")


def test_a_folder_is_told_with_a_file_in_it(tmp_path: Path) -> None:
    assert refusal(lambda: read_model(tmp_path)) == f"{tmp_path} is a folder, not a GGUF file"
    (tmp_path / "m.gguf").write_bytes(build())
    with pytest.raises(ModelFileError) as caught:
        read_model(tmp_path)
    assert caught.value.hint == "name a file in it, such as m.gguf"


@pytest.mark.skipif(os.name != "posix", reason="named pipes are POSIX")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in refusal(lambda: read_model(tmp_path / "pipe"))


def test_an_unreadable_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(build())
    if os.geteuid() == 0:

        def denied(*_: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", denied)
    else:
        path.chmod(0)
    assert refusal(lambda: read_model(path)) == f"{path} cannot be read: permission denied"


@pytest.mark.parametrize("name", ["a\0b.gguf", "n" * 5000])
def test_impossible_names_are_refused(name: str) -> None:
    assert "cannot be read" in refusal(lambda: read_model(name))


def test_messages_name_the_file_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short.gguf").write_bytes(build()[:-1])
    monkeypatch.chdir(tmp_path)
    assert refusal(lambda: read_model("short.gguf")).startswith("short.gguf is cut short: it needs ")


# --- what is no text model -------------------------------------------------------------------------------------------


def of_architecture(arch: str, **values: Any) -> Meta:
    meta = {key.replace("llama.", f"{arch}.", 1) if key.startswith("llama.") else key: v for key, v in BASE.items()}
    meta["general.architecture"] = ("str", arch)
    return {**meta, **{key.replace("__", ".").replace("ARCH", arch): value for key, value in values.items()}}


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"general.type": ("str", "mmproj")}, "a vision or audio projector (mmproj)"),
        ({"general.architecture": ("str", "clip")}, "(clip) is a vision or audio projector (mmproj)"),
        ({"general.type": ("str", "imatrix")}, "an importance matrix"),
        (changed(general__type=("str", "adapter")), "a LoRA adapter"),
        (of_architecture("bert"), "(bert) is an embedding or encoder model: it writes no text"),
        (of_architecture("nomic-bert-moe"), "an embedding or encoder model"),
        (of_architecture("nomic-bert-v9"), "an embedding or encoder model"),
        (of_architecture("jina-bert-v3"), "an embedding or encoder model"),
        (of_architecture("neo-bert"), "an embedding or encoder model"),
        (of_architecture("modern-bert"), "an embedding or encoder model"),
        (of_architecture("eurobert"), "an embedding or encoder model"),
        (of_architecture("t5encoder"), "an embedding or encoder model"),
        (of_architecture("gemma-embedding"), "an embedding or encoder model"),
        (of_architecture("t5"), "an encoder-decoder model"),
        (of_architecture("dream"), "a diffusion model"),
        (of_architecture("llada"), "a diffusion model"),
        (of_architecture("llada-moe"), "a diffusion model"),
        (of_architecture("diffusion-x"), "a diffusion model"),
        (of_architecture("wavtokenizer-dec"), "a speech decoder"),
        (changed(llama__pooling_type=("u32", 3)), "an embedding or reranking model (llama.pooling_type is set)"),
        (changed(llama__attention__causal=("bool", 0)), "no causal model (llama.attention.causal is false)"),
    ],
)
def test_other_kinds_are_refused_by_name(meta: Meta, words: str) -> None:
    message = refusal(lambda: model(meta))
    assert words in message
    assert message.startswith("x.gguf ")


def test_a_causal_model_without_pooling_is_a_model() -> None:
    model(changed(llama__pooling_type=("u32", 0), llama__attention__causal=("bool", 1), general__type=("str", "model")))


def test_a_vocabulary_alone_can_be_read_and_not_run() -> None:
    info = model(tensors=[])
    assert not info.has_weights
    assert info.vocab_size == 6
    assert (info.parameters, info.tensor_bytes) == (0, 0)
    assert refusal(info.require_runnable) == "x.gguf holds a vocabulary and no weights"


@pytest.mark.parametrize("arch", ["eagle3", "dflash", "gemma4-assistant"])
def test_a_draft_head_can_be_read_and_not_run(arch: str) -> None:
    meta = of_architecture(arch)
    for key in list(meta):
        if key.startswith("tokenizer."):
            del meta[key]
    info = model(meta)
    assert info.is_draft_head
    assert f"is a draft head ({arch}), not a model" in refusal(info.require_runnable)


def test_mtp_layers_alone_are_a_draft_head() -> None:
    meta = changed(llama__nextn_predict_layers=("u32", 1))
    assert not model(meta).is_draft_head
    alone = model(meta, [tensor for tensor in TENSORS if not tensor[0].startswith("blk.0.")])
    assert alone.is_draft_head
    assert "is a draft head (MTP layers), not a model" in refusal(alone.require_runnable)


def test_a_model_without_vocabulary_is_read_and_not_run() -> None:
    meta = {key: value for key, value in BASE.items() if not key.startswith("tokenizer.")}
    info = model({**meta, "tokenizer.ggml.model": ("str", "none"), "llama.vocab_size": ("u32", 77)})
    assert (info.tokens, info.vocab_size, info.tokenizer_model) == ([], 77, "none")
    assert "has no vocabulary" in refusal(info.require_runnable)


# --- metadata that must be sane --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"general__architecture": None}, "x.gguf has no general.architecture"),
        ({"general__architecture": ("u32", 3)}, "general.architecture must be a string, and is the uint32 3"),
        ({"general__name": ("u32", 3)}, "general.name must be a string"),
        ({"general__type": ("[str]", [b"x"])}, "general.type must be a string, and is the array of string"),
        ({"llama__context_length": None}, "x.gguf has no llama.context_length"),
        ({"llama__context_length": ("u32", 0)}, "llama.context_length is 0, and must be at least 1"),
        ({"llama__context_length": ("str", "4k")}, "llama.context_length must be a uint32, and is the string '4k'"),
        ({"llama__context_length": ("bool", 1)}, "llama.context_length must be a uint32, and is the bool True"),
        ({"llama__context_length": ("u64", 9)}, "llama.context_length must be a uint32, and is the uint64 9"),
        ({"llama__block_count": None}, "x.gguf has no llama.block_count"),
        ({"llama__block_count": ("i32", -1)}, "llama.block_count must be a uint32, and is the int32 -1"),
        ({"llama__block_count": ("u32", 513)}, "llama.block_count is 513, and must be at most 512"),
        ({"llama__embedding_length": ("f32", 8.0)}, "llama.embedding_length must be a uint32, and is the float32 8.0"),
        ({"llama__nextn_predict_layers": ("u32", 3)}, "llama.nextn_predict_layers is 3, and must be at most"),
        ({"llama__attention__head_count_kv": ("[i32]", [1])}, "head_count_kv has 1 entries for 2 layers"),
        ({"llama__attention__head_count_kv": ("[i32]", [1, -1])}, "head_count_kv is -1, and must be at least 0"),
        ({"llama__attention__head_count": ("[f32]", [1.0, 1.0])}, "head_count must be a uint32 or an array of them"),
        ({"llama__attention__sliding_window": ("str", "x")}, "sliding_window must be a uint32"),
        ({"llama__expert_count": ("u32", 2000)}, "llama.expert_count is 2000, and must be at most 1024"),
        ({"llama__expert_count": ("u32", 8)}, "llama.expert_used_count is 0, and must be between 1 and"),
        ({"llama__expert_used_count": ("u32", 2)}, "llama.expert_used_count is 2, and must be 0 without expert_count"),
        (
            {
                "llama__expert_count": ("u32", 8),
                "llama__expert_used_count": ("u32", 2),
                "llama__expert_group_count": ("u32", 3),
            },
            "llama.expert_group_count is 3, and must be a divisor of expert_count, 8",
        ),
        ({"llama__rope__scaling__type": ("str", "odd")}, "rope.scaling.type is 'odd', and must be one of none"),
        ({"tokenizer__ggml__model": None}, "x.gguf has no tokenizer.ggml.model"),
        ({"tokenizer__ggml__tokens": None}, "x.gguf has no tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__tokens": ("[str]", [])}, "tokenizer.ggml.tokens is empty"),
        ({"tokenizer__ggml__tokens": ("[i32]", [1])}, "tokenizer.ggml.tokens must be an array of strings, and is the"),
        ({"tokenizer__ggml__tokens": ("str", "abc")}, "tokenizer.ggml.tokens must be an array of strings"),
        ({"tokenizer__ggml__token_type": ("[u32]", [1] * 6)}, "token_type must be an array of int32, and is the array"),
        ({"tokenizer__ggml__token_type": ("[i64]", [1] * 6)}, "token_type must be an array of int32"),
        ({"tokenizer__ggml__token_type": ("i32", 1)}, "token_type must be an array of int32"),
        ({"tokenizer__ggml__token_type": ("[i32]", [1] * 5)}, "token_type has 5 entries for 6 tokens"),
        ({"tokenizer__ggml__scores": ("[f64]", [1.0] * 6)}, "scores must be an array of float32 or array of int32"),
        ({"tokenizer__ggml__scores": ("[f32]", [1.0])}, "scores has 1 entries for 6 tokens"),
        ({"tokenizer__ggml__merges": ("[i32]", [1])}, "tokenizer.ggml.merges must be an array of strings"),
        ({"tokenizer__ggml__bos_token_id": ("u32", 6)}, "bos_token_id is 6, and must be below the vocabulary's size"),
        ({"tokenizer__ggml__eos_token_id": ("u32", 2**32 - 1)}, "eos_token_id is 4294967295, and must be below"),
        ({"tokenizer__ggml__eot_token_id": ("u32", 99)}, "eot_token_id is 99, and must be below"),
        ({"tokenizer__ggml__eos_token_id": ("str", "</s>")}, "eos_token_id must be a uint32, and is the string '</s>'"),
        ({"tokenizer__ggml__padding_token_id": ("i32", -1)}, "padding_token_id must be a uint32, and is the int32 -1"),
        ({"tokenizer__ggml__tokens": ("[str]", [*TOKENS[:5], b"a"])}, "'a' twice, as token 3 and as token 5"),
        ({"tokenizer__chat_template": ("u32", 1)}, "tokenizer.chat_template must be a string"),
    ],
)  # fmt: skip
def test_metadata_is_refused_by_key_and_value(values: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: model(changed(**values)))


def test_a_padding_id_outside_the_vocabulary_is_ignored_as_llama_cpp_does() -> None:
    info = model(changed(tokenizer__ggml__padding_token_id=("u32", 6)))
    assert info.special_tokens == {"bos": 1, "eos": 2}


def test_several_empty_tokens_are_fine() -> None:
    tokens = [*TOKENS[:4], b"", b""]
    assert model(changed(tokenizer__ggml__tokens=("[str]", tokens))).tokens == tokens
    doubled = changed(tokenizer__ggml__tokens=("[str]", [*TOKENS[:3], b"", b"", b"<s>"]))
    assert "'<s>' twice, as token 1 and as token 5" in refusal(lambda: model(doubled))


# --- split models ----------------------------------------------------------------------------------------------------


def split(number: int, count: int, total: int = 4, **values: Any) -> Meta:
    keys: Meta = {
        "split.no": ("u16", number),
        "split.count": ("u16", count),
        "split.tensors.count": ("i32", total),
    }
    meta: Meta = {**(BASE if number == 0 else {}), **keys}
    return {**meta, **{key.replace("__", "."): value for key, value in values.items()}}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in three parts."""
    groups = [TENSORS[:1], TENSORS[1:2], TENSORS[2:]]
    paths = [tmp_path / f"m-{number + 1:05d}-of-00003.gguf" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(build(split(number, 3), groups[number]))
    return paths


def test_all_parts_make_one_model(parts: list[Path]) -> None:
    info = read_model(parts[0])
    assert info.files == tuple(parts)
    assert info.total_bytes == sum(part.stat().st_size for part in parts)
    assert [tensor.name for tensor in info.tensors] == [tensor[0] for tensor in TENSORS]
    assert info.parameters == 48 + 8 + 8 + 96
    info.require_runnable()


def test_all_missing_parts_are_named_at_once(parts: list[Path]) -> None:
    parts[1].unlink()
    parts[2].unlink()
    message = refusal(lambda: read_model(parts[0]), NotFoundError)
    assert message == (
        f"{parts[0]} is part 1 of 3, and 2 of the others are not beside it: m-00002-of-00003.gguf, m-00003-of-00003.gguf"
    )


def test_thousands_of_missing_parts_are_not_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-65535.gguf"
    path.write_bytes(build(split(0, 65535)))
    message = refusal(lambda: read_model(path), NotFoundError)
    assert message.endswith("m-00021-of-65535.gguf and 65514 more")


def test_a_later_part_says_which_to_give(parts: list[Path]) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_model(parts[1])
    assert str(caught.value) == f"{parts[1]} is part 2 of 3; a model is named by its first part"
    assert caught.value.hint == f"give {parts[0]}"


def test_a_renamed_part_says_its_name(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ModelFileError) as caught:
        read_model(renamed)
    assert "is part 1 of 3 by its header, but its name does not say so" in str(caught.value)
    assert caught.value.hint == "rename it model-00001-of-00003.gguf"


def test_one_part_of_one_is_a_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "any.gguf"
    path.write_bytes(build(split(0, 1)))
    assert read_model(path).split_count == 1


@pytest.mark.parametrize(
    ("meta", "tensors", "words"),
    [
        (split(2, 3), TENSORS[1:2], "split.no is 2 and split.count 3, expected 1 and 3"),
        (split(1, 4), TENSORS[1:2], "split.no is 1 and split.count 4, expected 1 and 3"),
        ({}, TENSORS[1:2], "split.no is None and split.count None, expected 1 and 3"),
        (split(1, 3, total=5), TENSORS[1:2], "split.tensors.count is 5 there and 4 here"),
        (split(1, 3, general__architecture=("str", "qwen2")), TENSORS[1:2], "general.architecture is 'qwen2' there"),
        (split(1, 3, general__name=("str", "Other")), TENSORS[1:2], "general.name is 'Other' there and 'Tiny' here"),
        (split(1, 3), TENSORS[:1], "tensor 'token_embd.weight' is also in m-00001-of-00003.gguf"),
        (split(1, 3), [("blk.7.ffn_norm.weight", (8,), 0, 32)], "it has layer 7 of a model of 2 layers"),
        (split(1, 3), TENSORS[1:2] + TENSORS[3:], "tensor 'output.weight' is also in m-00002-of-00003.gguf"),
        (split(1, 3), [], "have 3 tensors together, split.tensors.count says 4"),
        (split(1, 3, split__no=("u32", 1)), TENSORS[1:2], "split.no must be a uint16, and is the uint32 1"),
    ],
)
def test_a_part_of_another_model_is_refused(parts: list[Path], meta: Meta, tensors: list[Tensor], words: str) -> None:
    parts[1].write_bytes(build(meta, tensors))
    assert words in refusal(lambda: read_model(parts[0]))


def test_a_part_of_another_width_is_refused(parts: list[Path]) -> None:
    parts[0].write_bytes(build(split(0, 3), TENSORS[:2]))
    parts[1].write_bytes(build(split(1, 3), [("blk.1.attn_norm.weight", (16,), 0, 64)]))
    assert "its layers have another width" in refusal(lambda: read_model(parts[0]))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"split__count": ("str", "3")}, "split.count must be a uint16, and is the string '3'"),
        ({"split__no": ("str", "0")}, "split.no must be a uint16, and is the string '0'"),
        ({"split__no": ("u16", 3)}, "split.no is 3 with split.count 3"),
        ({"split__tensors__count": ("str", "4")}, "split.tensors.count must be an integer, and is the string '4'"),
    ],
)
def test_split_keys_are_checked(parts: list[Path], values: dict[str, Any], words: str) -> None:
    parts[0].write_bytes(build(split(0, 3, **values), TENSORS[:1]))
    assert words in refusal(lambda: read_model(parts[0]))


def test_a_split_model_without_a_number_is_refused(parts: list[Path]) -> None:
    meta = split(0, 3)
    del meta["split.no"]
    parts[0].write_bytes(build(meta, TENSORS[:1]))
    assert "is one of 3 parts, but has no split.no" in refusal(lambda: read_model(parts[0]))


def test_a_cut_part_is_named(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    assert refusal(lambda: read_model(parts[0])).startswith(f"{parts[2]} is cut short: it needs ")


# --- what is derived -------------------------------------------------------------------------------------------------


def test_quantization_from_the_file_type_or_the_tensors() -> None:
    assert model(changed(general__file_type=("u32", 15))).quantization == "Q4_K_M"
    assert model(changed(general__file_type=("u32", 1024 + 7))).quantization == "Q8_0"
    assert model(changed(general__file_type=("u32", 999))).quantization == "F32"
    assert model().quantization == "F32"
    assert model(tensors=[]).quantization == "none"
    mostly = [("a.weight", (256, 9), 12, 9 * 144), ("b.weight", (8,), 0, 32)]
    assert model(tensors=mostly).quantization == "Q4_K"


@pytest.mark.parametrize(
    ("basename", "name", "family"),
    [
        ("Qwen2.5-Coder", "", "Qwen2.5"),
        ("Qwen3", "", "Qwen3"),
        (None, "Qwen3 Next 80B A3B", "Qwen3-Next"),
        (None, "Meta Llama 3.1 8B Instruct", "Llama 3"),
        ("gemma-3", "", "Gemma 3"),
        ("gemma-3n", "", "Gemma 3n"),
        ("DeepSeek-R1-Distill-Qwen", "", "DeepSeek-R1-Distill-Qwen"),
        ("smollm2", "", "SmolLM2"),
        ("gpt-oss", "", "GPT-OSS"),
        (None, "My_Merge", None),
    ],
)
def test_family_from_names(basename: str | None, name: str, family: str | None) -> None:
    info = model(changed(general__basename=basename and ("str", basename), general__name=("str", name) if name else None))
    assert info.named_family == family
    assert info.family == (family or "llama")


def test_name_falls_back_to_the_file() -> None:
    assert model(changed(general__name=None)).name == "x"


def test_numbers_of_experts_and_windows() -> None:
    info = model(
        changed(
            llama__expert_count=("u32", 8),
            llama__expert_used_count=("[u32]", [2, 4]),
            llama__attention__sliding_window=("u32", 512),
            llama__nextn_predict_layers=("u32", 1),
        )
    )
    assert (info.expert_count, info.expert_used_count, info.sliding_window, info.nextn_layers) == (8, 4, 512, 1)
    assert (model().expert_count, model().expert_used_count, model().sliding_window) == (0, 0, None)


def kv(arch: str = "llama", layers: int = 4, **values: Any) -> ModelInfo:
    meta = of_architecture(arch)
    meta[f"{arch}.block_count"] = ("u32", layers)
    meta[f"{arch}.embedding_length"] = ("u32", 128)
    for key, value in values.items():
        meta[f"{arch}.{key.replace('__', '.')}"] = value
    return model(meta)


def test_kv_bytes_of_grouped_heads() -> None:
    assert kv().kv_bytes_per_token() == 4 * 2 * (32 + 32) * 2
    assert kv().kv_bytes_per_token("q8_0", "q8_0") == 4 * 2 * (34 + 34)
    assert kv().kv_bytes_per_token("q8_0", "f16") == 4 * 2 * (34 + 64)
    assert refusal(lambda: kv().kv_bytes_per_token("q9"), UsageError) == "there is no cache type 'q9'"


def test_kv_bytes_of_given_lengths() -> None:
    info = kv(attention__key_length=("u32", 64), attention__value_length=("u32", 96))
    assert info.kv_bytes_per_token() == 4 * 2 * (64 + 96) * 2


def test_kv_bytes_without_kv_heads_named_use_all_heads() -> None:
    meta = changed(llama__attention__head_count_kv=None)
    assert model(meta).kv_bytes_per_token() == 2 * 4 * (2 + 2) * 2


def test_kv_bytes_per_layer() -> None:
    assert kv(attention__head_count_kv=("[u32]", [2, 0, 1, 0])).kv_bytes_per_token() == 3 * (32 + 32) * 2


def test_kv_bytes_leave_mtp_layers_out() -> None:
    assert kv(nextn_predict_layers=("u32", 1)).kv_bytes_per_token() == 3 * 2 * (32 + 32) * 2


def test_kv_bytes_of_latent_attention_are_keys_only() -> None:
    info = kv(
        "deepseek2",
        attention__head_count_kv=("u32", 1),
        attention__key_length=("u32", 576),
        attention__value_length=("u32", 512),
        attention__key_length_mla=("u32", 192),
        attention__value_length_mla=("u32", 128),
    )
    assert info.kv_bytes_per_token() == 4 * 576 * 2


@pytest.mark.parametrize("arch", ["mamba", "mamba2", "rwkv6", "rwkv7"])
def test_kv_bytes_of_recurrent_models_are_none(arch: str) -> None:
    assert kv(arch).kv_bytes_per_token() == 0


def test_kv_bytes_of_hybrids_count_attention_layers() -> None:
    layer = 2 * (32 + 32) * 2
    assert kv("qwen3next").kv_bytes_per_token() == layer
    assert kv("qwen35", full_attention_interval=("u32", 2)).kv_bytes_per_token() == 2 * layer
    assert kv("qwen35", attention__recurrent_layers=("[bool]", [1, 0, 0, 0])).kv_bytes_per_token() == 3 * layer


def test_kv_bytes_of_shared_and_windowed_layers() -> None:
    layer = 2 * (32 + 32) * 2
    assert kv("gemma4", attention__shared_kv_layers=("u32", 3)).kv_bytes_per_token() == layer
    assert kv("gemma3n", layers=30).kv_bytes_per_token() == 20 * layer
    info = kv(
        "gemma4",
        attention__sliding_window_pattern=("[bool]", [1, 1, 1, 0]),
        attention__key_length_swa=("u32", 16),
        attention__value_length_swa=("u32", 16),
    )
    assert info.kv_bytes_per_token() == 3 * 2 * (16 + 16) * 2 + layer


# --- real files ------------------------------------------------------------------------------------------------------

VOCABULARIES = Path(__file__).parent.parent.parent / "shared" / "data" / "vocab"


@pytest.mark.skipif(not VOCABULARIES.is_dir(), reason="the real vocabularies are not beside the checkout")
def test_real_vocabularies_are_read() -> None:
    sizes = {path.stem.removeprefix("ggml-vocab-"): read_model(path).vocab_size for path in VOCABULARIES.glob("*.gguf")}
    assert sizes == {"deepseek-coder": 32256, "gpt-neox": 50432, "llama-spm": 32000, "mpt": 50432, "phi-3": 32064}
