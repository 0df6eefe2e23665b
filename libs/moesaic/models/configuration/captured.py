# The decode steps that a GPU captures, by arithmetic. Imports no torch.
#   Sizes      1, 2, 4, 8, then multiples of 8 up to 256, then sixteen for each doubling. So a step of 16 to 256 rows
#              has at most 7 rows too many, and a larger one a sixteenth.
#   Scratch    all sizes share the memory of the largest, one buffer of logits and one of block tables.
"""Numbers of rows of captured decode steps, and the bytes that they keep."""

from typing import TYPE_CHECKING

from moesaic.kernels.attention_pieces import most_pieces
from moesaic.models.configuration.architecture import LatentAttention, ModelConfig
from moesaic.models.configuration.sizes import Numbers, row_numbers
from moesaic.prefix.blocks import BLOCK_SIZE

if TYPE_CHECKING:  # it takes pydantic, which commands do without
    from moesaic.settings import ServiceSettings

CAPTURING = "local", "routed"  # ways of --dispatch
_NODES_PER_LAYER = 16  # launches of one layer
_NODE_BYTES = 8 << 10  # what the driver keeps of a launch; estimated, not measured


def decode_sizes(most: int) -> list[int]:
    """Return the numbers of rows of captured steps, up to the first that holds ``most`` rows."""
    sizes = [1]
    while (last := sizes[-1]) < most:
        sixteenth = (1 << last.bit_length() - 1) // 16
        sizes.append(2 * last if last < 16 else last + max(8, sixteenth))
    return sizes


def captured_bytes(config: ModelConfig, numbers: Numbers, max_rows: int, max_length: int) -> int:
    """Estimate the bytes that the captured decode steps of one worker keep, for good.

    Args:
        config: configuration of the model, or of this rank's part.
        numbers: number formats of the process.
        max_rows: rows of the largest step, ``--max-num-seqs``.
        max_length: tokens of the longest context.
    """
    sizes, how, moe = decode_sizes(max_rows), config.attention, config.moe
    value_dim = how.kv_lora_rank if isinstance(how, LatentAttention) else how.head_dim
    activations = (row_numbers(config) + 2 * moe.top_k * moe.expert_size) * numbers.item_bytes
    # The head's output, the same in float32, and the buffer that all sizes share.
    logits = config.vocab_size * (numbers.item_bytes + 4 + 4)
    pieces = most_pieces(max_length, value_dim)
    partial_sums = how.num_heads * pieces * (value_dim + 1) * 4 if pieces > 1 else 0
    tables = 4 * -(-max_length // BLOCK_SIZE)
    nodes = len(sizes) * config.num_layers * _NODES_PER_LAYER * _NODE_BYTES
    return sizes[-1] * (activations + logits + partial_sums + tables) + nodes


def captures(settings: "ServiceSettings") -> bool:
    """Return true if a worker with ``settings`` captures its decode steps."""
    return (
        getattr(settings, "device", "cpu") != "cpu"
        and getattr(settings, "dispatch", None) in CAPTURING
        and not getattr(settings, "offload", False)
        and getattr(settings, "decode_graphs", False)
    )


def captured_bytes_of(settings: "ServiceSettings", config: ModelConfig, numbers: Numbers) -> int:
    """Estimate as ``captured_bytes``, for contexts of any length; 0 of a worker that captures nothing."""
    if not captures(settings):
        return 0
    max_rows = getattr(settings, "max_num_seqs", 64)
    return captured_bytes(config, numbers, max_rows, config.max_positions)
