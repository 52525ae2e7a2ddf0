"""A loaded GGUF model: its weights, its vocabulary, text to tokens and back."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from llamaspec.errors import Cancelled, RuntimeFailure, UsageError
from llamaspec.gguf_header import ModelInfo
from llamaspec.llama import devices, library, log

SplitMode = Literal["none", "layer", "row"]
SPLIT_MODES: dict[str, int] = {"none": 0, "layer": 1, "row": 2}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's weights go.

    Attributes:
        gpu_layers: layers on the graphics processors; None means all of them when this build has a GPU backend and the
            machine a GPU, else none. -1 means all.
        main_gpu: the device that holds the whole model when `split_mode` is "none".
        split_mode: how to spread over several GPUs: by layer, by rows, or not at all.
        mmap: map the file instead of reading it; None leaves it to llama.cpp.
        mlock: keep the weights in memory, never swapped.
    """

    gpu_layers: int | None = None
    main_gpu: int = 0
    split_mode: SplitMode = "layer"
    mmap: bool | None = None
    mlock: bool = False


class Model:
    """One model in memory.

    Args:
        info: the file's header, already checked: llama.cpp aborts the process on some damaged files.
        placement: devices and memory.
        progress: called with 0.0 to 1.0 while the weights load; a false answer abandons the load.

    Raises:
        Cancelled: `progress` said so.
        RuntimeFailure: llama.cpp cannot load the file; the message says why.
    """

    def __init__(self, info: ModelInfo, placement: Placement, progress: Callable[[float], bool] | None = None) -> None:
        llama = self._llama = library.load()
        self.info = info
        self.gpu_layers = _gpu_layers(placement, info)
        params = llama.llama_model_default_params()
        params.n_gpu_layers = self.gpu_layers
        params.main_gpu = placement.main_gpu
        params.split_mode = SPLIT_MODES[placement.split_mode]
        params.load_mode = _load_mode(placement, llama)
        # An exception cannot cross the C code: it is kept, the load abandoned, and then it is raised.
        stopped: list[BaseException] = []

        def report(fraction: float, _user_data: object) -> bool:
            try:
                if progress is not None and not progress(fraction):
                    stopped.append(Cancelled(f"loading {info.path.name} was stopped"))
            except BaseException as error:
                stopped.append(error)
            return not stopped

        callback = llama.llama_progress_callback(report)
        params.progress_callback = callback
        errors = log.Errors()
        handle = llama.llama_model_load_from_file(str(info.path).encode(), params)
        if stopped:
            if handle:
                llama.llama_model_free(handle)
            raise stopped[0]
        if not handle:
            raise RuntimeFailure(f"{info.path.name} does not load: {errors.reason() or 'llama.cpp gave no reason'}")
        self.handle = handle
        self.close = weakref.finalize(self, llama.llama_model_free, handle)
        self.vocab = llama.llama_model_get_vocab(handle)
        self.n_vocab: int = llama.llama_vocab_n_tokens(self.vocab)
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self._missing_bytes, self._letters = _unspellable(info)

    # --- text and tokens

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The tokens of `text`.

        Args:
            add_special: put the model's own BOS (and EOS) around it, as its metadata asks.
            parse_special: read control tokens spelled out in the text as such; otherwise they are plain text.

        Raises:
            UsageError: the vocabulary has no token for a character of the text.
        """
        if self._missing_bytes:
            # llama.cpp ends the process on these.
            for letter in set(text.replace(" ", "\u2581")) - self._letters:
                if self._missing_bytes.intersection(letter.encode("utf-8", "replace")):
                    raise UsageError(f"{self.info.path.name} has no token for {letter!r}")
        # A lone surrogate has no UTF-8 form, and llama.cpp throws across the C boundary on invalid UTF-8.
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * capacity)()
            count: int = self._llama.llama_tokenize(self.vocab, data, len(data), tokens, capacity, add_special, parse_special)
            if 0 <= count <= capacity:
                return tokens[:count]
            if count == -(2**31):
                raise UsageError("the text is too long for llama.cpp's tokenizer (over 2^31 tokens)")
            capacity = -count

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text: none for a control token; perhaps half a character."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._token_to_piece(token, special=False)
        return piece

    def token_text(self, token: int) -> str:
        """A token spelled out, control tokens too; "" for the id -1."""
        return self._token_to_piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def is_end(self, token: int) -> bool:
        """Does this token end the generation (EOS, end of turn and their like)?"""
        end = self._ends.get(token)
        if end is None:
            end = self._ends[token] = bool(self._llama.llama_vocab_is_eog(self.vocab, token))
        return end

    def control_texts(self) -> list[str]:
        """The spellings of every control token."""
        vocab, llama = self.vocab, self._llama
        return [self.token_text(t) for t in range(self.n_vocab) if llama.llama_vocab_is_control(vocab, t)]

    @property
    def bos(self) -> int:
        """The id of the beginning-of-text token, -1 when there is none."""
        return int(self._llama.llama_vocab_bos(self.vocab))

    @property
    def eos(self) -> int:
        """The id of the end-of-text token, -1 when there is none."""
        return int(self._llama.llama_vocab_eos(self.vocab))

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's own chat template."""
        source = self._llama.llama_model_chat_template(self.handle, None)
        return source.decode("utf-8", "replace") if source else None

    def _token_to_piece(self, token: int, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count: int = self._llama.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count


def _unspellable(info: ModelInfo) -> tuple[frozenset[int], frozenset[str]]:
    """The bytes a SentencePiece vocabulary has no token for, and the letters it has; nothing when it can spell any text."""
    if info.tokenizer_model != "llama":
        return frozenset(), frozenset()
    known = set(info.tokens)
    missing = frozenset(byte for byte in range(256) if b"<0x%02X>" % byte not in known)
    if not missing:
        return missing, frozenset()
    return missing, frozenset(text for text in (token.decode("utf-8", "replace") for token in known) if len(text) == 1)


def _gpu_layers(placement: Placement, info: ModelInfo) -> int:
    if placement.gpu_layers is None:
        return info.block_count + 1 if devices.gpus() else 0
    if placement.gpu_layers < 0:
        return info.block_count + 1
    return placement.gpu_layers


def _load_mode(placement: Placement, llama: ModuleType) -> int:
    mapped, locked = placement.mmap, placement.mlock
    if mapped is None and not locked:
        return int(llama.LLAMA_LOAD_MODE_AUTO)
    if mapped is False:
        return int(llama.LLAMA_LOAD_MODE_MLOCK if locked else llama.LLAMA_LOAD_MODE_NONE)
    return int(llama.LLAMA_LOAD_MODE_MMAP_MLOCK if locked else llama.LLAMA_LOAD_MODE_MMAP)
