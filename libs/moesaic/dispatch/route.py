"""Workers that serve a placement now, as far as they are linked."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moesaic.experts.assignment import has_choice, serving_workers
from moesaic.experts.basis import AssignmentBasis
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.messages.substitution import Substitution
from moesaic.transport.contract import Link

# Up to so many bytes of rows, frames in shared memory are faster than messages between devices
# (benchmarks/results/gpu/2026-11-26-nvidia-h100-80gb-hbm3-serving.json; rows of 1 KiB, one GPU for both sides):
#   rows of a step            1        8       32      prompts
#   tokens/s, host         47.4    342.5     1102       27,260
#   tokens/s, device       33.2    267.0     1085       43,765
BY_HOST_BYTES = 32 << 10
CARRYING = ("aebs", "aebs-memory-bound")  # policies that count the work of earlier batches


@dataclass(frozen=True, eq=False)
class UsualLoads:
    """Mean load of each worker over past batches of a layer, in the unit of ``aebs``.

    C functions read and write it, for steps with several parts in flight.
    """

    mean: Tensor  # float64 [N]; zeros until a load is known
    known: Tensor  # int64 [1]: 1 if one is


@dataclass(frozen=True, eq=False)
class Route:
    """A placement with the workers that can be reached now."""

    placement: Placement
    live: tuple[int, ...]  # indices into placement.workers
    links: dict[int, Link]  # by index
    targets: dict[int, tuple[int, ...]]  # layer -> indices of workers that may serve its experts
    encoded: dict[int, Tensor]  # by layer, the basis of assignment without loads
    usual_loads: dict[int, UsualLoads]  # of layers whose policy counts them
    substitution: Substitution | None = (
        None  # how choices may be degraded; None: a united expert is missing
    )
    has_lost: bool = False  # some experts are served by united ones alone

    @property
    def usable(self) -> bool:
        """True while all its links carry."""
        return all(link.alive for link in self.links.values())

    def takes_from(self, device: torch.device, layer: int, nbytes: int) -> bool:
        """True if rows and sums of a layer travel best from and to the memory of ``device``.

        All its workers must be able to, and ``nbytes`` of rows too many for the channels of the host.
        """
        targets = self.targets[layer]
        if nbytes <= BY_HOST_BYTES and all(self.links[idx].channel for idx in targets):
            return False
        return all(self._devices.get(idx) == device.type for idx in targets)

    @cached_property
    def _devices(self) -> dict[int, str]:
        """Types of the devices of links' memories, by index."""
        return {idx: link.memory.device.type for idx, link in self.links.items() if link.memory}

    def basis_of(self, layer: int) -> Tensor:
        """The encoded basis of rows of a layer, without loads."""
        return self.encoded[layer]


def plan_route(
    placement: Placement, links: dict[int, Link], scheduling: ExpertScheduling = "aebs"
) -> Route | None:
    """Find the workers that may serve the experts of every layer.

    A layer without two live replicas of any expert has nothing to schedule, so its policy is
    ``static``.

    Returns:
        ``None`` if no live worker holds some expert, nor one that stands in for it.
    """
    live = tuple(sorted(links))
    targets, bases, has_lost, has_united = {}, {}, False, True
    for layer in placement.layers:
        policy = scheduling if has_choice(placement, layer, live) else "static"
        serving = serving_workers(placement, layer, policy, live)
        if serving is None:
            return None
        targets[layer], bases[layer] = serving.workers, AssignmentBasis(policy, live)
        has_lost |= serving.has_lost
        has_united &= serving.has_united
    encoded = {layer: each.encode() for layer, each in bases.items()}
    num_workers = len(placement.workers)
    usual = {
        layer: UsualLoads(
            torch.zeros(num_workers, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        )
        for layer, basis in bases.items()
        if basis.scheduling in CARRYING
    }
    # A placement of before a brownout was allowed cannot degrade, whatever thresholds are by now.
    substitution = (
        placement.substitution if has_united and placement.substitution != Substitution() else None
    )
    return Route(placement, live, links, targets, encoded, usual, substitution, has_lost)
