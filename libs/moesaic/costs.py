"""Costs of the parts of a step. Pure: measurements in, a performance model with error bars out.

A fit turns amounts of work into seconds: a sum over terms, none negative, of which the newest
measurements count most. The fit minimises the squares of relative errors. Each error is relative to
the prediction, so that long measurements count no more than short ones. Errors relative to the
measured time would bias the mean towards short ones.

Of terms that always grew together, and so cannot be told apart, one is kept. Of rows and the like
it is the last, so that time grows in proportion to work. Keys, messages and bytes, which grow
faster, are kept only if measurements show that they cost time. So are the experts of a step: many
rows activate all, so measurements must show that fewer take less.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from moesaic.messages.performance import PART_TERMS, FitSums, Part, PartCost, PerformanceModel

_SINGULAR = 1e-9  # pivot of equations that say the same
FORGET = 0.98  # what a measurement counts after the next one
FITTED_AFTER = 4  # measurements a term, before expectations weigh the next ones
EXPECT_ANEW = 32  # measurements after which expectations are made anew
LONGEST = 4.0  # times the expectation: a measurement that took longer weighs less, as a machine may stop for a while
LAST_RESORT = (
    "key",
    "prompt_key",
    "message",
    "byte",
)  # terms that explain only what no other explains as well
_NEGLIGIBLE = 1e-9  # part of all squares


class RandomChoice(NamedTuple):
    """A gate that chooses at random: each row ``top_k`` of ``num_experts`` unlike experts."""

    num_experts: int
    top_k: int

    def experts(self, rows: float) -> float:
        """Return the mean number of experts of one layer that this number of rows chooses.

        The first rows add ``top_k`` each, later ones ever fewer, up to all there are.
        """
        return self.num_experts * (1.0 - math.pow(1.0 - self.top_k / self.num_experts, rows))


def solve(
    matrix: Sequence[Sequence[float]], wanted: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """Solve ``matrix @ x = wanted`` for the ``chosen`` rows and columns.

    Args:
        matrix: ``[n][n]``, symmetric, with ones on its diagonal.
        wanted: ``[n]``.
        chosen: indices.

    Returns:
        ``[len(chosen)]``; None if two unknowns cannot be told apart.
    """
    rows = [[matrix[i][j] for j in chosen] + [wanted[i]] for i in chosen]
    if not _eliminate(rows):
        return None
    return [row[-1] for row in rows]


def inverse(matrix: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[list[float]]:
    """Invert the ``chosen`` rows and columns of ``matrix``, which ``solve`` can solve."""
    size = len(chosen)
    rows = [
        [matrix[i][j] for j in chosen] + [float(at == column) for column in range(size)]
        for at, i in enumerate(chosen)
    ]
    _eliminate(rows)
    return [row[size:] for row in rows]


def _eliminate(rows: list[list[float]]) -> bool:
    """Turn the left part of ``rows`` into ones on a diagonal; False if that cannot be."""
    size = len(rows)
    for at in range(size):
        best = max(range(at, size), key=lambda i: abs(rows[i][at]))
        rows[at], rows[best] = rows[best], rows[at]
        pivot = rows[at][at]
        if abs(pivot) < _SINGULAR:
            return False
        rows[at] = [each / pivot for each in rows[at]]
        for i in range(size):
            if i != at and (part := rows[i][at]):
                rows[i] = [x - part * y for x, y in zip(rows[i], rows[at], strict=True)]
    return True


class CostFit:
    """The cost of one part, learned from measurements one by one."""

    def __init__(self, terms: Sequence[str], forget: float = FORGET) -> None:
        """Know nothing yet.

        Args:
            terms: names of the amounts.
            forget: factor on the weight of a measurement with each later one, in 0 < ``forget`` <= 1.
        """
        self._terms, self._forget = tuple(terms), forget
        n = len(self._terms)
        self._products, self._responses = [[0.0] * n for _ in range(n)], [0.0] * n
        self._squares = self._weight = self._squared_weight = 0.0
        self._cost: PartCost | None = None
        self._expected: PartCost | None = None
        self._since = 0  # measurements, since expectations were made

    @property
    def is_known(self) -> bool:
        """False before the first measurement."""
        return self._weight > 0

    @property
    def weight(self) -> float:
        """Number of measurements, earlier ones counting less."""
        return self._weight

    def expect(self, cost: PartCost) -> None:
        """Weigh the next measurements by what ``cost`` says of them, rather than by what they took."""
        if any(cost.unit_s):
            self._expected, self._since = cost, 0

    def add(self, amounts: Sequence[float], seconds: float) -> None:
        """Learn one measurement; those without time or work tell nothing. Amounts left out at the end are none."""
        if not (0 < seconds < math.inf) or not any(amounts):
            return
        # What counts for less than it took must not be weighed as if it were that short.
        expected_s = max(self._expectation(amounts) or seconds, seconds / LONGEST)
        part, keep = seconds / expected_s, self._forget
        scaled = [amount / expected_s for amount in amounts]
        scaled += [0.0] * (len(self._terms) - len(scaled))
        for i, (row, amount) in enumerate(zip(self._products, scaled, strict=True)):
            self._responses[i] = self._responses[i] * keep + amount * part
            for j, other in enumerate(scaled):
                row[j] = row[j] * keep + amount * other
        self._squares = self._squares * keep + part * part
        self._weight = self._weight * keep + 1
        self._squared_weight = self._squared_weight * keep * keep + 1
        self._cost = None
        self._since += 1

    def cost(self) -> PartCost:
        """Return what is known; nothing costs anything before the first measurement."""
        if self._cost is None:
            self._cost = fitted(self._terms, self.sums())
        return self._cost

    def sums(self) -> FitSums:
        """Return all that is known, to be sent or added up."""
        return FitSums(
            products=tuple(map(tuple, self._products)),
            responses=tuple(self._responses),
            squares=self._squares,
            weight=self._weight,
            squared_weight=self._squared_weight,
        )

    def _expectation(self, amounts: Sequence[float]) -> float | None:
        if self._expected is None or self._since >= EXPECT_ANEW:
            if self._weight < min(
                FITTED_AFTER * len(self._terms), 0.5 / max(1 - self._forget, 1e-3)
            ):
                return None
            self._expected, self._since = self.cost(), 0
        return self._expected.seconds(*amounts)


def merged(sums: Iterable[FitSums]) -> FitSums:
    """Add up what several fits know of the same part.

    Raises:
        ValueError: there are none, or of unlike terms.
    """
    found = list(sums)
    if not found or len({len(each.responses) for each in found}) != 1:
        raise ValueError("sums of one part are needed, of the same terms")
    rows = zip(*(each.products for each in found), strict=True)
    return FitSums(
        products=tuple(tuple(map(sum, zip(*row, strict=True))) for row in rows),
        responses=tuple(map(sum, zip(*(each.responses for each in found), strict=True))),
        squares=sum(each.squares for each in found),
        weight=sum(each.weight for each in found),
        squared_weight=sum(each.squared_weight for each in found),
    )


def fitted(terms: Sequence[str], sums: FitSums) -> PartCost:
    """Solve for the seconds of each term: the least squares without negative ones.

    All sets of terms are tried, small ones first: there are few.
    """
    n = len(terms)
    scale = [math.sqrt(max(0.0, sums.products[i][i])) for i in range(n)]
    used = [i for i in range(n) if scale[i] > 0]
    bounded = {"expert"} if "step" in terms else set()
    used.sort(key=lambda i: (terms[i] in LAST_RESORT, terms[i] in bounded, -i))
    scaled = [
        [sums.products[i][j] / (scale[i] * scale[j] or 1.0) for j in range(n)] for i in range(n)
    ]
    wanted = [sums.responses[i] / (scale[i] or 1.0) for i in range(n)]
    best, support, unit = sums.squares, list[int](), [0.0] * n
    for size in range(1, len(used) + 1):
        bound = best - _NEGLIGIBLE * sums.squares
        for chosen in itertools.combinations(used, size):
            found = solve(scaled, wanted, chosen)
            if found is None or min(found) < 0:
                continue
            left = max(
                0.0, sums.squares - sum(wanted[i] * x for i, x in zip(chosen, found, strict=True))
            )
            if left < bound:
                best, support, unit = left, list(chosen), [0.0] * n
                # Among equals the first in that order.
                bound = left - _NEGLIGIBLE * sums.squares
                for i, x in zip(chosen, found, strict=True):
                    unit[i] = x / scale[i]
    spread, covariance = _uncertainty(scaled, scale, support, max(0.0, best), sums)
    return PartCost(
        terms=tuple(terms),
        unit_s=tuple(unit),
        covariance=covariance,
        spread=spread,
        samples=sums.weight,
    )


def _uncertainty(
    scaled: Sequence[Sequence[float]],
    scale: Sequence[float],
    support: Sequence[int],
    left: float,
    sums: FitSums,
) -> tuple[float, tuple[tuple[float, ...], ...]]:
    """Return the spread of a measurement, and the covariance of the terms."""
    n = len(scale)
    covariance = [[0.0] * n for _ in range(n)]
    if not support:
        return 0.0, tuple(map(tuple, covariance))
    # Measurements, were all worth the same.
    effective = sums.weight**2 / sums.squared_weight
    variance = left / sums.weight * effective / max(1.0, effective - len(support))
    for i, row in zip(support, inverse(scaled, support), strict=True):
        for j, each in zip(support, row, strict=True):
            covariance[i][j] = variance * each * sums.weight / effective / (scale[i] * scale[j])
    return math.sqrt(variance), tuple(map(tuple, covariance))


class CostBook:
    """Measurements of all parts."""

    def __init__(self, forget: float = FORGET) -> None:
        """Know nothing; ``forget``: see ``CostFit``."""
        self._forget = forget
        self._fits: dict[Part, CostFit] = {}

    def add(self, part: Part, amounts: Sequence[float], seconds: float) -> None:
        """Learn one measurement.

        Args:
            part: part that was measured.
            amounts: amounts of its terms, in the order of ``PART_TERMS``.
            seconds: time that it took.
        """
        self.fit(part).add(amounts, seconds)

    def fit(self, part: Part) -> CostFit:
        """Return the fit of a part."""
        if part not in self._fits:
            self._fits[part] = CostFit(PART_TERMS[part], self._forget)
        return self._fits[part]

    def sums(self) -> dict[str, FitSums]:
        """Return all that is known, by part."""
        return {part: fit.sums() for part, fit in self._fits.items() if fit.is_known}


def model_of_fleet(
    reports: Sequence[Mapping[str, FitSums]], device: str = "", source: str = ""
) -> PerformanceModel:
    """Make the model of what several workers have measured; parts that this version does not know are left out."""
    parts: dict[str, PartCost] = {}
    for part, terms in PART_TERMS.items():
        found = [sums[part] for sums in reports if part in sums]
        found = [each for each in found if len(each.responses) == len(terms) and each.weight > 0]
        if found:
            parts[part] = fitted(terms, merged(found))
    return PerformanceModel(device=device, source=source, parts=parts)
