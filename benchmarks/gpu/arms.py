"""The benchmarks that a CUDA device is for, and the choice of them for a number of minutes."""

from collections.abc import Sequence
from dataclasses import dataclass

RESERVE_S = 20.0  # of the time, for starts and for results to be written
PATIENCE = 1.5  # an arm may take so many times its estimate; more, if the later ones still fit
IMPOSSIBLE = "not possible:"  # how the outcome of an arm begins that this machine cannot run


@dataclass(frozen=True)
class GpuArm:
    """One benchmark.

    Attributes:
        bench: its name for ``moesaic bench``.
        quick_s: seconds that ``--quick`` takes on an H200, estimated.
        whole_s: seconds without ``--quick``, estimated.
        shares_device: several processes use the device, so MPS matters.
        devices: number of CUDA devices that it needs.
    """

    bench: str
    quick_s: float
    whole_s: float
    shares_device: bool = False
    devices: int = 1


# The most telling first. No run has stated these times yet; each run records its own.
ARMS = (
    GpuArm("kernels", 80, 290),
    GpuArm("gpu-tests", 90, 90),
    GpuArm("serving", 145, 445, shares_device=True),
    GpuArm("wide", 160, 445, shares_device=True),
    GpuArm("steps", 30, 90),
    GpuArm("sampling", 15, 30),
    GpuArm("aebs", 20, 40),
    GpuArm("costs", 40, 120),
    GpuArm("gpu-ranks", 100, 240, devices=2),
)


@dataclass(frozen=True)
class ChosenArm:
    """An arm that is to run, quick or whole."""

    arm: GpuArm
    quick: bool

    @property
    def estimate_s(self) -> float:
        """Seconds that it should take."""
        return self.arm.quick_s if self.quick else self.arm.whole_s

    def limit_s(self, left_s: float, later_s: float = 0.0) -> float:
        """Count the seconds after which it is ended.

        ``left_s`` are left for all, of which later ones should take ``later_s``.
        """
        spare_s = max(0.0, left_s - RESERVE_S)
        return min(spare_s, max(PATIENCE * self.estimate_s, spare_s - later_s))


def within_devices(arms: Sequence[GpuArm], devices: int) -> tuple[list[GpuArm], dict[str, str]]:
    """Divide the arms into those that ``devices`` are enough for and the others, with the reason."""
    possible = [arm for arm in arms if arm.devices <= devices]
    return possible, {
        arm.bench: f"{IMPOSSIBLE} it needs {arm.devices} CUDA devices, and there are {devices}"
        for arm in arms
        if arm.devices > devices
    }


def chosen(arms: Sequence[GpuArm], seconds: float) -> list[ChosenArm]:
    """Choose the arms that fit, in their order.

    Each arm that fits as a quick one takes part. Then the first ones become whole, as long as that fits.
    """
    left_s, quick = seconds - RESERVE_S, list[GpuArm]()
    for arm in arms:
        if arm.quick_s <= left_s:
            quick.append(arm)
            left_s -= arm.quick_s
    turns = []
    for arm in quick:
        more_s = arm.whole_s - arm.quick_s
        whole = more_s <= left_s
        left_s -= more_s * whole
        turns.append(ChosenArm(arm, quick=not whole))
    return turns
