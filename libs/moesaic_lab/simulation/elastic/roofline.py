"""A performance model from published rates, for devices that nobody has measured yet.

Seconds of a part are sums: reading weights, computing rows, and reading KV do not overlap here. A kernel that overlaps
them well is faster, by at most a factor of two; which of them dominates, and so the best shape, changes little.
"""

from moesaic.messages.performance import PART_TERMS, Part, PartCost, PerformanceModel
from moesaic_lab.simulation.elastic.hardware import DeviceLink, DeviceProfile
from moesaic_lab.simulation.elastic.model_shapes import ITEM_BYTES, ModelShape

LAYER_KERNELS = 14  # of attention, an assumption: projections, norms, rotation, KV, the gate; attention itself as five


def roofline(device: DeviceProfile, model: ModelShape) -> PerformanceModel:
    """Predict the parts of a step from rates and sizes.

    Args:
        device: of both sides.
        model: of the fleet.

    Returns:
        ``attention`` and ``head`` of one worker, ``experts`` of one layer, and links. Samples are 0.
    """
    weights_s = model.attention_parameters * ITEM_BYTES * device.read_s
    kernels_s = LAYER_KERNELS * model.num_layers * device.kernel_s
    row_s = 2 * model.attention_parameters * device.flop_s
    # Each generation reads its keys; rows of one prompt share what they read.
    prompt_key_s = model.key_flops * device.flop_s
    key_s = max(model.kv_token_bytes * device.read_s, prompt_key_s)
    expert_row_s = model.expert_bytes / ITEM_BYTES * 2 * device.flop_s
    head_s = model.head_parameters * ITEM_BYTES * device.read_s + device.kernel_s
    unit_s: dict[Part, tuple[float, ...]] = {
        "attention": (weights_s + kernels_s, row_s, key_s, prompt_key_s),
        "experts": (device.experts_s, model.expert_bytes * device.read_s, expert_row_s),
        "link.intra": _link(device.intra),
        "link.inter": _link(device.inter),
        "head": (head_s, 2 * model.head_parameters * device.flop_s),
    }
    return PerformanceModel(
        device=device.title,
        source="; ".join(dict.fromkeys(device.sources.values())),
        parts={part: PartCost(terms=PART_TERMS[part], unit_s=of) for part, of in unit_s.items()},
    )


def _link(link: DeviceLink) -> tuple[float, float, float]:
    return link.hop_s, link.message_s, 1 / link.bytes_per_s
