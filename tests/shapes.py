"""Models of any size as headers alone: GGUF files whose tensor data is a hole in a sparse file.

llama.cpp can be asked what it would allocate for them (`no_alloc`), so that a memory plan can be held against its own numbers
for shapes that no test machine could hold.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from llamaspec.gguf_header import TENSOR_TYPES, _padded
from llamaspec.llama import library, log

_TYPES = {name: (number, block, size) for number, (name, block, size) in TENSOR_TYPES.items()}
Tensor = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True)
class Measured:
    """What llama.cpp says it would allocate, in bytes."""

    weights: int
    cache: int
    compute: int
    output: int


def write_headers(path: Path, arch: str, keys: Mapping[str, Any], tensors: Sequence[Tensor], vocab: int) -> Path:
    """Write a GGUF without tokenizer and without data; shapes in ggml's order (row length first)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {"vocab_size": vocab, **keys}.items():
        full = f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_uint32(full, value)
    writer.add_tokenizer_model("no_vocab")
    end = 0
    for name, shape, kind in tensors:
        number, block, size = _TYPES[kind]
        bytes_ = math.prod(shape) // block * size
        dtype = gguf.GGMLQuantizationType(number)
        # the writer takes a numpy dtype and shape, and the real type besides
        writer.tensors[-1][name] = gguf.gguf_writer.TensorInfo(shape=tuple(reversed(shape)), dtype=dtype, nbytes=bytes_)
        end = _padded(end + bytes_, 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = _padded(path.stat().st_size, 32)
    with path.open("r+b") as file:
        file.truncate(start + end)
    return path


def dense(
    path: Path,
    *,
    arch: str = "llama",
    width: int,
    layers: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    head: int | None = None,
    vocab: int,
    kind: str = "Q4_K",
    tied: bool = False,
    window: int | None = None,
    experts: tuple[int, int, int] | None = None,
    context: int = 131072,
) -> Path:
    """A llama, qwen2, gemma3 or qwen3moe; `experts` is (how many, used per token, width of one)."""
    head = head or width // heads
    keys: dict[str, Any] = {
        "context_length": context,
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": feed_forward,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    if window:
        keys["attention.sliding_window"] = window
    tensors: list[Tensor] = [("token_embd.weight", (width, vocab), kind), ("output_norm.weight", (width,), "F32")]
    if not tied:
        tensors.append(("output.weight", (width, vocab), "Q6_K" if kind == "Q4_K" else kind))
    if experts:
        keys |= {"expert_count": experts[0], "expert_used_count": experts[1], "expert_feed_forward_length": experts[2]}
    for i in range(layers):
        norms = {"attn_norm": width, "ffn_norm": width}
        if arch in ("gemma3", "qwen3moe"):
            norms |= {"attn_q_norm": head, "attn_k_norm": head}
        if arch == "gemma3":
            norms |= {"post_attention_norm": width, "post_ffw_norm": width}
        mats: dict[str, tuple[int, ...]] = {
            "attn_q": (width, heads * head),
            "attn_k": (width, kv_heads * head),
            "attn_v": (width, kv_heads * head),
            "attn_output": (heads * head, width),
        }
        if experts:
            mats |= {
                "ffn_gate_exps": (width, experts[2], experts[0]),
                "ffn_up_exps": (width, experts[2], experts[0]),
                "ffn_down_exps": (experts[2], width, experts[0]),
            }
            tensors.append((f"blk.{i}.ffn_gate_inp.weight", (width, experts[0]), "F32"))
        else:
            mats |= {"ffn_gate": (width, feed_forward), "ffn_up": (width, feed_forward), "ffn_down": (feed_forward, width)}
        tensors += [(f"blk.{i}.{name}.weight", (size,), "F32") for name, size in norms.items()]
        tensors += [(f"blk.{i}.{name}.weight", shape, kind) for name, shape in mats.items()]
        if arch == "qwen2":
            sizes = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}
            tensors += [(f"blk.{i}.attn_{name}.bias", (size,), "F32") for name, size in sizes.items()]
    return write_headers(path, arch, keys, tensors, vocab)


def latent(path: Path) -> Path:
    """DeepSeek-V2-Lite's shape: multi-head latent attention, shared and routed experts."""
    width, heads, rank, rope, nope, value, vocab = 2048, 16, 512, 64, 128, 128, 102400
    keys: dict[str, Any] = {
        "context_length": 163840,
        "embedding_length": width,
        "block_count": 27,
        "feed_forward_length": 10944,
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": value,
        "attention.kv_lora_rank": rank,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": rope,
        "leading_dense_block_count": 1,
        "expert_count": 64,
        "expert_used_count": 6,
        "expert_shared_count": 2,
        "expert_feed_forward_length": 1408,
    }
    kind = "Q4_0"
    tensors: list[Tensor] = [
        ("token_embd.weight", (width, vocab), kind),
        ("output_norm.weight", (width,), "F32"),
        ("output.weight", (width, vocab), "Q6_K"),
    ]
    for i in range(27):
        mats: dict[str, tuple[int, ...]] = {
            "attn_q": (width, heads * (nope + rope)),
            "attn_kv_a_mqa": (width, rank + rope),
            "attn_k_b": (nope, rank, heads),
            "attn_v_b": (rank, value, heads),
            "attn_output": (heads * value, width),
        }
        if i < 1:
            mats |= {"ffn_gate": (width, 10944), "ffn_up": (width, 10944), "ffn_down": (10944, width)}
        else:
            mats |= {
                "ffn_gate_exps": (width, 1408, 64),
                "ffn_up_exps": (width, 1408, 64),
                "ffn_down_exps": (1408, width, 64),
                "ffn_gate_shexp": (width, 2816),
                "ffn_up_shexp": (width, 2816),
                "ffn_down_shexp": (2816, width),
            }
            tensors.append((f"blk.{i}.ffn_gate_inp.weight", (width, 64), "F32"))
        norms = {"attn_norm": width, "attn_kv_a_norm": rank, "ffn_norm": width}
        tensors += [(f"blk.{i}.{name}.weight", (size,), "F32") for name, size in norms.items()]
        tensors += [(f"blk.{i}.{name}.weight", shape, kind) for name, shape in mats.items()]
    return write_headers(path, "deepseek2", keys, tensors, vocab)


def hybrid(path: Path, *, width: int = 2560, layers: int = 32, mtp: bool = True) -> Path:
    """A Qwen3.5 shape: three gated delta net layers to one with attention, an MTP layer behind them."""
    heads, kv_heads, head, feed_forward, vocab = 16, 4, 256, 9216, 248320
    state, groups, ranks, conv = 128, 16, 32, 4
    inner = state * ranks
    keys: dict[str, Any] = {
        "context_length": 262144,
        "embedding_length": width,
        "block_count": layers + mtp,
        "nextn_predict_layers": int(mtp),
        "feed_forward_length": feed_forward,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": conv,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": ranks,
        "ssm.group_count": groups,
    }
    kind = "Q4_K"
    tensors: list[Tensor] = [
        ("token_embd.weight", (width, vocab), kind),
        ("output_norm.weight", (width,), "F32"),
    ]
    for i in range(layers + mtp):
        mats: dict[str, tuple[int, ...]] = {
            "ffn_gate": (width, feed_forward),
            "ffn_up": (width, feed_forward),
            "ffn_down": (feed_forward, width),
        }
        floats: dict[str, tuple[int, ...]] = {"attn_norm.weight": (width,), "post_attention_norm.weight": (width,)}
        if i >= layers or (i + 1) % 4 == 0:
            mats |= {
                "attn_q": (width, heads * head * 2),
                "attn_k": (width, kv_heads * head),
                "attn_v": (width, kv_heads * head),
                "attn_output": (heads * head, width),
            }
            floats |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        else:
            mats |= {
                "attn_qkv": (width, state * groups * 2 + inner),
                "attn_gate": (width, inner),
                "ssm_out": (inner, width),
            }
            floats |= {
                "ssm_conv1d.weight": (conv, state * groups * 2 + inner),
                "ssm_dt.bias": (ranks,),
                "ssm_a": (ranks,),
                "ssm_beta.weight": (width, ranks),
                "ssm_alpha.weight": (width, ranks),
                "ssm_norm.weight": (state,),
            }
        if i >= layers:
            mats["nextn.eh_proj"] = (2 * width, width)
            floats |= {"nextn.enorm.weight": (width,), "nextn.hnorm.weight": (width,)}
        tensors += [(f"blk.{i}.{name}", shape, "F32") for name, shape in floats.items()]
        tensors += [(f"blk.{i}.{name}.weight", shape, kind) for name, shape in mats.items()]
    return write_headers(path, "qwen35", keys, tensors, vocab)


def measure(path: Path, *, n_ctx: int, outputs: int, kind: str = "f16", flash: int = -1, full_window: bool = True) -> Measured:
    """Ask llama.cpp what it would allocate on the CPU."""
    llama = library.load()
    lines: list[str] = []
    callback = llama.llama_log_callback(lambda _level, text, _data: lines.append((text or b"").decode()))
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        params = llama.llama_model_default_params()
        params.no_alloc = True
        params.load_mode = llama.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = False
        params.n_gpu_layers = 0
        model = llama.llama_model_load_from_file(str(path).encode(), params)
        assert model, "".join(lines)
        given = llama.llama_context_default_params()
        given.n_ctx = n_ctx
        given.n_batch = given.n_ubatch = min(512, n_ctx)
        given.n_outputs_max = given.n_outputs_max_per_seq = outputs
        given.flash_attn_type = flash
        given.swa_full = full_window
        given.type_k = given.type_v = getattr(llama, f"GGML_TYPE_{kind.upper()}")
        context = llama.llama_init_from_model(model, given)
        assert context, "".join(lines)
        llama.llama_free(context)
        weights = llama.llama_model_size(model)
        llama.llama_model_free(model)
    finally:
        log.install(llama)
    text = "".join(lines)

    def total(pattern: str) -> int:
        return round(sum(map(float, re.findall(pattern, text))) * 2**20)

    return Measured(
        weights=int(weights),
        cache=total(r"(?:llama_kv_cache|llama_memory_recurrent): size = +([\d.]+) MiB"),
        compute=total(r"sched_reserve: +\w+ compute buffer size = +([\d.]+) MiB"),
        output=total(r"output buffer size = +([\d.]+) MiB"),
    )
