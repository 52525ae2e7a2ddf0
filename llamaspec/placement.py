"""The plan that a load follows: what was left open is chosen, what cannot fit is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from llamaspec.gguf_header import ModelInfo
from llamaspec.hardware import room
from llamaspec.options import MAX_DRAFT
from llamaspec.plan import Wishes, propose

if TYPE_CHECKING:
    from llamaspec.engine import LoadOptions


def settle(target: ModelInfo, draft: ModelInfo | None, options: LoadOptions) -> tuple[LoadOptions, tuple[str, ...]]:
    """Complete `options` for this machine as it is now: the context and both models' layers on the GPU.

    Returns them with sentences about what the user may not expect: a smaller context, layers left on the CPU.

    Raises:
        OutOfMemoryError: it cannot fit; its table shows what needs how much.
    """
    wanted = {f.name: getattr(options, f.name) for f in fields(Wishes) if f.name != "outputs"}
    wishes = Wishes(outputs=MAX_DRAFT + 1, **wanted)
    plan = propose(target, draft, wishes, room.here(measure=False))
    if not plan.fits and plan.room.gpus:
        # the share kept free on a GPU is for comfort: it refuses nothing
        plan = propose(target, draft, wishes, room.here(1.0, measure=False))
    plan.require_fit()
    layers, draft_layers = plan.settings.gpu_layers, plan.settings.draft_gpu_layers
    return replace(options, n_ctx=plan.n_ctx, gpu_layers=layers, draft_gpu_layers=draft_layers), plan.changes
