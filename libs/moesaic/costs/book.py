"""CostBook: the fits of all parts that one process measures, and the model that several of them make."""

from collections.abc import Mapping, Sequence

from moesaic.costs.fit import FORGET, CostFit, fitted, merged
from moesaic.messages.performance import PART_TERMS, FitSums, Part, PartCost, PerformanceModel


class CostBook:
    """Measurements of all parts."""

    def __init__(self, forget: float = FORGET) -> None:
        """Know nothing; ``forget``: see ``CostFit``."""
        self._forget = forget
        self._fits: dict[Part, CostFit] = {}

    def add(self, part: Part, amounts: Sequence[float], seconds: float) -> None:
        """Learn one measurement.

        Args:
            part: that was measured.
            amounts: of its terms, in the order of ``PART_TERMS``.
            seconds: that it took.
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
