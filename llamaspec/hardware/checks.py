"""What is wrong with a machine, or with a pair on it: pure questions about a snapshot, each answered in one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from llamaspec.footprint import can_roll_back
from llamaspec.gguf_header import ModelInfo
from llamaspec.hardware.machine import Backend, Machine
from llamaspec.hardware.nvml import Card
from llamaspec.plan import CPU, Plan, Wishes
from llamaspec.vocab import compare, pair_warnings

Status = Literal["ok", "warning", "failure"]

NOT_REPORTED = "not reported"
_GIB = 2**30
_REINSTALL = "pip install --force-reinstall --no-cache-dir llama-cpp-python"
_BUILDS = {"NVIDIA": f'CMAKE_ARGS="-DGGML_CUDA=on" {_REINSTALL}', "AMD": f'CMAKE_ARGS="-DGGML_VULKAN=on" {_REINSTALL}'}
# ggml's name of a feature -> Linux's
_FEATURES = {
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
}
_WORTH_A_BUILD = ("AVX2", "FMA", "AVX512", "AVX512_BF16")
_LITTLE_DISK = 10 * _GIB
_LITTLE_VRAM = _GIB // 4
_OWNERS_OF_PYNVML = ("pynvml", "nvidia-ml-py3")
_QUANTIZED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        name: what was looked at.
        status: "ok", "warning" (it works, worse than it could) or "failure" (it does not, or the GPU is left unused).
        said: the finding.
        fix: what to do; None when there is nothing to do.
    """

    name: str
    status: Status
    said: str
    fix: str | None = None


def machine_checks(machine: Machine) -> list[Check]:
    """Every check of the machine itself."""
    return [
        Check("Python", "ok", f"{machine.python} on {machine.system}"),
        *_runtime(machine),
        *_driver(machine),
        *(check for card in machine.nvidia.cards for check in _card(card, machine)),
        *_processor(machine),
        *_memory(machine),
        *_disks(machine),
    ]


def pair_checks(target: ModelInfo, draft: ModelInfo | None, plan: Plan, wishes: Wishes) -> list[Check]:
    """Every check of a pair: its vocabulary, sizes, fit, and settings that work against each other."""
    checks = []
    if not can_roll_back(target):
        checks.append(
            Check(
                "target",
                "warning",
                f"{target.architecture} keeps a state that cannot be rolled back: nothing can be drafted for it",
            )
        )
    if draft is not None:
        report = compare(target, draft)
        if report.usable:
            checks.append(Check("vocabulary", "ok", f"{report.verdict}, {report.shared:,} tokens shared"))
        else:
            checks.append(Check("vocabulary", "failure", f"mismatch: {report.reason}", report.suggestion))
        if not can_roll_back(draft):
            said = f"{draft.architecture} keeps a state that cannot be rolled back: it cannot draft"
            checks.append(Check("draft", "failure", said, "take a draft with ordinary attention"))
        warnings = pair_warnings(target, draft)
        checks += [Check("sizes", "warning", warning) for warning in warnings]
        if not warnings:
            checks.append(Check("sizes", "ok", f"the draft has {draft.tensor_bytes / target.tensor_bytes:.0%} of the bytes"))
    checks += _fit(plan)
    checks += _conflicts(draft, plan, wishes)
    return checks


# --- the runtime


def _runtime(machine: Machine) -> Iterator[Check]:
    for name in _OWNERS_OF_PYNVML:
        if name in machine.packages:
            said = f"the package {name} {machine.packages[name]} writes the same module as nvidia-ml-py"
            yield Check("packages", "warning", said, f"pip uninstall {name}; pip install --force-reinstall nvidia-ml-py")
    backend = machine.backend
    if backend is None:
        error = machine.backend_error
        yield Check("llama.cpp", "failure", str(error), error.hint if error is not None else None)
        return
    versions = backend.versions
    bindings, own = (versions.get(name, NOT_REPORTED) for name in ("llama_cpp_python", "llama_cpp"))
    yield Check("llama.cpp", "ok", f"llama-cpp-python {bindings}, llama.cpp {own}")
    yield _backends(machine, backend)


def _backends(machine: Machine, backend: Backend) -> Check:
    shown = [f"{d.name} ({d.description}{_room(d.memory_free, d.memory_total)})" for d in backend.devices]
    said = ", ".join(shown) or NOT_REPORTED
    if any(device.kind in ("gpu", "igpu") for device in backend.devices):
        return Check("devices", "ok", said)
    vendor = "NVIDIA" if machine.nvidia.cards else next((gpu.vendor for gpu in machine.pci_gpus if gpu.driver), None)
    if vendor is None:
        return Check("devices", "ok", said)
    names = ", ".join(card.name or f"NVIDIA card {card.index}" for card in machine.nvidia.cards) or f"an {vendor} card"
    if backend.gpu_offload:
        return Check("devices", "failure", f"{names} is here, and this build's GPU backend finds no device", "check the driver")
    return Check("devices", "failure", f"{names} is here and unused: this llama.cpp is built for the CPU only", _BUILDS[vendor])


def _room(free: int, total: int) -> str:
    return f", {free / _GIB:.1f} of {total / _GIB:.1f} GiB free" if total else ""


def _driver(machine: Machine) -> Iterator[Check]:
    nvidia, backend = machine.nvidia, machine.backend
    if nvidia.error is not None:
        on_bus = any(gpu.vendor == "NVIDIA" for gpu in machine.pci_gpus)
        if on_bus or nvidia.present:
            status: Status = "failure" if on_bus else "warning"
            yield Check("NVIDIA driver", status, nvidia.error, "install or repair the NVIDIA driver, then reboot")
        else:
            yield Check("NVIDIA driver", "ok", f"{nvidia.error}, and no NVIDIA card on the bus")
        return
    cuda = f"{nvidia.cuda[0]}.{nvidia.cuda[1]}" if nvidia.cuda else NOT_REPORTED
    said = f"{nvidia.driver or NOT_REPORTED}, CUDA up to {cuda}"
    built = backend.cuda_runtime if backend is not None else None
    if built and nvidia.cuda and built > nvidia.cuda:
        # within a major version an older driver still runs newer runtimes, without their newer kernels' code
        status = "failure" if built[0] > nvidia.cuda[0] else "warning"
        said += f"; llama.cpp is built with CUDA {built[0]}.{built[1]}"
        yield Check("NVIDIA driver", status, said, "update the driver, or build with an older CUDA toolkit")
    else:
        yield Check("NVIDIA driver", "ok", said)
    if machine.wsl:
        yield Check(
            "WSL",
            "warning",
            "Windows moves GPU memory that does not fit into system memory, silently and slowly",
            "leave room: llamaspec plan --utilization 0.85; or set CUDA's sysmem fallback policy to 'prefer no fallback'",
        )


def _card(card: Card, machine: Machine) -> Iterator[Check]:
    name = f"GPU {card.index}"
    if card.lost:
        yield Check(name, "failure", "it has fallen off the bus", "reboot; if it comes back, look at power supply and heat")
        return
    if "handle" in card.missing:
        yield Check(name, "failure", card.missing["handle"], "nvidia-smi -q may tell why")
        return
    memory = f"{_gib(card.memory_free)} of {_gib(card.memory_total)} free"
    rate = f"{card.bandwidth / 1e9:.0f} GB/s" if card.bandwidth else f"bandwidth {NOT_REPORTED}"
    capability = "compute capability " + (
        ".".join(map(str, card.compute_capability)) if card.compute_capability else NOT_REPORTED
    )
    yield Check(name, "ok", f"{card.name or NOT_REPORTED}, {memory}, {rate}, {capability}")
    yield from _architecture(name, card, machine.backend)
    if card.mig:
        yield Check(name, "warning", "cut into MIG slices: a process sees one slice", "CUDA_VISIBLE_DEVICES names the slice")
    if card.display_attached:
        said = "a screen is driven from it: the desktop takes memory, more at times"
        yield Check(name, "warning", said, "leave room: llamaspec plan --utilization 0.85")
    if card.power_limit_w and card.power_default_w and card.power_limit_w < 0.95 * card.power_default_w:
        said = f"limited to {card.power_limit_w:.0f} W of {card.power_default_w:.0f} W"
        yield Check(name, "warning", said, f"nvidia-smi -i {card.index} -pl {card.power_default_w:.0f}")
    if card.throttles:
        yield Check(name, "warning", f"throttled now: {', '.join(card.throttles)}", "look at cooling and power")
    large = (p for p in card.processes or () if p.used_bytes is None or p.used_bytes >= _LITTLE_VRAM)
    holders = [f"{machine.process_names.get(p.pid, 'process')} ({p.pid}) {_gib(p.used_bytes)}" for p in large]
    if holders:
        yield Check(name, "warning", f"memory is held by {', '.join(holders)}", "end what is not needed")


def _architecture(name: str, card: Card, backend: Backend | None) -> Iterator[Check]:
    built = (backend.features.get("CUDA", {}) if backend is not None else {}).get("ARCHS", "")
    numbers = [int(arch) for arch in built.replace(";", ",").split(",") if arch.strip().isdigit()]
    if not numbers or card.compute_capability is None:
        return
    ours = card.compute_capability[0] * 100 + card.compute_capability[1] * 10
    if min(numbers) > ours:
        fix = f'CMAKE_ARGS="-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native" {_REINSTALL}'
        yield Check(name, "failure", f"this build is for compute capabilities {built}, the card has {ours}", fix)


def _gib(size: int | None) -> str:
    return NOT_REPORTED if size is None else f"{size / _GIB:.1f} GiB"


# --- the rest of the machine


def _processor(machine: Machine) -> Iterator[Check]:
    built = machine.backend.features.get("CPU", {}) if machine.backend is not None else {}
    flags = machine.cpu_flags
    said = machine.cpu or NOT_REPORTED
    if flags is None or not built:
        yield Check("CPU", "ok", f"{said}; features {NOT_REPORTED}")
    else:
        lacking = [ours for ours, linux in _FEATURES.items() if ours in built and linux not in flags]
        unused = [ours for ours in _WORTH_A_BUILD if _FEATURES[ours] in flags and ours not in built]
        used = ", ".join(ours for ours in _FEATURES if ours in built)
        if lacking:
            yield Check("CPU", "failure", f"{said} lacks {', '.join(lacking)}, which llama.cpp was built for", _REINSTALL)
        elif unused and flags & {"avx", "avx2"}:
            yield Check("CPU", "warning", f"{said}: the build leaves {', '.join(unused)} unused", _REINSTALL)
        else:
            yield Check("CPU", "ok", f"{said}: {used or 'no features needed'}")
    cores = machine.physical_cores
    said = f"{cores if cores is not None else NOT_REPORTED} physical, {machine.logical_cpus} logical"
    held = []
    if machine.allowed_cpus < machine.logical_cpus:
        held.append(f"affinity allows {machine.allowed_cpus}")
    if machine.cpu_quota is not None and machine.cpu_quota < machine.logical_cpus:
        held.append(f"the container may use {machine.cpu_quota:g}")
    said = f"{said}; {' and '.join([*held, f'{machine.usable_cores} used'])}"
    yield Check("cores", "warning" if held and cores is not None and machine.usable_cores < cores else "ok", said)


def _memory(machine: Machine) -> Iterator[Check]:
    said = f"{_gib(machine.memory_available)} of {_gib(machine.memory_total)} available"
    if machine.memory_limit is not None and machine.memory_limit < machine.memory_total:
        said += f", the container may use {_gib(machine.memory_limit)}"
    yield Check("memory", "ok" if machine.memory_available > _GIB else "warning", said)
    if machine.swap_total is None or machine.swap_used is None:
        yield Check("swap", "ok", NOT_REPORTED)
    elif machine.swap_used > max(0.25 * machine.swap_total, _GIB):
        said = f"{_gib(machine.swap_used)} of {_gib(machine.swap_total)} in use: a model there answers very slowly"
        yield Check("swap", "warning", said, "close what is not needed, or --mlock")
    else:
        yield Check("swap", "ok", f"{_gib(machine.swap_used)} of {_gib(machine.swap_total)} in use")
    yield Check("huge pages", "ok", machine.huge_pages or NOT_REPORTED)


def _disks(machine: Machine) -> Iterator[Check]:
    for disk in machine.disks:
        few = disk.free_bytes < _LITTLE_DISK
        yield Check("disk", "warning" if few else "ok", f"{_gib(disk.free_bytes)} free for {disk.path}")


# --- the pair


def _fit(plan: Plan) -> Iterator[Check]:
    used = ", ".join(f"{_gib(plan.used(device))} on {device}" for device in plan.limits() if plan.used(device))
    if not plan.fits:
        short = ", ".join(f"{_gib(size)} too much on {device}" for device, size in plan.missing.items())
        yield Check("fit", "failure", f"{short} for {plan.n_ctx} tokens ({used})", "llamaspec plan shows what fits")
    else:
        yield Check("fit", "ok", f"{plan.n_ctx} tokens: {used}")
    yield from (Check("plan", "warning", note) for note in plan.notes)


def _conflicts(draft: ModelInfo | None, plan: Plan, wishes: Wishes) -> Iterator[Check]:
    if wishes.flash_attention == "off":
        for who, kind in (("the target's", wishes.cache_type_v), ("the draft's", wishes.draft_cache_type_v)):
            if kind in _QUANTIZED and (draft is not None or who == "the target's"):
                said = f"{who} {kind} values need flash attention, which is off"
                yield Check("settings", "failure", said, "-fa auto, or -ctv f16")
    if draft is None:
        return
    kinds: list[Any] = [k for k in (wishes.draft_cache_type_k, wishes.draft_cache_type_v) if k in _QUANTIZED]
    if kinds:
        yield Check("settings", "warning", f"a {kinds[0]} cache of the draft can ruin acceptance", "-ctkd f16 -ctvd f16")
    on_gpu = (plan.settings.gpu_layers or 0) > target_layers(plan) // 2
    if on_gpu and plan.room.gpus and not plan.settings.draft_gpu_layers:
        said = f"the draft is on the {CPU} and the target on the GPU: drafting may cost more than it gives"
        yield Check("settings", "warning", said, "-ngld all, with a smaller context or fewer of the target's layers")
    if draft is not None and len(plan.room.gpus) > 1 and wishes.split_mode == "row":
        yield Check("settings", "ok", "the draft stays whole on one GPU, whatever the target's split")


def target_layers(plan: Plan) -> int:
    """The layers of the target, its output counted as one."""
    return plan.target.block_count + 1
