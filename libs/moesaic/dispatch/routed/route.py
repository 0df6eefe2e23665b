"""Workers that serve a placement now, as far as they are linked."""

from dataclasses import dataclass, field, replace
from weakref import WeakSet

import torch
from torch import Tensor

from moesaic.experts.assignment import has_choice, serving_workers
from moesaic.experts.basis import AssignmentBasis, loads_in
from moesaic.messages.placement import Placement
from moesaic.messages.rung import Rung
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.transport.contract import Link

CARRYING = ("aebs", "aebs-memory-bound")  # policies that count the work of earlier batches
MAX_BATCH_LOAD = 1 << 30  # a reply is believed up to here
NEWEST_WEIGHS = 1 / 8  # in the mean of the loads of a layer


@dataclass(frozen=True, eq=False)
class UsualLoads:
    """Mean load of each worker over past batches of a layer, in the unit of ``aebs``.

    C functions read and write the same memory.
    """

    mean: Tensor  # float64 [N]; zeros until a load is known
    known: Tensor  # int64 [1]: 1 if one is

    def learn(self, load: Tensor) -> None:
        """Count the load of one more batch, int64 ``[N]``."""
        if not self.known.item():
            self.mean.copy_(load)
            self.known.fill_(1)
        self.mean.add_((load - self.mean) * NEWEST_WEIGHS)


@dataclass(frozen=True, eq=False)
class BatchUnderWay:
    """A batch that was sent, for as long as somebody holds this."""

    layer: int


@dataclass(frozen=True, eq=False)
class Route:
    """A placement with the workers that can be reached now."""

    placement: Placement
    live: tuple[int, ...]  # indices into placement.workers
    links: dict[int, Link]  # by index
    targets: dict[int, tuple[int, ...]]  # layer -> indices of workers that may serve its experts
    bases: dict[int, AssignmentBasis]  # by layer, without loads
    encoded: dict[int, Tensor]  # the same, encoded
    usual_loads: dict[int, UsualLoads]  # of layers whose policy counts them
    rung: Rung | None = None  # how choices may be degraded; None: a united expert is missing
    has_lost: bool = False  # some experts are served by united ones alone
    # Batches that wait for replies. One that nobody awaits any more is not among them.
    under_way: "WeakSet[BatchUnderWay]" = field(default_factory=WeakSet)

    @property
    def usable(self) -> bool:
        """True while all its links carry."""
        return all(link.alive for link in self.links.values())

    def takes_from(self, device: torch.device, layer: int) -> bool:
        """True if rows and sums of a layer can travel from and to the memory of ``device``, at all its workers."""
        links = [self.links[idx] for idx in self.targets[layer]]
        memories = [getattr(link, "memory", None) for link in links]
        return all(memory is not None and memory.device.type == device.type for memory in memories)

    def basis_of(self, layer: int) -> Tensor:
        """The encoded basis of a batch that is sent now, beside those under way."""
        if not self.under_way or layer not in self.usual_loads:
            return self.encoded[layer]
        busy = torch.zeros(len(self.placement.workers), dtype=torch.float64)
        for batch in self.under_way:
            if (usual := self.usual_loads.get(batch.layer)) is not None:
                busy += usual.mean
        load = tuple(busy.round().long()[list(self.live)].tolist())
        return replace(self.bases[layer], load=load).encode()

    def sent(self, layer: int) -> BatchUnderWay:
        """Count a batch as under way from now on."""
        batch = BatchUnderWay(layer)
        self.under_way.add(batch)
        return batch

    def learn(self, layer: int, basis: Tensor, loads: Tensor | None) -> None:
        """Remember the workers' ``loads`` of a batch, which replies tell if its ``basis`` has some."""
        if loads is not None and (known := loads_in(basis)) is not None:
            carried = torch.zeros(len(self.placement.workers), dtype=torch.int64)
            carried[list(self.live)] = known
            self.usual_loads[layer].learn((loads - carried).clamp(0, MAX_BATCH_LOAD))


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
    rung = placement.rung if has_united and placement.rung != Rung() else None
    return Route(placement, live, links, targets, bases, encoded, usual, rung, has_lost)
