"""Devices as data: rates and sizes from published figures, each with its source, or marked as an assumption."""

from functools import cache
from importlib.resources import files

import msgspec

from moesaic.errors import InvalidInput

_DATA = files("moesaic_lab.simulation.elastic") / "data"


class DeviceLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A way from one device to another.

    Attributes:
        bytes_per_s: in one direction.
        hop_s: until the first byte of a transfer is there.
        message_s: for each message that one device sends or receives.
    """

    bytes_per_s: float
    hop_s: float
    message_s: float


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device.

    Attributes:
        title: for people.
        flops: of dense bfloat16 arithmetic, in one second.
        memory_bytes: of its memory.
        memory_bytes_per_s: that can be read.
        devices_per_node: that share a machine.
        intra: links within a machine.
        inter: links between machines, for each device.
        kernel_s: least time of any kernel.
        experts_s: time of a layer's experts beyond their weights and rows.
        flops_share: part of the arithmetic that kernels reach.
        memory_share: part of the reading rate that kernels reach.
        usable_share: part of the memory for weights and KV.
        price_per_hour: of one device, in any unit.
        sources: by fields, where they are published or were measured.
        assumptions: by fields, that nobody published.
    """

    title: str
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    devices_per_node: int
    intra: DeviceLink
    inter: DeviceLink
    kernel_s: float
    experts_s: float
    flops_share: float
    memory_share: float
    usable_share: float
    price_per_hour: float = 1.0
    sources: dict[str, str]
    assumptions: dict[str, str]

    @property
    def usable_bytes(self) -> float:
        """Memory for weights and KV."""
        return self.memory_bytes * self.usable_share

    @property
    def read_s(self) -> float:
        """Seconds to read one byte."""
        return 1 / (self.memory_bytes_per_s * self.memory_share)

    @property
    def flop_s(self) -> float:
        """Seconds of one floating-point operation."""
        return 1 / (self.flops * self.flops_share)


@cache
def device_profiles() -> dict[str, DeviceProfile]:
    """Read all profiles that come with the library."""
    content = (_DATA / "devices.json").read_bytes()
    return msgspec.json.decode(content, type=dict[str, DeviceProfile])


def device_profile(name: str) -> DeviceProfile:
    """Find a profile.

    Raises:
        InvalidInput: there is none of that name.
    """
    found = device_profiles().get(name)
    if found is None:
        raise InvalidInput("device", f"must be one of {', '.join(device_profiles())}, got {name!r}")
    return found
