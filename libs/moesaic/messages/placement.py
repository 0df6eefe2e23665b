"""The placement: the expert in every slot of every worker."""

import msgspec

from moesaic.errors import InvalidInput
from moesaic.messages.bounds import Count, Name, SmallCount
from moesaic.messages.substitution import Substitution

EMPTY_SLOT = -1
Incarnation = tuple[str, int]  # worker id and generation


class PlacedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """An expert worker as the placement knows it."""

    worker_id: Name
    generation: Count
    admin_address: Name
    data_address: Name
    weights_address: Name = ""  # where its experts can be fetched; empty: nowhere
    ridge_rows: SmallCount = 0  # rows of an expert that take as long as its weights; 0: not known
    node: Name = ""  # what it shares memory or a fast bus with; empty: a node of its own

    @classmethod
    def of(cls, worker: object) -> "PlacedWorker":
        """Take the fields of a record in the registry, or of a wire message."""
        return cls(**{name: getattr(worker, name) for name in cls.__struct_fields__})

    @property
    def incarnation(self) -> Incarnation:
        """One start of this worker: its id and generation."""
        return self.worker_id, self.generation

    @property
    def node_name(self) -> str:
        """The node; a worker that shares none has one of its own."""
        return self.node or f"{self.worker_id}'s own"


class Placement(msgspec.Struct, frozen=True, kw_only=True, tag="placement.v1"):
    """The placement document: per layer and worker, the expert in each slot. Its epoch only grows.

    ``slots[i][n][s]`` is the expert in slot ``s`` of worker ``n`` for decoder layer ``layers[i]``;
    -1 is an empty slot.
    """

    epoch: Count
    model_digest: Name
    num_experts: SmallCount  # of a layer: the model's own, and behind them the united ones of ``substitution``
    workers: list[PlacedWorker]
    layers: list[SmallCount]
    slots: list[list[list[int]]]
    substitution: Substitution = Substitution()  # how choices may be degraded
    num_united: SmallCount = 0  # the last of ``num_experts``
    traceparent: Name = ""  # W3C: the scheduler's span that placed it; empty: it is not traced

    def checked(self) -> "Placement":
        """Return the placement itself, if its parts fit together.

        Raises:
            InvalidInput: names the first wrong field, and its allowed values.
        """
        if self.num_experts <= self.num_united:
            raise InvalidInput("placement.num_experts", "must be at least 1 without united experts")
        has_united = self.substitution.instead == "united"
        united = self.substitution.num_united(self.num_own) if has_united else 0
        if self.num_united != united or (has_united and not self.substitution.way):
            raise InvalidInput("placement.num_united", f"must be {united}, got {self.num_united}")
        workers = {worker.worker_id for worker in self.workers}
        if len(workers) != len(self.workers):
            raise InvalidInput("placement.workers", "must be named once each")
        if len(self.slots) != len(self.layers) or len(set(self.layers)) != len(self.layers):
            raise InvalidInput("placement.layers", f"must be {len(self.slots)}, each once")
        for layer, by_worker in zip(self.layers, self.slots, strict=True):
            if len(by_worker) != len(workers):
                raise InvalidInput(
                    "placement.slots", f"layer {layer} must have those of {len(workers)} workers"
                )
            for slots in by_worker:
                if slots and not EMPTY_SLOT <= min(slots) <= max(slots) < self.num_experts:
                    raise InvalidInput(
                        "placement.slots", f"expert ids must be in -1..{self.num_experts - 1}"
                    )
        return self

    @property
    def num_own(self) -> int:
        """Experts of a layer without united ones."""
        return self.num_experts - self.num_united

    def holders(self, layer: int) -> list[list[int]]:
        """Indices of the workers that hold each expert of a decoder layer, ascending."""
        held: list[list[int]] = [[] for _ in range(self.num_experts)]
        for worker_idx, experts in enumerate(self.slots[self.layers.index(layer)]):
            for expert_id in experts:
                if expert_id != EMPTY_SLOT and worker_idx not in held[expert_id]:
                    held[expert_id].append(worker_idx)
        return held


class PlacementHint(msgspec.Struct, frozen=True, kw_only=True, tag="placement-hint.v1"):
    """A placement was committed; read the document."""

    epoch: Count
