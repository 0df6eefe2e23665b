"""How a placement can be served with the expert workers that are linked now."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moesaic.dispatch.sharing import has_choice, serving_workers
from moesaic.dispatch.terms import Terms
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.transport.contract import Link
from moesaic.transport.frame import Frame

CARRYING = ("aebs", "aebs-memory-bound")  # policies that ask what workers still have to do
MAX_SHARE = 1 << 30  # what a reply says about loads is believed up to here
NEWEST_WEIGHS = 1 / 8  # in the mean of what workers have of a layer


@dataclass(frozen=True, eq=False)
class Route:
    """A placement with the workers that can be reached now."""

    placement: Placement
    live: tuple[int, ...]  # indices into placement.workers
    links: dict[int, Link]  # by index
    targets: dict[int, tuple[int, ...]]  # layer -> indices of workers that may serve its experts
    terms: dict[int, Terms]  # by layer, without loads
    encoded: dict[int, Tensor]  # the same as frames have them
    shares: dict[int, Tensor] = field(default_factory=dict)
    """By layer: what each worker of the placement mostly had of batches whose replies said so, float64
    ``[N]``, as ``aebs`` counts."""
    under_way: list[int] = field(default_factory=list)
    """The layers of the batches that wait for replies."""

    @property
    def usable(self) -> bool:
        """Whether all its links still carry."""
        return all(link.alive for link in self.links.values())

    def terms_of(self, layer: int) -> Tensor:
        """What a request says besides rows, if nothing else is under way: ``Terms``, encoded."""
        return self.encoded[layer]

    @contextmanager
    def batch(self, layer: int) -> Iterator[Tensor]:
        """What the frames of one more batch say besides rows; meanwhile it counts as under way."""
        terms = self.encoded[layer]
        if self.under_way and self.terms[layer].scheduling in CARRYING:
            busy = torch.zeros(len(self.placement.workers), dtype=torch.float64)
            for at in self.under_way:
                busy += self.shares.get(at, 0)
            load = tuple(busy.round().long()[list(self.live)].tolist())
            terms = replace(self.terms[layer], load=load).encode()
        self.under_way.append(layer)
        try:
            yield terms
        finally:
            self.under_way.remove(layer)

    def learn(self, layer: int, terms: Tensor, replies: Sequence[Frame]) -> None:
        """Remember what the workers had of a batch, if ``terms`` made its replies say so."""
        if len(terms) > 1:
            carried = torch.zeros(len(self.placement.workers), dtype=torch.int64)
            carried[list(self.live)] = terms[1, 1:]
            share = (replies[0].tensors[1][0] - carried).clamp(0, MAX_SHARE).double()
            usual = self.shares.get(layer, share)
            self.shares[layer] = usual + (share - usual) * NEWEST_WEIGHS


def plan_route(
    placement: Placement, links: dict[int, Link], scheduling: ExpertScheduling = "aebs"
) -> Route | None:
    """Find for every layer who may serve its experts; None if some expert has nobody.

    Where no expert has two live replicas there is nothing to schedule, and nobody tries.
    """
    live = tuple(sorted(links))
    targets, terms = {}, {}
    for layer in placement.layers:
        policy = scheduling if has_choice(placement, layer, live) else "static"
        serving = serving_workers(placement, layer, policy, live)
        if serving is None:
            return None
        targets[layer], terms[layer] = serving, Terms(policy, live)
    encoded = {layer: each.encode() for layer, each in terms.items()}
    return Route(placement, live, links, targets, terms, encoded)
