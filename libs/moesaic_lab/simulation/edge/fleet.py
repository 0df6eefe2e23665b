"""Fleets of edge servers: sites with GPUs, memory for experts, and links."""

from dataclasses import dataclass
from itertools import cycle, islice
from typing import Self

from moesaic.errors import InvalidInput

GPUS_OF_SITES = 1, 1, 2  # DanceMoE section IV-A; larger fleets repeat it
BYTES_PER_MBIT = 125_000


@dataclass(frozen=True, kw_only=True)
class EdgeFleet:
    """Sites whose links to each other are alike.

    Attributes:
        gpus: of each site, N sites.
        experts_per_gpu: that the memory of one GPU has room for, over all layers.
        mbit_per_s: of each site's link, each way.
        running: requests that are in the passes of one GPU at a time; 1: one after the other.
    """

    gpus: tuple[int, ...]
    experts_per_gpu: int
    mbit_per_s: float
    running: int = 1

    def __post_init__(self) -> None:
        if not self.gpus or min(self.gpus) < 1:
            raise InvalidInput("gpus", "must be at least 1 at every site")
        if not self.mbit_per_s > 0:
            raise InvalidInput("mbit_per_s", f"must be above 0, got {self.mbit_per_s}")
        if self.experts_per_gpu < 1 or self.running < 1:
            raise InvalidInput("experts_per_gpu", "must be at least 1, and so must running")

    @classmethod
    def of_paper(
        cls, num_gpus: int, experts_per_gpu: int, mbit_per_s: float, running: int = 1
    ) -> Self:
        """Make a fleet of sites with 1, 1 and 2 GPUs, again and again; the last site may have fewer.

        Raises:
            InvalidInput: there are no GPUs, or no experts find room.
        """
        if num_gpus < 1:
            raise InvalidInput("gpus", f"must be at least 1, got {num_gpus}")
        gpus = list[int]()
        for each in islice(cycle(GPUS_OF_SITES), num_gpus):
            gpus.append(min(each, num_gpus - sum(gpus)))
            if sum(gpus) == num_gpus:
                break
        return cls(
            gpus=tuple(gpus),
            experts_per_gpu=experts_per_gpu,
            mbit_per_s=mbit_per_s,
            running=running,
        )

    @property
    def num_sites(self) -> int:
        """N."""
        return len(self.gpus)

    @property
    def byte_s(self) -> float:
        """Seconds of one byte on a link."""
        return 1 / (self.mbit_per_s * BYTES_PER_MBIT)
