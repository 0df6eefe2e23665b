"""Layers, batches and instances of every kind, for what schedules experts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from moesaic.placement.schedule.aebs import Costs, replica_table


@dataclass(frozen=True)
class Batch:
    """One batch of one layer, with what its schedule depends on."""

    topk_ids: NDArray[np.int32]
    replicas: NDArray[np.int32]
    live: NDArray[np.bool_]
    load: NDArray[np.int64]
    costs: Costs[NDArray[np.int64]]

    @property
    def circumstances(self) -> dict[str, Any]:
        """The keyword arguments of ``schedule_experts``."""
        return {"live": self.live, "load": self.load, "costs": self.costs}


@st.composite
def _batches(draw: st.DrawFn) -> Batch:
    num_instances, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    small = st.integers(0, 4)

    def per_instance(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=num_instances, max_size=num_instances))

    slots = per_instance(st.lists(st.integers(-1, num_experts - 1), max_size=6))
    num_rows, top_k = draw(st.integers(0, 6)), draw(st.integers(1, 3))
    ids = draw(
        st.lists(st.integers(-1, num_experts), min_size=num_rows * top_k, max_size=num_rows * top_k)
    )
    return Batch(
        np.array(ids, np.int32).reshape(num_rows, top_k),
        replica_table(slots, num_experts),
        np.array(per_instance(st.sampled_from([True, True, True, False]))),
        np.array(per_instance(small), np.int64),
        Costs(np.array(per_instance(small), np.int64), np.array(per_instance(small), np.int64)),
    )


@pytest.fixture(scope="session")
def batches() -> st.SearchStrategy[Batch]:
    """Ties, dead instances, experts that nobody holds and ids that are none are all common."""
    return _batches()
