"""Which attention worker gets a request. Pure: numbers in, a choice out."""

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

WorkerKey = TypeVar("WorkerKey", bound=Hashable)


def route(
    outstanding_tokens: Mapping[WorkerKey, int], excluded: Collection[WorkerKey] = ()
) -> WorkerKey | None:
    """Pick the worker with the fewest outstanding tokens, the first of several; ``None`` if there is none left."""
    left = [key for key in outstanding_tokens if key not in excluded]
    return min(left, key=outstanding_tokens.__getitem__, default=None)
