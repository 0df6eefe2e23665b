"""Shadows of the workers: what was given to each and is not done, in FLOPs.

Every request that was routed remembers what remains of it. Progress, completion, cancellation and
the loss of a worker all release from that record, so a worker's load is the sum of what remains of
its requests after any sequence of events. What other routers gave a worker is what the worker last
said of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WorkerKey = Any  # whatever the caller names them by, if it can be hashed
JobId = Any


@dataclass(frozen=True, eq=False)
class Job:
    """One request, as far as routing is concerned."""

    job_id: JobId
    num_tokens: int  # of the prompt
    hashes: Sequence[bytes] = ()  # names of the prompt's full blocks
    answer_tokens: int = 1  # that the answer is expected to have; the first comes with the prompt
    sibling_tokens: int = 0  # of longer candidates, which run behind the prompt
    priority: int = 0  # less goes first
    excluded: frozenset[WorkerKey] = frozenset()  # where it must not go
    tenant: str = ""
    part_of: str = ""  # the request that it is one of several jobs of; empty: of none


@dataclass(eq=False)
class Routed:
    """A job at its worker."""

    job: Job
    worker: "Shadow"
    promised: Sequence[bytes]  # the blocks that it will have there
    computed_tokens: int  # of the prompt, or cached
    answered_tokens: int = 0
    began: bool = False
    prefilling: bool = False
    remaining: int = 0  # FLOPs
    ready: int = 0  # those of them that the worker's next steps could take at once
    remaining_tokens: int = 0


@dataclass(frozen=True)
class OthersWork:
    """What other routers gave a worker and is not done, as the worker says."""

    num_requests: int = 0
    num_tokens: int = 0
    flops: int = 0  # that its next steps could take


NOTHING = OthersWork()
PACE = 1 << 10  # of a worker that transfers do not slow


@dataclass(eq=False)
class Shadow:
    """One worker.

    ``remaining`` is what it was given here and has to do (the papers' C_g). ``ready`` leaves out
    tokens of answers behind the next one: they come one a step, so no step can be filled with them.
    """

    key: WorkerKey
    slot: int
    saturation: int  # FLOPs of ready work that fill it
    accepting: bool = False
    caches: bool = True
    pace: int = PACE  # how much longer it takes than one that transfers do not slow
    others: OthersWork = NOTHING
    remaining: int = 0
    ready: int = 0
    remaining_tokens: int = 0
    num_began: int = 0
    num_prefilling: int = 0  # jobs whose prompts are not computed yet
    busy_since_s: float = 0.0  # when its load last rose from nothing
    jobs: dict[JobId, Routed] = field(default_factory=dict)

    @property
    def bit(self) -> int:
        """It, in bitsets of workers."""
        return 1 << self.slot

    @property
    def saturated(self) -> bool:
        """Whether it has enough to do."""
        return self.ready + self.others.flops >= self.saturation

    @property
    def load(self) -> int:
        """How long it will have to do, whoever gave it the work; in FLOPs, ``PACE`` times over, of a
        worker that transfers do not slow."""
        return (self.remaining + self.others.flops) * self.pace

    @property
    def num_requests(self) -> int:
        """Requests that it has, whoever gave it them."""
        return len(self.jobs) + self.others.num_requests

    @property
    def num_tokens(self) -> int:
        """Tokens that it has yet to compute, whoever wants them."""
        return self.remaining_tokens + self.others.num_tokens
