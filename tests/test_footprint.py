"""A model's memory, predicted from its header, against what llama.cpp says it allocates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamaspec.bench.demo import demo_model
from llamaspec.footprint import BATCH, ContextShape, cache_read_bytes, can_roll_back, footprint, read_bytes, trunk_layers
from llamaspec.gguf_header import read_model
from llamaspec.llama import context, devices, log
from llamaspec.llama.cancel import CancelFlag
from llamaspec.llama.context import Context, ContextOptions
from llamaspec.llama.model import Model, Placement
from tests import shapes
from tests.tiny import write_recurrent, write_tiny

Writer = Callable[[Path], Path]

SHAPES: dict[str, Writer] = {
    "llama-8b": functools.partial(shapes.dense, width=4096, layers=32, feed_forward=14336, heads=32, kv_heads=8, vocab=128256),
    "qwen2-32b": functools.partial(
        shapes.dense, arch="qwen2", width=5120, layers=64, feed_forward=27648, heads=40, kv_heads=8, vocab=152064
    ),
    "gemma3-27b": functools.partial(
        shapes.dense,
        arch="gemma3",
        width=5376,
        layers=62,
        feed_forward=21504,
        heads=32,
        kv_heads=16,
        head=128,
        vocab=262144,
        tied=True,
        window=1024,
    ),
    "qwen3-30b-a3b": functools.partial(
        shapes.dense,
        arch="qwen3moe",
        width=2048,
        layers=48,
        feed_forward=6144,
        heads=32,
        kv_heads=4,
        head=128,
        vocab=151936,
        experts=(128, 8, 768),
    ),
    "deepseek-v2-lite": shapes.latent,
    "qwen3.5": shapes.hybrid,
    "mamba": write_recurrent,
    "tiny": write_tiny,
}


@pytest.fixture(scope="module", params=SHAPES)
def shaped(request: pytest.FixtureRequest, models: Path) -> Path:
    return SHAPES[request.param](models / f"shape-{request.param}.gguf")


@pytest.mark.parametrize("n_ctx", [700, 4096, 32768])
@pytest.mark.parametrize(("kind", "flash"), [("f16", True), ("q8_0", True), ("f16", False)])
def test_llama_cpp_agrees(shaped: Path, n_ctx: int, kind: str, flash: bool) -> None:
    model = read_model(shaped)
    if kind != "f16" and model.embedding_length < 64:
        pytest.skip("heads too small for a quantized cache")
    for full_window in {True, model.sliding_window is None}:
        real = shapes.measure(shaped, n_ctx=n_ctx, outputs=33, kind=kind, flash=-1 if flash else 0, full_window=full_window)
        ours = footprint(model, ContextShape(n_ctx, 33, kind, kind, flash, full_window))
        cache = sum(ours.cache) + sum(ours.state)
        mtp = sum(t.n_bytes for t in model.tensors if t.name.startswith(f"blk.{trunk_layers(model)}."))
        assert ours.weights == real.weights - mtp
        assert cache == pytest.approx(real.cache, abs=2**14)
        predicted, taken = ours.weights + cache + ours.compute, real.weights - mtp + real.cache + real.compute
        assert predicted == pytest.approx(taken, rel=0.03, abs=2**18)
        assert ours.logits // 33 == pytest.approx(real.output, abs=2**14)


@pytest.mark.parametrize("n_ctx", [2048, 8192])
def test_the_compute_buffer_alone(models: Path, n_ctx: int) -> None:
    for name, write in SHAPES.items():
        path = write(models / f"compute-{name}.gguf")
        if path.stat().st_size < 2**30:
            continue
        real = shapes.measure(path, n_ctx=n_ctx, outputs=1)
        assert footprint(read_model(path), ContextShape(n_ctx)).compute == pytest.approx(real.compute, rel=0.12), name


@pytest.mark.parametrize(("n_ctx", "kind"), [(1024, "f16"), (4096, "q8_0"), (8192, "f16")])
def test_a_real_model_in_memory(n_ctx: int, kind: Any) -> None:
    try:
        info = read_model(demo_model())
    except FileNotFoundError as error:
        pytest.skip(str(error))
    buffers = log.Buffers()
    model = Model(info, Placement(gpu_layers=0))
    held = Context(model, ContextOptions(n_ctx, 33, 1, type_k=kind, type_v=kind), CancelFlag())
    sizes = buffers.sizes()
    held.close()
    ours = footprint(info, ContextShape(n_ctx, 33, kind, kind), devices.repacked_types())
    predicted = ours.weights + sum(ours.repacked_layers) + ours.repacked_output + sum(ours.cache) + ours.compute
    real = sum(sum(places.values()) for part, places in sizes.items() if part != "output")
    assert predicted == pytest.approx(real, rel=0.03)
    assert sum(ours.cache) == pytest.approx(sizes["KV"]["CPU"], abs=2**14)


def test_repacked_weights_are_what_llama_cpp_copies(models: Path) -> None:
    types = devices.repacked_types()
    if "Q4_0" not in types:
        pytest.skip("this build repacks nothing")
    path = shapes.dense(
        models / "repacked.gguf", width=64, layers=2, feed_forward=128, heads=4, kv_heads=2, vocab=264, kind="Q4_0", tied=True
    )
    info = read_model(path)
    buffers = log.Buffers()
    Model(info, Placement(gpu_layers=0)).close()
    ours = footprint(info, ContextShape(256), types)
    assert sum(ours.repacked_layers) + ours.repacked_output == pytest.approx(
        buffers.sizes()["model"].get("CPU_REPACK", 0), abs=2**14
    )


def test_experts_are_read_by_their_share(models: Path) -> None:
    path = SHAPES["qwen3-30b-a3b"](models / "experts.gguf")
    model = read_model(path)
    layers, outside = read_bytes(model)
    assert sum(layers) + outside < model.tensor_bytes / 7
    assert outside < sum(t.n_bytes for t in model.tensors if t.name.startswith(("output", "token_embd")))


def test_a_window_bounds_what_is_read(models: Path) -> None:
    model = read_model(SHAPES["gemma3-27b"](models / "window.gguf"))
    near, far = cache_read_bytes(model, 1024), cache_read_bytes(model, 4096)
    everywhere = [layer for layer in model.cache_layers() if not layer.windowed]
    assert len(everywhere) == 10
    assert far - near == 3072 * sum(layer.bytes_per_token for layer in everywhere)


def test_who_can_roll_back(models: Path, target: Path) -> None:
    assert can_roll_back(read_model(target))
    assert not can_roll_back(read_model(shapes.hybrid(models / "rollback.gguf")))


def test_the_batch_is_the_one_contexts_have() -> None:
    assert BATCH == context.BATCH


@pytest.mark.parametrize(
    ("arch", "keys", "everywhere"),
    [
        ("gemma2", {}, [1, 3, 5, 7]),
        ("gemma3", {"attention.sliding_window": 512}, [5]),
        ("gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": 3}, [2, 5]),
        ("gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": [1, 0, 1, 1, 1, 1, 1, 1]}, [1]),
        ("gpt-oss", {"attention.sliding_window": 128}, [1, 3, 5, 7]),
        ("cohere2moe", {"attention.sliding_window": 4096}, [0, 4]),
        ("qwen2", {"attention.sliding_window": 4096}, list(range(8))),
        ("gemma3", {}, list(range(8))),
    ],
)
def test_which_layers_have_a_window(models: Path, arch: str, keys: dict[str, Any], everywhere: list[int]) -> None:
    base = {
        "context_length": 8192,
        "embedding_length": 64,
        "block_count": 8,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    path = shapes.write_headers(models / "windows.gguf", arch, base | keys, [("token_embd.weight", (64, 32), "F32")], 32)
    assert [layer.index for layer in read_model(path).cache_layers() if not layer.windowed] == everywhere
