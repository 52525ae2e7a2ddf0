"""A real model: SmolLM2-135M-Instruct, the one `make demo` installs. Skipped where it is not there."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from llamaspec import Round, Sampling, Speculation, Stats
from llamaspec.bench.demo import PROMPT, demo_model
from tests.conftest import LoadPair

GREEDY = Sampling(temperature=0)
ALONE = Speculation("none")

PROMPTS = (
    "Name three rivers of Europe and say where each ends.",
    "Write a Python function that reverses the words of a sentence.",
    "Tell a short story about a lighthouse keeper.",
    PROMPT.read_text(),
)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        path: Path = demo_model()
        return path
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def deepened(smollm2: Path, models: Path) -> Path:
    """Every block followed by one whose output projections are zero: twice the cost, the same logits bit for bit."""
    path = models / "smollm2-deep.gguf"
    reader = gguf.GGUFReader(smollm2)
    blocks = reader.fields["llama.block_count"].contents()
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = blocks * 2 if key == "llama.block_count" else field.contents()
        writer.add_key_value(
            key, value, field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk."):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        _, block, rest = tensor.name.split(".", 2)
        silent = np.zeros_like(tensor.data) if rest in ("attn_output.weight", "ffn_down.weight") else tensor.data
        for copy, data in enumerate((tensor.data, silent)):
            writer.add_tensor(f"blk.{int(block) * 2 + copy}.{rest}", data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokens(rounds: list[Round]) -> list[int]:
    return [token for one in rounds for token in one.tokens]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["facts", "code", "story", "edit"])
def test_greedy_text_is_the_targets_own(load_pair: LoadPair, smollm2: Path, prompt: str) -> None:
    """Each token is the argmax of its own verifying pass; against plain decoding, kernels may round a near tie otherwise."""
    pair = load_pair(smollm2, n_ctx=512, threads=2)
    messages = [{"role": "user", "content": prompt}]
    alone = list(pair.generate(messages, sampling=GREEDY, speculation=ALONE, max_tokens=100))
    for n_draft in (1, 4, 8):
        pair.reset()
        speculation = Speculation("ngram", n_draft, ngram_min=1)
        drafted = list(pair.generate(messages, sampling=GREEDY, speculation=speculation, max_tokens=100))
        if _tokens(drafted) != _tokens(alone):
            _assert_near_tie(pair, messages, _tokens(alone), _tokens(drafted))
        assert Stats.of(drafted).drafted_tokens > 20


def _assert_near_tie(pair: object, messages: list[dict[str, str]], alone: list[int], drafted: list[int]) -> None:
    """The texts differ: was the target undecided between the two tokens there?"""
    from llamaspec import Pair

    assert isinstance(pair, Pair)
    at = next(i for i, (a, b) in enumerate(zip(alone, drafted, strict=False)) if a != b)
    context = pair._context

    def gap() -> float:
        context.clear()
        for token in [*pair.tokenize(messages), *alone[:at]]:
            context.decode([token], "last")
        row = context.logits()[0]
        return float(row[alone[at]] - row[drafted[at]])

    assert abs(pair._worker.run(gap)) < 0.5, f"token {at} is not the target's"


def test_a_draft_of_the_same_logits_is_accepted_whole(load_pair: LoadPair, smollm2: Path, deepened: Path) -> None:
    pair = load_pair(deepened, smollm2, n_ctx=512, threads=2)
    speculation = Speculation("model", 3)
    rounds = list(pair.generate("The capital of France is", sampling=GREEDY, speculation=speculation, max_tokens=33))
    assert [one.accepted for one in rounds] == [0] + [3] * 8
    assert rounds[-1].finish_reason == "length"


def test_text_of_other_scripts_streams_whole(load_pair: LoadPair, smollm2: Path) -> None:
    pair = load_pair(smollm2, n_ctx=512, threads=2)
    sampling = Sampling(temperature=0, grammar='root ::= "日本語🦙" [ぁ-ん]{3}')
    rounds = list(pair.generate("Japanese:", sampling=sampling, speculation=Speculation("ngram", 4, ngram_min=1)))
    text = "".join(one.text for one in rounds)
    assert text.startswith("日本語🦙")
    assert len(text) == 7
    assert "�" not in text


def test_a_chat_reuses_its_cache(load_pair: LoadPair, smollm2: Path) -> None:
    pair = load_pair(smollm2, n_ctx=1024, threads=2)
    messages = [{"role": "user", "content": "Say hello."}]
    first = list(pair.generate(messages, sampling=GREEDY, max_tokens=200))
    assert first[-1].finish_reason == "stop"
    known = len(pair.cached_tokens)
    messages += [
        {"role": "assistant", "content": "".join(one.text for one in first)},
        {"role": "user", "content": "Say it again."},
    ]
    again = next(iter(pair.generate(messages, sampling=GREEDY)))
    assert again.prefill is not None
    assert again.prefill.reused_tokens >= known
    assert again.prefill.prompt_tokens - again.prefill.reused_tokens < 20
