"""WaitTally: the time that steps of one dispatcher spend because experts are in other processes."""

from collections import Counter
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
        took_ns: by worker id, of all layers.
        layers: by worker id, of all steps.
    """

    took_ns: Counter[str] = field(default_factory=Counter)
    layers: Counter[str] = field(default_factory=Counter)

    def add(self, worker_id: str, took_ns: int) -> None:
        """Count the time of a worker for one layer; 0: it computed nothing, or does not tell."""
        if took_ns:
            self.took_ns[worker_id] += took_ns
            self.layers[worker_id] += 1

    def and_also(self, more: "Work") -> None:
        """Add those of more steps."""
        self.took_ns.update(more.took_ns)
        self.layers.update(more.layers)


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
