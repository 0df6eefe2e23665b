"""Shadows of the workers: the work that each was given and has not done, in FLOPs.

Every routed request records what remains of it. Progress, completion, cancellation and the loss of a
worker all take from that record, so after any sequence of events a worker's load is the sum over its
requests. The work that other routers gave a worker is known from the worker's own reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moesaic.prefix.crowd import Room

WorkerKey = Any  # the caller's name of a worker; it can be hashed
JobId = Any


@dataclass(frozen=True, eq=False)
class Job:
    """One request, as the router sees it."""

    job_id: JobId
    num_tokens: int  # of the prompt
    hashes: Sequence[bytes] = ()  # names of the prompt's full blocks
    answer_tokens: int = 1  # that the answer is expected to have; the first comes with the prompt
    sibling_tokens: int = 0  # of candidates longer than a token, which run behind the prompt
    priority: int = 0  # less goes first
    excluded: frozenset[WorkerKey] = frozenset()  # workers that must not get it
    tenant: str = ""
    part_of: str = ""  # the request that has this and other jobs; empty: this job alone


@dataclass(eq=False)
class Routed:
    """A job at its worker."""

    job: Job
    worker: "Shadow"
    promised: Sequence[bytes]  # its blocks, once it is computed
    computed_tokens: int  # of the prompt, or cached
    answered_tokens: int = 0
    began: bool = False
    prefilling: bool = False
    remaining: int = 0  # FLOPs
    ready: int = 0  # those of them that the worker's next steps could take at once
    remaining_tokens: int = 0


@dataclass(frozen=True)
class OthersWork:
    """Unfinished work that other routers gave a worker, by the worker's report."""

    num_requests: int = 0
    num_tokens: int = 0
    flops: int = 0  # that its next steps could take


NOTHING = OthersWork()


@dataclass(frozen=True)
class QueueLimits:
    """Bounds of a worker's queue, beyond which it refuses requests; 0: they are not known."""

    max_waiting: int = 0
    max_waiting_tokens: int = 0
    max_running: int = 0  # requests that need not wait


UNKNOWN = QueueLimits()
PACE = 1 << 10  # of a worker that transfers do not slow


@dataclass(eq=False)
class Shadow:
    """One worker.

    ``remaining`` is the work that it was given here and has to do (the papers' C_g). ``ready`` leaves
    out the tokens of answers behind the next one: they come one a step, and fill no step.
    """

    key: WorkerKey
    idx: int  # among the shadows
    saturation: int  # FLOPs of ready work that fill it
    accepting: bool = False
    caches: bool = True
    pace: int = PACE  # how much longer it takes than one that transfers do not slow
    others: OthersWork = NOTHING
    limits: QueueLimits = UNKNOWN
    remaining: int = 0
    ready: int = 0
    remaining_tokens: int = 0
    num_began: int = 0
    num_prefilling: int = 0  # jobs whose prompts are not computed yet
    busy_since_s: float = 0.0  # when its load last rose from nothing
    jobs: dict[JobId, Routed] = field(default_factory=dict)

    @property
    def bit(self) -> int:
        """The worker, in bitsets of workers."""
        return 1 << self.idx

    @property
    def saturated(self) -> bool:
        """True if the worker has enough to do."""
        return self.ready + self.others.flops >= self.saturation

    @property
    def load(self) -> int:
        """Time to do all work, from all routers: in FLOPs, ``PACE`` times over, of an unslowed worker."""
        return (self.remaining + self.others.flops) * self.pace

    @property
    def room(self) -> Room:
        """Room for requests that wait for it, beside what other routers gave it."""
        limits, others = self.limits, self.others
        waiting = max(0, others.num_requests - limits.max_running)
        return Room(
            max(0, limits.max_waiting - waiting),
            max(0, limits.max_waiting_tokens - (others.num_tokens if waiting else 0)),
        )

    @property
    def num_requests(self) -> int:
        """Requests that the worker has, from all routers."""
        return len(self.jobs) + self.others.num_requests

    @property
    def num_tokens(self) -> int:
        """Tokens that the worker has yet to compute, for all routers."""
        return self.remaining_tokens + self.others.num_tokens
