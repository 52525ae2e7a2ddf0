"""A loaded pair: the models, their caches, and `generate`."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Literal, TypeGuard

from llamaspec import calibration, hardware
from llamaspec.chat.templates import ChatTemplate
from llamaspec.decoding.draft_length import Decisions, DraftLength
from llamaspec.decoding.rounds import Answer, Round, rounds
from llamaspec.drafting import Drafter
from llamaspec.drafting.auto import AutoDrafter
from llamaspec.drafting.model import ModelDrafter
from llamaspec.drafting.ngram import NgramDrafter
from llamaspec.errors import (
    ContextFullError,
    UnfitError,
    UsageError,
)
from llamaspec.find import model_here, pair_here
from llamaspec.gguf_header import ModelInfo, read_model
from llamaspec.llama import library
from llamaspec.llama.cancel import CancelFlag
from llamaspec.llama.context import CACHE_TYPES, FLASH_ATTENTION, CacheType, Context, ContextOptions, FlashAttention
from llamaspec.llama.model import SPLIT_MODES, Model, Placement, SplitMode
from llamaspec.llama.sampler import DraftSampler, TargetSampler
from llamaspec.options import DRAFT_OUTPUTS, MAX_DRAFT, Sampling, Speculation
from llamaspec.placement import settle
from llamaspec.plan import DEFAULT_CONTEXT
from llamaspec.remembered import Memory
from llamaspec.text import TextStream
from llamaspec.vocab import VocabReport, compare, pair_warnings
from llamaspec.worker import Worker

Overflow = Literal["stop", "drop_oldest"]
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a pair is put into memory.

    Attributes:
        n_ctx: tokens of both contexts; None takes 4096, or less if the target was trained on less, or if less fits.
        gpu_layers, draft_gpu_layers: layers on the GPU; None takes as many as fit when there is a GPU this build can use.
        main_gpu: the device of a target that is not split, and of the draft, which never is.
        split_mode: how the target is spread over several GPUs.
        flash_attention: "auto", "on" or "off".
        cache_type_k, cache_type_v: types of the target's KV cache.
        draft_cache_type_k, draft_cache_type_v: of the draft's. A quantized one can ruin acceptance.
        threads: CPU threads; None takes the physical cores this process may use.
        mmap, mlock: map the files; keep the weights in memory.
        remember: keep what is learnt of the pair's speed on this machine for the next load, in the user's cache folder.
    """

    n_ctx: int | None = None
    gpu_layers: int | None = None
    draft_gpu_layers: int | None = None
    main_gpu: int = 0
    split_mode: SplitMode = "layer"
    flash_attention: FlashAttention = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    draft_cache_type_k: CacheType = "f16"
    draft_cache_type_v: CacheType = "f16"
    threads: int | None = None
    mmap: bool | None = None
    mlock: bool = False
    remember: bool = True

    def __post_init__(self) -> None:
        if self.n_ctx is not None and self.n_ctx < 8:
            raise UsageError(f"n_ctx is {self.n_ctx}: a context has at least 8 tokens")
        if self.threads is not None and not 1 <= self.threads <= 512:
            raise UsageError(f"threads is {self.threads}: it takes 1 to 512")
        if self.main_gpu < 0:
            raise UsageError(f"main_gpu is {self.main_gpu}: devices count from 0")
        for name, value, known in (
            ("split_mode", self.split_mode, tuple(SPLIT_MODES)),
            ("flash_attention", self.flash_attention, tuple(FLASH_ATTENTION)),
            *((n, getattr(self, n), CACHE_TYPES) for n in self.__slots__ if n.rpartition("_")[0].endswith("cache_type")),
        ):
            if value not in known:
                raise UsageError(f"{name} is {value!r}", f"one of: {', '.join(known)}")


def load(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    options: LoadOptions | None = None,
    chat_template: str | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> Pair:
    """Load a target, and a draft model for it, from GGUF files.

    Both headers are read first: files that cannot work, and a pair whose tokens differ, are refused before any weights load.

    Args:
        target, draft: paths of GGUF files (of a sharded model, its first file); as texts also names: a pair of models.toml,
            which brings its draft, "user/repo:QUANT" for what is in the Hub's cache, or a model that `llamaspec list` shows.
        options: contexts, devices, memory.
        chat_template: Jinja source to use in place of the target's own.
        on_progress: called with ("target" or "draft", 0.0 to 1.0) while weights load, in another thread.

    Raises:
        NotFoundError: a file is missing; a NotPulledError says how to pull it.
        ModelFileError: a file is damaged, or no model that writes text.
        VocabularyMismatchError: the draft's tokens are not the target's.
        OutOfMemoryError: it needs more memory than there is; its table shows what takes how much.
        UnfitError: the draft cannot be rolled back (a recurrent model).
        RuntimeFailure: llama.cpp cannot load a file.
    """
    options = options or LoadOptions()
    if chat_template is not None:
        ChatTemplate(chat_template, bos_token="", eos_token="", special_tokens=())  # a mistake in it shows before 20 GB load
    if isinstance(target, str):
        found = pair_here(target, draft if isinstance(draft, str) else None, wants_draft=draft is None)
        target, draft = found.target, found.draft or draft
    elif isinstance(draft, str):
        draft = model_here(draft)
    target_info = read_model(target)
    target_info.require_runnable()
    draft_info = report = None
    if draft is not None:
        draft_info = read_model(draft)
        draft_info.require_runnable()
        report = compare(target_info, draft_info)
        report.require_usable()
    options, changes = settle(target_info, draft_info, options)
    pair = Pair(target_info, draft_info, report, options, chat_template, on_progress)
    pair.notices = (*changes, *pair.notices)
    return pair


class Pair:
    """A target and its drafter, ready to generate. Made by `load`; a context manager that frees both.

    One answer at a time: starting another ends the one before. All methods may be called from any thread.

    Attributes:
        target, draft: the headers of the two files.
        vocabulary: how the two vocabularies compare; None without a draft.
        notices: sentences a user should see: what is unusual about this pair, what is switched off and why.
        n_ctx: tokens of the context.
        can_draft: whether the target can be rolled back, without which nothing can be drafted for it.
    """

    def __init__(
        self,
        target: ModelInfo,
        draft: ModelInfo | None,
        vocabulary: VocabReport | None,
        options: LoadOptions,
        chat_template: str | None,
        on_progress: Callable[[str, float], None] | None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.vocabulary = vocabulary
        self.options = options
        self.n_ctx = options.n_ctx or min(DEFAULT_CONTEXT, target.context_length)
        self.threads = options.threads or hardware.physical_cores()
        self._progress = on_progress
        self._cancel = CancelFlag()
        self._worker = Worker(self._cancel.set, self._cancel.clear)
        self._answer: object = None
        self._settled = 0  # tokens of the target's cache that the caller knows of
        self._draft_context: Context | None = None
        self._decider: DraftLength | None = None
        self._memory: Memory | None = None
        notices = list(pair_warnings(target, draft)) if draft is not None else []
        if self.n_ctx > target.context_length:
            notices.append(f"the context of {self.n_ctx} tokens is longer than the {target.context_length} it was trained on")
        try:
            self._worker.run(self._load)
            self._template = self._worker.run(self._chat_template, chat_template)
        except BaseException:
            self.close()
            raise
        self.can_draft = self._context.can_rollback
        if not self.can_draft:
            notices.append(
                f"drafting is off: {target.architecture} keeps a state that cannot be rolled back to an earlier token"
            )
        if self._template is None:
            notices.append("the model has no chat template: messages are completed as plain text")
        self.notices: tuple[str, ...] = tuple(notices)

    # --- generating

    def generate(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling | None = None,
        speculation: Speculation | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        overflow: Overflow = "stop",
    ) -> Iterator[Round]:
        """Generate an answer, round by round.

        The cache is kept: a prompt that begins like the last one, with its answer, reads only what is new. Closing the
        iterator early keeps what was generated.

        Args:
            prompt: text to complete as it is (control tokens in it count), token ids, or chat messages
                `{"role": ..., "content": ...}`, rendered with the chat template (control tokens in them are plain text).
            sampling: how the target picks tokens.
            speculation: how to draft.
            max_tokens: tokens to generate at most; None for no limit but the context.
            stop: strings that end the answer, which ends before them.
            overflow: what happens when the context is full: "stop" ends with finish_reason "context"; "drop_oldest" forgets
                the oldest messages after the system's, two by two, and goes on (chat messages only).

        Raises:
            UsageError: a request that cannot be fulfilled: an empty prompt, a bad grammar, a wrong token id.
            ContextFullError: the prompt does not fit.
            Cancelled: `cancel()` was called.
            RuntimeFailure: llama.cpp failed.
        """
        sampling, speculation = sampling or Sampling(), speculation or Speculation()
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}: it takes 1 or more")
        if isinstance(stop, str):
            stop = (stop,)
        turns = _Turns(self, prompt, overflow)
        tokens = turns.tokens(room_for=min(max_tokens or self.n_ctx, self.n_ctx // 4))
        return self._generate(tokens, turns, sampling, speculation, max_tokens, stop)

    def _generate(
        self,
        tokens: list[int],
        turns: _Turns,
        sampling: Sampling,
        speculation: Speculation,
        max_tokens: int | None,
        stop: Sequence[str],
    ) -> Iterator[Round]:
        self._answer = current = object()
        answer, drafter = self._worker.run(self._start, tokens, sampling, speculation, max_tokens, stop)
        steps = rounds(self._context, drafter, tokens, answer)
        said: list[int] = []
        held = len(tokens) - 1  # tokens the target's cache has before those said
        # Rounds are computed ahead while the caller looks at the last one, so that neither waits for the other to wake up. A
        # target that cannot take a round back computes none that may not be wanted.
        depth = 2 if self.can_draft else 0
        ahead = deque(self._worker.start(next, steps) for _ in range(max(depth, 1)))
        self._settled = held
        try:
            while True:
                if self._answer is not current:
                    raise UsageError("this answer has ended: another one was started on the same pair")
                one = self._worker.wait(ahead.popleft())
                said += one.tokens
                if notices := turns.take_notices():
                    one = replace(one, notices=notices)
                if one.finish_reason is not None and isinstance(drafter, AutoDrafter):
                    one = replace(one, decisions=drafter.decisions)
                if one.finish_reason == "context":
                    shorter = turns.drop_oldest()
                    if shorter is not None:
                        steps = rounds(self._context, drafter, [*shorter, *said], answer)
                        ahead.clear()  # what was asked for behind the last round is not there
                        held = len(shorter) - 1
                        one = replace(one, finish_reason=None, decisions=None)
                    else:
                        one = replace(one, pieces=(*one.pieces[:-1], one.pieces[-1] + answer.text.finish()))
                self._settled = held + len(said)
                while one.finish_reason is None and len(ahead) < depth:
                    ahead.append(self._worker.start(next, steps))
                yield one
                if one.finish_reason is not None:
                    return
                if not ahead:
                    ahead.append(self._worker.start(next, steps))
        finally:
            if self._answer is current:
                self._take_back(self._settled)

    def _take_back(self, length: int) -> None:
        """Stop the round in the making; the target's cache keeps `length` tokens."""
        # Where a generator that nobody holds any more ends is anybody's guess.
        if self.can_draft and not self._worker.closed and not self._worker.is_here:
            self._worker.halt()
            self._worker.run(self._context.truncate, length)

    def _start(
        self,
        prompt: list[int],
        sampling: Sampling,
        speculation: Speculation,
        max_tokens: int | None,
        stop: Sequence[str],
    ) -> tuple[Answer, Drafter | None]:
        self._cancel.clear()
        seed = secrets.randbits(31) if sampling.seed is None else sampling.seed
        sampler = TargetSampler(self._model, sampling, seed, self.n_ctx)
        sampler.begin(prompt)
        drafter, n_draft = self._drafter(prompt, speculation, seed)
        answer = Answer(
            sampler=sampler,
            text=TextStream(self._model.piece, stop),
            rng=Random(seed),
            n_draft=n_draft,
            max_tokens=max_tokens,
        )
        return answer, drafter

    def drafters(self, speculation: Speculation | None = None) -> tuple[str, ...]:
        """Who may draft with these settings: "model", "ngram", both, or nobody."""
        asked = speculation or Speculation()
        if not self.can_draft or asked.drafter == "none" or asked.n_draft == 0:
            return ()
        if asked.drafter != "auto":
            return (asked.drafter,)
        both = ("model", "ngram") if self.draft is not None else ("ngram",)
        return both if asked.n_draft is None else both[:1]

    def _drafter(self, prompt: Sequence[int], speculation: Speculation, seed: int) -> tuple[Drafter | None, int]:
        """The drafter, and the most tokens it may propose in a round."""
        names = self.drafters(speculation)
        if not names:
            return None, 0
        fixed = speculation.n_draft
        lookup = model = None
        if "ngram" in names:
            reference = self._tokenize(speculation.reference) if speculation.reference else []
            lookup = NgramDrafter(speculation.ngram_min or (2 if fixed is None else 3), reference)
        if "model" in names:
            if self._draft_context is None or self.vocabulary is None:
                raise UsageError("the drafter 'model' needs a draft model, and this pair has none")
            sampler = DraftSampler(self._draft_context.model, speculation.draft_temperature, self.vocabulary.undraftable)
            # Another stream of numbers than the target's: a token must not be accepted because of how it was drawn.
            model = ModelDrafter(self._draft_context, sampler, Random(f"draft {seed}"), speculation.p_min)
        if fixed is not None:
            return model or lookup, fixed
        decider = self._decide(prompt)
        decider.begin()
        return AutoDrafter(decider, model, lookup, speculation.p_min), MAX_DRAFT

    def _decide(self, prompt: Sequence[int]) -> DraftLength:
        """Who decides on the draft length: it knows this pair from before, or measures it now.

        Doubtful costs are measured again unless `prompt` goes on from what the cache holds, which measuring would empty.
        """
        if self._decider is None and self._memory is None and self.options.remember:
            self._memory = Memory(self._identity())
            self._decider = self._memory.recall()
        undraftable = self.vocabulary.undraftable if self.vocabulary is not None else ()
        if self._decider is None:
            self._decider = calibration.measure(self._context, self._draft_context, undraftable)
        elif self._decider.costs.doubtful and self._context.common_prefix(prompt) < DRAFT_OUTPUTS:
            self._decider = calibration.measure_again(self._decider, self._context, self._draft_context, undraftable)
        return self._decider

    def _identity(self) -> dict[str, Any]:
        """What the speeds of this pair depend on."""
        files = {}
        for which, info in (("target", self.target), ("draft", self.draft)):
            if info is not None:
                try:
                    changed = info.path.stat().st_mtime_ns
                except OSError:
                    changed = 0  # moved away since it was loaded
                files[which] = [info.path.name, changed, info.tensor_bytes, info.vocab_size]
        settings = self.settings()
        kept = ("threads", "gpu_layers", "draft_gpu_layers", "main_gpu", "split_mode", "flash_attention")
        types = {name: value for name, value in settings.items() if "cache_type" in name}
        return files | {name: settings[name] for name in kept} | types | hardware.identity() | library.versions()

    # --- around it

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, as `generate` would read it."""
        return _Turns(self, prompt, "stop").tokens(room_for=0)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens; control tokens have none."""
        return b"".join(map(self._model.piece, tokens)).decode("utf-8", "replace")

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """What the target's cache holds."""
        return tuple(self._context.tokens[: self._settled])

    @property
    def busy_seconds(self) -> float:
        """Wall time spent inside llama.cpp's decodes, of both models, since the pair was loaded."""
        return self._context.busy_seconds + (self._draft_context.busy_seconds if self._draft_context else 0.0)

    def reset(self) -> None:
        """Forget every prompt and answer, so that the next run starts cold."""
        self._answer = None
        self._worker.run(self._context.clear)
        if self._draft_context is not None:
            self._worker.run(self._draft_context.clear)

    def decisions(self) -> Decisions | None:
        """What the next decision on the draft length would rest on; None when none was taken yet."""
        return self._decider.decisions() if self._decider is not None else None

    def forget(self) -> None:
        """Forget what was learnt of how far to draft, now and in earlier runs: the next answer begins with a measurement."""
        if self._memory is None and self.options.remember:
            self._memory = Memory(self._identity())
        self._decider = None

    def cancel(self) -> None:
        """Stop the answer in the making, from another thread: its `generate` raises Cancelled."""
        self._cancel.set()

    def settings(self, sampling: Sampling | None = None, speculation: Speculation | None = None) -> dict[str, Any]:
        """What is in force, defaults filled in, for a report."""
        return {
            "target": str(self.target.path),
            "draft": str(self.draft.path) if self.draft else None,
            **asdict(self.options),
            "n_ctx": self.n_ctx,
            "threads": self.threads,
            "gpu_layers": self._model.gpu_layers,
            "draft_gpu_layers": self._draft_context.model.gpu_layers if self._draft_context else None,
            "sampling": asdict(sampling or Sampling()),
            "speculation": {
                **asdict(speculation or Speculation()),
                "drafters": self.drafters(speculation),
            },
        }

    def close(self) -> None:
        """Free both models. The pair cannot be used afterwards."""
        self._worker.close()
        if self._memory is not None and self._decider is not None and not self._decider.costs.doubtful:
            self._memory.keep(self._decider)
        self._memory = None
        for context in (getattr(self, "_context", None), self._draft_context):
            if context is not None:
                context.close()
                context.model.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- loading

    def _load(self) -> None:
        options = self.options
        target = Placement(options.gpu_layers, options.main_gpu, options.split_mode, options.mmap, options.mlock)
        self._model = Model(self.target, target, self._report("target"))
        self._context = self._make_context(self._model, options.cache_type_k, options.cache_type_v, MAX_DRAFT + 1)
        if self.draft is None:
            return
        placement = replace(target, gpu_layers=options.draft_gpu_layers, split_mode="none")
        model = Model(self.draft, placement, self._report("draft"))
        self._draft_context = self._make_context(model, options.draft_cache_type_k, options.draft_cache_type_v, DRAFT_OUTPUTS)
        if not self._draft_context.can_rollback:
            raise UnfitError(
                f"{self.draft.path.name} cannot draft: {self.draft.architecture} keeps a state that cannot be rolled back",
                "take a draft with ordinary attention, or run without one (--no-draft)",
            )

    def _make_context(self, model: Model, type_k: CacheType, type_v: CacheType, max_outputs: int) -> Context:
        context = ContextOptions(self.n_ctx, max_outputs, self.threads, self.options.flash_attention, type_k, type_v)
        return Context(model, context, self._cancel)

    def _report(self, which: str) -> Callable[[float], bool]:
        def report(fraction: float) -> bool:
            if self._progress is not None:
                self._progress(which, fraction)
            return not self._cancel.is_set

        return report

    def _chat_template(self, override: str | None) -> ChatTemplate | None:
        source = override if override is not None else self._model.chat_template
        if source is None:
            return None
        return ChatTemplate(
            source,
            bos_token=self._model.token_text(self._model.bos),
            eos_token=self._model.token_text(self._model.eos),
            special_tokens=self._model.control_texts(),
        )

    def _tokenize(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False, parse_special=False)


class _Turns:
    """A prompt as the caller gave it, and its tokens, with the oldest messages dropped when asked for."""

    def __init__(self, pair: Pair, prompt: Prompt, overflow: Overflow) -> None:
        self._pair = pair
        self._prompt = prompt
        self._may_drop = overflow == "drop_oldest" and _is_messages(prompt)
        self._dropped = 0
        self._notices: tuple[str, ...] = ()

    def tokens(self, room_for: int) -> list[int]:
        """The prompt's tokens; `room_for` is the room to leave behind it when messages may be dropped."""
        tokens = self._pair._worker.run(self._render)
        n_ctx = self._pair.n_ctx
        while len(tokens) + room_for > n_ctx:
            shorter = self.drop_oldest()
            if shorter is None:
                break
            tokens = shorter
        if not tokens:
            raise UsageError("the prompt is empty")
        if len(tokens) > n_ctx:
            raise ContextFullError(
                f"the prompt has {len(tokens)} tokens, the context {n_ctx}",
                f"ask for a larger context: -c {-(-(len(tokens) + 512) // 1024) * 1024}",
            )
        return tokens

    def drop_oldest(self) -> list[int] | None:
        """The tokens without the oldest exchange after the system message; None when that is not allowed or possible."""
        if not self._may_drop:
            return None
        messages: Any = list(self._prompt)
        first = 1 if messages[0].get("role") == "system" else 0
        if len(messages) < first + 3:
            return None
        self._prompt = messages[:first] + messages[first + 2 :]
        self._dropped += 2
        return self._pair._worker.run(self._render)

    def take_notices(self) -> tuple[str, ...]:
        """What the user should be told since the last time."""
        notices, self._notices = self._notices, ()
        if self._dropped:
            notices += (f"the context is full: the {self._dropped} oldest messages were dropped",)
            self._dropped = 0
        return notices

    def _render(self) -> list[int]:
        pair, prompt = self._pair, self._prompt
        model = pair._model
        if isinstance(prompt, str):
            return model.tokenize(prompt, add_special=True, parse_special=True)
        if not _is_messages(prompt):
            return [_checked(token, model) for token in prompt]
        if pair._template is None:
            text = "\n\n".join(str(message.get("content", "")) for message in prompt)
            return model.tokenize(text, add_special=True, parse_special=False)
        rendered = pair._template.render(prompt)
        self._notices = rendered.notices
        tokens: list[int] = []
        for number, piece in enumerate(rendered.pieces):
            first = number == 0 and not rendered.starts_with_bos
            tokens += model.tokenize(piece.text, add_special=first, parse_special=piece.special)
        return tokens


def _checked(token: object, model: Model) -> int:
    """llama.cpp refuses a batch with an unknown id, without saying which."""
    if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= (number := token.__index__()) < model.n_vocab:
        raise UsageError(f"{token!r} is no token of this model: they go from 0 to {model.n_vocab - 1}")
    return int(number)


def _is_messages(prompt: Prompt) -> TypeGuard[Sequence[Mapping[str, str]]]:
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], int)
