"""A loaded pair: what is refused before it loads, chats, full contexts, callers that come and go."""

from __future__ import annotations

import gc
import signal
import threading
from pathlib import Path

import pytest

import llamaspec
from llamaspec import LoadOptions, Round, Sampling, Speculation, Stats, hardware
from llamaspec.errors import (
    Cancelled,
    ContextFullError,
    LlamaspecError,
    ModelFileError,
    NotFoundError,
    OutOfMemoryError,
    RuntimeFailure,
    UnfitError,
    UsageError,
    VocabularyMismatchError,
)
from llamaspec.llama import log
from llamaspec.llama.context import Context
from tests.conftest import LoadPair
from tests.tiny import END, letters, write_recurrent, write_tiny

GREEDY = Sampling(temperature=0)
ALONE = Speculation("none")


def _chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def _tokens(rounds: list[Round]) -> list[int]:
    return [token for one in rounds for token in one.tokens]


# --- loading


def test_files_that_cannot_work_are_refused(tmp_path: Path, target: Path) -> None:
    whole = target.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "page.gguf").write_text("<!DOCTYPE html>")
    cases: list[tuple[Path, type[LlamaspecError]]] = [
        (tmp_path / "missing.gguf", NotFoundError),
        (tmp_path, ModelFileError),
        (cut, ModelFileError),
        (tmp_path / "page.gguf", ModelFileError),
    ]
    for path, expected in cases:
        with pytest.raises(expected):
            llamaspec.load(path)
        with pytest.raises(expected):
            llamaspec.load(target, path)


def test_a_pair_with_other_tokens_is_refused_before_weights_load(
    models: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny(models / "other-words.gguf", words=[b"x" + word for word in letters(20)])
    monkeypatch.setattr("llamaspec.engine.Pair", lambda *_: pytest.fail("weights were about to load"))
    with pytest.raises(VocabularyMismatchError, match="token 261 is 'a' in the target and 'xa' in the draft"):
        llamaspec.load(target, other)


def test_a_model_that_llama_cpp_refuses_says_why(models: Path) -> None:
    """The header is in order; a tensor the architecture needs is not there."""
    import gguf

    path = models / "half.gguf"
    write_tiny(path)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(models / "no-norm.gguf", "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        if tensor.name != "output_norm.weight":
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RuntimeFailure, match="output_norm"):
        llamaspec.load(models / "no-norm.gguf")


def test_a_context_larger_than_memory_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemoryError, match="too much on CPU"):
        llamaspec.load(target, options=LoadOptions(n_ctx=1 << 20))


def test_options_that_mean_nothing_are_refused(target: Path) -> None:
    for bad in (
        {"n_ctx": 3},
        {"threads": 0},
        {"cache_type_k": "q3"},
        {"flash_attention": "maybe"},
        {"split_mode": "diagonal"},
        {"main_gpu": -1},
    ):
        with pytest.raises(UsageError, match=next(iter(bad))):
            LoadOptions(**bad)


def test_loading_reports_progress_and_can_be_stopped(target: Path, near_draft: Path) -> None:
    seen: list[tuple[str, float]] = []
    llamaspec.load(target, near_draft, on_progress=lambda which, fraction: seen.append((which, fraction))).close()
    assert {which for which, _ in seen} == {"target", "draft"}
    assert seen[-1] == ("draft", 1.0)

    class Impatient(Exception):
        pass

    def interrupt(which: str, fraction: float) -> None:
        raise Impatient

    # An exception in a native callback cannot cross the C code: the load is abandoned, then it is raised.
    with pytest.raises(Impatient):
        llamaspec.load(target, on_progress=interrupt)


def test_notices_say_what_is_unusual(load_pair: LoadPair, models: Path, target: Path) -> None:
    bare = write_tiny(models / "bare.gguf", template=None)
    assert any("no chat template" in notice for notice in load_pair(bare).notices)
    assert any("trained on" in notice for notice in load_pair(target, n_ctx=1024).notices)
    assert any("draft" in notice for notice in load_pair(target, target).notices)
    assert load_pair(target).notices == ()


def test_quantized_caches_work_and_settings_tell(load_pair: LoadPair, models: Path) -> None:
    wide = write_tiny(models / "wide.gguf", width=128)
    pair = load_pair(wide, wide, cache_type_k="q8_0", cache_type_v="q8_0", flash_attention="on")
    rounds = list(pair.generate("abc", sampling=GREEDY, max_tokens=20))
    assert len(_tokens(rounds)) == 20
    settings = pair.settings(GREEDY, Speculation())
    assert settings["cache_type_k"] == "q8_0"
    assert settings["draft_cache_type_k"] == "f16"
    assert settings["speculation"]["drafters"] == ("model", "ngram")
    assert settings["speculation"]["n_draft"] is None


# --- models that cannot roll back


def test_a_recurrent_target_is_not_drafted_for(load_pair: LoadPair, models: Path, near_draft: Path) -> None:
    recurrent = write_recurrent(models / "recurrent.gguf")
    alone = load_pair(recurrent)
    text = _tokens(list(alone.generate("abcabcabc", sampling=GREEDY, max_tokens=40)))
    assert len(text) == 40
    pair = load_pair(recurrent, near_draft)
    assert not pair.can_draft
    assert any("cannot be rolled back" in notice for notice in pair.notices)
    assert pair.drafters(Speculation("ngram", 5)) == ()
    for speculation in (Speculation("model", 5), Speculation("ngram", 5)):
        rounds = list(pair.generate("abcabcabc", sampling=GREEDY, speculation=speculation, max_tokens=40))
        assert _tokens(rounds) == text
        assert Stats.of(rounds).drafted_tokens == 0


def test_a_recurrent_target_reads_on_or_starts_again(load_pair: LoadPair, models: Path) -> None:
    pair = load_pair(write_recurrent(models / "recurrent2.gguf"))
    first = list(pair.generate("abcabcabc", sampling=GREEDY, max_tokens=10))
    said = [*pair.tokenize("abcabcabc"), *_tokens(first)]
    on = list(pair.generate(said, sampling=GREEDY, max_tokens=10))
    assert on[0].prefill is not None
    assert on[0].prefill.reused_tokens == len(said) - 1
    again = list(pair.generate("abcabcabc", sampling=GREEDY, max_tokens=20))
    assert again[0].prefill is not None
    assert again[0].prefill.reused_tokens == 0
    assert _tokens(again) == _tokens(first) + _tokens(on)


def test_a_recurrent_draft_is_refused(models: Path, target: Path) -> None:
    recurrent = write_recurrent(models / "recurrent3.gguf")
    with pytest.raises(UnfitError, match="cannot draft: mamba"):
        llamaspec.load(target, recurrent)


# --- who drafts


def test_who_may_draft(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    pair = load_pair(target, near_draft)
    assert pair.drafters() == ("model", "ngram")
    assert pair.drafters(Speculation(n_draft=3)) == ("model",)
    assert pair.drafters(Speculation("ngram")) == ("ngram",)
    lonely = load_pair(target)
    assert lonely.drafters() == ("ngram",)
    assert lonely.drafters(Speculation(n_draft=0)) == ()
    assert lonely.drafters(Speculation("none")) == ()
    with pytest.raises(UsageError, match="has none"):
        list(lonely.generate("abc", speculation=Speculation("model")))
    with pytest.raises(UsageError, match="n_draft is 33: it takes 0 to 32"):
        Speculation(n_draft=33)


def test_a_reference_is_copied_from(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    answer = "".join(one.text for one in pair.generate("k", sampling=GREEDY, speculation=ALONE, max_tokens=40))
    pair.reset()
    speculation = Speculation("ngram", 8, reference=f"k{answer}")
    stats = Stats.of(pair.generate("k", sampling=GREEDY, speculation=speculation, max_tokens=40))
    assert stats.acceptance_rate is not None
    assert stats.acceptance_rate > 0.9


def test_ids_that_differ_are_never_drafted(load_pair: LoadPair, models: Path, target: Path) -> None:
    """The draft's favourite token has another text in the target: it is left out, and the text stays the target's."""
    from tests import tiny

    renamed = models / "renamed.gguf"
    specials = list(tiny.SPECIALS)
    try:
        tiny.SPECIALS[3] = b"<|person|>"
        write_tiny(renamed)
    finally:
        tiny.SPECIALS[:] = specials
    pair = load_pair(target, renamed)
    assert pair.vocabulary is not None
    assert pair.vocabulary.undraftable == (3,)
    drafted = list(pair.generate("abcabc", sampling=GREEDY, max_tokens=40))
    alone = list(pair.generate("abcabc", sampling=GREEDY, speculation=ALONE, max_tokens=40))
    assert _tokens(drafted) == _tokens(alone)


def test_a_target_with_more_tokens_than_the_draft(load_pair: LoadPair, models: Path, target: Path) -> None:
    """Padding rows: the target can read and write ids that the draft does not have."""
    padded = write_tiny(models / "padded.gguf", words=[*letters(20), b"<pad1>", b"<pad2>"])
    pair = load_pair(padded, target)
    prompt = [1, 261, 262, 281, 282, 261, 262]
    speculation = Speculation("model", 4)
    sampling = Sampling(temperature=0, logit_bias={282: 4.0})
    drafted = list(pair.generate(prompt, sampling=sampling, speculation=speculation, max_tokens=40))
    alone = list(pair.generate(prompt, sampling=sampling, speculation=ALONE, max_tokens=40))
    assert _tokens(drafted) == _tokens(alone)
    assert 282 in _tokens(alone)


# --- prompts and chats


def test_what_a_user_types_is_no_control_token(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    typed = pair.tokenize(_chat("a<|end|>b"))
    honest = pair.tokenize(_chat("ab"))
    assert typed.count(END) == honest.count(END) == 1
    assert "a<|end|>b" in pair.detokenize(typed)
    assert pair.tokenize("a<|end|>b").count(END) == 1  # a raw prompt means what it says


def test_the_beginning_token_is_added_once(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    assert pair.tokenize(_chat("a")).count(1) == 1
    assert pair.tokenize("a").count(1) == 1
    other = load_pair(target, chat_template="{{ messages[0].content }}")
    assert other.tokenize(_chat("a")) == pair.tokenize("a")


def test_prompts_that_mean_nothing(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    for bad in ([], [999999], [-1], [True], [{"role": "user"}], [{"role": "robot", "content": "x"}]):
        with pytest.raises(UsageError):
            list(pair.generate(bad))
    with pytest.raises(UsageError, match="max_tokens"):
        pair.generate("a", max_tokens=0)
    with pytest.raises(UsageError, match="line 1"):
        load_pair(target, chat_template="{% if %}")


def test_text_that_is_no_unicode_does_not_reach_the_tokenizer(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    assert pair.tokenize("a\ud800b") == pair.tokenize("a?b")
    assert pair.detokenize(pair.tokenize("a\0b")[1:]) == "a\0b"


def test_a_second_turn_of_a_chat_reads_only_what_is_new(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    first = list(pair.generate(_chat("abc"), sampling=GREEDY, max_tokens=10))
    answer = "".join(one.text for one in first)
    second = next(iter(pair.generate(_chat("abc", answer, "def"), sampling=GREEDY)))
    assert second.prefill is not None
    # "user: abc<end>" and its answer's role line are the same tokens; what follows may be tokenized anew.
    assert second.prefill.reused_tokens >= len(pair.tokenize(_chat("abc"))) - 15


def test_a_full_context_is_an_error_or_drops_the_oldest_turns(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target, n_ctx=128)
    long = _chat(*("abcdefghij" * 2 for _ in range(9)))
    with pytest.raises(ContextFullError, match="the context 128"):
        pair.generate(long)
    rounds = list(pair.generate(long, sampling=GREEDY, overflow="drop_oldest", max_tokens=8))
    assert len(_tokens(rounds)) == 8
    assert any("oldest messages were dropped" in notice for one in rounds for notice in one.notices)
    assert rounds[0].prefill is not None
    assert rounds[0].prefill.prompt_tokens <= 128 - 8


def test_a_context_that_fills_up_meanwhile_drops_the_oldest_turns(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    pair = load_pair(target, near_draft, n_ctx=128)
    messages = [{"role": "system", "content": "sys"}, *_chat("abcd", "efgh", "ijkl", "mnop", "qrst")]
    stopped = list(pair.generate(messages, sampling=GREEDY))
    assert stopped[-1].finish_reason == "context"
    going_on = list(pair.generate(messages, sampling=GREEDY, overflow="drop_oldest"))
    assert len(_tokens(going_on)) > len(_tokens(stopped))
    assert going_on[-1].finish_reason == "context"  # one exchange is left at last, and nothing more to drop
    dropped = [notice for one in going_on for notice in one.notices]
    assert len(dropped) == 2
    stats = Stats.of(going_on)
    assert stats.generated_tokens == len(_tokens(going_on))


def test_a_prompt_of_one_long_message_is_not_dropped(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target, n_ctx=64)
    with pytest.raises(ContextFullError):
        pair.generate(_chat("a" * 100), overflow="drop_oldest")


# --- callers


def test_an_answer_ends_when_another_one_starts(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    first = pair.generate("abc", sampling=GREEDY)
    next(first)
    second = pair.generate("abc", sampling=GREEDY, max_tokens=5)
    next(second)
    with pytest.raises(UsageError, match="another one was started"):
        next(first)
    assert len(_tokens(list(second))) == 4


def test_cancel_from_another_thread(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    seen: list[Round] = []

    def consume() -> None:
        for one in pair.generate("abc", sampling=GREEDY):
            seen.append(one)
            if len(seen) == 5:
                threading.Thread(target=pair.cancel).start()

    with pytest.raises(Cancelled):
        consume()
    assert len(seen) >= 5
    said = [token for one in seen for token in one.tokens]
    assert list(pair.cached_tokens) == [*pair.tokenize("abc"), *said[:-1]]
    assert _tokens(list(pair.generate("abc", sampling=GREEDY, max_tokens=3)))


def test_an_interrupt_while_waiting_stops_the_work(load_pair: LoadPair, target: Path) -> None:
    """Ctrl+C reaches the waiting caller: native code is stopped, and the pair is whole afterwards."""
    pair = load_pair(target)
    stream = pair.generate("abc", sampling=GREEDY)
    first = next(stream)
    real = pair._context._decode

    def endless(*args: object) -> int:
        signal.raise_signal(signal.SIGINT)  # in the worker's thread; Python hands it to the main one, which waits
        while not pair._cancel.is_set:
            pass
        return 2

    def interrupted() -> None:
        pair._context._decode = endless
        for _ in stream:
            pass

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    stream.close()  # type: ignore[attr-defined]
    pair._context._decode = real
    assert not pair._cancel.is_set
    again = list(pair.generate([*pair.tokenize("abc"), *first.tokens], sampling=GREEDY, max_tokens=5))
    assert len(_tokens(again)) == 5


def test_closed_pairs_say_so(target: Path) -> None:
    pair = llamaspec.load(target)
    stream = pair.generate("abc")
    next(stream)
    pair.close()
    pair.close()
    with pytest.raises(UsageError, match="closed"):
        next(stream)


def test_a_pair_may_be_used_from_any_thread(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    texts: list[list[int]] = []

    def run() -> None:
        texts.append(_tokens(list(pair.generate("abc", sampling=GREEDY, max_tokens=20))))

    for _ in range(3):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert texts[0] == texts[1] == texts[2]


def test_memory_does_not_grow_over_a_thousand_rounds(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    import psutil

    pair = load_pair(target, near_draft, n_ctx=512)
    sampling = Sampling(temperature=1.0, repeat_penalty=1.1, seed=1, grammar="root ::= [a-t]+")

    def some_rounds(wanted: int) -> None:
        rounds = 0
        while rounds < wanted:
            for _ in pair.generate("abc", sampling=sampling, speculation=Speculation("model", 4), max_tokens=400):
                rounds += 1

    process = psutil.Process()
    some_rounds(500)
    gc.collect()
    before = process.memory_info().rss
    some_rounds(1000)
    gc.collect()
    assert process.memory_info().rss - before < 4 << 20


def test_the_log_is_kept_and_quiet(load_pair: LoadPair, target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    list(load_pair(target).generate("abc", max_tokens=3))
    assert any("llama_context" in line or "llama_model_loader" in line for line in log.lines())
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_grammars_and_schemas_that_do_not_parse(load_pair: LoadPair, target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pair = load_pair(target)
    bad: dict[str, Sampling] = {
        "expecting": Sampling(grammar="root = x"),
        "Undefined rule": Sampling(grammar="root ::= other"),
        "empty": Sampling(grammar="  "),
        "NUL": Sampling(grammar="root ::= \0"),
        "root": Sampling(grammar='start ::= "a"'),
        "left recursion": Sampling(grammar='root ::= root "a"'),
        "schema": Sampling(json_schema={"type": "no such type"}),
    }
    for part, sampling in bad.items():
        with pytest.raises(UsageError, match=part):
            list(pair.generate("abc", sampling=sampling))
    assert capfd.readouterr().err == ""


def test_a_json_schema_holds(load_pair: LoadPair, target: Path) -> None:
    import json

    pair = load_pair(target)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n", "ok"]}
    for seed in range(3):
        sampling = Sampling(temperature=1.2, top_k=0, json_schema=schema, seed=seed)
        rounds = list(pair.generate("abc", sampling=sampling, speculation=Speculation("ngram", 4, ngram_min=1), max_tokens=300))
        if rounds[-1].finish_reason == "stop":
            assert set(json.loads("".join(one.text for one in rounds))) == {"n", "ok"}


def test_a_round_computed_ahead_leaves_no_trace(load_pair: LoadPair, target: Path, near_draft: Path) -> None:
    pair = load_pair(target, near_draft)
    prompt = pair.tokenize("abcabcabc")
    for rounds_taken in (1, 2, 5):
        stream = pair.generate(prompt, sampling=GREEDY, speculation=Speculation("model", 4), max_tokens=80)
        said = [token for _, one in zip(range(rounds_taken), stream, strict=False) for token in one.tokens]
        stream.close()  # type: ignore[attr-defined]
        assert list(pair.cached_tokens) == [*prompt, *said][:-1]
        assert pair._worker.run(lambda: list(pair._context.tokens)) == [*prompt, *said][:-1]
    again = list(pair.generate([*prompt, *said], sampling=GREEDY, speculation=ALONE, max_tokens=4))
    assert again[0].prefill is not None
    assert again[0].prefill.reused_tokens == len(prompt) + len(said) - 1


def test_a_failure_in_a_round_ahead_reaches_the_caller(
    load_pair: LoadPair, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = load_pair(target)
    stream = pair.generate("abc", sampling=GREEDY, speculation=ALONE, max_tokens=30)
    next(stream)
    decode = Context.decode

    def fail(self: Context, tokens: list[int], outputs: str) -> None:
        raise RuntimeFailure("llama.cpp could not decode (status -3)")

    first = next(stream)
    monkeypatch.setattr(Context, "decode", fail)
    with pytest.raises(RuntimeFailure, match="status -3"):
        list(stream)
    monkeypatch.setattr(Context, "decode", decode)
    assert first.tokens
    assert Stats.of(pair.generate("abc", sampling=GREEDY, speculation=ALONE, max_tokens=5)).generated_tokens == 5


def test_an_abandoned_answer_does_not_hold_the_pair_up(load_pair: LoadPair, target: Path) -> None:
    pair = load_pair(target)
    for _ in range(20):
        stream = pair.generate("abc", sampling=GREEDY, max_tokens=50)
        next(stream)
        del stream
        gc.collect()
    assert Stats.of(pair.generate("abc", sampling=GREEDY, max_tokens=5)).generated_tokens == 5
