"""Models written on the spot: the shapes of real ones, random weights in Q4_K, no download.

    python -m llamaspec.bench.gpu.models FOLDER 7b 27b

Each size gives a target and drafts. A draft is the target's first layers; the target's other layers have output projections of
zero, so that they cost what they cost and change nothing: the draft agrees with the target wherever their kernels round alike.
A "noisy" target has small output projections there instead: it disagrees with the same draft now and then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import gguf
import numpy as np
from numpy.typing import NDArray

BLOCK = 256
Q4_K_BYTES, Q6_K_BYTES = 144, 210
ALIGNMENT = 32
CHUNK_BLOCKS = 1 << 18
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama's shape."""

    width: int
    layers: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocab: int


SHAPES = {
    "tiny": Shape(width=256, layers=8, feed_forward=512, heads=4, kv_heads=2, vocab=512),
    "7b": Shape(width=4096, layers=32, feed_forward=14336, heads=32, kv_heads=8, vocab=32000),
    "27b": Shape(width=5376, layers=62, feed_forward=21504, heads=42, kv_heads=14, vocab=32000),
}


def q4_k(blocks: int, deviation: float, stream: np.random.Generator) -> Bytes:
    """Random Q4_K blocks of 256 weights with mean 0 and this standard deviation; 0 makes them all exactly zero.

    A block (ggml-common.h, block_q4_K) is two half floats d and dmin, eight 6-bit scales and mins in 12 bytes, and 4-bit
    numbers q; a weight is d * scale * q - dmin * min. Every scale and min is 32 here, dmin is 7.5 d, and q uniform in 0 to 15.
    """
    data = np.zeros((blocks, Q4_K_BYTES), np.uint8)
    if deviation:
        scale = deviation / (32 * np.sqrt((16**2 - 1) / 12))
        data[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
        data[:, 4:12] = 0xA0  # 32 in the low six bits, the upper bits of another 32 above them
        data[:, 16:] = stream.integers(0, 256, (blocks, 128), np.uint8)
    return data.reshape(-1)


def q6_k(blocks: int, deviation: float, stream: np.random.Generator) -> Bytes:
    """Random Q6_K blocks (block_q6_K: 128 low and 64 high bytes of q, 16 scales, d); a weight is d * scale * (q - 32)."""
    data = np.zeros((blocks, Q6_K_BYTES), np.uint8)
    data[:, :192] = stream.integers(0, 256, (blocks, 192), np.uint8)
    data[:, 192:208] = 32
    scale = deviation / (32 * np.sqrt((64**2 - 1) / 12))
    data[:, 208:] = np.array([scale], np.float16).view(np.uint8)
    return data.reshape(-1)


def write_model(path: Path, shape: Shape, *, layers: int | None = None, awake: int | None = None, noise: float = 0.0) -> Path:
    """Write one model.

    Args:
        layers: of them, the first ones; all by default.
        awake: layers whose output counts in full; all by default.
        noise: how much of the usual deviation the output projections of the others have.
    """
    layers = shape.layers if layers is None else layers
    awake = layers if awake is None else awake
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_file_type(15)
    _add_vocabulary(writer, shape.vocab)
    tensors = list(_tensors(shape, layers, awake, noise))
    for name, size, kind, _ in tensors:
        dtype = {"Q4_K": gguf.GGMLQuantizationType.Q4_K, "Q6_K": gguf.GGMLQuantizationType.Q6_K}.get(kind)
        bytes_ = _bytes(size, kind)
        writer.add_tensor_info(name, tuple(reversed(size)), np.dtype(np.float32), bytes_, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
        for name, size, kind, deviation in tensors:
            for piece in _data(name, size, kind, deviation):
                file.write(piece.tobytes())
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
    return path


def _tensors(shape: Shape, layers: int, awake: int, noise: float) -> Iterator[tuple[str, tuple[int, ...], str, float]]:
    """Name, shape (row length first), type, deviation."""
    width, feed = shape.width, shape.feed_forward
    kv = width // shape.heads * shape.kv_heads
    yield "token_embd.weight", (width, shape.vocab), "Q4_K", 1.0
    yield "output_norm.weight", (width,), "F32", 0.0
    yield "output.weight", (width, shape.vocab), "Q6_K", 6 / np.sqrt(width)
    for i in range(layers):
        share = 1.0 if i < awake else noise
        yield f"blk.{i}.attn_norm.weight", (width,), "F32", 0.0
        yield f"blk.{i}.attn_q.weight", (width, width), "Q4_K", 1 / np.sqrt(width)
        yield f"blk.{i}.attn_k.weight", (width, kv), "Q4_K", 1 / np.sqrt(width)
        yield f"blk.{i}.attn_v.weight", (width, kv), "Q4_K", 1 / np.sqrt(width)
        yield f"blk.{i}.attn_output.weight", (width, width), "Q4_K", share / np.sqrt(width)
        yield f"blk.{i}.ffn_norm.weight", (width,), "F32", 0.0
        yield f"blk.{i}.ffn_gate.weight", (width, feed), "Q4_K", 1 / np.sqrt(width)
        yield f"blk.{i}.ffn_up.weight", (width, feed), "Q4_K", 1 / np.sqrt(width)
        yield f"blk.{i}.ffn_down.weight", (feed, width), "Q4_K", share / np.sqrt(feed)


def _data(name: str, size: tuple[int, ...], kind: str, deviation: float) -> Iterator[NDArray[np.generic]]:
    """The tensor's bytes in pieces; the same name gives the same weights in every model."""
    if kind == "F32":
        yield np.ones(size, np.float32)
        return
    stream = np.random.default_rng([7, *name.encode()])
    blocks = int(np.prod(size)) // BLOCK
    make = q4_k if kind == "Q4_K" else q6_k
    for start in range(0, blocks, CHUNK_BLOCKS):
        yield make(min(CHUNK_BLOCKS, blocks - start), deviation, stream)


def _bytes(size: tuple[int, ...], kind: str) -> int:
    count = int(np.prod(size))
    return count * 4 if kind == "F32" else count // BLOCK * (Q4_K_BYTES if kind == "Q4_K" else Q6_K_BYTES)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Bytes and numbered words; the end token is one that random weights are as unlikely to choose as any other."""
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    tokens += [f" w{i}".encode() for i in range(size - len(tokens))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (size - 259)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_pair(folder: Path, name: str, part: float = 0.1, noise: float = 0.0) -> tuple[Path, Path]:
    """A target and a draft with about `part` of its layers. Files that are there already are kept."""
    shape = SHAPES[name]
    few = max(1, round(shape.layers * part))
    target = folder / f"{name}-{few}of{shape.layers}{'-noisy' if noise else ''}.gguf"
    draft = folder / f"{name}-draft{few}.gguf"
    if not target.exists():
        write_model(target, shape, awake=few, noise=noise)
    if not draft.exists():
        write_model(draft, shape, layers=few)
    return target, draft


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("sizes", nargs=-1, required=True, type=click.Choice(list(SHAPES)))
@click.option(
    "--part", "parts", type=float, multiple=True, default=(0.1,), show_default=True, help="The draft's share of layers."
)
@click.option(
    "--noise", type=float, default=0.0, show_default=True, help="Let the target disagree with its draft now and then."
)
def main(folder: Path, sizes: tuple[str, ...], parts: tuple[float, ...], noise: float) -> None:
    """Write a target and a draft of each size; prints their paths, a pair to a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for size in sizes:
        for part in parts:
            click.echo(" ".join(map(str, write_pair(folder, size, part, noise))))


if __name__ == "__main__":
    main()
