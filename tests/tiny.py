"""Tiny GGUF models with random weights: the whole path, native code included, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

BYTES = [f"<0x{byte:02X}>".encode() for byte in range(256)]
SPECIALS = [b"<unk>", b"<s>", b"</s>", b"<|user|>", b"<|end|>"]
END = 4
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


def letters(count: int) -> list[bytes]:
    """The one-letter tokens a, b, c …"""
    return [chr(ord("a") + i).encode() for i in range(count)]


def write_tiny(
    path: Path,
    *,
    words: Sequence[bytes] = tuple(letters(20)),
    seed: int = 2,
    layers: int = 2,
    width: int = 32,
    sharpness: float = 6.0,
    with_bytes: bool = True,
    template: str | None = TEMPLATE,
    context: int = 512,
    ends: bool = False,
    arch: str = "llama",
    name: str = "tiny",
    mix: tuple[int, float] | None = None,
) -> Path:
    """Write a llama-architecture model.

    Args:
        words: the ordinary tokens, after the special ones (and the 256 byte tokens).
        seed: of the weights.
        sharpness: scale of the output weights: larger makes the next token more certain.
        with_bytes: have byte tokens, so that any text can be tokenized.
        ends: let the end token be written now and then.
        mix: (seed, share): blend the weights of another seed in, to make a draft that is nearly its target.
    """
    tokens = [*SPECIALS, *(BYTES if with_bytes else [BYTES[10]]), *words]
    kinds = [2, 3, 3, 3, 3] + [6] * (256 if with_bytes else 1) + [1] * len(words)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width * 2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // 4)
    _add_vocabulary(writer, tokens, kinds)
    if template is not None:
        writer.add_chat_template(template)
    for tensor_name, shape in _shapes(len(tokens), width, layers):
        writer.add_tensor(tensor_name, _weights(tensor_name, shape, seed, mix, sharpness, ends, len(words)))
    _write(writer)
    return path


def write_recurrent(path: Path, *, words: Sequence[bytes] = tuple(letters(20)), width: int = 32) -> Path:
    """Write a Mamba model: a state instead of a cache, which cannot go back to an earlier token."""
    tokens = [*SPECIALS, *BYTES, *words]
    inner, state, rank = width * 2, 8, 4
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    _add_vocabulary(writer, tokens, [2, 3, 3, 3, 3] + [6] * 256 + [1] * len(words))
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (len(tokens), width)),
        ("output_norm.weight", (width,)),
        ("output.weight", (len(tokens), width)),
    ]
    for i in range(2):
        shapes += [
            (f"blk.{i}.attn_norm.weight", (width,)),
            (f"blk.{i}.ssm_in.weight", (inner * 2, width)),
            (f"blk.{i}.ssm_conv1d.weight", (inner, 4)),
            (f"blk.{i}.ssm_conv1d.bias", (inner,)),
            (f"blk.{i}.ssm_x.weight", (rank + 2 * state, inner)),
            (f"blk.{i}.ssm_dt.weight", (inner, rank)),
            (f"blk.{i}.ssm_dt.bias", (inner,)),
            (f"blk.{i}.ssm_a", (inner, state)),
            (f"blk.{i}.ssm_d", (inner,)),
            (f"blk.{i}.ssm_out.weight", (width, inner)),
        ]
    for name, shape in shapes:
        values = _weights(name, shape, 2, None, 6.0, False, len(words))
        writer.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)
    _write(writer)
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, tokens: list[bytes], kinds: list[int]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0 if kind != 1 else -1.0 for kind in kinds])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(END)
    writer.add_add_space_prefix(False)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(vocab: int, width: int, layers: int) -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (vocab, width)),
        ("output_norm.weight", (width,)),
        ("output.weight", (vocab, width)),
    ]
    for i in range(layers):
        shapes += [
            (f"blk.{i}.attn_norm.weight", (width,)),
            (f"blk.{i}.attn_q.weight", (width, width)),
            (f"blk.{i}.attn_k.weight", (width // 2, width)),
            (f"blk.{i}.attn_v.weight", (width // 2, width)),
            (f"blk.{i}.attn_output.weight", (width, width)),
            (f"blk.{i}.ffn_norm.weight", (width,)),
            (f"blk.{i}.ffn_gate.weight", (width * 2, width)),
            (f"blk.{i}.ffn_up.weight", (width * 2, width)),
            (f"blk.{i}.ffn_down.weight", (width, width * 2)),
        ]
    return shapes


def _weights(
    name: str,
    shape: tuple[int, ...],
    seed: int,
    mix: tuple[int, float] | None,
    sharpness: float,
    ends: bool,
    words: int,
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    values = _random(name, shape, seed)
    if mix is not None:
        values = (1 - mix[1]) * values + mix[1] * _random(name, shape, mix[0])
    if name == "output.weight":
        values = values * sharpness
        kept = values[END].copy()
        values[:-words] = 0.0  # against words, whose logits reach several units, the others hardly ever win
        if ends:
            values[END] = kept
    return values.astype(np.float32)


def _random(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    stream = np.random.default_rng([seed, *name.encode()])
    return stream.normal(0.0, 1.0 / np.sqrt(shape[-1]), shape)
