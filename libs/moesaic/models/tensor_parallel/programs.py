"""Parts that all ranks compute in a captured step, in their order: a rule that each of them follows by itself.

NCCL has no way to tell that two ranks want different things: both wait forever. Captured operations of
one rank also need captured ones of the others, in graphs that were captured together.
"""

from itertools import chain

import msgspec

from moesaic.errors import MoesaicError
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.configuration.captured import decode_sizes
from moesaic.models.tensor_parallel.group import RankMessage

Part = tuple[RankMessage, int]
"""What the ranks compute together: its kind, and the layer."""


class RanksDiffer(MoesaicError):
    """A rank would compute something else than the first one does: the instance cannot go on."""


class CapturedForm(msgspec.Struct, frozen=True, array_like=True):
    """The form of the captured steps over one cache; see ``OtherRanks.prepare``."""

    max_rows: int
    max_length: int
    whole: bool


def parts_of(config: ModelConfig, form: CapturedForm) -> list[list[Part]]:
    """Return the parts of a step, those of each graph together, in their order."""
    graphs: list[list[Part]] = [[]]
    for layer in range(config.num_layers):
        graphs[-1].append((RankMessage.ATTEND, layer))
        if layer not in config.moe_layers:
            graphs[-1].append((RankMessage.MLP, layer))
            continue
        if config.moe.shared_expert_size:
            graphs.append([(RankMessage.MLP, layer)])
        graphs.append([])
    graphs[-1].append((RankMessage.HEAD, 0))
    return [list(chain.from_iterable(graphs))] if form.whole else graphs


def described(config: ModelConfig, form: CapturedForm, block_size: int) -> str:
    """Describe all that ranks must have alike before they capture steps."""
    sizes = decode_sizes(form.max_rows)
    return repr((form, sizes, block_size, config.hidden_size, parts_of(config, form)))
