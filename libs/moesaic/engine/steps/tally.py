"""Counts of what batching did, for metrics."""

from dataclasses import dataclass


@dataclass
class BatcherTally:
    """Counts of events since they were last taken."""

    preemptions: int = 0
    prefix_queries_tokens: int = 0  # tokens of requests when they first ran
    prefix_hits_tokens: int = 0  # those of them whose KV was there
    displaced: int = 0  # requests that had to leave the queue

    def take(self) -> "BatcherTally":
        """Return the counts so far, and begin again at zero."""
        taken = BatcherTally(**vars(self))
        vars(self).update(vars(BatcherTally()))
        return taken
