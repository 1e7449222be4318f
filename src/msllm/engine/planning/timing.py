"""How long a traced step takes on a device model: a roofline for each operation and message.

An operation takes as long as its FLOPs or its bytes do, whichever is longer, at the peak times the
model's efficiency. Nothing is assumed to overlap but gradient reduction where the run says so.
Launch times, stragglers and the input of data are not in it: take the figures for comparing
layouts, and for an order of magnitude beside a measured run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from msllm.engine.layout import Layout
from msllm.engine.planning.records import Collective, Work
from msllm.models.device_models import DeviceModel

UPDATE_BYTES = 30
"""Bytes that AdamW moves a parameter: gradient and three float32 states read, those three and the
bf16 parameter written."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as its links see it: how many ranks, and how far apart they are."""

    size: int
    stride: int

    def on_a_machine(self, npus: int) -> int:
        """Ranks of it that share a machine of `npus` devices."""
        return max(1, min(self.size, npus // self.stride))


def groups(layout: Layout) -> dict[str, Group]:
    """The process groups by their name in the ledger."""
    stage = layout.world_size // layout.pp
    expert_dp = max(1, stage // (layout.ep * layout.etp))
    return {
        "tp": Group(layout.tp, 1),
        "cp": Group(layout.cp, layout.tp),
        "tp x cp": Group(layout.tp * layout.cp, 1),
        "dp": Group(layout.dp * layout.cp, layout.tp),
        "dp without cp": Group(layout.dp, layout.tp * layout.cp),
        "tp x dp": Group(stage, 1),
        "pp": Group(layout.pp, stage),
        "ep": Group(layout.ep, layout.etp),
        "etp": Group(layout.etp, 1),
        "etp x ep": Group(layout.etp * layout.ep, 1),
        "expert dp": Group(expert_dp, layout.etp * layout.ep),
        "embedding": Group(min(layout.pp, 2), stage * max(1, layout.pp - 1)),
        "model": Group(layout.tp * layout.pp, 1),
    }


def work_seconds(work: Mapping[Work, int], device: DeviceModel, dtype: str) -> float:
    """Seconds of operations, one after another."""
    efficiency, peak = device.efficiency, device.peak(dtype)
    share = {"matmul": efficiency.matmul, "attention": efficiency.attention}
    bandwidth = device.memory_bandwidth * efficiency.memory
    seconds = 0.0
    for (kind, flops, moved), times in work.items():
        compute = flops / (peak * share[kind]) if flops else 0.0
        seconds += times * max(compute, moved / bandwidth)
    return seconds


def collective_seconds(name: str, size: int, group: Group, device: DeviceModel, npus: int) -> float:
    """Seconds of one collective whose message is `size` bytes.

    Rings: a rank sends (n - 1) / n of what is gathered or summed, twice that for an all-reduce;
    over several machines, first in each and then between them, with all of a machine's ports.
    """
    n = group.size
    if n < 2 or not size:
        return 0.0
    fast = device.node_bandwidth * device.efficiency.links
    slow = device.network_bandwidth * device.efficiency.links
    near = group.on_a_machine(min(npus, device.node))
    machines = -(-n // near)
    if name in ("send", "broadcast"):
        return device.latency + size / (slow if near == 1 else fast)
    if name == "all-to-all":
        within, beyond = (near - 1) / n, (n - near) / n
        return device.latency + size * max(within / fast, beyond / slow)
    once = (near - 1) / near / fast + (machines - 1) / machines / near / slow
    return device.latency + size * once * (2 if name == "all-reduce" else 1)


def collectives_seconds(
    collectives: Mapping[Collective, int], layout: Layout, device: DeviceModel, npus: int
) -> Mapping[str, float]:
    """Seconds of collectives by group, one after another."""
    known = groups(layout)
    seconds: defaultdict[str, float] = defaultdict(float)
    for (name, group, size), times in collectives.items():
        took = collective_seconds(name, size, known[group], device, npus)
        seconds[group] += times * took
    return seconds


def update_seconds(updated: int, device: DeviceModel) -> float:
    """Seconds of the optimizer's update of `updated` parameters."""
    return updated * UPDATE_BYTES / (device.memory_bandwidth * device.efficiency.memory)
