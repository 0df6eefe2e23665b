"""Small fleets, drawn by hypothesis, and one whose queue has a closed form."""

import numpy as np
from hypothesis import strategies as st

from moesaic_lab.simulation.edge.costs import EdgeCosts
from moesaic_lab.simulation.edge.fleet import EdgeFleet
from moesaic_lab.simulation.edge.placing import EdgePlan, place
from moesaic_lab.simulation.edge.routing import Ints, TaskRouting
from moesaic_lab.simulation.edge.workload import EdgeWorkload, demand_of, mixes_of

COSTS = EdgeCosts(
    layer_s=2e-3,
    row_s=1e-4,
    key_s=1e-7,
    experts_s=1e-3,
    expert_s=5e-4,
    choice_s=1e-5,
    hop_s=1e-3,
    message_s=1e-4,
    row_bytes=4096,
)
ROUTING = TaskRouting.drawn(3, 3, 12, 2, mean_prompt=16, skew=1.5, alike=0.5, seed=1)
MIXES = st.sampled_from(["specialised", "mixed"])
FLEETS = st.builds(
    EdgeFleet,
    gpus=st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple),
    experts_per_gpu=st.just(36),
    mbit_per_s=st.sampled_from([1.0, 10.0, 1000.0]),
    running=st.integers(1, 3),
)


def planned(fleet: EdgeFleet, policy: str = "optimal", experts: int = 12) -> EdgePlan:
    """Place with room for ``experts`` of the 36 on each GPU, or more where that is too little."""
    room = max(experts, -(-36 // sum(fleet.gpus)))
    small = EdgeFleet(gpus=fleet.gpus, experts_per_gpu=room, mbit_per_s=fleet.mbit_per_s)
    mixes = mixes_of("specialised", fleet.num_sites, 3)
    return place(policy, small, demand_of(ROUTING, mixes, 1.0, 3))


def drawn(fleet: EdgeFleet, seed: int, gap_s: float = 0.5, duration_s: float = 5.0) -> EdgeWorkload:
    """Draw a few requests of 1 + 3 passes for each site."""
    mixes = mixes_of("specialised", fleet.num_sites, 3)
    return EdgeWorkload.poisson(ROUTING, mixes, gap_s, duration_s, answers=3, seed=seed)


def everything_at_home(fleet: EdgeFleet) -> Ints:
    """Say that every site holds every expert."""
    shape = fleet.num_sites, ROUTING.num_layers, ROUTING.num_experts
    own = np.arange(fleet.num_sites, dtype=np.int32)[:, None, None]
    return np.broadcast_to(own, shape).copy()
