"""Whether one model's tokens mean the same text as another's, told from GGUF headers alone.

A draft proposes token ids. They are worth something only where an id stands for the same text in the target, so the
texts are compared id by id, and the verdict is about what can really be drafted:

- identical: the same texts under the same ids, the same tokens that begin and end a text;
- compatible: only rows of padding beyond the smaller vocabulary differ, or special tokens that are named differently.
  Those ids are listed in `VocabReport.undraftable` and must never be drafted. The text stays right either way, because
  the target checks every token;
- mismatch: ordinary tokens differ, or the tokenizers are of different kinds.

Types of tokens as in llama.cpp's `llama_token_type`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from llamaspec.errors import VocabularyMismatchError
from llamaspec.gguf_header import ModelInfo

MAX_DIFFERENCES = 10

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPECIAL_TYPES = frozenset({_UNKNOWN, _CONTROL, _UNUSED, _BYTE})
# a user-defined token is special when it looks like a marker: Gemma's runs of blanks are user-defined and ordinary
_MARKER = re.compile(rb"<[^<>\s]+>|\[[^\[\]\s]+\]")
# what is padding or special whatever its type: <|...|>, <unused7>, [PAD151665], <extra_id_1>, ...
_FILLER = re.compile(
    rb"<\|.+\|>|<\xef\xbd\x9c.+\xef\xbd\x9c>|</?(s|unk|pad|bos|eos|mask|sep|cls)>"
    rb"|[<\[]_*(pad|unused|reserved|extra|dummy|placeholder|empty)[\w-]*[>\]]",
    re.IGNORECASE,
)
_OPENINGS = frozenset(b"<[")

_ENDS = ("bos", "eos", "eot", "eom")
_END_NAMES = {"bos": "beginning", "eos": "end-of-text", "eot": "end-of-turn", "eom": "end-of-message"}
_TOKENIZER_KINDS = {"llama": "SentencePiece", "gpt2": "BPE", "gemma4": "BPE", "rwkv": "RWKV", "t5": "Unigram"}
# a vocabulary padded for speed grows by less than this part of itself
_MAX_SIZE_DIFFERENCE = 0.1
_NAMED_IN_NOTES = 5

# families whose small models fit the big ones
_SMALL_MODELS = {
    "Qwen3.5": "Qwen3.5-0.8B",
    "Qwen3-Next": "Qwen3-0.6B",
    "Qwen3": "Qwen3-0.6B",
    "QwQ": "Qwen2.5-0.5B-Instruct",
    "Qwen2.5": "Qwen2.5-0.5B-Instruct or Qwen2.5-Coder-0.5B-Instruct",
    "Qwen2": "Qwen2-0.5B-Instruct",
    "Qwen1.5": "Qwen1.5-0.5B-Chat",
    "DeepSeek-R1-Distill-Qwen": "DeepSeek-R1-Distill-Qwen-1.5B",
    "DeepSeek-R1-Distill-Llama": "Llama-3.2-1B-Instruct",
    "DeepSeek-Coder": "deepseek-coder-1.3b-instruct",
    "Llama 3": "Llama-3.2-1B-Instruct",
    "Llama 2": "TinyLlama-1.1B-Chat",
    "Gemma 3": "gemma-3-270m-it or gemma-3-1b-it",
    "SmolLM2": "SmolLM2-135M-Instruct",
    "SmolLM": "SmolLM-135M-Instruct",
    "Granite 4": "granite-4.0-350m",
    "OLMo 2": "OLMo-2-0425-1B-Instruct",
}
_KIN = (
    frozenset({"Llama 2", "TinyLlama", "CodeLlama"}),
    frozenset({"Qwen2.5", "Qwen2", "QwQ"}),
    frozenset({"Qwen3", "Qwen3-Next"}),
)

# of the target's bytes; a larger draft rarely pays
_USEFUL_PART = 0.25


class Verdict(StrEnum):
    """What a comparison found; see the module's text."""

    IDENTICAL = "identical"
    COMPATIBLE = "compatible"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The part of a model that says what its token ids mean.

    Attributes:
        tokens: the text of each id, as the tokenizer writes it.
        types: the type of each id; empty when the file does not say, which means ordinary.
        model: the kind of tokenizer, as "gpt2".
        pre: the name of the pre-tokenizer.
        special: ids by name: "bos", "eos", "eot", "eom", ...
        merges: the merge rules, or None.
        adds_bos: whether a text starts with the "bos" token; None when the file does not say.
        family: the model family, when its name shows one.
    """

    tokens: Sequence[bytes]
    types: Sequence[int] = ()
    model: str = "gpt2"
    pre: str | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    merges: Sequence[bytes] | None = None
    adds_bos: bool | None = None
    family: str | None = None

    @classmethod
    def of(cls, model: ModelInfo) -> Vocabulary:
        """The vocabulary of a model whose header was read."""
        types = model.metadata.get("tokenizer.ggml.token_type", ())
        merges = model.metadata.get("tokenizer.ggml.merges")
        adds_bos = model.metadata.get("tokenizer.ggml.add_bos_token")
        return cls(
            tokens=model.tokens,
            types=types if isinstance(types, Sequence) else (),  # type: ignore[arg-type]  # read_model checked it
            model=model.tokenizer_model,
            pre=model.tokenizer_pre,
            special=model.special_tokens,
            merges=merges if isinstance(merges, list) else None,
            adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
            family=model.named_family,
        )

    def text(self, token: int) -> str:
        """The text of `token` for people to read: in quotes, unprintable characters escaped, 60 characters at most."""
        text = self.tokens[token].decode("utf-8", errors="replace")
        return repr(text if len(text) <= 60 else text[:59] + "…")

    def is_special(self, token: int) -> bool:
        """Whether `token` is no ordinary text: control, unused, unknown, a byte, or padding or a marker by its name."""
        kind = self.types[token] if self.types else _NORMAL
        text = self.tokens[token]
        if kind in _SPECIAL_TYPES or not text:
            return True
        if text[0] not in _OPENINGS:
            return False
        return (_MARKER if kind == _USER_DEFINED else _FILLER).fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """An id that stands for different things in the two vocabularies.

    Attributes:
        id: the token's id.
        target_text: its text in the target, as the tokenizer writes it; bytes that are no UTF-8 replaced.
        draft_text: its text in the draft.
        kind: "ordinary", or "special" when it is special in both.
    """

    id: int
    target_text: str
    draft_text: str
    kind: str


@dataclass(frozen=True, slots=True)
class VocabReport:
    """What the comparison of two vocabularies found.

    Attributes:
        verdict: identical, compatible or mismatch.
        target_size: rows of the target's vocabulary. A draft of fewer rows cannot be fed the ids from `draft_size` on.
        draft_size: rows of the draft's.
        shared: ids that stand for the same text in both.
        differing: the first MAX_DIFFERENCES ids, of those in both, that do not; ordinary ones first.
        differing_total: how many there are.
        undraftable: the draft's ids that must never be drafted, ascending: those that differ or that the target lacks.
        notes: one sentence each, for people to read.
        reason: for a mismatch the one sentence that says why; None otherwise.
        suggestion: for a mismatch what would fit, when the target's family tells; None otherwise.
    """

    verdict: Verdict
    target_size: int
    draft_size: int
    shared: int
    differing: tuple[TokenDifference, ...]
    differing_total: int
    undraftable: tuple[int, ...]
    notes: tuple[str, ...]
    reason: str | None = None
    suggestion: str | None = None

    @property
    def usable(self) -> bool:
        """Whether the pair can draft."""
        return self.verdict is not Verdict.MISMATCH

    def require_usable(self) -> None:
        """Refuse a mismatch.

        Raises:
            VocabularyMismatchError: with the reason, and the suggestion as its hint.
        """
        if not self.usable:
            raise VocabularyMismatchError(f"the vocabularies do not match: {self.reason}", self.suggestion)

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON; `undraftable_ranges` are pairs of a first and a last id."""
        return {
            "verdict": self.verdict.value,
            "target_size": self.target_size,
            "draft_size": self.draft_size,
            "shared": self.shared,
            "differing": [
                {"id": d.id, "target_text": d.target_text, "draft_text": d.draft_text, "kind": d.kind} for d in self.differing
            ],
            "differing_total": self.differing_total,
            "undraftable_total": len(self.undraftable),
            "undraftable_ranges": _ranges(self.undraftable),
            "notes": list(self.notes),
            "reason": self.reason,
            "suggestion": self.suggestion,
        }


def compare(target: ModelInfo | Vocabulary, draft: ModelInfo | Vocabulary) -> VocabReport:
    """Compare two vocabularies, id by id. Never fails: two that do not fit are a mismatch with a reason.

    llama.cpp's own check (common/speculative.cpp) is stricter about special tokens and skips ids 0 to 4.
    """
    ours = target if isinstance(target, Vocabulary) else Vocabulary.of(target)
    theirs = draft if isinstance(draft, Vocabulary) else Vocabulary.of(draft)
    sizes = len(ours.tokens), len(theirs.tokens)
    differing, renamed = _differing(ours, theirs)
    ordinary = [i for i in differing if not (ours.is_special(i) and theirs.is_special(i))]
    known_ordinary = set(ordinary)
    special = [i for i in differing if i not in known_ordinary]
    reason = _mismatch(ours, theirs, ordinary)
    if reason:
        verdict = Verdict.MISMATCH
    elif differing or sizes[0] != sizes[1] or _end_differences(ours, theirs):
        verdict = Verdict.COMPATIBLE
    else:
        verdict = Verdict.IDENTICAL
    return VocabReport(
        verdict=verdict,
        target_size=sizes[0],
        draft_size=sizes[1],
        shared=min(sizes) - renamed,
        differing=tuple(
            TokenDifference(
                i,
                ours.tokens[i].decode("utf-8", errors="replace"),
                theirs.tokens[i].decode("utf-8", errors="replace"),
                "ordinary" if i in known_ordinary else "special",
            )
            for i in [*ordinary, *special][:MAX_DIFFERENCES]
        ),
        differing_total=len(differing),
        undraftable=(*differing, *range(sizes[0], sizes[1])),
        notes=() if verdict is Verdict.MISMATCH else tuple(_notes(ours, theirs, special)),
        reason=reason,
        suggestion=_suggestion(ours) if reason else None,
    )


def pair_warnings(target: ModelInfo, draft: ModelInfo) -> tuple[str, ...]:
    """What makes a pair slow or weak although it works: one sentence each, none for a good pair."""
    if _same_file(target, draft):
        return ("the draft is the target: every token is drafted at full cost",)
    warnings = []
    part = draft.tensor_bytes / target.tensor_bytes if target.has_weights else 0.0
    if part > 1:
        warnings.append("the draft is larger than the target; are they swapped?")
    elif part > _USEFUL_PART:
        warnings.append(f"the draft has {part:.0%} of the target's bytes; one tenth to one twentieth is the useful range")
    families = (target.named_family, draft.named_family)
    if None in families:
        families = (target.architecture, draft.architecture)
    if families[0] != families[1] and not any(kin.issuperset(families) for kin in _KIN):
        warnings.append(f"the target is of the family {families[0]} and the draft of {families[1]}; they may seldom agree")
    return tuple(warnings)


def _differing(ours: Vocabulary, theirs: Vocabulary) -> tuple[list[int], int]:
    """The ids in both that stand for different things, and how many of them have different texts.

    The text "<0x0A>" is a line feed where its type is byte, and six characters elsewhere.
    """
    renamed: list[int] = []
    if ours.tokens != theirs.tokens:
        texts = zip(ours.tokens, theirs.tokens, strict=False)
        renamed = [i for i, (a, b) in enumerate(texts) if a != b]
    if not ours.types or not theirs.types or ours.types == theirs.types:
        return renamed, len(renamed)
    types = zip(ours.types, theirs.types, strict=False)
    retyped = [i for i, (a, b) in enumerate(types) if a != b and _BYTE in (a, b)]
    return sorted({*renamed, *retyped}) if retyped else renamed, len(renamed)


def _mismatch(ours: Vocabulary, theirs: Vocabulary, ordinary: Sequence[int]) -> str | None:
    """Why the two do not fit, in one sentence that names the first difference; None when they do."""
    for side, vocabulary in (("target", ours), ("draft", theirs)):
        if not vocabulary.tokens:
            return f"the {side} has no vocabulary"
    if ours.model != theirs.model:
        return f"the target's tokenizer is {_kind(ours.model)}, the draft's is {_kind(theirs.model)}"
    sizes = len(ours.tokens), len(theirs.tokens)
    far = max(sizes) - min(sizes) > _MAX_SIZE_DIFFERENCE * max(sizes)
    counts = f"the target has {sizes[0]} tokens and the draft {sizes[1]}"
    if ordinary:
        first = ordinary[0]
        if ours.tokens[first] == theirs.tokens[first]:
            text = f"token {first} is {ours.text(first)} in both, but a byte in only one"
        else:
            text = f"token {first} is {ours.text(first)} in the target and {theirs.text(first)} in the draft"
        more = f", and {len(ordinary) - 1} more ordinary tokens differ" if len(ordinary) > 1 else ""
        return f"{counts}, and {text}{more}" if far else text + more
    if far:
        return counts
    longer, shorter, side, other = (
        (ours, theirs, "target", "draft") if sizes[0] > sizes[1] else (theirs, ours, "draft", "target")
    )
    extra = [i for i in range(len(shorter.tokens), len(longer.tokens)) if not longer.is_special(i)]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        return f"the {side} has ordinary tokens that the {other} lacks: {extra[0]} is {longer.text(extra[0])}{more}"
    return None


def _notes(ours: Vocabulary, theirs: Vocabulary, special: Sequence[int]) -> Iterable[str]:
    """What is worth knowing about two vocabularies that fit."""
    sizes = len(ours.tokens), len(theirs.tokens)
    if sizes[0] != sizes[1]:
        side, end = ("target", "the draft does not know them") if sizes[0] > sizes[1] else ("draft", "never drafted")
        yield (
            f"the {side} has {max(sizes) - min(sizes)} more rows, {min(sizes)} to {max(sizes) - 1}, "
            f"all padding or special: {end}"
        )
    if special:
        named = [
            f"{i} (target {ours.text(i)}, draft {theirs.text(i)})" if ours.tokens[i] != theirs.tokens[i] else f"{i}"
            for i in special[:_NAMED_IN_NOTES]
        ]
        more = f" and {len(special) - _NAMED_IN_NOTES} more" if len(special) > _NAMED_IN_NOTES else ""
        yield f"special tokens differ and are never drafted: {', '.join(named)}{more}"
    for name in _end_differences(ours, theirs):
        yield (
            f"the {_END_NAMES[name]} token ({name}) is {_token(ours, name)} in the target and "
            f"{_token(theirs, name)} in the draft; the target's counts"
        )
    if None not in (ours.adds_bos, theirs.adds_bos) and ours.adds_bos != theirs.adds_bos:
        expects, not_ = ("target", "draft") if ours.adds_bos else ("draft", "target")
        yield f"the {expects} starts a text with a beginning token and the {not_} does not: drafts may be weaker"
    weaker = "the two split some text into other tokens, so drafts may be weaker"
    if ours.model != "llama" and ours.pre != theirs.pre:
        yield f"the pre-tokenizers differ ({ours.pre or 'none'}, {theirs.pre or 'none'}): {weaker}"
    if None not in (ours.merges, theirs.merges) and ours.merges != theirs.merges:
        yield f"the merge rules differ: {weaker}"


def _end_differences(ours: Vocabulary, theirs: Vocabulary) -> list[str]:
    """The names of the tokens that begin or end a text and have different ids; what only one names is no difference."""
    return [
        name for name in _ENDS if name in ours.special and name in theirs.special and ours.special[name] != theirs.special[name]
    ]


def _token(vocabulary: Vocabulary, name: str) -> str:
    token = vocabulary.special[name]
    return f"{token} {vocabulary.text(token)}"


def _kind(model: str) -> str:
    known = _TOKENIZER_KINDS.get(model)
    return f"{known} ({model})" if known else repr(model[:40])


def _suggestion(target: Vocabulary) -> str | None:
    small = _SMALL_MODELS.get(target.family or "")
    return f"a draft that fits {target.family} models: {small}" if small else None


def _same_file(target: ModelInfo, draft: ModelInfo) -> bool:
    try:
        return target.path.samefile(draft.path)
    except OSError:
        return target.path == draft.path


def _ranges(ids: Sequence[int]) -> list[list[int]]:
    """Ascending ids as pairs of a first and a last one."""
    ranges: list[list[int]] = []
    for i in ids:
        if ranges and i == ranges[-1][1] + 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ranges
