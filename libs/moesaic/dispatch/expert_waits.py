"""WaitTally: the time that steps of one dispatcher spend because experts are in other processes."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from moesaic.costs import CostBook


class ExpertWaits(NamedTuple):
    """Sums over exchanges.

    Attributes:
        num: exchanges, one a layer and part of a step.
        seconds: time of the engine's thread, from sending rows to the sum of all replies.
        beyond_s: ``seconds`` less the computation of the slowest expert worker; 0 if not reported.
        messages: there and back.
        nbytes: there and back.
        is_inter: some went to another node.
    """

    num: int = 0
    seconds: float = 0.0
    beyond_s: float = 0.0
    messages: int = 0
    nbytes: int = 0
    is_inter: bool = False

    def and_also(self, more: "ExpertWaits") -> "ExpertWaits":
        """Add up two sums."""
        return ExpertWaits(
            self.num + more.num,
            self.seconds + more.seconds,
            self.beyond_s + more.beyond_s,
            self.messages + more.messages,
            self.nbytes + more.nbytes,
            self.is_inter or more.is_inter,
        )


NOTHING = ExpertWaits()


@dataclass
class WaitTally:
    """Adds up exchanges until they are taken; for one thread."""

    _sum: ExpertWaits = NOTHING

    def add(self, more: ExpertWaits) -> None:
        """Count some more."""
        self._sum = self._sum.and_also(more)

    @property
    def num(self) -> int:
        """Exchanges that were not taken yet."""
        return self._sum.num

    def take(self) -> ExpertWaits:
        """Take the sums since the last call."""
        taken, self._sum = self._sum, NOTHING
        return taken


@dataclass
class Work:
    """Work of expert workers, as they tell it.

    Attributes:
        seconds: by worker id, of all layers.
        layers: by worker id, of all steps.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)

    def add(self, worker_id: str, took_ns: int, layers: int = 1) -> None:
        """Count the time of a worker; 0: it computed nothing, or does not tell."""
        if took_ns:
            self.seconds[worker_id] = self.seconds.get(worker_id, 0.0) + took_ns * 1e-9
            self.layers[worker_id] = self.layers.get(worker_id, 0) + layers

    def and_also(self, more: "Work") -> None:
        """Add those of more steps."""
        for worker_id, seconds in more.seconds.items():
            self.seconds[worker_id] = self.seconds.get(worker_id, 0.0) + seconds
            self.layers[worker_id] = self.layers.get(worker_id, 0) + more.layers[worker_id]


@runtime_checkable
class TellsOfWork(Protocol):
    """A dispatcher that knows what each expert worker computed."""

    def take_work(self) -> Work:
        """Take what was computed since the last call."""
        ...


@runtime_checkable
class WaitsForExperts(Protocol):
    """A dispatcher whose experts are in other processes."""

    @property
    def waits(self) -> WaitTally:
        """Exchanges of its steps."""
        ...


@runtime_checkable
class Measuring(Protocol):
    """A dispatcher that measures costs of its own."""

    @property
    def costs(self) -> CostBook:
        """Costs of parts that no step shows."""
        ...
