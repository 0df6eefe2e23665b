"""Workers that serve a placement now, as far as they are linked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moesaic.experts.assignment import has_choice, serving_workers
from moesaic.experts.basis import AssignmentBasis, loads_in
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.transport.contract import Link

CARRYING = ("aebs", "aebs-memory-bound")  # policies that count the work of earlier batches
MAX_BATCH_LOAD = 1 << 30  # a reply is believed up to here
NEWEST_WEIGHS = 1 / 8  # in the mean of the loads of a layer


@dataclass(frozen=True, eq=False)
class Route:
    """A placement with the workers that can be reached now."""

    placement: Placement
    live: tuple[int, ...]  # indices into placement.workers
    links: dict[int, Link]  # by index
    targets: dict[int, tuple[int, ...]]  # layer -> indices of workers that may serve its experts
    bases: dict[int, AssignmentBasis]  # by layer, without loads
    encoded: dict[int, Tensor]  # the same, encoded
    # By layer: mean load of each worker over past batches, float64 [N], in the unit of ``aebs``.
    usual_loads: dict[int, Tensor] = field(default_factory=dict)
    under_way: list[int] = field(default_factory=list)  # layers of batches that wait for replies

    @property
    def usable(self) -> bool:
        """True while all its links carry."""
        return all(link.alive for link in self.links.values())

    def basis_of(self, layer: int) -> Tensor:
        """The encoded basis of a batch if nothing else is under way."""
        return self.encoded[layer]

    @contextmanager
    def batch(self, layer: int) -> Iterator[Tensor]:
        """The encoded basis of one more batch, which counts as under way meanwhile."""
        basis = self.encoded[layer]
        if self.under_way and self.bases[layer].scheduling in CARRYING:
            busy = torch.zeros(len(self.placement.workers), dtype=torch.float64)
            for at in self.under_way:
                busy += self.usual_loads.get(at, 0)
            load = tuple(busy.round().long()[list(self.live)].tolist())
            basis = replace(self.bases[layer], load=load).encode()
        self.under_way.append(layer)
        try:
            yield basis
        finally:
            self.under_way.remove(layer)

    def learn(self, layer: int, basis: Tensor, loads: Tensor | None) -> None:
        """Remember the workers' ``loads`` of a batch, which replies tell if its ``basis`` has some."""
        if loads is not None and (known := loads_in(basis)) is not None:
            carried = torch.zeros(len(self.placement.workers), dtype=torch.int64)
            carried[list(self.live)] = known
            load = (loads - carried).clamp(0, MAX_BATCH_LOAD).double()
            usual = self.usual_loads.get(layer, load)
            self.usual_loads[layer] = usual + (load - usual) * NEWEST_WEIGHS


def plan_route(
    placement: Placement, links: dict[int, Link], scheduling: ExpertScheduling = "aebs"
) -> Route | None:
    """Find the workers that may serve the experts of every layer.

    A layer without two live replicas of any expert has nothing to schedule, so its policy is
    ``static``.

    Returns:
        ``None`` if no live worker holds some expert.
    """
    live = tuple(sorted(links))
    targets, bases = {}, {}
    for layer in placement.layers:
        policy = scheduling if has_choice(placement, layer, live) else "static"
        serving = serving_workers(placement, layer, policy, live)
        if serving is None:
            return None
        targets[layer], bases[layer] = serving, AssignmentBasis(policy, live)
    encoded = {layer: each.encode() for layer, each in bases.items()}
    return Route(placement, live, links, targets, bases, encoded)
