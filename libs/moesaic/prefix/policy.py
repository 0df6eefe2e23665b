"""The form of a routing policy: a job and its workers in, a pick out. All look at the same shadows."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from moesaic.prefix.fleet import Job, Shadow, ShadowFleet


class Pick(NamedTuple):
    """A worker, and how many of the job's first blocks it has."""

    worker: Shadow
    cached_blocks: int
    spilled: bool = False  # saturated workers have more of them


class Behind(NamedTuple):
    """Saturated workers, as a bitset, that are better worth waiting for."""

    workers: int


class Policy(ABC):
    """One way to route.

    Attributes:
        holds: requests wait while every worker is saturated.
        reorders: waiting requests go by ``length`` rather than by arrival.
    """

    holds = False
    reorders = False

    @abstractmethod
    def pick(self, job: Job, fleet: ShadowFleet, room: int, allowed: int) -> Pick | Behind:
        """Choose among the workers of the bitset ``room``, at least one, or have the job wait.

        ``allowed`` is the bitset of all workers that it may go to, saturated or not.

        A job that has waited as long as it may must not wait; ``room`` is then all it may go to.
        """

    def length(self, job: Job, fleet: ShadowFleet) -> int:
        """Give a waiting job its place in the order, if the policy reorders; less goes first."""
        raise NotImplementedError


def known_prefix(fleet: ShadowFleet, job: Job, worker: Shadow) -> Pick:
    """Pick a worker, with the blocks that it has."""
    return Pick(worker, fleet.index.match(job.hashes, worker.bit)[0])
