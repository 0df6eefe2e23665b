"""Drawn edge servers with memory, and what a placement on them must keep."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from benchmarks.common.remote_calls import remote_calls
from moesaic.errors import PlacementInfeasible
from moesaic.placement.policies.packing import pack_devices
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.room import even_shares
from moesaic.placement.policies.uniform import Slots
from tests.placement.drawn import traffic_of


def cost_of(placed: list[Slots], problem: PlacementProblem) -> float:
    """Sum the costs of rows to experts that the instance they come from does not hold."""
    demand = [problem.demand_of(layer_idx) for layer_idx in range(len(problem.traffic))]
    return remote_calls(placed, np.stack(demand, axis=1))


@st.composite
def edges(
    draw: st.DrawFn,
    most_experts: int = 7,
    most_layers: int = 4,
    sizes: tuple[tuple[int, ...], ...] = ((10,), (8, 11), (5, 12, 30)),
) -> PlacementProblem:
    """Servers with none to three devices; tight and roomy, limited per layer, silent, too small."""
    num_experts, num_instances = draw(st.integers(1, most_experts)), draw(st.integers(1, 4))
    num_layers, seed = draw(st.integers(1, most_layers)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    layer_bytes = tuple(rng.choice(draw(st.sampled_from(sizes)), num_layers).tolist())
    needed = num_experts * sum(layer_bytes)
    roomy = draw(st.sampled_from([0.8, 1.0, 1.2, 2.0]))
    devices = [int(count) for count in rng.integers(0, 4, num_instances)]
    devices[0] += 1
    parts = rng.multinomial(int(needed * roomy), rng.dirichlet(np.ones(sum(devices))))
    memory = np.split(parts, np.cumsum(devices)[:-1])
    demand = rng.integers(0, 9, (num_instances, num_layers, num_experts)).astype(float)
    demand[rng.random(num_instances) < 0.2] = 0
    slots = draw(st.sampled_from([num_experts, num_experts + 3, max(1, num_experts - 2)]))
    return PlacementProblem(
        traffic=tuple(traffic_of(num_experts, seed + i) for i in range(num_layers)),
        slots=(slots,) * num_instances,
        demand=draw(st.sampled_from([None, demand])),
        remote_cost=draw(st.sampled_from([None, rng.random(num_instances)])),
        layer_bytes=layer_bytes,
        memory=tuple(tuple(int(size) for size in mine) for mine in memory),
    )


def has_room(problem: PlacementProblem) -> bool:
    try:
        even_shares(problem)
    except PlacementInfeasible:
        return False
    return True


def require_sound(problem: PlacementProblem, placed: Any) -> None:
    """Every expert is held, none twice, no layer is over its limit and no device over its memory."""
    assert problem.memory is not None
    chosen = pack_devices(placed, problem)
    used = [[0] * len(devices) for devices in problem.memory]
    assert len(placed) == len(problem.traffic)
    for layer, places, size in zip(placed, chosen, problem.sizes, strict=True):
        assert {e for mine in layer for e in mine} - {-1} == set(range(problem.num_experts))
        for n, (experts, devices) in enumerate(zip(layer, places, strict=True)):
            present = [expert for expert in experts if expert != -1]
            assert len(set(present)) == len(present)
            assert len(experts) <= problem.slots[n]
            assert [device == -1 for device in devices] == [expert == -1 for expert in experts]
            for device in devices:
                if device != -1:
                    used[n][device] += size
    for mine, limits in zip(used, problem.memory, strict=True):
        assert all(taken <= size for taken, size in zip(mine, limits, strict=True))
