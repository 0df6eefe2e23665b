"""Plans the gathering of experts: bytes of memory, and the holder of each share. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesaic.errors import InvalidInput, UnusableSettings
from moesaic.experts.pull.ranges import PULL_BYTES, PULLS_AHEAD, HeldShare, Share

# Memory that UCX receives into, of each process that shares memory: 512 pieces of 32 KB, of which it
# writes a page each when it starts, and 256 go round. It opens two such, for either kind of shared
# memory, and uses one.
_PAGE, _PIECE = 4 << 10, 32 << 10
UNUSED_SEGMENTS_BYTES = 512 * _PAGE
SEGMENTS_BYTES = UNUSED_SEGMENTS_BYTES + 256 * (_PIECE - _PAGE)


@dataclass(frozen=True)
class GatherPlan:
    """The places of the experts that one worker computes with.

    The first layer's experts are always in memory. Those of the others are gathered through a ring
    of ``window + 1`` layers.

    A device with memory of its own has the first layer and a buffer for each layer of the ring. The
    share and the ring are in the host's memory, and every expert of a layer is copied from there.
    """

    layers: tuple[int, ...]  # decoder layers with experts
    num_experts: int
    expert_bytes: int  # one expert as it is computed with
    share: Share  # of each gathered layer, held here and given to others
    offload: bool  # that share lies in a file, not in memory
    window: int  # layers that are gathered ahead of the one that is computed
    on_device: bool = False  # that computes has memory of its own

    @property
    def gathered_layers(self) -> tuple[int, ...]:
        """All but the first."""
        return self.layers[1:]

    @property
    def held(self) -> HeldShare:
        """The worker's own share of the gathered layers, in memory or in a file."""
        return HeldShare(self.gathered_layers, self.num_experts, self.expert_bytes, self.share)

    @property
    def in_memory(self) -> tuple[int, ...]:
        """Experts of every gathered layer that stay in the host's memory."""
        return () if self.offload else tuple(self.share.experts(self.num_experts))

    @property
    def buffered(self) -> tuple[int, ...]:
        """Experts of every gathered layer that a buffer of the device has, in the order of its rows."""
        return self.gathered + self.in_memory

    @property
    def gathered_shares(self) -> tuple[Share, ...]:
        """The shares whose experts come through the ring."""
        shares = (Share(index, self.share.count) for index in range(self.share.count))
        return tuple(share for share in shares if self.offload or share != self.share)

    @property
    def gathered(self) -> tuple[int, ...]:
        """Experts of every gathered layer that come through the ring, share by share.

        The position of one is its row in a buffer.
        """
        shares = self.gathered_shares
        return tuple(expert for share in shares for expert in share.experts(self.num_experts))

    @property
    def num_buffers(self) -> int:
        """Layers that the ring has room for."""
        return min(self.window + 1, len(self.gathered_layers))

    @property
    def layer_bytes(self) -> int:
        """Bytes of all experts of one layer."""
        return self.num_experts * self.expert_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of the gathered layers that stay in memory."""
        return 0 if self.offload else self.held.nbytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file of an offloaded share."""
        return self.held.nbytes if self.offload else 0

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring."""
        return self.num_buffers * len(self.gathered) * self.expert_bytes

    @property
    def message_bytes(self) -> int:
        """Bytes of pulls on their way.

        They are incoming messages, outgoing messages with their file buffer, and shared memory. A
        peer on the same host writes into the receiver's shared memory.
        """
        peers = self.share.count - 1
        if not peers:
            return 0
        messages = 2 * peers * PULLS_AHEAD + self.offload
        return messages * PULL_BYTES + (1 + peers) * SEGMENTS_BYTES + UNUSED_SEGMENTS_BYTES

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers on a device; 0: the ring is computed with."""
        return self.num_buffers * self.layer_bytes if self.on_device else 0

    @property
    def host_bytes(self) -> int:
        """Memory of the host for routed experts, beside that of a device that computes."""
        staged = self.shard_bytes + self.ring_bytes + self.message_bytes
        return staged if self.on_device else 0

    @property
    def total_bytes(self) -> int:
        """Memory for routed experts, where they are computed."""
        if self.on_device:
            return self.layer_bytes + self.buffer_bytes
        return self.layer_bytes + self.shard_bytes + self.ring_bytes + self.message_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of all experts, if all were in memory instead."""
        return len(self.layers) * self.layer_bytes


def plan_gather(
    layers: Sequence[int],
    num_experts: int,
    expert_bytes: int,
    *,
    share: Share,
    offload: bool,
    window: int = 1,
    budget_bytes: int = 0,
    on_device: bool = False,
) -> GatherPlan:
    """Lay out a worker's routed experts.

    Args:
        layers: decoder layers that have experts, ascending; one at least.
        num_experts: experts of each layer.
        expert_bytes: bytes of one expert.
        share: share of this worker.
        offload: keep that share in a file.
        window: layers gathered ahead, at least 1.
        budget_bytes: memory that routed experts may take where they are computed; 0: no limit.
        on_device: they are computed by a device with memory of its own.

    Raises:
        UnusableSettings: the plan needs more than the budget; it says what would fit.
        InvalidInput: the share has no experts.
    """
    if share.count > num_experts:
        raise InvalidInput("share", f"{share} leaves workers without any of {num_experts} experts")
    plan = GatherPlan(tuple(layers), num_experts, expert_bytes, share, offload, window, on_device)
    if not budget_bytes or plan.total_bytes <= budget_bytes:
        return plan
    raise UnusableSettings(
        "expert_memory_bytes",
        f"{budget_bytes} bytes were given, but {plan.total_bytes} are needed: "
        f"{plan.layer_bytes} for the first layer, {_the_rest(plan)}; {_what_fits(plan, budget_bytes)}",
    )


def _the_rest(plan: GatherPlan) -> str:
    """The parts of a plan's memory but for the first layer."""
    if plan.on_device:
        return f"{plan.buffer_bytes} for {plan.num_buffers} layers in transfer"
    return (
        f"{plan.shard_bytes} for the worker's share, {plan.ring_bytes} for {plan.num_buffers} layers "
        f"in transfer, {plan.message_bytes} for messages"
    )


def _what_fits(plan: GatherPlan, budget_bytes: int) -> str:
    least = replace(plan, offload=True).total_bytes
    fits = least <= budget_bytes
    return f"--offload would need {least}" if fits else f"nothing fits into less than {least}"
