"""The doctor's questions, asked of machines that are not here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamaspec.errors import UnfitError
from llamaspec.gguf_header import read_model
from llamaspec.hardware import machine as machines
from llamaspec.hardware import nvml, system
from llamaspec.hardware.checks import Check, machine_checks, pair_checks
from llamaspec.hardware.machine import Backend, Disk, Machine, PciGpu, pci_gpus, snapshot
from llamaspec.hardware.nvml import Card, CardProcess, Nvidia, Nvml
from llamaspec.llama.devices import Device
from llamaspec.plan import GpuRoom, Room, Wishes, propose
from llamaspec.roofline import Rate
from tests.nvml_stand_in import ANSWERS, Library, NvmlError
from tests.tiny import letters, write_recurrent, write_tiny

GIB = 2**30
CPU = Device("CPU", "a processor", "cpu", 16 * GIB, 16 * GIB)
CUDA = Device("CUDA0", "NVIDIA GeForce RTX 4090", "gpu", 22 * GIB, 24 * GIB)
ON_CPU = Backend({"llama_cpp_python": "0.3.36", "llama_cpp": "0.5"}, (CPU,), {"CPU": {"AVX2": "1", "FMA": "1"}}, False, None)
ON_CUDA = replace(
    ON_CPU, devices=(CUDA, CPU), features={"CUDA": {"ARCHS": "890"}, "CPU": {}}, gpu_offload=True, cuda_runtime=(12, 4)
)

HEALTHY = Machine(
    python="3.12.1",
    system="Linux 6.8 x86_64",
    wsl=False,
    cpu="a processor",
    cpu_flags=frozenset({"avx", "avx2", "fma"}),
    logical_cpus=16,
    physical_cores=8,
    allowed_cpus=16,
    cpu_quota=None,
    usable_cores=8,
    memory_total=32 * GIB,
    memory_available=20 * GIB,
    memory_limit=None,
    swap_total=8 * GIB,
    swap_used=0,
    huge_pages="madvise",
    pci_gpus=(),
    nvidia=Nvidia(error="no NVIDIA driver", present=False),
    backend=ON_CPU,
    backend_error=None,
    process_names={},
    disks=(Disk("/models", 100 * GIB),),
    packages={},
)


def with_card(**fields: Any) -> Machine:
    with Nvml(Library()) as session:
        card = session.report().cards[0]
    nvidia = Nvidia(driver="560", cuda=(12, 6), cards=(replace(card, **{"processes": (), **fields}),))
    return replace(HEALTHY, nvidia=nvidia, backend=ON_CUDA)


def found(checks: list[Check], status: str) -> str:
    return "\n".join(f"{c.name}: {c.said} | {c.fix}" for c in checks if c.status == status)


def test_healthy_machines_have_nothing_to_say() -> None:
    for machine in (HEALTHY, with_card()):
        checks = machine_checks(machine)
        assert found(checks, "warning") + found(checks, "failure") == ""
    assert "CUDA0 (NVIDIA GeForce RTX 4090, 22.0 of 24.0 GiB free)" in found(machine_checks(with_card()), "ok")


@pytest.mark.parametrize(
    ("machine", "status", "said"),
    [
        (replace(with_card(), backend=ON_CPU), "failure", "RTX 4090 is here and unused"),
        (replace(with_card(), backend=ON_CPU), "failure", 'CMAKE_ARGS="-DGGML_CUDA=on" pip install --force-reinstall'),
        (replace(HEALTHY, pci_gpus=(PciGpu("AMD", "amdgpu"),)), "failure", "-DGGML_VULKAN=on"),
        (replace(with_card(), backend=replace(ON_CUDA, devices=(CPU,))), "failure", "GPU backend finds no device"),
        (
            replace(HEALTHY, backend=None, backend_error=UnfitError("llama.cpp does not load", "reinstall")),
            "failure",
            "reinstall",
        ),
        (replace(HEALTHY, pci_gpus=(PciGpu("NVIDIA", None),)), "failure", "install or repair the NVIDIA driver"),
        (replace(HEALTHY, nvidia=Nvidia(error="versions differ: reboot")), "warning", "versions differ: reboot"),
        (replace(with_card(), backend=replace(ON_CUDA, cuda_runtime=(13, 0))), "failure", "built with CUDA 13.0"),
        (replace(with_card(), backend=replace(ON_CUDA, cuda_runtime=(12, 8))), "warning", "built with CUDA 12.8"),
        (with_card(compute_capability=(6, 1)), "failure", "for compute capabilities 890, the card has 610"),
        (with_card(display_attached=True), "warning", "a screen is driven from it"),
        (with_card(mig=True), "warning", "MIG slices"),
        (with_card(power_limit_w=200.0), "warning", "limited to 200 W of 450 W"),
        (with_card(throttles=("power cap",)), "warning", "throttled now: power cap"),
        (with_card(processes=(CardProcess(1, GIB),)), "warning", "process (1) 1.0 GiB"),
        (replace(with_card(processes=(CardProcess(1, None),)), process_names={1: "game"}), "warning", "game (1) not reported"),
        (with_card(missing={"memory": "the GPU is lost"}), "failure", "fallen off the bus"),
        (replace(with_card(), wsl=True), "warning", "silently and slowly"),
        (replace(HEALTHY, cpu_flags=frozenset({"avx"})), "failure", "lacks AVX2, FMA"),
        (replace(HEALTHY, cpu_flags=frozenset({"avx", "avx2", "fma", "avx512f"})), "warning", "leaves AVX512 unused"),
        (replace(HEALTHY, cpu_quota=2.0, usable_cores=2), "warning", "the container may use 2 and 2 used"),
        (replace(HEALTHY, allowed_cpus=1, usable_cores=1), "warning", "affinity allows 1"),
        (replace(HEALTHY, memory_available=GIB // 2), "warning", "0.5 GiB of 32.0 GiB available"),
        (replace(HEALTHY, swap_used=6 * GIB), "warning", "a model there answers very slowly"),
        (replace(HEALTHY, disks=(Disk("/models", GIB),)), "warning", "1.0 GiB free for /models"),
        (replace(HEALTHY, packages={"pynvml": "11.5"}), "warning", "pip uninstall pynvml"),
        (replace(HEALTHY, memory_limit=4 * GIB), "ok", "the container may use 4.0 GiB"),
    ],
)
def test_each_trouble_has_its_line(machine: Machine, status: str, said: str) -> None:
    assert said in found(machine_checks(machine), status)


def test_nothing_reported_is_said_and_nothing_fails() -> None:
    machine = replace(
        with_card(),
        nvidia=Nvidia(cards=(Card(0, missing=dict.fromkeys(ANSWERS, "not supported")),)),
        cpu=None,
        cpu_flags=None,
        physical_cores=None,
        swap_total=None,
        swap_used=None,
        huge_pages=None,
    )
    checks = machine_checks(machine)
    assert found(checks, "warning") + found(checks, "failure") == ""
    assert found(checks, "ok").count("not reported") >= 8


def test_the_snapshot_survives_every_odd_driver() -> None:
    for library in (
        Library(init=NvmlError(12)),
        Library(init=NvmlError(4)),
        Library({name: NvmlError(15) for name in ANSWERS}),
        Library(cards=2),
    ):
        machine = snapshot(lambda library=library: Nvml(library))  # type: ignore[misc]
        assert machine.usable_cores >= 1
        assert machine_checks(machine)


def test_containers_limits_of_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(system, "PROC", tmp_path / "proc")
    groups = tmp_path / "proc" / "self" / "cgroup"
    groups.parent.mkdir(parents=True)
    inner = tmp_path / "cgroup" / "user" / "job"
    inner.mkdir(parents=True)
    groups.write_text("0::/user/job\n")
    assert system.cpu_quota() is None
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (inner / "memory.max").write_text(f"{8 * GIB}\n")
    (inner / "memory.current").write_text(f"{3 * GIB}\n")
    (inner / "memory.stat").write_text(f"anon 5\nfile {2 * GIB}\n")
    assert system.cpu_quota() == 1.5
    assert system.memory_limit() == 8 * GIB
    assert system.available_memory() <= 7 * GIB
    groups.write_text("4:memory:/gone\n3:cpu,cpuacct:/gone\n")
    for name, files in {
        "cpu": {"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"},
        "memory": {"memory.limit_in_bytes": f"{2**63 - 4096}"},
    }.items():
        (tmp_path / "cgroup" / name).mkdir()
        for file, text in files.items():
            (tmp_path / "cgroup" / name / file).write_text(text)
    assert system.memory_limit() is None
    assert system.cpu_quota() == 2.0


def test_cards_on_the_bus(tmp_path: Path) -> None:
    for number, (vendor, kind, driver) in enumerate(
        [
            ("0x10de", "0x030000", "nvidia"),
            ("0x10de", "0x040300", None),
            ("0x1234", "0x030000", "bochs"),
            ("0x1002", "0x038000", None),
        ]
    ):
        device = tmp_path / "devices" / f"0000:0{number}"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
        if driver:
            (tmp_path / "drivers" / driver).mkdir(parents=True)
            (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert pci_gpus(tmp_path / "devices") == (PciGpu("NVIDIA", "nvidia"), PciGpu("AMD", None))
    assert pci_gpus(tmp_path / "nowhere") == ()


def test_a_question_the_system_does_not_answer() -> None:
    def fails() -> int:
        raise NotImplementedError

    assert machines._quietly(fails) is None
    assert nvml.report(lambda: Nvml(Library(init=NvmlError(4)))).error == "no permission"


ROOM = Room(8 * GIB, Rate(5e10, "assumed"))


def checked(target: Path, draft: Path | None, room: Room = ROOM, **wishes: Any) -> list[Check]:
    asked = Wishes(**wishes)
    models = read_model(target), read_model(draft) if draft is not None else None
    return pair_checks(*models, propose(*models, asked, room), asked)


def test_a_good_pair(target: Path, far_draft: Path) -> None:
    checks = checked(target, far_draft)
    assert "vocabulary: identical, 281 tokens shared" in found(checks, "ok")
    assert "fit: 512 tokens" in found(checks, "ok")
    assert found(checks, "failure") == ""


def test_a_bad_pair(target: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", words=letters(20)[::-1])
    assert "vocabulary: mismatch" in found(checked(target, other), "failure")
    larger = write_tiny(tmp_path / "larger.gguf", layers=6)
    assert "are they swapped?" in found(checked(target, larger), "warning")
    recurrent = write_recurrent(tmp_path / "recurrent.gguf")
    assert "it cannot draft" in found(checked(target, recurrent), "failure")
    assert "nothing can be drafted for it" in found(checked(recurrent, None), "warning")


def test_settings_that_conflict(target: Path, far_draft: Path) -> None:
    off = checked(target, far_draft, flash_attention="off", cache_type_v="q8_0", draft_cache_type_v="q4_0")
    assert "the target's q8_0 values need flash attention" in found(off, "failure")
    assert "the draft's q4_0 values need flash attention" in found(off, "failure")
    assert "can ruin acceptance" in found(checked(target, far_draft, draft_cache_type_k="q8_0"), "warning")
    cards = replace(ROOM, gpus=(GpuRoom("GPU0", GIB, ROOM.ram_rate), GpuRoom("GPU1", GIB, ROOM.ram_rate)))
    assert "the draft is on the CPU" in found(checked(target, far_draft, cards, draft_gpu_layers=0), "warning")
    assert "the draft stays whole on one GPU" in found(checked(target, far_draft, cards, split_mode="row"), "ok")
    assert "too much on CPU" in found(checked(target, far_draft, replace(ROOM, ram_bytes=1000), n_ctx=512), "failure")
