"""Comparing two vocabularies: every rule with small ones, and a few facts of real ones."""

from __future__ import annotations

import array
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamaspec.errors import VocabularyMismatchError
from llamaspec.gguf_header import GGUFHeader, MetaValue, ModelInfo, TensorInfo, model_from_headers, read_model
from llamaspec.vocab import MAX_DIFFERENCES, TokenDifference, Verdict, Vocabulary, compare, pair_warnings

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
WORDS: list[tuple[bytes, int]] = [(f"word{i}".encode(), NORMAL) for i in range(95)]
SPECIALS: list[tuple[bytes, int]] = [
    (b"<|endoftext|>", CONTROL),
    (b"<|im_start|>", CONTROL),
    (b"<|im_end|>", CONTROL),
    (b"<tool_call>", USER_DEFINED),
    (b"[PAD99]", UNUSED),
]
ROWS = WORDS + SPECIALS
ENDS = {"bos": 95, "eos": 97}


def vocabulary(
    rows: Sequence[tuple[bytes, int]] = ROWS,
    *,
    model: str = "gpt2",
    pre: str | None = "qwen2",
    special: dict[str, int] | None = None,
    merges: list[bytes] | None = None,
    adds_bos: bool | None = None,
    family: str | None = None,
) -> Vocabulary:
    return Vocabulary(
        tokens=[text for text, _ in rows],
        types=array.array("i", [kind for _, kind in rows]),
        model=model,
        pre=pre,
        special=ENDS if special is None else special,
        merges=merges,
        adds_bos=adds_bos,
        family=family,
    )


def replaced(*changes: tuple[int, bytes, int], rows: Sequence[tuple[bytes, int]] = ROWS) -> list[tuple[bytes, int]]:
    new = list(rows)
    for i, text, kind in changes:
        new[i] = (text, kind)
    return new


# --- identical -------------------------------------------------------------------------------------------------------


def test_the_same_vocabulary_is_identical() -> None:
    report = compare(vocabulary(), vocabulary())
    assert report.verdict is Verdict.IDENTICAL
    assert report.usable
    assert (report.target_size, report.draft_size, report.shared) == (100, 100, 100)
    assert (report.differing, report.differing_total, report.undraftable, report.notes) == ((), 0, (), ())
    assert report.reason is None
    assert report.suggestion is None
    report.require_usable()


def test_other_pre_tokenizer_or_merges_still_identical_and_noted() -> None:
    report = compare(vocabulary(pre=None, merges=[b"a b"]), vocabulary(pre="mpt", merges=[b"b a"]))
    assert report.verdict is Verdict.IDENTICAL
    assert report.notes == (
        "the pre-tokenizers differ (none, mpt): the two split some text into other tokens, so drafts may be weaker",
        "the merge rules differ: the two split some text into other tokens, so drafts may be weaker",
    )


def test_pre_tokenizer_of_sentencepiece_means_nothing() -> None:
    report = compare(vocabulary(model="llama", pre="default"), vocabulary(model="llama", pre=None))
    assert report.verdict is Verdict.IDENTICAL
    assert report.notes == ()


def test_another_type_of_the_same_special_token_does_not_matter() -> None:
    report = compare(vocabulary(), vocabulary(replaced((96, b"<|im_start|>", USER_DEFINED))))
    assert report.verdict is Verdict.IDENTICAL


def test_files_without_types_are_compared_by_text() -> None:
    tokens = [text for text, _ in ROWS]
    assert compare(Vocabulary(tokens), Vocabulary(list(tokens))).verdict is Verdict.IDENTICAL
    changed = [*tokens[:-1], b"<|other|>"]
    report = compare(Vocabulary([*tokens[:-1], b"<|one|>"]), Vocabulary(changed))
    assert report.verdict is Verdict.COMPATIBLE
    assert report.undraftable == (99,)


# --- compatible ------------------------------------------------------------------------------------------------------


def padding(first: int, count: int) -> list[tuple[bytes, int]]:
    return [(f"[PAD{first + i}]".encode(), UNUSED) for i in range(count)]


def test_padding_rows_of_the_target() -> None:
    report = compare(vocabulary(ROWS + padding(100, 8)), vocabulary())
    assert report.verdict is Verdict.COMPATIBLE
    assert (report.target_size, report.draft_size, report.shared) == (108, 100, 100)
    assert report.undraftable == ()
    assert report.notes == ("the target has 8 more rows, 100 to 107, all padding or special: the draft does not know them",)


def test_padding_rows_of_the_draft_are_never_drafted() -> None:
    report = compare(vocabulary(), vocabulary(ROWS + padding(100, 8)))
    assert report.verdict is Verdict.COMPATIBLE
    assert report.undraftable == tuple(range(100, 108))
    assert report.notes == ("the draft has 8 more rows, 100 to 107, all padding or special: never drafted",)


@pytest.mark.parametrize(
    "row",
    [
        (b"<|reserved_special_token_3|>", NORMAL),
        (b"[PAD100]", NORMAL),
        (b"[PAD100]", USER_DEFINED),
        (b"<unused7>", NORMAL),
        (b"<extra_id_1>", NORMAL),
        (b"<reserved_9>", NORMAL),
        (b"<dummy00001>", NORMAL),
        (b"<think>", USER_DEFINED),
        ("<｜fim▁hole｜>".encode(), NORMAL),
        (b"<0x0A>", BYTE),
        (b"anything", CONTROL),
        (b"anything", UNKNOWN),
        (b"", NORMAL),
    ],
)
def test_what_counts_as_padding_or_special(row: tuple[bytes, int]) -> None:
    vocab = vocabulary([*ROWS, row])
    assert vocab.is_special(100)
    assert compare(vocab, vocabulary()).verdict is Verdict.COMPATIBLE


@pytest.mark.parametrize(
    "row",
    [
        (b"word", NORMAL),
        (b"word", USER_DEFINED),
        ("▁▁".encode(), USER_DEFINED),
        (b"<div>", NORMAL),
        (b"<", NORMAL),
        (b"[0]", NORMAL),
        (b"<think>", NORMAL),
        (b"<|", NORMAL),
    ],
)
def test_what_counts_as_ordinary(row: tuple[bytes, int]) -> None:
    vocab = vocabulary([*ROWS, row])
    assert not vocab.is_special(100)
    report = compare(vocabulary(), vocab)
    assert report.verdict is Verdict.MISMATCH
    assert report.reason == f"the draft has ordinary tokens that the target lacks: 100 is {vocab.text(100)}"


def test_special_tokens_named_differently() -> None:
    """Qwen2 and Qwen2.5-Coder: one has padding where the other has markers."""
    draft = replaced((96, b"<|fim_prefix|>", CONTROL), (98, b"[PAD98]", UNUSED))
    report = compare(vocabulary(), vocabulary(draft))
    assert report.verdict is Verdict.COMPATIBLE
    assert report.shared == 98
    assert report.undraftable == (96, 98)
    assert report.differing == (
        TokenDifference(96, "<|im_start|>", "<|fim_prefix|>", "special"),
        TokenDifference(98, "<tool_call>", "[PAD98]", "special"),
    )
    assert report.notes == (
        "special tokens differ and are never drafted: 96 (target '<|im_start|>', draft '<|fim_prefix|>'), "
        "98 (target '<tool_call>', draft '[PAD98]')",
    )


def test_many_special_tokens_are_not_all_named() -> None:
    many = [(f"<|a{i}|>".encode(), CONTROL) for i in range(22)]
    other = [(f"<|b{i}|>".encode(), CONTROL) for i in range(22)]
    report = compare(vocabulary(WORDS + many), vocabulary(WORDS + other))
    assert report.verdict is Verdict.COMPATIBLE
    assert report.undraftable == tuple(range(95, 117))
    assert report.differing_total == 22
    assert len(report.differing) == MAX_DIFFERENCES
    assert report.notes[0].endswith(" and 17 more")


def test_renamed_tokens_and_more_rows_together() -> None:
    draft = replaced((96, b"<|x|>", CONTROL)) + padding(100, 2)
    assert compare(vocabulary(), vocabulary(draft)).undraftable == (96, 100, 101)


def test_other_ends_are_noted() -> None:
    report = compare(vocabulary(special={"bos": 95, "eos": 97}), vocabulary(special={"bos": 95, "eos": 95, "eot": 97}))
    assert report.verdict is Verdict.COMPATIBLE
    assert report.undraftable == ()
    assert report.notes == (
        "the end-of-text token (eos) is 97 '<|im_end|>' in the target and 95 '<|endoftext|>' in the draft; the target's counts",
    )


def test_an_end_that_only_one_names_and_other_padding_ids_are_no_difference() -> None:
    report = compare(vocabulary(special={"eos": 97, "pad": 95}), vocabulary(special={"bos": 95, "eos": 97, "pad": 99}))
    assert report.verdict is Verdict.IDENTICAL


def test_only_one_starting_with_bos_is_noted() -> None:
    report = compare(vocabulary(adds_bos=True), vocabulary(adds_bos=False))
    assert report.verdict is Verdict.IDENTICAL
    assert report.notes == ("the target starts a text with a beginning token and the draft does not: drafts may be weaker",)
    assert compare(vocabulary(adds_bos=True), vocabulary()).notes == ()


def test_llama_and_phi_3() -> None:
    """The same first texts; what comes after is special; the texts end otherwise."""
    llama = [(b"<unk>", UNKNOWN), (b"<s>", CONTROL), (b"</s>", CONTROL), *WORDS]
    phi = [(b"<unk>", CONTROL), (b"<s>", CONTROL), (b"</s>", USER_DEFINED), *WORDS]
    phi += [(b"<|endoftext|>", CONTROL), (b"<|assistant|>", CONTROL), (b"[PAD100]", UNKNOWN)]
    ours = vocabulary(llama, model="llama", special={"bos": 1, "eos": 2})
    theirs = vocabulary(phi, model="llama", special={"bos": 1, "eos": 98})
    report = compare(ours, theirs)
    assert report.verdict is Verdict.COMPATIBLE
    assert report.shared == 98
    assert report.undraftable == (98, 99, 100)
    assert "eos" in report.notes[1]
    assert compare(theirs, ours).undraftable == ()


# --- mismatch --------------------------------------------------------------------------------------------------------


def test_one_ordinary_token_is_enough() -> None:
    """Gemma 2 27B and 2B differ in id 139, a run of blanks that is user-defined."""
    ours = vocabulary(replaced((39, "▁▁".encode(), USER_DEFINED)))
    theirs = vocabulary(replaced((39, "▁▁▁".encode(), USER_DEFINED)))
    report = compare(ours, theirs)
    assert report.verdict is Verdict.MISMATCH
    assert not report.usable
    assert report.reason == "token 39 is '▁▁' in the target and '▁▁▁' in the draft"
    assert report.undraftable == (39,)
    assert report.differing == (TokenDifference(39, "▁▁", "▁▁▁", "ordinary"),)


def test_several_ordinary_tokens_come_before_special_ones() -> None:
    rows = replaced((0, b"x", NORMAL), (1, b"y", NORMAL), (96, b"<|z|>", CONTROL))
    first_special = vocabulary([(b"<|p|>", CONTROL), *ROWS])
    report = compare(first_special, vocabulary([(b"<|q|>", CONTROL), *rows]))
    assert report.reason == "token 1 is 'word0' in the target and 'x' in the draft, and 1 more ordinary tokens differ"
    assert [(d.id, d.kind) for d in report.differing] == [
        (1, "ordinary"), (2, "ordinary"), (0, "special"), (97, "special")
    ]  # fmt: skip
    assert report.undraftable == (0, 1, 2, 97)


def test_an_ordinary_token_against_a_special_one_is_ordinary() -> None:
    report = compare(vocabulary(), vocabulary(replaced((5, b"<|x|>", CONTROL))))
    assert report.verdict is Verdict.MISMATCH
    assert report.reason == "token 5 is 'word5' in the target and '<|x|>' in the draft"


def test_a_byte_and_its_name_are_different_tokens() -> None:
    ours, theirs = vocabulary(replaced((5, b"<0x0A>", BYTE))), vocabulary(replaced((5, b"<0x0A>", NORMAL)))
    report = compare(ours, theirs)
    assert report.verdict is Verdict.MISMATCH
    assert report.reason == "token 5 is '<0x0A>' in both, but a byte in only one"
    assert (report.shared, report.undraftable) == (100, (5,))


def test_a_byte_and_a_marker_of_the_same_text_are_never_drafted() -> None:
    ours, theirs = vocabulary(replaced((5, b"<0x0A>", BYTE))), vocabulary(replaced((5, b"<0x0A>", USER_DEFINED)))
    report = compare(ours, theirs)
    assert report.verdict is Verdict.COMPATIBLE
    assert report.notes == ("special tokens differ and are never drafted: 5",)


def test_other_kinds_of_tokenizer() -> None:
    report = compare(vocabulary(), vocabulary(model="llama"))
    assert report.reason == "the target's tokenizer is BPE (gpt2), the draft's is SentencePiece (llama)"
    assert "'odd'" in str(compare(vocabulary(), vocabulary(model="odd")).reason)


def test_no_vocabulary() -> None:
    none = Vocabulary((), model="none")
    assert compare(none, vocabulary()).reason == "the target has no vocabulary"
    report = compare(vocabulary(), none)
    assert report.reason == "the draft has no vocabulary"
    assert (report.shared, report.undraftable) == (0, ())


def test_sizes_far_apart_even_when_the_rest_is_padding() -> None:
    report = compare(vocabulary(ROWS + padding(100, 50)), vocabulary())
    assert report.verdict is Verdict.MISMATCH
    assert report.reason == "the target has 150 tokens and the draft 100"


def test_sizes_far_apart_and_other_tokens() -> None:
    report = compare(vocabulary(ROWS + padding(100, 50)), vocabulary(replaced((0, b"!", NORMAL))))
    assert report.reason == (
        "the target has 150 tokens and the draft 100, and token 0 is 'word0' in the target and '!' in the draft"
    )


def test_ordinary_rows_beyond_the_smaller_vocabulary() -> None:
    report = compare(vocabulary([*ROWS, (b"new", NORMAL), (b"newer", NORMAL)]), vocabulary())
    assert report.reason == "the target has ordinary tokens that the draft lacks: 100 is 'new' and 1 more"


def test_a_mismatch_suggests_what_fits() -> None:
    report = compare(vocabulary(family="Qwen2.5"), vocabulary(model="llama", family="Gemma 3"))
    assert report.suggestion is not None
    assert "Qwen2.5-0.5B-Instruct" in report.suggestion
    with pytest.raises(VocabularyMismatchError) as caught:
        report.require_usable()
    assert str(caught.value) == f"the vocabularies do not match: {report.reason}"
    assert caught.value.hint == report.suggestion
    assert compare(vocabulary(), vocabulary(model="llama")).suggestion is None
    assert compare(vocabulary(family="Qwen2.5"), vocabulary(family="Qwen2.5")).suggestion is None


def test_text_in_sentences_is_escaped_and_short() -> None:
    rows = replaced((0, b"\x1b[31m\n", NORMAL), (1, b"x" * 300, NORMAL), (2, b"\xff", NORMAL))
    vocab = vocabulary(rows)
    assert vocab.text(0) == r"'\x1b[31m\n'"
    assert len(vocab.text(1)) == 62
    assert vocab.text(2) == "'�'"
    assert "\x1b" not in str(compare(vocab, vocabulary()).reason)


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_for_json() -> None:
    draft = vocabulary(replaced((96, b"<|x|>", CONTROL)) + padding(100, 3))
    data = json.loads(json.dumps(compare(vocabulary(), draft).to_dict()))
    notes = data.pop("notes")
    assert len(notes) == 2
    assert data == {
        "verdict": "compatible",
        "target_size": 100,
        "draft_size": 103,
        "shared": 99,
        "differing": [{"id": 96, "target_text": "<|im_start|>", "draft_text": "<|x|>", "kind": "special"}],
        "differing_total": 1,
        "undraftable_total": 4,
        "undraftable_ranges": [[96, 96], [100, 102]],
        "reason": None,
        "suggestion": None,
    }


def test_large_vocabularies_are_compared_fast() -> None:
    rows = [(f"token{i}".encode(), NORMAL) for i in range(152_000)]
    ours, same = vocabulary(rows), vocabulary([(bytes(bytearray(text)), kind) for text, kind in rows])
    other = vocabulary([(b"x" + text, kind) for text, kind in rows])
    for theirs, verdict in ((same, Verdict.IDENTICAL), (other, Verdict.MISMATCH)):
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            assert compare(ours, theirs).verdict is verdict
            best = min(best, time.perf_counter() - start)
        assert best < 0.5


# --- pairs of models -------------------------------------------------------------------------------------------------


def model(name: str, size: int, general_name: str = "Qwen2.5 Coder", arch: str = "qwen2") -> ModelInfo:
    metadata: dict[str, MetaValue] = {
        "general.architecture": arch,
        "general.name": general_name,
        f"{arch}.context_length": 16,
        f"{arch}.block_count": 1,
        f"{arch}.embedding_length": 4,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [text for text, _ in ROWS],
        "tokenizer.ggml.token_type": array.array("i", [kind for _, kind in ROWS]),
        "tokenizer.ggml.merges": [b"a b"],
        "tokenizer.ggml.eos_token_id": 97,
        "tokenizer.ggml.add_bos_token": False,
    }
    types = dict.fromkeys(metadata, "uint32")
    types |= {"tokenizer.ggml.token_type": "array of int32"}
    tensors = (TensorInfo("token_embd.weight", (4, size // 16), "F32", 0, size),) if size else ()
    header = GGUFHeader(Path(name), 3, metadata, types, tensors, 64, 64 + size, 32)
    return model_from_headers([header])


def test_models_are_compared_by_their_headers() -> None:
    info = model("a.gguf", 1600)
    vocab = Vocabulary.of(info)
    assert (vocab.model, vocab.pre, vocab.special, vocab.family) == ("gpt2", "qwen2", {"eos": 97}, "Qwen2.5")
    assert (vocab.merges, vocab.adds_bos) == ([b"a b"], False)
    assert list(vocab.types) == [kind for _, kind in ROWS]
    assert compare(info, model("b.gguf", 160)).verdict is Verdict.IDENTICAL


def test_a_good_pair_has_no_warnings() -> None:
    assert pair_warnings(model("t.gguf", 16000), model("d.gguf", 1600)) == ()
    assert pair_warnings(model("t.gguf", 16000), model("d.gguf", 4000)) == ()


def test_a_large_draft_is_warned_of() -> None:
    assert pair_warnings(model("t.gguf", 16000), model("d.gguf", 8000)) == (
        "the draft has 50% of the target's bytes; one tenth to one twentieth is the useful range",
    )
    assert pair_warnings(model("t.gguf", 1600), model("d.gguf", 16000)) == (
        "the draft is larger than the target; are they swapped?",
    )


def test_the_same_file_twice_is_warned_of(tmp_path: Path) -> None:
    words = ("the draft is the target: every token is drafted at full cost",)
    assert pair_warnings(model("t.gguf", 1600), model("t.gguf", 1600)) == words
    path, link = tmp_path / "t.gguf", tmp_path / "link.gguf"
    path.write_bytes(b"x")
    link.symlink_to(path)
    assert pair_warnings(model(str(path), 1600), model(str(link), 1600)) == words


def test_other_families_are_warned_of() -> None:
    target = model("t.gguf", 16000)
    assert pair_warnings(target, model("d.gguf", 1600, "Llama 3.2 1B", "llama")) == (
        "the target is of the family Qwen2.5 and the draft of Llama 3; they may seldom agree",
    )
    assert pair_warnings(target, model("d.gguf", 1600, "My Merge", "llama")) == (
        "the target is of the family qwen2 and the draft of llama; they may seldom agree",
    )
    assert pair_warnings(target, model("d.gguf", 1600, "My Merge", "qwen2")) == ()
    assert pair_warnings(target, model("d.gguf", 1600, "Qwen2 0.5B", "qwen2")) == ()
    llama = model("t.gguf", 16000, "Llama 2 7B", "llama")
    assert pair_warnings(llama, model("d.gguf", 1600, "TinyLlama 1.1B", "llama")) == ()


def test_vocabularies_without_weights_have_no_size() -> None:
    assert pair_warnings(model("t.gguf", 0), model("d.gguf", 1600)) == ()


# --- real vocabularies -----------------------------------------------------------------------------------------------

FILES = Path(__file__).parent.parent.parent / "shared" / "data" / "vocab"
real = pytest.mark.skipif(not FILES.is_dir(), reason="the real vocabularies are not beside the checkout")


def real_model(name: str) -> ModelInfo:
    return read_model(FILES / f"ggml-vocab-{name}.gguf")


@real
def test_real_gpt_neox_and_mpt_are_identical() -> None:
    report = compare(real_model("gpt-neox"), real_model("mpt"))
    assert report.verdict is Verdict.IDENTICAL
    assert len(report.notes) == 1
    assert "pre-tokenizers differ (none, mpt)" in report.notes[0]


@real
def test_real_llama_and_phi_3_are_compatible() -> None:
    report = compare(real_model("llama-spm"), real_model("phi-3"))
    assert report.verdict is Verdict.COMPATIBLE
    assert (report.shared, report.differing_total) == (32000, 0)
    assert report.undraftable == tuple(range(32000, 32064))
    assert "eos" in report.notes[1]


@real
@pytest.mark.parametrize("other", ["gpt-neox", "mpt", "llama-spm", "phi-3"])
def test_real_deepseek_coder_is_like_no_other(other: str) -> None:
    for pair in ((real_model("deepseek-coder"), real_model(other)), (real_model(other), real_model("deepseek-coder"))):
        assert compare(*pair).verdict is Verdict.MISMATCH
