"""`llamaspec plan`: does the pair fit, where, and how fast can it be?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from llamaspec.cli import arguments, output
from llamaspec.cli.output import ExitCode
from llamaspec.errors import UsageError

if TYPE_CHECKING:
    from llamaspec.plan import Plan, Room
    from llamaspec.roofline import Roofline

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class _Amount(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes. GB of memory are 2^30 bytes, as on the box a card comes in; of a bandwidth 10^9."""

    def __init__(self, per_second: bool) -> None:
        self.per_second = per_second
        self.name = "bandwidth" if per_second else "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?(/s)?\s*", value, re.IGNORECASE)
        if match is None or (match[3] and not self.per_second):
            self.fail(f"{value!r} is not an amount such as {'1008GB/s' if self.per_second else '24GB'}", param, ctx)
        unit = match[2].lower()
        if unit and not self.per_second and not unit.endswith("i"):
            unit += "i"
        return round(float(match[1]) * _UNITS[unit])


@click.command("plan", cls=arguments.SectionedCommand, short_help="Memory and speed of a pair, before it is loaded.")
@click.argument("words", metavar="[TARGET [DRAFT]]", nargs=-1)
@arguments.model_options
@click.option(
    "--vram",
    type=_Amount(False),
    multiple=True,
    metavar="SIZE",
    help="Plan for a GPU with this much memory, as 24GB, instead of this machine's; once for each GPU.",
)
@click.option("--bandwidth", type=_Amount(True), metavar="RATE", help="The memory bandwidth of --vram's GPUs, as 1008GB/s.")
@click.option("--ram", type=_Amount(False), metavar="SIZE", help="Plan for this much system memory.")
@click.option(
    "--utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.92,
    show_default=True,
    help="Share of a GPU's memory to take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(words: tuple[str, ...], vram: tuple[int, ...], as_json: bool, **given: Any) -> ExitCode:
    """Say where a pair goes in memory, what fits, and how fast it can be, from the headers of the files alone.

    Exit code 0: it fits; 4: it does not.
    """
    from llamaspec.plan import propose

    target, draft = arguments.pair_headers(words, given, "plan")
    wishes = arguments.wishes(given, target)
    plan = propose(target, draft, wishes, _room(vram, given))
    roofline = plan.roofline()
    if as_json:
        output.write_json(_report(plan, roofline))
    else:
        output.write_lines(_lines(plan, roofline))
    return ExitCode.OK if plan.fits else ExitCode.UNFIT


def _room(vram: tuple[int, ...], given: dict[str, Any]) -> Room:
    from dataclasses import replace

    from llamaspec.hardware import room
    from llamaspec.plan import GpuRoom
    from llamaspec.roofline import Rate

    if given["bandwidth"] and not vram:
        raise UsageError("--bandwidth is the bandwidth of --vram's GPUs, and there is none", "give --vram too")
    utilization = given["utilization"]
    found = room.here(utilization)
    if vram:
        rate = Rate(float(given["bandwidth"]), "specified") if given["bandwidth"] else room.ASSUMED_GPU
        cards = tuple(GpuRoom(f"GPU{i}", round(size * utilization), rate) for i, size in enumerate(vram))
        found = replace(found, gpus=cards, repacked=frozenset())
    return replace(found, ram_bytes=given["ram"]) if given["ram"] else found


def _lines(plan: Plan, roofline: Roofline) -> list[str]:
    from llamaspec.plan import cache_choices, largest_context, table

    settings = plan.settings
    rows = [("context", f"{plan.n_ctx} tokens of {plan.target.context_length} trained; at most {largest_context(plan)} here")]
    if plan.room.gpus:
        placed = f"target {settings.gpu_layers} of {plan.target.block_count + 1}"
        if plan.draft is not None:
            placed += f", draft {settings.draft_gpu_layers} of {plan.draft.block_count + 1}"
        rows.append(("layers on the GPU", placed))
    choices = ", ".join(f"{kind} {most}" for kind, most in cache_choices(plan))
    rows.append(("largest context", f"by type of the KV cache: {choices}"))
    rows.append(("settings", _options(plan)))
    rows += [("note", note) for note in plan.notes]
    verdict = "It fits." if plan.fits else "It does not fit."
    for device, size in plan.missing.items():
        verdict += f" {size / 2**20:,.0f} MiB too much on {device}."
    return [verdict, "", *table(plan), "", *output.table(rows), "", *_speed_lines(plan, roofline)]


def _options(plan: Plan) -> str:
    settings = plan.settings
    words = [f"-c {plan.n_ctx}"]
    if plan.room.gpus:
        words.append(f"-ngl {settings.gpu_layers}")
        if plan.draft is not None:
            words.append(f"-ngld {settings.draft_gpu_layers}")
    return " ".join([*words, f"-ctk {settings.cache_type_k} -ctv {settings.cache_type_v}"])


def _speed_lines(plan: Plan, roofline: Roofline) -> list[str]:
    from llamaspec.roofline import ACCEPTANCES, DRAFT_LENGTHS

    read = sum(load.read_bytes for load in roofline.target)
    lines = output.table(
        [
            ("read per token", f"{output.human_bytes(read)} with the context half full"),
            ("bandwidth", ", ".join(roofline.sources)),
            ("roofline", f"{roofline.tokens_per_second:.1f} tokens/s at most, without drafting"),
        ]
    )
    if roofline.draft_cost is None:
        return lines
    lines += [f"draft step      {roofline.draft_cost:.2f} of a token of the target", ""]
    lines.append(
        "tokens/s over the roofline, by draft length and acceptance (the cost of a pass over several tokens is assumed)"
    )
    lines.append("n_draft  " + "".join(f"{acceptance:>7.1f}" for acceptance in ACCEPTANCES) + "   pays from")
    for n_draft in DRAFT_LENGTHS:
        needed = roofline.needed_acceptance(n_draft)
        most = roofline.tokens_per_second
        cells = "".join(f"{most * roofline.gain(n_draft, acceptance):7.1f}" for acceptance in ACCEPTANCES)
        lines.append(f"{n_draft:>7}  {cells}   {'never' if needed is None else f'{needed:.2f}'}")
    return lines


def _report(plan: Plan, roofline: Roofline) -> dict[str, Any]:
    from llamaspec.plan import cache_choices
    from llamaspec.roofline import ACCEPTANCES, DRAFT_LENGTHS

    def loads(which: str) -> list[dict[str, Any]]:
        return [
            {
                "device": load.device,
                "read_bytes": load.read_bytes,
                "bandwidth_bytes_per_second": load.rate.bytes_per_second,
                "bandwidth_source": load.rate.source,
            }
            for load in getattr(roofline, which)
        ]

    drafting = {
        "draft_cost": roofline.draft_cost,
        "verify_cost_source": "assumed",
        "lengths": [
            {
                "n_draft": n,
                "needed_acceptance": roofline.needed_acceptance(n),
                "tokens_per_second_by_acceptance": {
                    str(a): roofline.tokens_per_second * roofline.gain(n, a) for a in ACCEPTANCES
                },
            }
            for n in DRAFT_LENGTHS
        ],
    }
    return {
        "target": str(plan.target.path),
        "draft": str(plan.draft.path) if plan.draft is not None else None,
        **plan.to_dict(),
        "largest_n_ctx_by_cache_type": dict(cache_choices(plan)),
        "roofline": {
            "tokens_per_second": roofline.tokens_per_second,
            "target": loads("target"),
            "draft": loads("draft"),
            "drafting": drafting if roofline.draft else None,
        },
    }
