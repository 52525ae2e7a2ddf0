"""From a row of logits to what a token is drawn from, by llama.cpp's own samplers.

The native chain ends before its last step, the draw: the caller needs the distribution, not one token of it.
"""

from __future__ import annotations

import ctypes
import json
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamaspec.decoding.acceptance import Choice, Distribution
from llamaspec.errors import RuntimeFailure, UsageError
from llamaspec.llama import library, log
from llamaspec.llama.model import Model
from llamaspec.options import Sampling

Logits = NDArray[np.float32]
_RECORD = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data

_TAIL = 12.0
"""Tokens this far in log-probability below the best one are in no top-k of practical size."""

DRAFT_TOP_K = 40
"""A sampling draft draws from its k likeliest tokens: the tail costs time and is not accepted."""


def certainty(row: Logits) -> float:
    """The probability of the likeliest token at temperature 1, 0 to 1."""
    return 1.0 / float(np.exp(row - row.max()).sum())


class TargetSampler:
    """What the target draws from at one position after another.

    Args:
        sampling: the user's settings.
        seed: of the samplers that are random themselves (XTC).
        n_ctx: tokens of the context: what "the whole context" means to the penalties.

    Raises:
        UsageError: a grammar or schema that does not parse, a biased token that does not exist.
    """

    def __init__(self, model: Model, sampling: Sampling, seed: int, n_ctx: int) -> None:
        llama = self._llama = library.load()
        self._greedy = sampling.greedy
        self._candidates = _Candidates(model.n_vocab)
        self._chain, self._has_memory, empty = _target_chain(model, sampling, seed, n_ctx)
        self._top_k = 0 if self._greedy or self._has_memory or sampling.logit_bias else sampling.top_k
        self._grammar = _grammar(model, sampling)
        self._only_argmax = self._greedy and empty and self._grammar is None
        for sampler in filter(None, (self._chain, self._grammar)):
            weakref.finalize(self, llama.llama_sampler_free, sampler)

    def begin(self, prompt: Sequence[int]) -> None:
        """Show the penalties what stands before the answer. A grammar starts with the answer, so it sees none of it."""
        if self._has_memory:
            for token in prompt:
                self._llama.llama_sampler_accept(self._chain, token)

    def choice(self, row: Logits) -> Choice:
        """What the next token is drawn from: one token when greedy, else a distribution.

        Args:
            row: logits of the position, shape (n_vocab,). Not changed.

        Raises:
            RuntimeFailure: the grammar forbids every token of this vocabulary.
        """
        if self._only_argmax:
            return int(row.argmax())
        ids, logits = self._apply(self._candidates.fill_top(row, self._top_k))
        if self._grammar is not None:
            allowed = self._allowed(ids)
            if allowed.any():
                ids, logits = ids[allowed], logits[allowed]
            else:
                everything = self._candidates.fill(row)
                self._llama.llama_sampler_apply(self._grammar, everything)
                ids, logits = self._apply(self._candidates.drop_forbidden())
        if self._greedy:
            return int(ids[0])
        return _softmax(ids, logits)

    def accept(self, token: int) -> None:
        """Tell the samplers with a memory which token was emitted."""
        if self._has_memory:
            self._llama.llama_sampler_accept(self._chain, token)
        if self._grammar is not None:
            self._llama.llama_sampler_accept(self._grammar, token)

    def _apply(self, array: object) -> tuple[NDArray[np.int32], Logits]:
        self._llama.llama_sampler_apply(self._chain, array)
        ids, logits = self._candidates.read()
        if self._greedy:
            best = int(logits.argmax())
            return ids[best : best + 1], logits[best : best + 1]
        return ids, logits

    def _allowed(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        few = _Candidates(len(ids))
        self._llama.llama_sampler_apply(self._grammar, few.fill(np.zeros(len(ids), np.float32), ids))
        return np.isfinite(few.read()[1])


class DraftSampler:
    """What the draft draws from, and how sure it is.

    Args:
        temperature: 0 takes the likeliest token.
        forbidden: ids never drafted (those the target does not share).
    """

    def __init__(self, model: Model, temperature: float, forbidden: Sequence[int]) -> None:
        llama = self._llama = library.load()
        self._forbidden = np.asarray(forbidden, np.int64)
        self._buffer = np.empty(model.n_vocab, np.float32)
        self._chain = None
        if temperature > 0:
            self._candidates = _Candidates(model.n_vocab)
            self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
            llama.llama_sampler_chain_add(self._chain, llama.llama_sampler_init_top_k(DRAFT_TOP_K))
            llama.llama_sampler_chain_add(self._chain, llama.llama_sampler_init_temp(temperature))
            weakref.finalize(self, llama.llama_sampler_free, self._chain)

    def choice(self, row: Logits) -> tuple[Choice, float]:
        """What the next draft token is drawn from, and the probability of the likeliest one.

        The probability is over the whole vocabulary at temperature 1, whatever the draft temperature.

        Args:
            row: logits of the position, shape (n_vocab,); the forbidden ids in it are overwritten.
        """
        if self._forbidden.size:
            row[self._forbidden] = -np.inf
        best = int(row.argmax())
        np.subtract(row, row[best], out=self._buffer)
        np.exp(self._buffer, out=self._buffer)
        confidence = 1.0 / float(self._buffer.sum())
        if self._chain is None:
            return best, confidence
        self._llama.llama_sampler_apply(self._chain, self._candidates.fill_top(row, DRAFT_TOP_K))
        return _softmax(*self._candidates.read()), confidence


class _Candidates:
    """A native `llama_token_data_array` over memory of ours."""

    def __init__(self, size: int) -> None:
        llama = library.load()
        self._records = np.zeros(size, _RECORD)
        self._ids = np.arange(size, dtype=np.int32)
        self._array = llama.llama_token_data_array()
        self._pointer = ctypes.pointer(self._array)
        self._data = ctypes.cast(self._records.ctypes.data, llama.llama_token_data_p)

    def fill(self, logits: Logits, ids: NDArray[np.int32] | None = None) -> object:
        """Present these logits to the samplers; the ids count from 0 when not given."""
        size = len(logits)
        self._records["id"][:size] = self._ids if ids is None else ids
        self._records["logit"][:size] = logits
        return self._present(size)

    def fill_top(self, logits: Logits, k: int) -> object:
        """The same for a chain that begins with top-k: without the tail that top-k would drop. k = 0 keeps all."""
        if k:
            near = np.flatnonzero(logits > logits.max() - _TAIL)
            if k <= len(near):
                return self.fill(logits[near], near.astype(np.int32))
        return self.fill(logits)

    def drop_forbidden(self) -> object:
        """Keep the records whose logit is finite.

        Raises:
            RuntimeFailure: there are none.
        """
        kept = self._records[np.isfinite(self._records["logit"])]
        if not kept.size:
            raise RuntimeFailure("the grammar allows no token of this model's vocabulary here")
        self._records[: kept.size] = kept
        return self._present(kept.size)

    def read(self) -> tuple[NDArray[np.int32], Logits]:
        """Ids and logits as the samplers left them, copied."""
        size = self._array.size
        address = ctypes.cast(self._array.data, ctypes.c_void_p).value
        assert address is not None
        left = np.frombuffer((ctypes.c_char * (size * _RECORD.itemsize)).from_address(address), _RECORD)
        return left["id"].copy(), left["logit"].copy()

    def _present(self, size: int) -> object:
        self._array.data = self._data
        self._array.size = size
        self._array.selected = -1
        self._array.sorted = False
        return self._pointer


def _softmax(ids: NDArray[np.int32], logits: Logits) -> Distribution:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return Distribution(ids, weights / weights.sum())


def _target_chain(model: Model, sampling: Sampling, seed: int, n_ctx: int) -> tuple[object, bool, bool]:
    """The chain; whether a part of it remembers tokens; whether it is empty."""
    llama = library.load()
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    steps: list[object] = []
    if sampling.logit_bias:
        steps.append(_logit_bias(model, sampling))
    last_n = n_ctx if sampling.penalty_last_n < 0 else min(sampling.penalty_last_n, n_ctx)
    penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    remembers = bool(last_n) and penalties != (1.0, 0.0, 0.0)
    if remembers:
        steps.append(llama.llama_sampler_init_penalties(model.n_vocab, last_n, *penalties))
    dry_last_n = n_ctx if sampling.dry_penalty_last_n < 0 else min(sampling.dry_penalty_last_n, n_ctx)
    if sampling.dry_multiplier > 0 and dry_last_n:
        remembers = True
        breakers = [text.encode("utf-8", "replace") for text in sampling.dry_sequence_breakers]
        steps.append(
            llama.llama_sampler_init_dry(
                model.vocab,
                sampling.dry_multiplier,
                sampling.dry_base,
                sampling.dry_allowed_length,
                dry_last_n,
                (ctypes.c_char_p * len(breakers))(*breakers),
                len(breakers),
            )
        )
    if not sampling.greedy:
        if sampling.top_k:
            steps.append(llama.llama_sampler_init_top_k(min(sampling.top_k, model.n_vocab)))
        if sampling.typical_p < 1:
            steps.append(llama.llama_sampler_init_typical(sampling.typical_p, 1))
        if sampling.top_p < 1:
            steps.append(llama.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p > 0:
            steps.append(llama.llama_sampler_init_min_p(sampling.min_p, 1))
        if sampling.xtc_probability > 0:
            steps.append(llama.llama_sampler_init_xtc(sampling.xtc_probability, sampling.xtc_threshold, 1, seed & 0xFFFFFFFE))
        steps.append(llama.llama_sampler_init_temp(sampling.temperature))
    for step in steps:
        llama.llama_sampler_chain_add(chain, step)
    return chain, remembers, not steps


def _logit_bias(model: Model, sampling: Sampling) -> object:
    llama = library.load()
    for token in sampling.logit_bias:
        if not 0 <= token < model.n_vocab:
            raise UsageError(f"logit_bias names token {token}: this vocabulary has 0 to {model.n_vocab - 1}")
    biases = [llama.llama_logit_bias(token=t, bias=b) for t, b in sampling.logit_bias.items()]
    return llama.llama_sampler_init_logit_bias(model.n_vocab, len(biases), (llama.llama_logit_bias * len(biases))(*biases))


def _grammar(model: Model, sampling: Sampling) -> object | None:
    text = sampling.grammar
    if sampling.json_schema is not None:
        text = _schema_to_gbnf(sampling.json_schema)
    if text is None:
        return None
    if not text.strip():
        raise UsageError("the grammar is empty")
    if "\0" in text:
        raise UsageError("the grammar holds a NUL character")
    printed: list[str] = []
    errors = log.Errors()
    with log.captured_stderr(printed):
        grammar = library.load().llama_sampler_init_grammar(model.vocab, text.encode("utf-8", "replace"), b"root")
    if not grammar:
        first = next((line for line in "".join(printed).splitlines() if line.strip()), "") or errors.reason()
        reason = first.rsplit("error parsing grammar: ", 1)[-1].strip() or "it has no usable rule `root`"
        raise UsageError(f"the grammar does not parse: {reason[:200]}")
    loaded: object = grammar
    return loaded


def _schema_to_gbnf(schema: object) -> str:
    library.load()
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        return str(json_schema_to_gbnf(json.dumps(schema)))
    except Exception as error:  # the converter raises whatever its code happens to hit
        raise UsageError(f"the JSON schema cannot be turned into a grammar: {error or type(error).__name__}") from error
