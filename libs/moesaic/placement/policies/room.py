"""Room for experts: how many of each layer an instance holds, in slots or within its memory.

Policies that divide no memory themselves get equally many experts of every layer. All counts here
fit on the devices, in the order in which ``pack_devices`` packs.
"""

from collections.abc import Iterable
from math import gcd

import numpy as np

from moesaic.errors import PlacementInfeasible
from moesaic.placement.policies.packing import fitted
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.replication import Counts


def slots_by_layer(problem: PlacementProblem) -> list[tuple[int, ...]]:
    """Give each instance its slots in each layer, ``[L][N]``.

    Without memory they are the problem's own. With memory they are even shares, which cover every
    layer.

    Raises:
        PlacementInfeasible: names the shortfall over all layers, in slots and bytes.
    """
    if problem.memory is not None:
        return [tuple(layer) for layer in even_shares(problem).T.tolist()]
    missing = problem.num_experts - int(most_of_a_layer(problem).sum())
    if missing > 0:
        raise PlacementInfeasible(missing * len(problem.traffic), missing * sum(problem.sizes))
    return [problem.slots] * len(problem.traffic)


def most_of_a_layer(problem: PlacementProblem) -> Counts:
    """Experts of one layer that each instance may hold at most, ``[N]``."""
    return np.minimum(np.asarray(problem.slots, np.int64), problem.num_experts)


def usable_bytes(problem: PlacementProblem) -> Counts:
    """Bytes of each instance that experts can fill, ``[N]``.

    What is left on a device below the greatest common divisor of all sizes is of no use. With
    experts of one size that is exact, else an upper bound.
    """
    assert problem.memory is not None
    unit = gcd(*problem.sizes)
    usable = [sum(size // unit * unit for size in devices) for devices in problem.memory]
    return np.array(usable, np.int64)


def even_shares(problem: PlacementProblem) -> Counts:
    """Divide each instance's memory into equally many experts of each layer, ``[N, L]``.

    What is left over goes to layers in turn, from one instance to the next, so that layers differ
    little. Where experts of some layer are larger, and that covers too few of them, layers with more
    experts than they need give way.

    Raises:
        PlacementInfeasible: names the shortfall. With experts of one size it is exact, else what
            largest first leaves over.
    """
    num_layers, turn = len(problem.traffic), 0
    _require_total(problem)
    counts = np.zeros((problem.num_instances, num_layers), np.int64)
    usable = usable_bytes(problem) // sum(problem.sizes)
    for n, most in enumerate(np.minimum(most_of_a_layer(problem), usable).tolist()):
        while not fits([most] * num_layers, n, problem):
            most -= 1
        layers = [(turn + i) % num_layers for i in range(num_layers)]
        counts[n] = filled_up(np.full(num_layers, most), layers, n, problem)
        turn = (turn + int(counts[n].sum())) % num_layers
    shares = _shifted(counts, problem)
    return _first_fit(problem) if shares is None else shares


def covering(counts: Counts, problem: PlacementProblem) -> Counts:
    """Change counts that fit until every layer is covered; the layers with most to spare give way.

    Args:
        counts: experts of each layer on each instance, ``[N, L]``.
        problem: with memory.

    Returns:
        ``[N, L]``; even shares where single changes do not lead there.

    Raises:
        PlacementInfeasible: names the shortfall.
    """
    # Always, so that all policies refuse the same problems.
    shares = even_shares(problem)
    shifted = _shifted(counts, problem)
    return shares if shifted is None else shifted


def fits(counts: list[int], n: int, problem: PlacementProblem) -> bool:
    """True if instance ``n`` has memory for these experts of each layer, ``[L]``."""
    assert problem.memory is not None
    return fitted(counts, problem.sizes, problem.memory[n]) == counts


def filled_up(counts: Counts, layers: Iterable[int], n: int, problem: PlacementProblem) -> Counts:
    """Add experts to instance ``n``, one of each of ``layers`` in turn, while memory is left.

    Args:
        counts: that fit, ``[L]``.
        layers: in order of preference.
        n: the instance.
        problem: with memory.
    """
    most, usable = int(most_of_a_layer(problem)[n]), int(usable_bytes(problem)[n])
    row, order, sizes = counts.tolist(), list(layers), problem.sizes
    left, before = usable - int(counts @ np.asarray(sizes)), -1
    while before != left and left >= min(sizes):
        before = left
        for layer_idx in order:
            if row[layer_idx] == most or sizes[layer_idx] > left:
                continue
            row[layer_idx] += 1
            if fits(row, n, problem):
                left -= sizes[layer_idx]
            else:
                row[layer_idx] -= 1
    return np.array(row, np.int64)


def _require_total(problem: PlacementProblem) -> None:
    """Refuse memory that is too small for experts of one size, however they are placed."""
    if len(set(problem.sizes)) > 1:
        return
    num_layers, size = len(problem.traffic), problem.sizes[0]
    room = np.minimum(usable_bytes(problem) // size, most_of_a_layer(problem) * num_layers)
    missing = problem.num_experts * num_layers - int(room.sum())
    if missing > 0:
        raise PlacementInfeasible(missing, missing * size)


def _shifted(counts: Counts, problem: PlacementProblem) -> Counts | None:
    """Cover layers, most lacking first, by experts of those with most to spare; None if stuck."""
    counts = counts.copy()
    while (spare := counts.sum(axis=0) - problem.num_experts).min() < 0:
        lacking = int(spare.argmin())
        offers = []
        for n in np.argsort(-counts[:, spare.argmax()], kind="stable").tolist():
            offer = _with_one_more(counts[n], lacking, spare, n, problem)
            if offer is None:
                continue
            given, row = offer
            offers.append((given, n, row))
            if given <= problem.sizes[lacking]:
                # Nobody gives up much less.
                break
        if not offers:
            return None
        _, n, row = min(offers)
        counts[n] = row
    return counts


def _with_one_more(
    counts: Counts, lacking: int, spare: Counts, n: int, problem: PlacementProblem
) -> tuple[int, list[int]] | None:
    """Make room on instance ``n`` for one more expert of a layer, from what others can spare.

    Returns:
        The bytes given up, and the new counts ``[L]``; None if that is not enough.
    """
    row, spare, given = counts.tolist(), spare.copy(), 0
    if row[lacking] == most_of_a_layer(problem)[n]:
        return None
    row[lacking] += 1
    while not fits(row, n, problem):
        giving = int(np.where(np.array(row) > 0, spare, 0).argmax())
        if row[giving] == 0 or spare[giving] <= 0:
            return None
        row[giving] -= 1
        spare[giving] -= 1
        given += problem.sizes[giving]
    return given, row


def _first_fit(problem: PlacementProblem) -> Counts:
    """Cover layers, largest experts first, on one instance after another; then fill up evenly."""
    assert problem.memory is not None
    most = most_of_a_layer(problem).tolist()
    num_layers, sizes = len(problem.traffic), problem.sizes
    counts = np.zeros((problem.num_instances, num_layers), np.int64)
    missing = missing_bytes = 0
    for layer_idx in sorted(range(num_layers), key=lambda layer_idx: -sizes[layer_idx]):
        wanted = problem.num_experts
        for n, devices in enumerate(problem.memory):
            row = counts[n].tolist()
            row[layer_idx] = min(most[n], wanted)
            counts[n] = fitted(row, sizes, devices)
            wanted -= int(counts[n, layer_idx])
        missing += wanted
        missing_bytes += wanted * sizes[layer_idx]
    if missing:
        raise PlacementInfeasible(missing, missing_bytes)
    for n, row in enumerate(counts):
        counts[n] = filled_up(row, np.argsort(row, kind="stable").tolist(), n, problem)
    return counts
