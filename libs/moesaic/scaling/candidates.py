"""Search for the cheapest shape that meets the targets, with few forecasts.

More expert workers are taken to make no request late, for a given number of attention workers. No more is needed: one
attention worker more makes a batch more that experts serve in turn, and may well make things worse.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.scaling.contract import ShapeBounds

Judge = Callable[[FleetShape], bool]
"""Tells whether a shape meets the targets."""
Guess = Callable[[FleetShape], float]
"""Guesses how near a shape is to missing them: above 1, it does."""

FEW_SHAPES = 32  # all of them are looked at, the cheapest first
WORSE = 1.001  # than the best guess
Rank = tuple[float, int, int, int, FleetShape]


def shape_cost(policy: ScalingPolicy, shape: FleetShape) -> float:
    """Return the cost of a shape for an hour."""
    return policy.attention_cost * shape.attention + policy.expert_cost * shape.experts


def rank_of(policy: ScalingPolicy, shape: FleetShape, near: FleetShape) -> Rank:
    """Order shapes: by cost, by workers of the side that costs more, by all workers, by distance from ``near``."""
    costlier = 0
    if policy.attention_cost != policy.expert_cost:
        is_attention = policy.attention_cost > policy.expert_cost
        costlier = shape.attention if is_attention else shape.experts
    distance = abs(shape.attention - near.attention) + abs(shape.experts - near.experts)
    # Sums of the same costs differ by their order.
    cost = round(shape_cost(policy, shape), 9)
    return cost, costlier, shape.total, distance, shape


def cheapest(
    policy: ScalingPolicy,
    bounds: ShapeBounds,
    near: FleetShape,
    judge: Judge,
    guess: Guess | None = None,
    below: float | None = None,
) -> FleetShape | None:
    """Find the first shape by ``rank_of`` that ``judge`` accepts.

    Args:
        policy: has the costs.
        bounds: bounds of the search.
        near: the shape there is.
        judge: costly, and asked for some shapes twice; what it accepts, it accepts with more expert workers.
        guess: quick. A good one saves calls of ``judge``; it also tells where more expert workers do harm after
            all, since each of them means messages.
        below: shapes that cost more are of no interest.

    Returns:
        ``None`` if it accepts none.
    """
    best: FleetShape | None = None

    def rank(shape: FleetShape) -> Rank:
        return rank_of(policy, shape, near)

    def is_too_dear(shape: FleetShape) -> bool:
        if below is not None and rank(shape)[0] > below:
            return True
        return best is not None and rank(shape) >= rank(best)

    least, most = bounds.least, bounds.most
    rows = [
        [FleetShape(each, experts) for experts in range(least.experts, most.experts + 1)]
        for each in range(least.attention, most.attention + 1)
    ]
    if sum(map(len, rows)) <= FEW_SHAPES:
        ranked = sorted((shape for row in rows for shape in row), key=rank)
        return next((each for each in ranked if not is_too_dear(each) and judge(each)), None)

    def promise(row: list[FleetShape]) -> tuple[bool, Rank]:
        begin = row[_begin(row, guess)]
        return guess is not None and guess(begin) > 1, rank(begin)

    # A good shape soon rules out many others.
    for row in sorted(rows, key=promise):
        left = row[: bisect_left(row, True, key=is_too_dear)]
        if left and (found := _least(left, judge, guess)):
            best = found
    return best


def _begin(row: Sequence[FleetShape], guess: Guess | None) -> int:
    """Return the index of the first shape that should do; else of the best one."""
    if guess is None:
        return len(row) - 1
    found = next((i for i, shape in enumerate(row) if guess(shape) <= 1), None)
    return _best(row, guess) if found is None else found


def _best(row: Sequence[FleetShape], guess: Guess | None) -> int:
    """Return the index of the best shape: the last one, unless it is guessed to be worse than another one."""
    last = len(row) - 1
    if guess is None:
        return last
    best = min(range(len(row)), key=lambda i: guess(row[i]))
    return last if guess(row[last]) <= WORSE * guess(row[best]) else best


def _least(row: Sequence[FleetShape], judge: Judge, guess: Guess | None) -> FleetShape | None:
    """Find the first shape of a row that is accepted, from the one where that is likely."""
    high = _best(row, guess)
    begin = min(_begin(row, guess), high)
    if judge(row[begin]):
        low, high, middle = 0, begin, begin - 1
    elif begin < high and judge(row[high]):
        low, middle = begin + 1, begin + 1
    else:
        return None
    while low < high:
        if judge(row[middle]):
            high = middle
        else:
            low = middle + 1
        middle = (low + high) // 2
    return row[high]
