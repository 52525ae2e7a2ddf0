"""Placing a pair: what goes where, what fits, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llamaspec.errors import OutOfMemoryError
from llamaspec.gguf_header import ModelInfo, read_model
from llamaspec.plan import CPU, GpuRoom, Plan, Room, Wishes, cache_choices, largest_context, place, propose, table
from llamaspec.roofline import Load, Rate, Roofline
from tests import shapes

GIB = 2**30
RAM = Rate(50e9, "measured")
CARD = Rate(1000e9, "specified")


@pytest.fixture(scope="module")
def big(models: Path) -> ModelInfo:
    path = models / "plan-big.gguf"
    return read_model(
        shapes.dense(path, arch="qwen2", width=5120, layers=64, feed_forward=27648, heads=40, kv_heads=8, vocab=152064)
    )


@pytest.fixture(scope="module")
def small(models: Path) -> ModelInfo:
    path = models / "plan-small.gguf"
    return read_model(
        shapes.dense(
            path, arch="qwen2", width=896, layers=24, feed_forward=4864, heads=14, kv_heads=2, vocab=151936, kind="Q8_0"
        )
    )


def room(*gpus_gib: float, ram_gib: float = 64) -> Room:
    cards = tuple(GpuRoom(f"GPU{i}", round(size * GIB), CARD) for i, size in enumerate(gpus_gib))
    return Room(round(ram_gib * GIB), RAM, cards)


def of(plan: Plan, model: str, kind: str, device: str) -> int:
    return sum(p.n_bytes for p in plan.parts if (p.model, p.kind, p.device) == (model, kind, device))


def test_everything_on_one_card(big: ModelInfo, small: ModelInfo) -> None:
    plan = propose(big, small, Wishes(n_ctx=4096), room(32))
    assert plan.fits
    assert (plan.settings.gpu_layers, plan.settings.draft_gpu_layers) == (65, 25)
    assert of(plan, "target", "KV cache", CPU) == 0
    assert of(plan, "target", "KV cache", "GPU0") == 4096 * big.kv_bytes_per_token()
    embeddings = next(t.n_bytes for t in big.tensors if t.name == "token_embd.weight")
    assert of(plan, "target", "weights", CPU) == embeddings
    assert of(plan, "target", "weights", "GPU0") == big.tensor_bytes - embeddings
    assert not plan.notes


def test_layers_left_over_run_on_the_cpu(big: ModelInfo) -> None:
    plan = propose(big, None, Wishes(n_ctx=4096), room(12))
    layers = plan.settings.gpu_layers
    assert layers is not None
    assert 30 < layers < 50
    assert plan.fits
    assert not place(big, None, replace(plan.settings, gpu_layers=layers + 1), plan.room).fits
    # a cache lies with its layer; the output, counted as one, is on the GPU first
    assert of(plan, "target", "KV cache", "GPU0") == (layers - 1) * big.kv_bytes_per_token() * 4096 // 64
    assert any(f"{layers} of 65 layers" in note for note in plan.notes)


def test_the_draft_makes_room_only_where_it_pays(big: ModelInfo, small: ModelInfo) -> None:
    tight = room(20)
    alone = propose(big, None, Wishes(n_ctx=4096), tight)
    assert alone.settings.gpu_layers == 65
    both = propose(big, small, Wishes(n_ctx=4096), tight)
    assert both.fits
    speeds = {
        draft: propose(big, small, Wishes(n_ctx=4096, draft_gpu_layers=draft), tight).roofline().best(0.7)[1]
        * propose(big, small, Wishes(n_ctx=4096, draft_gpu_layers=draft), tight).roofline().tokens_per_second
        for draft in (0, 25)
    }
    assert both.settings.draft_gpu_layers == max(speeds, key=lambda draft: speeds[draft])


def test_two_cards_share_the_layers_and_one_has_the_draft(big: ModelInfo, small: ModelInfo) -> None:
    plan = propose(big, small, Wishes(n_ctx=4096, main_gpu=1), room(16, 16))
    assert plan.settings.gpu_layers == 65
    first, second = (of(plan, "target", "weights", name) for name in ("GPU0", "GPU1"))
    assert first == pytest.approx(second, rel=0.1)
    assert of(plan, "draft", "weights", "GPU0") == 0
    assert of(plan, "draft", "weights", "GPU1") > 0
    whole = propose(big, None, Wishes(n_ctx=4096, split_mode="none", main_gpu=1), room(16, 24))
    assert of(whole, "target", "weights", "GPU0") == 0


def test_the_context_shrinks_to_what_fits(small: ModelInfo) -> None:
    needed = propose(small, None, Wishes(n_ctx=2048), room(ram_gib=64)).used(CPU, mapped=False)
    plan = propose(small, None, Wishes(), Room(needed, RAM))
    assert plan.fits
    assert plan.n_ctx == 2048
    assert plan.notes[0] == "the context is 2048 tokens: more does not fit"
    assert largest_context(plan) == 2048
    assert largest_context(propose(small, None, Wishes(), room())) == small.context_length


def test_what_cannot_fit_is_refused_with_the_table(small: ModelInfo) -> None:
    plan = propose(small, None, Wishes(n_ctx=65536), room(ram_gib=0.5))
    with pytest.raises(OutOfMemoryError, match="GiB too much on CPU for 65536 tokens") as caught:
        plan.require_fit()
    assert "fits, or a smaller cache" in (caught.value.hint or "")
    assert list(caught.value.table) == table(plan)
    hopeless = propose(small, None, Wishes(), Room(2**20, RAM))
    with pytest.raises(OutOfMemoryError) as caught:
        hopeless.require_fit()
    assert caught.value.hint == "ask for a smaller quantization or model"
    asked = propose(small, None, Wishes(n_ctx=512, gpu_layers=-1), room(0.1))
    with pytest.raises(OutOfMemoryError, match="GPU0") as caught:
        asked.require_fit()
    assert caught.value.hint == "put fewer layers on the GPU: -ngl auto"


def test_mapped_weights_beyond_memory_are_a_warning(big: ModelInfo) -> None:
    plan = propose(big, None, Wishes(n_ctx=1024), room(ram_gib=8))
    assert plan.fits
    assert plan.pages
    assert any("every token will read them from disk" in note for note in plan.notes)
    assert not propose(big, None, Wishes(n_ctx=1024, mmap=False), room(ram_gib=8)).fits


def test_a_gpu_that_reports_no_memory_is_not_limited(small: ModelInfo) -> None:
    plan = propose(small, None, Wishes(), Room(GIB, RAM, (GpuRoom("Vulkan0", None, CARD),)))
    assert plan.settings.gpu_layers == 25
    assert "not reported" in table(plan)[-1]


def test_layers_asked_for_without_a_gpu_are_told(small: ModelInfo) -> None:
    plan = propose(small, small, Wishes(gpu_layers=-1, draft_gpu_layers=4), room())
    assert (plan.settings.gpu_layers, plan.settings.draft_gpu_layers) == (0, 0)
    assert "no GPU that this llama.cpp can use" in plan.changes[0]
    assert not propose(small, None, Wishes(gpu_layers=0), room()).changes


def test_repacked_weights_count_on_the_cpu_only(small: ModelInfo) -> None:
    types = frozenset({"Q8_0"})
    on_cpu = propose(small, None, Wishes(), replace(room(), repacked=types))
    assert of(on_cpu, "target", "weights, repacked", CPU) > small.tensor_bytes / 2
    read = propose(small, None, Wishes(mmap=False), replace(room(), repacked=types))
    assert of(read, "target", "weights", CPU) + of(read, "target", "weights, repacked", CPU) == small.tensor_bytes
    on_gpu = propose(small, None, Wishes(), replace(room(8), repacked=types))
    assert of(on_gpu, "target", "weights, repacked", CPU) == 0


def test_a_smaller_cache_holds_more(small: ModelInfo) -> None:
    choices = dict(cache_choices(propose(small, None, Wishes(), room(ram_gib=0.8))))
    assert choices["q4_0"] > choices["q8_0"] > choices["f16"] > 0


def test_windows_and_states_are_explained(models: Path) -> None:
    gemma = read_model(
        shapes.dense(
            models / "plan-gemma.gguf", arch="gemma3", width=640, layers=18, feed_forward=2048, heads=4, kv_heads=1, head=256,
            vocab=262144, tied=True, window=512, kind="Q8_0",
        )
    )  # fmt: skip
    assert any("window of 512 tokens keep all 4096" in note for note in propose(gemma, None, Wishes(), room()).notes)
    on_gpu = propose(gemma, None, Wishes(), room(8))
    assert of(on_gpu, "target", "weights", "GPU0") == gemma.tensor_bytes  # the embeddings once more, for the output
    hybrid = read_model(shapes.hybrid(models / "plan-hybrid.gguf"))
    plan = propose(gemma, hybrid, Wishes(), room())
    assert any("cannot draft: qwen35 keeps a state" in note for note in plan.notes)
    assert of(plan, "draft", "state", CPU) > 0


def roofline(target_bytes: int, draft_bytes: int, *, gpu: bool = True) -> Roofline:
    rate = Rate(1e9, "measured")
    return Roofline((Load("X", target_bytes, rate, gpu),), (Load("X", draft_bytes, rate, gpu),), quantized=False)


def test_the_roofline_is_bytes_over_bandwidth(big: ModelInfo) -> None:
    plan = propose(big, None, Wishes(n_ctx=4096), room(32))
    read = big.tensor_bytes - of(plan, "target", "weights", CPU) + 2048 * big.kv_bytes_per_token()
    assert plan.roofline().tokens_per_second == pytest.approx(1000e9 / read, rel=1e-3)
    assert plan.roofline(filled=0).tokens_per_second > plan.roofline().tokens_per_second
    halves = propose(big, None, Wishes(n_ctx=4096), room(12)).roofline()
    assert {load.device for load in halves.target} == {CPU, "GPU0"}
    assert halves.sources == ("CPU 50 GB/s (measured)", "GPU0 1000 GB/s (specified)")


def test_what_a_draft_adds() -> None:
    pair = roofline(10_000_000_000, 1_000_000_000)
    assert pair.draft_cost == pytest.approx(0.1)
    assert pair.gain(4, 0.0) == pytest.approx(1 / (4 * 0.1 + pair.verify_cost(5)))
    assert pair.gain(4, 1.0) == pytest.approx(5 / (4 * 0.1 + pair.verify_cost(5)))
    needed = pair.needed_acceptance(4)
    assert needed is not None
    assert pair.gain(4, needed + 1e-6) > 1 > pair.gain(4, needed - 1e-6)
    length, gain = pair.best(0.8)
    assert gain == max(pair.gain(n, 0.8) for n in range(1, 17)) == pair.gain(length, 0.8)


def test_a_draft_that_cannot_pay() -> None:
    as_large = roofline(10_000_000_000, 10_000_000_000, gpu=False)
    assert as_large.needed_acceptance(4) is None
    assert as_large.best(0.9) == (0, 1.0)


def test_passes_over_several_tokens_never_get_cheaper() -> None:
    for gpu in (True, False):
        costs = [roofline(10, 1, gpu=gpu).verify_cost(m) for m in range(1, 34)]
        assert costs[0] == 1
        assert costs == sorted(costs)
