"""A model's working state: its KV cache and the logits of its last decode.

The cache's content is mirrored in `Context.tokens`, so that what llama.cpp holds is always known exactly.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from llamaspec.errors import Cancelled, OutOfMemoryError, RuntimeFailure, UsageError
from llamaspec.llama import library, log
from llamaspec.llama.cancel import CancelFlag
from llamaspec.llama.model import Model

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
CACHE_TYPES: tuple[str, ...] = get_args(CacheType)
FlashAttention = Literal["auto", "on", "off"]
FLASH_ATTENTION: dict[str, int] = {"auto": -1, "off": 0, "on": 1}

BATCH = 512
"""Tokens of one decode at most: a prompt is read in pieces of this size, and stops between them when asked."""


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context is made.

    Attributes:
        n_ctx: tokens it holds.
        max_outputs: rows of logits that one decode may ask for. Buffers are reserved for as many, so no more than needed.
        threads: CPU threads, for single tokens and for batches alike.
        flash_attention: let llama.cpp choose, or force it.
        type_k, type_v: the types of the KV cache's halves.
    """

    n_ctx: int
    max_outputs: int
    threads: int
    flash_attention: FlashAttention = "auto"
    type_k: CacheType = "f16"
    type_v: CacheType = "f16"


class Context:
    """One sequence of one model.

    Attributes:
        tokens: the tokens whose keys and values the cache holds, position 0 first.
        busy_seconds: wall time spent inside llama_decode and waiting for its logits, since the context was made.
        can_rollback: whether the last tokens can be removed (recurrent models cannot forget).

    Raises:
        OutOfMemoryError: llama.cpp could not allocate it.
        UsageError: the model cannot have such a context, a cache type that does not divide its heads for example.
    """

    def __init__(self, model: Model, options: ContextOptions, cancel: CancelFlag) -> None:
        llama = self._llama = library.load()
        self.model = model
        self.options = options
        self.n_ctx = options.n_ctx
        self.tokens: list[int] = []
        self.busy_seconds = 0.0
        self._cancel = cancel
        self._rows = 0
        self._view_key = (0, 0)
        self._view = np.empty((0, model.n_vocab), np.float32)

        params = llama.llama_context_default_params()
        params.n_ctx = options.n_ctx
        params.n_batch = params.n_ubatch = min(BATCH, options.n_ctx)
        params.n_outputs_max = params.n_outputs_max_per_seq = options.max_outputs
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        params.type_k, params.type_v = _ggml_type(options.type_k), _ggml_type(options.type_v)
        params.no_perf = True
        params.abort_callback = ctypes.cast(cancel.callback, type(params.abort_callback))
        params.abort_callback_data = cancel.address
        errors = log.Errors()
        handle = llama.llama_init_from_model(model.handle, params)
        if not handle:
            reason = errors.reason() or "llama.cpp gave no reason"
            what = f"no context of {options.n_ctx} tokens for {model.info.path.name}: {reason}"
            if any(word in reason.lower() for word in ("memory", "alloc")):
                raise OutOfMemoryError(what, "ask for a smaller context (-c), or a smaller cache (-ctk q8_0 -ctv q8_0)")
            raise UsageError(what)
        self.handle = handle
        self.close = weakref.finalize(self, llama.llama_free, handle)
        self.memory = llama.llama_get_memory(handle)
        self._batch = _Batch(params.n_batch, llama)
        self._decode = llama.llama_decode
        # The bindings' own getter builds a pointer object per call; the address is enough.
        self._logits_address = llama._lib["llama_get_logits"]
        self._logits_address.restype, self._logits_address.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self.can_rollback = self._probe_rollback()

    # --- the cache

    def decode(self, tokens: Sequence[int], outputs: Literal["all", "last", "none"]) -> None:
        """Append tokens to the sequence and compute.

        Longer input than one batch is decoded in pieces, with a look at the cancel flag between them. After an error or a
        cancel the cache is as it was before the call.

        Args:
            tokens: ids below `model.n_vocab`; there must be room for them (`room`).
            outputs: which positions get logits; "all" takes at most `options.max_outputs` tokens.

        Raises:
            Cancelled: the flag was set.
            RuntimeFailure: llama.cpp refused or failed.
        """
        held = self.tokens
        before = len(held)
        # llama.cpp aborts the process on these two, so they are checked here, whoever calls.
        if before + len(tokens) > self.n_ctx:
            raise RuntimeFailure(f"{len(tokens)} tokens do not fit the {self.room} free places of the context")
        if outputs == "all" and len(tokens) > self.options.max_outputs:
            raise RuntimeFailure(f"{len(tokens)} rows of logits asked of a context made for {self.options.max_outputs}")
        for start in range(0, len(tokens), self._batch.capacity):
            piece = tokens[start : start + self._batch.capacity]
            last = start + len(piece) == len(tokens)
            self._batch.fill(piece, len(held), "none" if outputs == "last" and not last else outputs)
            began = time.perf_counter()
            status: int = 2 if self._cancel.is_set else self._decode(self.handle, self._batch.struct)
            self.busy_seconds += time.perf_counter() - began
            if status:
                self._forget_from(before)
                if status == 2:
                    raise Cancelled("stopped")
                raise RuntimeFailure(f"llama.cpp could not decode (status {status})")
            held.extend(piece)
        self._rows = len(tokens) if outputs == "all" else 1

    def logits(self) -> NDArray[np.float32]:
        """The logits of the last decode, shape (rows asked for, n_vocab): a view, valid until the next decode.

        Not copied: writing to it writes to llama.cpp's own buffer.
        """
        began = time.perf_counter()
        address = self._logits_address(self.handle)
        self.busy_seconds += time.perf_counter() - began
        if not address:
            raise RuntimeFailure("llama.cpp has no logits for the last decode")
        # The buffer seldom moves, and making a view anew costs more than the getter.
        if self._view_key != (address, self._rows):
            size = self._rows * self.model.n_vocab
            buffer = memoryview((ctypes.c_float * size).from_address(address))
            self._view = np.asarray(buffer, np.float32).reshape(self._rows, -1)
            self._view_key = (address, self._rows)
        return self._view

    def truncate(self, length: int) -> None:
        """Forget every token from position `length` on.

        Raises:
            RuntimeFailure: this model's memory cannot forget a part of the sequence.
        """
        if length < len(self.tokens):
            self._forget_from(length)

    def common_prefix(self, tokens: Sequence[int]) -> int:
        """How many tokens the cache and `tokens` have in common from the start."""
        return next(
            (i for i, (ours, theirs) in enumerate(zip(self.tokens, tokens, strict=False)) if ours != theirs),
            min(len(self.tokens), len(tokens)),
        )

    def keep_common_prefix(self, tokens: Sequence[int]) -> int:
        """Keep what the cache shares with `tokens`, forget the rest; returns how many tokens were kept."""
        kept = self.common_prefix(tokens)
        if kept < len(self.tokens) and not self.can_rollback:
            kept = 0
        self.truncate(kept)
        return kept

    def clear(self) -> None:
        """Forget everything."""
        self._llama.llama_memory_clear(self.memory, True)
        self.tokens.clear()

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.n_ctx - len(self.tokens)

    def _forget_from(self, length: int) -> None:
        if length == 0:
            self.clear()
            return
        if not self._llama.llama_memory_seq_rm(self.memory, 0, length, -1):
            self.clear()
            raise RuntimeFailure("this model's memory cannot forget the last tokens")
        del self.tokens[length:]

    def _probe_rollback(self) -> bool:
        """Decode two tokens and take one back: recurrent and hybrid models refuse. It warms the weights up, too."""
        if self.n_ctx < 2:
            return False
        self.decode([max(self.model.bos, 0)] * 2, "none")
        possible = bool(self._llama.llama_memory_seq_rm(self.memory, 0, 1, -1))
        self.clear()
        self.busy_seconds = 0.0
        return possible


class _Batch:
    """One `llama_batch` in memory of ours, filled through numpy views. Its sequence is always 0."""

    def __init__(self, capacity: int, llama: ModuleType) -> None:
        self.capacity = capacity
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._n_seq = np.ones(capacity, np.int32)
        self._zero = np.zeros(1, np.int32)
        self._seq = np.full(capacity, self._zero.ctypes.data, np.uintp)
        self._output = np.zeros(capacity, np.int8)
        self._steps = np.arange(capacity, dtype=np.int32)
        struct = self.struct = llama.llama_batch()
        fields = dict(struct._fields_)
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._n_seq),
            ("seq_id", self._seq),
            ("logits", self._output),
        ):
            setattr(struct, name, ctypes.cast(array.ctypes.data, fields[name]))

    def fill(self, tokens: Sequence[int], position: int, outputs: str) -> None:
        n = len(tokens)
        self.struct.n_tokens = n
        if n == 1:
            self._token[0] = tokens[0]
            self._pos[0] = position
            self._output[0] = outputs != "none"
            return
        self._token[:n] = tokens
        np.add(self._steps[:n], position, out=self._pos[:n])
        self._output[:n] = outputs == "all"
        if outputs == "last":
            self._output[n - 1] = 1


def _ggml_type(name: str) -> int:
    if name not in CACHE_TYPES:
        raise UsageError(f"no cache type {name!r}", f"one of: {', '.join(CACHE_TYPES)}")
    if name == "bf16":
        return 30  # ggml.h's number: the bindings leave this one out
    return int(getattr(library.load(), f"GGML_TYPE_{name.upper()}"))
