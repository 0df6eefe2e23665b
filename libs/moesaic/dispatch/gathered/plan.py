"""What streaming experts takes, before any of it is taken: bytes of memory, and who holds what. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from moesaic.errors import InvalidInput

PULL_BYTES = 1 << 20  # of one message
PULLS_AHEAD = 2  # messages of one holder under way
POOL_PULLS = 6  # of all expert workers together
# Memory that UCX receives into, of each process that shares memory: 512 pieces of 32 KB, of which it
# writes a page each when it starts, and 256 go round. It opens two such, for either kind of shared
# memory, and uses one.
_PAGE, _PIECE = 4 << 10, 32 << 10
UNUSED_SEGMENTS_BYTES = 512 * _PAGE
SEGMENTS_BYTES = UNUSED_SEGMENTS_BYTES + 256 * (_PIECE - _PAGE)


@dataclass(frozen=True)
class Share:
    """The experts that one of ``count`` equal workers holds: every ``count``-th from ``index``."""

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
        """Its experts, ascending; the position of one is its row in the share."""
        return range(self.index, num_experts, self.count)


@dataclass(frozen=True)
class StreamPlan:
    """How one worker has the experts of ``layers``: the first layer's always in memory, those of the
    others streamed through a ring of ``window + 1`` layers."""

    layers: tuple[int, ...]  # decoder layers with experts
    num_experts: int
    expert_bytes: int  # one expert as it is computed with
    share: Share  # of each streamed layer, held here and given to others
    offload: bool  # that share lies in a file, not in memory
    window: int  # layers that are fetched ahead of the one that is computed
    pool: bool = False  # expert workers hold everything too, and are asked before the file

    @property
    def streamed_layers(self) -> tuple[int, ...]:
        """All but the first."""
        return self.layers[1:]

    @property
    def in_memory(self) -> tuple[int, ...]:
        """Experts of every streamed layer that stay in memory."""
        return () if self.offload else tuple(self.share.experts(self.num_experts))

    @property
    def streamed_shares(self) -> tuple[Share, ...]:
        """Whose experts come through the ring."""
        shares = (Share(index, self.share.count) for index in range(self.share.count))
        return tuple(share for share in shares if self.offload or share != self.share)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Experts of every streamed layer that come through the ring, share by share; the position
        of one is its row there."""
        shares = self.streamed_shares
        return tuple(expert for share in shares for expert in share.experts(self.num_experts))

    @property
    def num_slots(self) -> int:
        """Layers that the ring has room for."""
        return min(self.window + 1, len(self.streamed_layers))

    @property
    def layer_bytes(self) -> int:
        """All experts of one layer."""
        return self.num_experts * self.expert_bytes

    @property
    def shard_bytes(self) -> int:
        """What stays in memory of the streamed layers."""
        return len(self.streamed_layers) * len(self.in_memory) * self.expert_bytes

    @property
    def file_bytes(self) -> int:
        """The file of an offloaded share."""
        held = len(self.share.experts(self.num_experts)) if self.offload else 0
        return len(self.streamed_layers) * held * self.expert_bytes

    @property
    def ring_bytes(self) -> int:
        """The ring."""
        return self.num_slots * len(self.streamed) * self.expert_bytes

    @property
    def message_bytes(self) -> int:
        """What pulls take on their way: messages that come, messages that go and the buffer that a
        file is read into for them, and the memory that peers on the same host send through: each
        writes into that of the one it sends to."""
        peers = self.share.count - 1
        if self.pool:  # experts come and none go, however many give them
            return POOL_PULLS * PULL_BYTES + SEGMENTS_BYTES + UNUSED_SEGMENTS_BYTES
        if not peers:
            return 0
        messages = 2 * peers * PULLS_AHEAD + self.offload
        return messages * PULL_BYTES + (1 + peers) * SEGMENTS_BYTES + UNUSED_SEGMENTS_BYTES

    @property
    def total_bytes(self) -> int:
        """Memory for routed experts."""
        return self.layer_bytes + self.shard_bytes + self.ring_bytes + self.message_bytes

    @property
    def resident_bytes(self) -> int:
        """What holding all experts would take instead."""
        return len(self.layers) * self.layer_bytes


def plan_stream(
    layers: Sequence[int],
    num_experts: int,
    expert_bytes: int,
    *,
    share: Share,
    offload: bool,
    window: int,
    budget_bytes: int = 0,
    pool: bool = False,
) -> StreamPlan:
    """Lay out a worker's routed experts.

    Args:
        layers: decoder layers that have experts, ascending; one at least.
        num_experts: of each.
        expert_bytes: of each.
        share: of this worker.
        offload: keep that share in a file.
        window: layers fetched ahead, at least 1.
        budget_bytes: what routed experts may take; 0: whatever it comes to.
        pool: expert workers are asked for experts before the file is.

    Raises:
        InvalidInput: the plan needs more than the budget (and says what would fit), or the share
            has no experts.
    """
    if share.count > num_experts:
        raise InvalidInput("share", f"{share} leaves workers without any of {num_experts} experts")
    plan = StreamPlan(tuple(layers), num_experts, expert_bytes, share, offload, window, pool)
    if not budget_bytes or plan.total_bytes <= budget_bytes:
        return plan
    raise InvalidInput(
        "expert_memory_bytes",
        f"{budget_bytes} bytes were given, {plan.total_bytes} are needed: "
        f"{plan.layer_bytes} for the first layer, {plan.shard_bytes} for the own share, "
        f"{plan.ring_bytes} for {plan.num_slots} layers on their way, {plan.message_bytes} for "
        f"messages; {_what_fits(plan, budget_bytes)}",
    )


def _what_fits(plan: StreamPlan, budget_bytes: int) -> str:
    for offload in dict.fromkeys((plan.offload, True)):
        for window in range(plan.window, 0, -1):
            other = replace(plan, offload=offload, window=window)
            if other.total_bytes <= budget_bytes:
                how = f"--gather-window {window}" + (" and offloading" if offload else "")
                return f"{how} would need {other.total_bytes}"
    return f"nothing fits into less than {other.total_bytes}"


Runs = list[tuple[int, int]]  # of a layer's share, as bytes: (start, length)


def cut(num_bytes: int, most: int) -> Runs:
    """Bytes ``0 .. num_bytes - 1`` in runs of at most ``most``. Holders of the same share take them
    in turns: ``runs[holder::num_holders]``."""
    return [(start, min(most, num_bytes - start)) for start in range(0, num_bytes, most)]


def rows_of(runs: Runs, row_bytes: int) -> list[int]:
    """The rows that ``runs`` touch, ascending."""
    return sorted(
        {
            row
            for start, length in runs
            for row in range(start // row_bytes, -(-(start + length) // row_bytes))
        }
    )
