"""Where a pair goes in memory, whether it fits, and what to expect of it. Pure: headers and numbers in, a table out.

Placement follows llama.cpp (src/llama-model.cpp, load_tensors): the embeddings stay in system memory, `gpu_layers` counts from
the output backwards, layers are dealt to several GPUs by their free memory, and a cache lies with its layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from llamaspec.errors import OutOfMemoryError
from llamaspec.footprint import (
    CELL_PADDING,
    RUNTIME_BYTES,
    ContextShape,
    Footprint,
    cache_read_bytes,
    can_roll_back,
    footprint,
    read_bytes,
    trunk_layers,
)
from llamaspec.gguf_header import ModelInfo
from llamaspec.options import DRAFT_OUTPUTS
from llamaspec.roofline import Load, Rate, Roofline

CPU = "CPU"
DEFAULT_CONTEXT = 4096
SMALLEST_CONTEXT = 512
ASSUMED_ACCEPTANCE = 0.7
"""Of a usual pair on usual text; it decides between placements, and no figure is shown for it as if it were known."""

_HALF = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """What may be taken of one GPU: bytes, None where its driver does not say; and its bandwidth."""

    name: str
    free_bytes: int | None
    rate: Rate


@dataclass(frozen=True, slots=True)
class Room:
    """What may be taken of a machine.

    Attributes:
        ram_bytes: system memory that can be allocated without swapping.
        ram_rate: its bandwidth.
        gpus: in the order in which llama.cpp counts them.
        repacked: tensor types of which the CPU backend keeps a second copy.
    """

    ram_bytes: int
    ram_rate: Rate
    gpus: tuple[GpuRoom, ...] = ()
    repacked: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for; None lets the plan choose. The fields are those of `LoadOptions`."""

    n_ctx: int | None = None
    gpu_layers: int | None = None
    draft_gpu_layers: int | None = None
    main_gpu: int = 0
    split_mode: str = "layer"
    flash_attention: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    draft_cache_type_k: str = "f16"
    draft_cache_type_v: str = "f16"
    mmap: bool | None = None
    outputs: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of memory.

    Attributes:
        model: "target", "draft", or "" for what belongs to the process.
        kind: "weights", "weights, repacked", "KV cache", "state", "compute", "output", "vocabulary" or "runtime".
        device: CPU or a GPU's name.
        n_bytes: its size.
        mapped: it is a mapped file: the kernel can drop its pages and read them again, slowly.
    """

    model: Literal["target", "draft", ""]
    kind: str
    device: str
    n_bytes: int
    mapped: bool = False


@dataclass(frozen=True)
class Plan:
    """A placement of a pair.

    Attributes:
        target, draft: the headers.
        room: of the machine it is for.
        settings: what was asked for, completed: `n_ctx`, `gpu_layers` and `draft_gpu_layers` are numbers.
        parts: all the memory.
        changes: sentences about what was chosen otherwise than one might expect.
        remarks: sentences about what is unusual in the models.
    """

    target: ModelInfo
    draft: ModelInfo | None
    room: Room
    settings: Wishes
    parts: tuple[Part, ...]
    changes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """All sentences."""
        return (*self.changes, *self.remarks)

    @property
    def n_ctx(self) -> int:
        """Tokens of both contexts."""
        assert self.settings.n_ctx is not None
        return self.settings.n_ctx

    def used(self, device: str, *, mapped: bool = True) -> int:
        """Bytes on a device; `mapped=False` leaves mapped files out."""
        return sum(part.n_bytes for part in self.parts if part.device == device and (mapped or not part.mapped))

    def limits(self) -> dict[str, int | None]:
        """Device -> bytes that may be taken of it; None where that is not reported."""
        return {CPU: self.room.ram_bytes} | {gpu.name: gpu.free_bytes for gpu in self.room.gpus}

    @property
    def missing(self) -> dict[str, int]:
        """Device -> bytes too few; empty when everything fits. Mapped weights count as not needed at once."""
        short = {
            device: self.used(device, mapped=False) - limit for device, limit in self.limits().items() if limit is not None
        }
        return {device: size for device, size in short.items() if size > 0}

    @property
    def fits(self) -> bool:
        """Nothing is missing."""
        return not self.missing

    @property
    def pages(self) -> bool:
        """Weights are mapped that do not stay in memory: each token would read them from disk again."""
        return self.used(CPU) > self.room.ram_bytes

    def require_fit(self) -> None:
        """Refuse what cannot fit.

        Raises:
            OutOfMemoryError: with the table.
        """
        if self.fits:
            return
        device, size = next(iter(self.missing.items()))
        largest = largest_context(self)
        what = f"{self.target.path.name} does not fit: {size / 2**30:.1f} GiB too much on {device} for {self.n_ctx} tokens"
        hint = "ask for a smaller quantization or model"
        if largest >= SMALLEST_CONTEXT:
            hint = f"-c {largest} fits, or a smaller cache: -ctk q8_0 -ctv q8_0"
        elif self.settings.gpu_layers and device != CPU:
            hint = "put fewer layers on the GPU: -ngl auto"
        raise OutOfMemoryError(what, hint, table(self))

    def roofline(self, filled: int | None = None) -> Roofline:
        """The speed to expect when the context holds `filled` tokens (half of it by default)."""
        tokens = self.n_ctx // 2 if filled is None else filled
        settings = self.settings
        target = _loads(self.target, settings.gpu_layers or 0, settings, self.room, tokens, draft=False)
        draft: tuple[Load, ...] = ()
        if self.draft is not None:
            draft = _loads(self.draft, settings.draft_gpu_layers or 0, settings, self.room, tokens, draft=True)
        floats = sum(t.n_bytes for t in self.target.tensors if t.type in ("F32", "F16", "BF16"))
        return Roofline(target, draft, quantized=floats < self.target.tensor_bytes / 2)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; bytes and bytes per second."""
        return {
            "n_ctx": self.n_ctx,
            "gpu_layers": self.settings.gpu_layers,
            "draft_gpu_layers": self.settings.draft_gpu_layers if self.draft is not None else None,
            "fits": self.fits,
            "missing_bytes": self.missing,
            "pages": self.pages,
            "largest_n_ctx": largest_context(self),
            "devices": {
                device: {"used_bytes": self.used(device), "limit_bytes": limit} for device, limit in self.limits().items()
            },
            "parts": [
                {"model": p.model or None, "kind": p.kind, "device": p.device, "bytes": p.n_bytes, "mapped": p.mapped}
                for p in self.parts
            ],
            "notes": list(self.notes),
        }


def propose(target: ModelInfo, draft: ModelInfo | None, wishes: Wishes, room: Room) -> Plan:
    """The best placement: what is asked for as asked, the rest chosen.

    The context is what was asked for, else 4096 tokens or what the target was trained on, less where that does not fit. Of the
    placements that fit (draft on the GPU or not, as many of the target's layers as the rest holds) the one with the most
    expected tokens per second is taken; where the draft does not pay there, it is still placed, and a note says so. The plan
    may not fit: ask `Plan.fits`.

    Raises:
        UsageError: there is no such cache type.
    """
    n_ctx = wishes.n_ctx or min(DEFAULT_CONTEXT, target.context_length)
    changes: list[str] = []
    remarks: list[str] = []
    best = _best_layers(target, draft, replace(wishes, n_ctx=n_ctx), room)
    if not best.fits and wishes.n_ctx is None:
        smaller = largest_context(best)
        if smaller >= SMALLEST_CONTEXT:
            best = _best_layers(target, draft, replace(wishes, n_ctx=smaller), room)
            changes.append(f"the context is {smaller} tokens: more does not fit")
    settings = best.settings
    if not room.gpus and (wishes.gpu_layers or wishes.draft_gpu_layers):
        changes.append("there is no GPU that this llama.cpp can use: every layer runs on the CPU (llamaspec doctor tells why)")
    if room.gpus and wishes.gpu_layers is None and (settings.gpu_layers or 0) < target.block_count + 1:
        changes.append(f"{settings.gpu_layers} of {target.block_count + 1} layers fit the GPU, the rest runs on the CPU")
    if draft is not None and room.gpus and wishes.draft_gpu_layers is None and settings.draft_gpu_layers == 0:
        changes.append("the draft runs on the CPU, so that the target keeps its place on the GPU")
    if best.pages:
        changes.append(
            f"{(best.used(CPU) - room.ram_bytes) / 2**30:.1f} GiB of mapped weights do not stay in memory: "
            "every token will read them from disk"
        )
    if draft is not None and not can_roll_back(draft):
        remarks.append(f"{draft.path.name} cannot draft: {draft.architecture} keeps a state that cannot be rolled back")
    if target.sliding_window and any(layer.windowed for layer in target.cache_layers()):
        remarks.append(_window_note(best))
    if f"{target.architecture}.attention.indexer.key_length" in target.metadata:
        remarks.append("the cache of its sparse-attention indexer is not counted")
    return replace(best, changes=tuple(changes), remarks=tuple(remarks))


def place(target: ModelInfo, draft: ModelInfo | None, settings: Wishes, room: Room) -> Plan:
    """The plan of exactly these settings; `n_ctx` and both `gpu_layers` are numbers."""
    parts = [
        *_parts("target", target, settings.gpu_layers or 0, settings, room),
        *(_parts("draft", draft, settings.draft_gpu_layers or 0, settings, room) if draft is not None else ()),
        Part("", "runtime", CPU, RUNTIME_BYTES),
    ]
    return Plan(target, draft, room, settings, tuple(part for part in parts if part.n_bytes))


def largest_context(plan: Plan) -> int:
    """The most tokens that fit with everything else unchanged, up to what the target was trained on; 0 when none do."""

    def fits(cells: int) -> bool:
        return place(plan.target, plan.draft, replace(plan.settings, n_ctx=cells), plan.room).fits

    trained = plan.target.context_length
    if fits(trained):
        return trained
    low, high = 0, trained // CELL_PADDING
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * CELL_PADDING) else (low, middle)
    return low * CELL_PADDING


def table(plan: Plan) -> list[str]:
    """The memory as lines for people: models and kinds down, devices across, in MiB."""
    devices = [device for device in plan.limits() if plan.used(device)]
    rows = [("MiB", *devices)]
    for model in ("target", "draft", ""):
        kinds = dict.fromkeys(part.kind for part in plan.parts if part.model == model)
        for kind in kinds:
            found = {d: [p for p in plan.parts if (p.model, p.kind, p.device) == (model, kind, d)] for d in devices}
            rows.append((f"{model} {kind}".strip(), *(_mib(sum(p.n_bytes for p in found[d])) for d in devices)))
    rows.append(("together", *(_mib(plan.used(device)) for device in devices)))
    limits = plan.limits()
    rows.append(("there is", *(_mib(limits[d]) if limits[d] is not None else "not reported" for d in devices)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]


# --- placing


def _best_layers(target: ModelInfo, draft: ModelInfo | None, wishes: Wishes, room: Room) -> Plan:
    """Of the numbers of layers left open, the best that fit; the first candidate when none does."""
    everything = target.block_count + 1
    if not room.gpus:
        return place(target, draft, replace(wishes, gpu_layers=0, draft_gpu_layers=0), room)
    whole = draft.block_count + 1 if draft is not None else 0
    drafts = [whole, 0] if wishes.draft_gpu_layers is None and draft is not None else [wishes.draft_gpu_layers or 0]
    candidates = []
    for draft_layers in drafts:
        settings = replace(wishes, draft_gpu_layers=_asked(draft_layers, draft, 0))
        if wishes.gpu_layers is not None:
            candidates.append(place(target, draft, replace(settings, gpu_layers=_asked(wishes.gpu_layers, target, 0)), room))
            continue
        low, high = 0, everything + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = place(target, draft, replace(settings, gpu_layers=middle), room).fits
            low, high = (middle, high) if fits else (low, middle)
        candidates.append(place(target, draft, replace(settings, gpu_layers=low), room))
    fitting = [plan for plan in candidates if plan.fits]
    return max(fitting, key=_expected_speed) if fitting else candidates[0]


def _asked(layers: int | None, model: ModelInfo | None, default: int) -> int:
    """A number of layers as llama.cpp takes it: negative and too many mean all."""
    if layers is None or model is None:
        return default
    everything = model.block_count + 1
    return everything if layers < 0 else min(layers, everything)


def _expected_speed(plan: Plan) -> float:
    roofline = plan.roofline()
    gain = roofline.best(ASSUMED_ACCEPTANCE)[1] if plan.draft is not None else 1.0
    return roofline.tokens_per_second * gain


def _layer_devices(model: ModelInfo, gpu_layers: int, settings: Wishes, room: Room, draft: bool) -> list[str]:
    """The device of each layer, and of the output behind them."""
    gpus = room.gpus
    alone = draft or settings.split_mode == "none"
    if alone and gpus:
        gpus = (gpus[min(settings.main_gpu, len(gpus) - 1)],)
    places = model.block_count + 1
    taken = min(gpu_layers, places) if gpus else 0
    shares = [gpu.free_bytes or 1 for gpu in gpus]
    ends = [share / sum(shares) for share in accumulate(shares)]
    names = []
    for layer in range(places):
        at = layer - (places - taken)
        names.append(CPU if at < 0 else gpus[min(bisect_right(ends, at / taken), len(gpus) - 1)].name)
    return names


def _parts(which: Literal["target", "draft"], model: ModelInfo, gpu_layers: int, settings: Wishes, room: Room) -> list[Part]:
    devices = _layer_devices(model, gpu_layers, settings, room, which == "draft")
    on_cpu = not gpu_layers or not room.gpus
    size = _footprint(which, model, settings, room.repacked if on_cpu else frozenset())
    mapped = settings.mmap is not False
    weights: dict[str, int] = {CPU: size.input_weights}
    caches: dict[str, int] = {}
    states: dict[str, int] = {}
    repacked = 0
    for layer, device in enumerate(devices[: trunk_layers(model)]):
        weights[device] = weights.get(device, 0) + size.layer_weights[layer]
        caches[device] = caches.get(device, 0) + size.cache[layer]
        states[device] = states.get(device, 0) + size.state[layer]
        repacked += size.repacked_layers[layer] if device == CPU else 0
    output = devices[-1]
    weights[output] = weights.get(output, 0) + size.output_weights + (size.tied_weights if output != CPU else 0)
    repacked += size.repacked_output if output == CPU else 0
    if not mapped:
        weights[CPU] -= repacked
    computing = dict.fromkeys(devices, size.compute)
    if CPU not in computing:
        computing[CPU] = size.inputs
    elif len(computing) > 1:
        # a prompt's batch takes the weights that lie in system memory to the GPU, matrix by matrix
        largest = max(size.layer_weights, default=0)
        computing = {device: amount + (largest if device != CPU else 0) for device, amount in computing.items()}
    return [
        *(Part(which, "weights", device, amount, mapped and device == CPU) for device, amount in weights.items()),
        Part(which, "weights, repacked", CPU, repacked),
        *(Part(which, "KV cache", device, amount) for device, amount in caches.items()),
        *(Part(which, "state", device, amount) for device, amount in states.items()),
        *(Part(which, "compute", device, amount) for device, amount in computing.items()),
        Part(which, "output", CPU, size.logits),
        Part(which, "vocabulary", CPU, size.vocabulary),
    ]


def _footprint(which: str, model: ModelInfo, settings: Wishes, repacked: frozenset[str]) -> Footprint:
    drafts = which == "draft"
    shape = ContextShape(
        n_ctx=settings.n_ctx or model.context_length,
        outputs=DRAFT_OUTPUTS if drafts else settings.outputs,
        type_k=settings.draft_cache_type_k if drafts else settings.cache_type_k,
        type_v=settings.draft_cache_type_v if drafts else settings.cache_type_v,
        flash_attention=settings.flash_attention != "off",
    )
    return footprint(model, shape, repacked)


def _loads(model: ModelInfo, gpu_layers: int, settings: Wishes, room: Room, tokens: int, *, draft: bool) -> tuple[Load, ...]:
    devices = _layer_devices(model, gpu_layers, settings, room, draft)
    layers, outside = read_bytes(model)
    types = (
        (settings.draft_cache_type_k, settings.draft_cache_type_v) if draft else (settings.cache_type_k, settings.cache_type_v)
    )
    each = cache_read_bytes(model, tokens, *types) // max(len(layers), 1)
    sums: dict[str, int] = {}
    for layer, device in zip(layers, devices, strict=False):
        sums[device] = sums.get(device, 0) + layer + each
    sums[devices[-1]] = sums.get(devices[-1], 0) + outside
    rates = {CPU: room.ram_rate} | {gpu.name: gpu.rate for gpu in room.gpus}
    return tuple(Load(device, size, rates[device], device != CPU) for device, size in sums.items())


def _window_note(plan: Plan) -> str:
    model, settings = plan.target, plan.settings
    shape = ContextShape(plan.n_ctx, type_k=settings.cache_type_k, type_v=settings.cache_type_v)
    whole, window = (sum(footprint(model, replace(shape, full_window=full)).cache) for full in (True, False))
    return (
        f"layers with a window of {model.sliding_window} tokens keep all {plan.n_ctx}, so that drafts can be taken back: "
        f"{(whole - window) / 2**20:.0f} MiB more"
    )


def cache_choices(plan: Plan, types: Iterable[str] = ("f16", "q8_0", "q4_0")) -> list[tuple[str, int]]:
    """The largest context with the target's keys and values in each of these types; types its heads do not divide are left
    out."""
    found = []
    for kind in types:
        head = plan.target.metadata.get(f"{plan.target.architecture}.attention.key_length")
        width = head if isinstance(head, int) else plan.target.embedding_length // max(plan.target.head_count, 1)
        if kind in _HALF or width % 32 == 0:
            settings = replace(plan.settings, cache_type_k=kind, cache_type_v=kind)
            found.append((kind, largest_context(replace(plan, settings=settings))))
    return found


def _mib(size: int | None) -> str:
    return "" if not size else f"{size / 2**20:,.0f}" if size >= 100 * 2**20 else f"{size / 2**20:.1f}"
