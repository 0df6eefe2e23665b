"""The device of each process that computes, and the memory of each place."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.usage.packages import has_driver

if TYPE_CHECKING:
    from moesaic.settings import ServiceSettings

MACHINE = "machine"  # the place of a process without a GPU
CPU = "cpu"
UNKNOWN_BYTES = 1 << 60


def devices_named(text: str) -> tuple[str, ...]:
    """Read ``--devices``: ``auto``, ``cpu``, or CUDA devices such as ``cuda:0,cuda:1``.

    Returns:
        CUDA devices; none: processes compute on the CPU.

    Raises:
        CommandError: it is none of these, or a device is not there.
    """
    if text == CPU:
        return ()
    there = tuple(f"cuda:{index}" for index in range(_num_gpus()))
    if text == "auto":
        return there
    named = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if missing := [device for device in named if device not in there]:
        raise CommandError(
            f"--devices {text}: {missing[0] or 'an empty word'} is not a device of this machine; available: "
            f"{', '.join(there) or 'no GPU that torch finds'}; give auto, cpu, or some of them, such as cuda:0,cuda:1",
            Exit.USAGE,
        )
    return named


def _num_gpus() -> int:
    if not has_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def place_of(settings: "ServiceSettings") -> str:
    """Name the place of a process: the machine, or its device with an index."""
    device = str(getattr(settings, "device", CPU))
    return MACHINE if device == CPU else "cuda:0" if device == "cuda" else device


def places_of(settings: "ServiceSettings") -> tuple[str, ...]:
    """Name the places of a process and of the ranks that it starts: a GPU for each, side by side."""
    place = place_of(settings)
    if place == MACHINE or getattr(settings, "tensor_parallel_address", None):
        return (place,)
    return side_by_side(place, getattr(settings, "tensor_parallel", 1))


def side_by_side(first: str, count: int) -> tuple[str, ...]:
    """Name a CUDA device and those that follow it."""
    index = int(first.rpartition(":")[2])
    return tuple(f"cuda:{index + rank}" for rank in range(count))


def shared_out(sizes: Mapping[str, Sequence[int]], room: Mapping[str, int]) -> dict[str, str]:
    """Give each process its first device: the largest process first, each to where most is left.

    Args:
        sizes: bytes of each rank, by process; ranks take devices side by side.
        room: bytes by device, one at least.

    Raises:
        CommandError: a process has more ranks than there are devices side by side.
    """
    left, devices = dict(room), dict[str, str]()
    for name in sorted(sizes, key=lambda name: -sum(sizes[name])):
        count = len(sizes[name])
        groups = [side_by_side(first, count) for first in room]
        groups = [group for group in groups if left.keys() >= set(group)]
        if not groups:
            raise CommandError(
                f"--tensor-parallel {count}: {name} needs {count} GPUs side by side, there are "
                f"{', '.join(room)}; give fewer ranks, or more --devices",
                Exit.USAGE,
            )
        group = max(groups, key=lambda group: min(left[device] for device in group))
        devices[name] = group[0]
        for device, size in zip(group, sizes[name], strict=True):
            left[device] -= size
    return {name: devices[name] for name in sizes}


def memory_there_is(places: Iterable[str], given: Sequence[int] = ()) -> dict[str, int]:
    """Count the bytes of the machine and of devices that are free now.

    Args:
        places: of processes; the machine is always among the results, and first.
        given: sizes to take instead, in order; the last counts for all behind it.

    Raises:
        CommandError: a device is not there.
    """
    devices = sorted(set(places) - {MACHINE}, key=lambda name: int(name.rpartition(":")[2]))
    if given:
        sizes = [*given, *[given[-1]] * len(devices)]
        return dict(zip((MACHINE, *devices), sizes, strict=False))
    from moesaic.telemetry.memory import free_bytes

    found = {MACHINE: free_bytes() or UNKNOWN_BYTES}
    there = _num_gpus() if devices else 0
    for device in devices:
        import torch

        if int(device.rpartition(":")[2]) >= there:
            raise CommandError(
                f"--device: {device} is not a device of this machine, which has {there} GPUs; give another, or fewer "
                "ranks (--tensor-parallel)",
                Exit.USAGE,
            )
        found[device] = int(torch.cuda.mem_get_info(device)[0])
    return found
