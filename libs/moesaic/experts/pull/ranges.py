"""Shares of a layer's experts, and the ranges of their bytes that one message carries. Pure."""

from dataclasses import dataclass
from typing import Self

from moesaic.errors import InvalidInput
from moesaic.experts import pieces

PULL_BYTES = pieces.PIECE_BYTES  # of one message
PULLS_AHEAD = 2  # messages of one holder under way
MOST_EXPERTS = 256  # in one message, however small they are

Runs = list[tuple[int, int]]  # of a layer's share, as bytes: (start, length)


@dataclass(frozen=True)
class Share:
    """The experts of one of ``count`` equal workers: every ``count``-th from ``index``."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``index/count``.

        Raises:
            InvalidInput: it is not that, or the index is not below the count.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise InvalidInput("share", f"must be like 0/2, the first of two, got {text!r}")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def experts(self, num_experts: int) -> range:
        """The share's experts, ascending; the position of one is its row in the share."""
        return range(self.index, num_experts, self.count)


@dataclass(frozen=True)
class HeldShare:
    """One worker's share of several layers, as packed experts."""

    layers: tuple[int, ...]
    num_experts: int  # of each layer, in all shares
    expert_bytes: int  # one packed expert
    share: Share

    @property
    def experts(self) -> range:
        """The experts of the share, ascending."""
        return self.share.experts(self.num_experts)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the share of one layer."""
        return len(self.experts) * self.expert_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return len(self.layers) * self.layer_bytes


def messages_of(num_bytes: int, row_bytes: int) -> Runs:
    """Cut a share of ``num_bytes`` into runs of whole pieces, one message each."""
    runs: Runs = []
    for start in range(0, num_bytes, row_bytes):
        _extend(runs, start, min(row_bytes, num_bytes - start), row_bytes)
    return runs


def _extend(runs: Runs, start: int, length: int, row_bytes: int) -> None:
    """Add a run within one expert, to the last run if it follows and one message holds both."""
    most = min(pieces.PIECE_BYTES, MOST_EXPERTS * row_bytes)
    if runs and sum(runs[-1]) == start and runs[-1][1] + length <= most:
        runs[-1] = runs[-1][0], runs[-1][1] + length
    else:
        runs.extend(pieces.cut(start, length))


def rows_of(runs: Runs, row_bytes: int) -> list[int]:
    """The rows that ``runs`` touch, ascending."""
    return sorted(
        {
            row
            for start, length in runs
            for row in range(start // row_bytes, -(-(start + length) // row_bytes))
        }
    )
