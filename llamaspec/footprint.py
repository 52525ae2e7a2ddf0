"""What a model takes in memory and reads per token, from its header alone.

Counted as llama.cpp (build of llama-cpp-python 0.3.36) allocates it. Weights, caches, states and output buffers are exact
arithmetic, followed from src/llama-model.cpp (load_tensors), src/llama-kv-cache.cpp, src/llama-kv-cache-iswa.cpp,
src/llama-memory-recurrent.cpp with src/llama-hparams.cpp (n_embd_r, n_embd_s), src/llama-context.cpp (output_reserve) and
ggml/src/ggml-cpu/repack.cpp. The compute buffer is what ggml's graph allocator leaves as its peak: here it is a sum of the
tensors that are alive then, fitted to llama.cpp's own numbers for dense, sliding-window, mixture-of-experts, latent-attention
and hybrid shapes (`tests/test_footprint.py` holds it against them).
"""

from __future__ import annotations

import array
import re
from dataclasses import dataclass

from llamaspec.gguf_header import ModelInfo, TensorInfo

BATCH = 512
"""Tokens of one decode at most, as llamaspec sets it: the width of the compute buffer."""

CELL_PADDING = 256
"""llama.cpp rounds a context up to this many tokens (llama_context, GGML_PAD)."""

RUNTIME_BYTES = 10 << 20
"""What the native library takes in a process before it holds a model (measured: 9 to 12 MiB on Linux)."""

_VOCABULARY_ENTRY_BYTES = 120  # of a token or a merge rule in llama.cpp's tables; measured on four models, 110 to 135
_FLOAT = 4
_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_INPUTS = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_ALL_RECURRENT_TOO = frozenset({"falcon-h1"})
# hybrids whose layers without key-value heads are the recurrent ones (load_arch_hparams in src/models/*.cpp)
_RECURRENT_WITHOUT_HEADS = frozenset(
    {
        "bailingmoe3",
        "glm5-next",
        "granitehybrid",
        "jamba",
        "kimi-k3",
        "kimi-linear",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "plamo2",
    }
)
_RECURRENT_BETWEEN = frozenset({"minimax-01", "qwen35", "qwen35moe", "qwen3next", "qwen4exp"})
_ROLLBACK = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "glm5-next",
        "kimi-k3",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen4exp",
    }
)


@dataclass(frozen=True, slots=True)
class ContextShape:
    """How a model's context is made.

    Attributes:
        n_ctx: tokens it holds.
        outputs: rows of logits that one decode may ask for.
        type_k, type_v: the cache's types.
        flash_attention: without it the scores of a whole batch against the whole cache are kept at once.
        full_window: layers with a sliding window keep the whole context, so that any token can be taken back; otherwise the
            window and a batch.
        snapshots: states kept per layer for rolling back, beside the current one; recurrent and hybrid models only.
    """

    n_ctx: int
    outputs: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: bool = True
    full_window: bool = True
    snapshots: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model's memory, in bytes, by what llama.cpp can place apart.

    Attributes:
        input_weights: the token embeddings; they stay in system memory.
        layer_weights: of each layer, MTP layers left out (they are not loaded).
        output_weights: the output projection and norm; 0 where the token embeddings serve for both.
        tied_weights: the token embeddings once more, where the output uses them and is on another device.
        repacked_layers, repacked_output: a second copy of weights on the CPU, in the order its kernels like.
        cache: keys and values of each layer.
        state: recurrent state of each layer.
        compute: the compute buffer of a device that runs layers.
        inputs: the compute buffer of a CPU that only feeds other devices.
        logits: the output buffer when it has grown to `ContextShape.outputs` rows.
        vocabulary: llama.cpp's tables of tokens and merges, about.
    """

    input_weights: int
    layer_weights: tuple[int, ...]
    output_weights: int
    tied_weights: int
    repacked_layers: tuple[int, ...]
    repacked_output: int
    cache: tuple[int, ...]
    state: tuple[int, ...]
    compute: int
    inputs: int
    logits: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """Weights, each counted once."""
        return self.input_weights + sum(self.layer_weights) + self.output_weights


def footprint(model: ModelInfo, shape: ContextShape, repacked: frozenset[str] = frozenset()) -> Footprint:
    """What `model` takes with a context like `shape`.

    Args:
        repacked: the tensor types that the CPU backend of this machine keeps a second, rearranged copy of
            (`llamaspec.llama.devices.repacked_types`); empty for a model wholly on other devices.

    Raises:
        UsageError: there is no such cache type.
    """
    layers = trunk_layers(model)
    layer_weights, layer_repacked = [0] * layers, [0] * layers
    input_weights = output_weights = repacked_output = embeddings = 0
    has_output = False
    for tensor in model.tensors:
        match = _LAYER.match(tensor.name)
        if match:
            if int(match[1]) < layers:
                layer_weights[int(match[1])] += tensor.n_bytes
                layer_repacked[int(match[1])] += _repacked_bytes(tensor, repacked)
        elif tensor.name.startswith(_INPUTS):
            input_weights += tensor.n_bytes
            embeddings += tensor.n_bytes if tensor.name == "token_embd.weight" else 0
        else:
            output_weights += tensor.n_bytes
            repacked_output += _repacked_bytes(tensor, repacked)
            has_output = has_output or tensor.name == "output.weight"
    if not has_output:
        repacked_output += sum(_repacked_bytes(t, repacked) for t in model.tensors if t.name == "token_embd.weight")
    cells = _padded(shape.n_ctx)
    window = cells if shape.full_window else _window_cells(model, cells)
    cache = [0] * layers
    for layer in model.cache_layers(shape.type_k, shape.type_v):
        if layer.index < layers:
            cache[layer.index] = layer.bytes_per_token * (window if layer.windowed else cells)
    state = [0] * layers
    for index in recurrent_layers(model):
        state[index] = state_bytes(model) * (1 + (shape.snapshots if model.architecture in _ROLLBACK else 0))
    masks = _mask_bytes(model, shape, cells, window)
    merges = model.metadata.get("tokenizer.ggml.merges")
    return Footprint(
        input_weights=input_weights,
        layer_weights=tuple(layer_weights),
        output_weights=output_weights,
        tied_weights=0 if has_output else embeddings,
        repacked_layers=tuple(layer_repacked),
        repacked_output=repacked_output,
        cache=tuple(cache),
        state=tuple(state),
        compute=_compute_bytes(model, shape, cells, masks),
        inputs=masks + min(BATCH, cells) * model.embedding_length * _FLOAT,
        logits=shape.outputs * model.vocab_size * _FLOAT,
        vocabulary=(len(model.tokens) + (len(merges) if isinstance(merges, list) else 0)) * _VOCABULARY_ENTRY_BYTES,
    )


# --- what is read


def read_bytes(model: ModelInfo) -> tuple[tuple[int, ...], int]:
    """Bytes of weights that one token reads: of each layer, and outside them (output projection, one embedding row).

    Of a mixture of experts, the experts a token uses.
    """
    layers = trunk_layers(model)
    by_layer = [0.0] * layers
    outside = 0.0
    has_output = any(tensor.name == "output.weight" for tensor in model.tensors)
    share = model.expert_used_count / model.expert_count if model.expert_count else 1.0
    for tensor in model.tensors:
        match = _LAYER.match(tensor.name)
        if match:
            if int(match[1]) < layers:
                by_layer[int(match[1])] += tensor.n_bytes * (share if "_exps" in tensor.name else 1.0)
        elif tensor.name.startswith(_INPUTS) and (has_output or tensor.name != "token_embd.weight"):
            outside += tensor.n_bytes / max(tensor.shape[-1], 1)
        else:
            outside += tensor.n_bytes
    return tuple(round(size) for size in by_layer), round(outside)


def cache_read_bytes(model: ModelInfo, tokens: int, type_k: str = "f16", type_v: str = "f16") -> int:
    """Bytes of keys, values and states that one token reads when the context holds `tokens`."""
    window = model.sliding_window or tokens
    keys = sum(
        layer.bytes_per_token * (min(window, tokens) if layer.windowed else tokens)
        for layer in model.cache_layers(type_k, type_v)
    )
    return keys + state_bytes(model) * len(recurrent_layers(model))


# --- the shape of a model


def trunk_layers(model: ModelInfo) -> int:
    """Layers without the MTP ones, which llamaspec does not load."""
    return model.block_count - model.nextn_layers or model.block_count


def recurrent_layers(model: ModelInfo) -> tuple[int, ...]:
    """The layers that keep a recurrent state."""
    arch, layers = model.architecture, trunk_layers(model)
    if arch in _RECURRENT or arch in _ALL_RECURRENT_TOO:
        return tuple(range(layers))
    if arch in _RECURRENT_BETWEEN:
        attention = {layer.index for layer in model.cache_layers()}
        return tuple(layer for layer in range(layers) if layer not in attention)
    if arch in _RECURRENT_WITHOUT_HEADS:
        heads, feed = _per_layer(model, "attention.head_count_kv"), _per_layer(model, "feed_forward_length")
        alone = arch.startswith("nemotron_h")  # its feed-forward blocks are layers of their own
        return tuple(i for i in range(layers) if not heads[i] and not (alone and feed[i]))
    return ()


def can_roll_back(model: ModelInfo) -> bool:
    """Whether the last tokens of a context can be taken back, which drafting needs."""
    return not recurrent_layers(model)


def state_bytes(model: ModelInfo) -> int:
    """Bytes of one layer's recurrent state (llama_hparams::n_embd_r and n_embd_s, in float32)."""
    width, heads = model.embedding_length, max(model.head_count, 1)
    kernel = _number(model, "ssm.conv_kernel")
    if head := _number(model, "wkv.head_size"):
        return (_number(model, "token_shift_count", 2) * width + width * head) * _FLOAT
    if length := _number(model, "shortconv.l_cache"):
        return width * (length - 1) * _FLOAT
    if head := _number(model, "kda.head_dim"):
        return (3 * ((kernel or 4) - 1) * heads * head + head * head * heads) * _FLOAT
    if model.architecture == "minimax-01":
        head = _number(model, "attention.key_length")
        return head * head * heads * _FLOAT
    inner, size = _number(model, "ssm.inner_size"), _number(model, "ssm.state_size")
    convolution = max(kernel - 1, 0) * (inner + 2 * _number(model, "ssm.group_count") * size)
    return (convolution + size * inner) * _FLOAT


def _compute_bytes(model: ModelInfo, shape: ContextShape, cells: int, masks: int) -> int:
    """The most that is alive at once: in a feed-forward block, in attention without flash attention, or at the output."""
    tokens = min(BATCH, cells)
    row = tokens * _FLOAT
    hidden = model.embedding_length * row
    heads = model.head_count
    head = _number(model, "attention.key_length") or model.embedding_length // max(heads, 1)
    query = heads * head * row
    keys = 2 * model.head_count_kv * head * row
    feed = max((t.shape[1] for t in model.tensors if re.search(r"ffn_(up|gate)\.weight$", t.name)), default=0) * row
    peaks = [3 * feed + 3 * hidden + query]
    experts = max((t.shape[1] for t in model.tensors if re.search(r"ffn_(up|gate)_exps\.weight$", t.name)), default=0)
    if experts:
        used = model.expert_used_count
        peaks.append(used * (2 * hidden + experts * row) + 3 * hidden)
    if not shape.flash_attention:
        peaks.append(cells * heads * row + 3 * hidden + 2 * query + keys)
    if inner := _number(model, "ssm.inner_size"):
        peaks.append(5 * inner * row + 3 * hidden)
    output = shape.outputs * model.vocab_size * _FLOAT + hidden
    return max(masks + max(peaks), output)


def _mask_bytes(model: ModelInfo, shape: ContextShape, cells: int, window: int) -> int:
    """The attention masks of a batch: one for the whole context, one for the window; half as wide with flash attention."""
    kinds = {layer.windowed for layer in model.cache_layers()}
    width = sum(window if windowed else cells for windowed in kinds | ({False} if True in kinds else set()))
    return width * min(BATCH, cells) * (2 if shape.flash_attention else _FLOAT)


def _window_cells(model: ModelInfo, cells: int) -> int:
    return _padded(min(cells, (model.sliding_window or cells) + BATCH))


def _repacked_bytes(tensor: TensorInfo, types: frozenset[str]) -> int:
    """Matrices whose rows come in eights; of stacked ones only experts (ggml_repack_get_optimal_repack_type)."""
    if tensor.type not in types or len(tensor.shape) < 2 or tensor.shape[1] % 8:
        return 0
    return tensor.n_bytes if len(tensor.shape) == 2 or "_exps" in tensor.name else 0


def _per_layer(model: ModelInfo, suffix: str) -> list[int]:
    value = model.metadata.get(f"{model.architecture}.{suffix}")
    if isinstance(value, array.array):
        return [int(number) for number in value]
    return [value if isinstance(value, int) else 0] * model.block_count


def _number(model: ModelInfo, suffix: str, default: int = 0) -> int:
    value = model.metadata.get(f"{model.architecture}.{suffix}", default)
    return value if isinstance(value, int) else default


def _padded(tokens: int) -> int:
    return -(-tokens // CELL_PADDING) * CELL_PADDING
