"""Accelerators as plans see them: speeds and sizes out of `devices.yaml`, and nothing of this host.

What a device at hand really is says `msllm.engine.device`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msllm.errors import InputError, closest

FILE = Path(__file__).with_name("devices.yaml")
DEFAULT = "Ascend910B2"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that kernels and links reach."""

    matmul: float
    attention: float
    memory: float
    links: float


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One kind of accelerator in a cluster of its usual machines.

    Attributes:
        name: As in the file.
        kind: `npu` or `cuda`.
        bf16: Peak FLOP/s of dense products in bf16.
        fp32: The same in fp32.
        memory_gib: Memory in GiB.
        memory_bandwidth: Bytes a second.
        node: Devices that the fast links connect.
        node_bandwidth: Bytes a second that a device sends over them, each way.
        network_bandwidth: Bytes a second that a device sends to other machines, each way.
        latency: Seconds that one collective costs beside its bytes.
        efficiency: What is reached of these.
    """

    name: str
    kind: Literal["npu", "cuda"]
    bf16: float
    fp32: float
    memory_gib: float
    memory_bandwidth: float
    node: int
    node_bandwidth: float
    network_bandwidth: float
    latency: float
    efficiency: Efficiency

    @property
    def memory(self) -> int:
        """Memory in bytes."""
        return round(self.memory_gib * 2**30)

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`, `bf16` or `fp32`."""
        return self.bf16 if dtype == "bf16" else self.fp32


@cache
def device_models() -> dict[str, DeviceModel]:
    """All of them by name."""
    import yaml

    content: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {
        name: DeviceModel(name, **{**values, "efficiency": Efficiency(**values["efficiency"])})
        for name, values in content.items()
    }


def device_model(name: str) -> DeviceModel:
    """Find a device model by name, in any case.

    Raises:
        InputError: There is none; it names the closest.
    """
    known = device_models()
    found = next((known[each] for each in known if each.lower() == name.lower()), None)
    if found is None:
        near = ", ".join(closest(name, list(known), 3))
        raise InputError(
            f"unknown device model {name!r}",
            f"--device-model {name}",
            f"closest are {near}; known are {', '.join(known)}",
        )
    return found
