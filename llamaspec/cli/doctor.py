"""`llamaspec doctor`: what about this machine, or this pair on it, costs speed or fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llamaspec.cli import arguments, output
from llamaspec.cli.output import ExitCode
from llamaspec.errors import UsageError

if TYPE_CHECKING:
    from llamaspec.hardware.checks import Check
    from llamaspec.hardware.machine import Machine

_STYLES = {"ok": "32", "warning": "33", "failure": "31"}


@click.command("doctor", cls=arguments.SectionedCommand, short_help="What on this machine costs speed, and the fix.")
@click.argument("words", metavar="[TARGET [DRAFT]]", nargs=-1)
@arguments.model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(words: tuple[str, ...], as_json: bool, **given: Any) -> ExitCode:
    """Look at the machine and the llama.cpp installed on it; with a target and a draft, at the pair too.

    Every line is ok, a warning or a failure, with a fix. Exit code 4 when there is a failure.
    """
    from llamaspec.hardware.checks import machine_checks
    from llamaspec.hardware.machine import snapshot

    machine = snapshot()
    checks = machine_checks(machine) + _pair(words, given, machine)
    failed = any(check.status == "failure" for check in checks)
    if as_json:
        output.write_json({"healthy": not failed, "checks": [_plain(check) for check in checks], "machine": _facts(machine)})
    else:
        for check in checks:
            _show(check)
    return ExitCode.UNFIT if failed else ExitCode.OK


def _pair(words: tuple[str, ...], given: dict[str, Any], machine: Machine) -> list[Check]:
    if not words and given["model"] is None:
        if given["model_draft"] is not None:
            raise UsageError("a draft without a target", "llamaspec doctor -m target.gguf -md draft.gguf")
        return []
    if machine.backend is None:
        return []  # without llama.cpp nothing can be planned, and the report already says so
    from llamaspec.hardware import room
    from llamaspec.hardware.checks import pair_checks
    from llamaspec.plan import propose

    target, draft = arguments.pair_headers(words, given, "doctor")
    wishes = arguments.wishes(given, target)
    return pair_checks(target, draft, propose(target, draft, wishes, room.here(measure=False)), wishes)


def _show(check: Check) -> None:
    import sys

    output.write(f"{check.status:<9}", _STYLES[check.status] if output.has_colour(sys.stdout) else None)
    lines = [f"{check.name}: {output.one_line(check.said)}"]
    if check.fix is not None:
        lines.append(f"{'':9}  try: {output.one_line(check.fix)}")
    output.write_lines(lines)


def _plain(check: Check) -> dict[str, Any]:
    return {"name": check.name, "status": check.status, "said": check.said, "fix": check.fix}


def _facts(machine: Machine) -> dict[str, Any]:
    """The snapshot for JSON: bytes, watts, degrees; null where nothing is reported."""
    from dataclasses import asdict

    facts = asdict(machine)
    facts["cpu_flags"] = sorted(machine.cpu_flags) if machine.cpu_flags is not None else None
    facts["backend_error"] = str(machine.backend_error) if machine.backend_error is not None else None
    renamed = {
        "memory_total": "memory_total_bytes",
        "memory_available": "memory_available_bytes",
        "memory_limit": "memory_limit_bytes",
        "swap_total": "swap_total_bytes",
        "swap_used": "swap_used_bytes",
    }
    return {renamed.get(name, name): value for name, value in facts.items()}
