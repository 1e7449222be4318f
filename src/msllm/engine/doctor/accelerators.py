"""Which devices this machine has, and how much of their memory is free."""

from __future__ import annotations

from collections.abc import Iterator

from msllm.engine.device import KINDS, Device, device_count, probe
from msllm.engine.doctor.finding import Finding, Verdict

GIB = 2**30
BUSY = 0.1
"""Share of a device's memory in use from which somebody else must be on it."""


def findings() -> Iterator[Finding]:
    """List devices; a machine without any is told what is still possible."""
    accelerated = False
    for kind in (kind for kind in KINDS if kind != "cpu"):
        problem = probe(kind)
        if problem is not None:
            yield Finding(kind, Verdict.NOTE, problem.problem, problem.hint)
            continue
        accelerated = True
        for index in range(device_count(kind)):
            yield _device(Device(kind, index))
    cpu = Device("cpu")
    yield Finding("cpu", Verdict.OK, f"{cpu.name}, {cpu.total_memory() / GIB:.0f} GiB of memory")
    if not accelerated:
        said = "none here: small runs on the CPU, plans, dry runs, conversion and data all work"
        mend = "`msllm plan` and `pretrain --device npu --dry-run` tell what a cluster would do"
        yield Finding("accelerator", Verdict.NOTE, said, mend)


def _device(device: Device) -> Finding:
    about = f"{device.kind}:{device.index}"
    try:
        name, total, free = device.name, device.total_memory(), device.free_memory()
    except RuntimeError as error:  # the driver's own words
        mend = "see `npu-smi info`; a reset or a restart of the machine may be needed"
        return Finding(about, Verdict.FAULT, f"it does not answer: {error}", mend)
    said = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < total * (1 - BUSY):
        mend = "somebody is on it: see `npu-smi info` or `nvidia-smi`"
        return Finding(about, Verdict.WARNING, said, mend)
    return Finding(about, Verdict.OK, said)
