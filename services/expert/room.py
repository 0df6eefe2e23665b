"""The number of an expert worker's slots: as many as are asked for, or as fit into its memory.

A worker decides before it loads anything, and cannot know who else will use its device. On a GPU it
therefore leaves the part that an attention worker needs at least, or a tenth of the memory if that is
more. It counts this part from the whole memory, not from what is free, because an attention worker that
is there already has taken it. So a worker that restarts gets as many slots as before. KV may have taken
some of the memory that was left for experts that move.

Two expert workers on one device cannot see each other before they load. Each should get
``--max-expert-bytes`` or ``--slots-per-layer``; else a worker finds out while it loads, see
``SlotRoom.lowered``.
"""

from dataclasses import dataclass, replace

import structlog

from moesaic.errors import InUse
from moesaic.models.configuration.captured import captured_bytes
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.sizes import (
    MOVING,
    ON_GPU_BYTES,
    USUAL_SEQUENCES,
    batch_bytes,
    least_attention_bytes,
    numbers_for,
)
from moesaic.services.expert.settings import ExpertSettings
from moesaic.transport.device_memory import MemoryOf

log = structlog.get_logger()


@dataclass(frozen=True)
class SlotRoom:
    """The slots of a worker, and the memory of their experts.

    Attributes:
        slots_per_layer: slots that placements may use.
        max_expert_bytes: memory for experts of all epochs together; 0: no limit.
        layer_bytes: bytes of one slot in all layers.
        chosen: the operator said how many slots there are.
    """

    slots_per_layer: int
    max_expert_bytes: int
    layer_bytes: int
    chosen: bool

    def lowered(self, fitted_bytes: int) -> "SlotRoom":
        """Return the room that there really is, once the device has had no more than ``fitted_bytes``.

        A number of slots that an operator chose stays.
        """
        if self.chosen or not fitted_bytes:
            return self
        slots = _slots_in(fitted_bytes, self.layer_bytes)
        if slots >= self.slots_per_layer:
            return self
        return replace(self, slots_per_layer=slots, max_expert_bytes=fitted_bytes)


def slot_room_of(
    settings: ExpertSettings, config: ModelConfig, expert_bytes: int, memory: MemoryOf
) -> SlotRoom:
    """Decide the slots of a worker.

    Args:
        settings: settings of the worker.
        config: configuration of the model.
        expert_bytes: bytes of one expert.
        memory: memory of the device, before any expert is loaded.

    Raises:
        InUse: not one slot fits.
    """
    layer_bytes, most = expert_bytes * len(config.moe_layers), config.moe.num_experts
    limit = settings.max_expert_bytes
    if settings.slots_per_layer:
        return SlotRoom(settings.slots_per_layer, limit, layer_bytes, chosen=True)
    if limit:
        most = min(most, limit // layer_bytes)
    if memory.free:
        whole, room = _rooms(settings, config, memory)
        # A worker with all experts has none that move.
        if most * layer_bytes > room:
            fitting = _slots_in(whole, layer_bytes)
            if fitting * layer_bytes > room:
                fitting = _slots_in(room, layer_bytes)
            most = min(most, fitting)
        if settings.device != "cpu":
            limit = min(limit or room, room)
    if most < 1:
        raise InUse(
            "--slots-per-layer",
            f"one slot of every layer takes {layer_bytes} bytes; {settings.device} has {memory.free} free "
            f"bytes, --max-expert-bytes is {settings.max_expert_bytes}: free memory, or give this flag",
        )
    log.info("slots.sized", slots_per_layer=most, bytes=most * layer_bytes, free=memory.free)
    return SlotRoom(most, limit, layer_bytes, chosen=False)


def _rooms(settings: ExpertSettings, config: ModelConfig, memory: MemoryOf) -> tuple[int, int]:
    """Count the bytes for experts on this device if no other process is there yet, and those that there are now."""
    numbers = numbers_for(settings, config)
    batch = batch_bytes(config, numbers)
    others = memory.total // 10
    if settings.device != "cpu":
        attention = least_attention_bytes(config, numbers) + ON_GPU_BYTES
        attention += captured_bytes(config, numbers, USUAL_SEQUENCES, config.max_positions)
        # Its own context is in the whole, too.
        others = max(others, batch + attention) + ON_GPU_BYTES
    whole = max(0, memory.total - others)
    return whole, max(0, min(memory.free - batch, whole))


def _slots_in(room: int, layer_bytes: int) -> int:
    """Count the slots for which there is room, with that for experts that move."""
    return room * MOVING // (MOVING + 1) // layer_bytes
