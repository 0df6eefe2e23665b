"""DeepSeek-V2-Lite on edge servers with 40 GB GPUs: its shape, and what its parts cost, with sources.

The model has 26 layers of 64 routed experts, of which a row takes 6 (arXiv:2405.04434, appendix B). The 8 experts of
DanceMoE section IV-A include the 2 shared ones. The hidden size is 2048; an expert has 3 x 2048 x 1408 weights of
16 bits. DanceMoE gives it 30 % of a GPU's 40 GB. Without 3.5 GB for all other weights (2.6 GB), keys, values and
activations, that is room for 490 experts a GPU: 1.18 times the model on four of them.
"""

from moesaic.messages.performance import PART_TERMS, Part, PartCost, PerformanceModel
from moesaic_lab.simulation.edge.costs import EdgeCosts

NUM_LAYERS, NUM_EXPERTS, TOP_K = 26, 64, 6
EXPERT_BYTES = 3 * 2048 * 1408 * 2
ROW_BYTES = 2048 * 2
EXPERTS_PER_GPU = int((0.3 * 40e9 - 3.5e9) / EXPERT_BYTES)
ANSWER_TOKENS = 20  # DanceMoE section IV-A: at most
MEAN_PROMPT = 300  # tokens; with it ``TESTBED`` is nearest to the paper's table
# Tasks differ in routing as much as the three tasks of the edge bench do (0.38, in total variation distance), and are
# as uneven as those of the recorded trace: the busiest quarter of experts has 0.72 of the rows, there 0.70.
NUM_TASKS, SKEW, ALIKE = 12, 1.5, 0.7


def _costs(parts: dict[Part, tuple[float, ...]]) -> dict[str, PartCost]:
    return {
        part: PartCost(terms=PART_TERMS[part], unit_s=unit_s, samples=0)
        for part, unit_s in parts.items()
    }


TESTBED = PerformanceModel(
    device="DanceMoE's testbed: MoE-Infinity on A100 40 GB, containers on one host",
    source=(
        "fitted to the five mean latencies of DanceMoE table II (BigBench, DeepSeek-V2-Lite, 10 s gaps, 500 Mbit/s): "
        "two seconds, of a layer and of a message, on a grid; residuals of 21 % rms"
    ),
    parts=_costs(
        {
            "attention": (13e-3, 52e-6, 26e-9),
            "experts": (3e-4, 1e-4, 1e-6),
            "link.inter": (3e-4, 2e-3, 0.0),
        }
    ),
)
A100 = PerformanceModel(
    device="A100 40 GB, 2 ms round trips",
    source=(
        "published: 1,555 GB/s and 312 TFLOPS in bf16 (NVIDIA A100 data sheet), of which 60 % and 50 % are assumed to "
        "be reached; 23 M weights a layer besides routed experts, 100 us of launches a layer; links: assumed"
    ),
    parts=_costs(
        {
            "attention": (26 * 150e-6, 26 * 0.3e-6, 26 * 6.6e-11),
            "head": (0.45e-3, 0.0),
            "experts": (2e-5, 1.85e-5, 0.11e-6),
            "link.inter": (1e-3, 1e-4, 0.0),
        }
    ),
)
PROFILES = {"testbed": TESTBED, "a100": A100}


def costs_of(profile: PerformanceModel) -> EdgeCosts:
    """Share the costs of a profile out over the model's layers."""
    return EdgeCosts.of(profile, NUM_LAYERS, ROW_BYTES)
