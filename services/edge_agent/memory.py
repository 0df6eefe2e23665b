"""Division of an agent's memory: what it holds anyway, then KV and buffers, then experts. Pure.

The limit covers the memory that the process takes for the model. The interpreter and its libraries,
some hundred megabytes, are not part of it. Experts get the rest:

==========  =====================================================================================
part        size
==========  =====================================================================================
held        all of the model but its routed experts, measured once it is loaded
KV          as asked for, else a 16th of the limit
buffers     activations and logits of the largest step, an 18th of the limit; steps are made smaller to fit
reserve     links to other sites, messages in flight, the heap, other growth: 4.5 MiB and a 16th
cache       experts from files: a 32nd of what is left, and those of one batch
staging     experts that are loaded while those they replace still serve: a sixteenth
slots       all others
==========  =====================================================================================
"""

from dataclasses import dataclass

from moesaic.errors import InvalidInput

LEAST_KV_BLOCKS = 8
LEAST_ROWS = 16
KV_SHARE = 16  # a 16th
BUFFER_SHARE = 18
STAGING_SHARE = 16
CACHE_SHARE = 32
LEAST_STAGED = 2
RESERVE_BYTES = 9 << 19
RESERVE_SHARE = 16


@dataclass(frozen=True)
class MemoryNeeds:
    """Sizes that the division depends on, in bytes.

    Attributes:
        held: memory of the model without its experts, already taken.
        expert: size of one expert.
        block: size of one KV block.
        row: activations of one row of a step.
        num_experts: experts of all layers together.
        at_once: experts from files that one batch has in memory, beside those kept.
    """

    held: int
    expert: int
    block: int
    row: int
    num_experts: int
    at_once: int


@dataclass(frozen=True)
class RequestedSizes:
    """Sizes that the settings request; 0 leaves a size to the plan."""

    kv_blocks: int
    most_rows: int  # of a step
    most_blocks: int
    rows: int = 0  # of a step


@dataclass(frozen=True)
class MemoryPlan:
    """Uses of an agent's memory.

    Attributes:
        limit_bytes: size of the whole; 0: no limit.
        kv_blocks: KV blocks.
        max_rows: most rows of a step.
        num_slots: experts that a placement may put here.
        num_staged: further experts in memory while one placement replaces another.
        num_cached: experts from files that may stay in memory.
    """

    limit_bytes: int
    kv_blocks: int
    max_rows: int
    num_slots: int
    num_staged: int
    num_cached: int


def plan_memory(limit_bytes: int, needs: MemoryNeeds, requested: RequestedSizes) -> MemoryPlan:
    """Divide ``limit_bytes``; without a limit every expert has a slot.

    Raises:
        InvalidInput: it leaves no room for a single expert; the error names the lowest limit that does.
    """
    if not limit_bytes:
        kv_blocks = requested.kv_blocks or requested.most_blocks
        num = needs.num_experts
        return MemoryPlan(0, kv_blocks, requested.most_rows, num, num, num)
    kv_blocks = requested.kv_blocks or min(
        max(limit_bytes // KV_SHARE // needs.block, LEAST_KV_BLOCKS), requested.most_blocks
    )
    rows = requested.rows or min(
        requested.most_rows, max(LEAST_ROWS, limit_bytes // BUFFER_SHARE // needs.row)
    )
    fixed = needs.held + kv_blocks * needs.block + rows * needs.row
    fixed += RESERVE_BYTES + limit_bytes // RESERVE_SHARE
    num = (limit_bytes - fixed) // needs.expert - needs.at_once
    num_cached = max(1, num // CACHE_SHARE)
    num_staged = max(LEAST_STAGED, (num - num_cached) // STAGING_SHARE)
    num_slots = num - num_cached - num_staged
    if num_slots < 1:
        least = fixed + (needs.at_once + max(1, num_cached) + LEAST_STAGED + 1) * needs.expert
        raise InvalidInput(
            "memory_bytes",
            f"leaves no room for experts: all else takes {fixed} of {limit_bytes} bytes; give at least {least}, "
            "or fewer --kv-blocks",
        )
    num_slots = min(num_slots, needs.num_experts)
    return MemoryPlan(limit_bytes, kv_blocks, rows, num_slots, num_staged, num_cached)
