"""The linear program of placement, for HiGHS: fewest remote calls, experts in fractions."""

from typing import TYPE_CHECKING

import numpy as np

from moesaic.errors import InvalidInput
from moesaic.placement.policies.replication import Counts
from moesaic.placement.traffic.statistics import Floats

if TYPE_CHECKING:
    from types import ModuleType


def relaxed(demand: Floats, budget: Floats, sizes: Floats, most: Counts | None = None) -> Floats:
    """Solve for layers that share a budget, where an instance may hold a part of an expert.

    Args:
        demand: ``[L, N, E]``, what is saved by holding an expert.
        budget: of each instance, ``[N]``.
        sizes: what an expert of each layer takes of the budget, ``[L]``.
        most: experts of one layer on each instance, ``[N]``; None: all.

    Returns:
        The part of each expert that instances hold, ``[L, N, E]``, each in ``0..1``.

    Raises:
        InvalidInput: scipy is not installed.
    """
    optimize, sparse = _scipy()
    num_layers, num_instances, num_experts = demand.shape
    columns = np.arange(demand.size)
    layer, instance, expert = (axis.ravel() for axis in np.indices(demand.shape))
    ones = np.ones(demand.size)
    used = sparse.csr_array((sizes[layer], (instance, columns)))
    copies = sparse.csr_array((ones, (layer * num_experts + expert, columns)))
    rows, limits = [used, -copies], [budget, -np.ones(num_layers * num_experts)]
    if most is not None:
        rows.append(sparse.csr_array((ones, (layer * num_instances + instance, columns))))
        limits.append(np.tile(most, num_layers))
    largest = max(float(demand.max()), 1e-300)
    found = optimize.linprog(
        -demand.flatten() / largest,
        A_ub=sparse.vstack(rows),
        b_ub=np.concatenate(limits),
        bounds=(0, 1),
        method="highs",
    )
    assert found.status == 0, found.message
    parts: Floats = found.x.reshape(demand.shape)
    return parts


def _scipy() -> "tuple[ModuleType, ModuleType]":
    try:
        from scipy import optimize, sparse
    except ModuleNotFoundError as error:
        fix = "'optimal' needs scipy: pip install 'moesaic[placement]'"
        raise InvalidInput("policy", fix) from error
    return optimize, sparse
