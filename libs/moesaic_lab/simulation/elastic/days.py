"""Days of a fleet that is sized anew at every decision, by the demand of the window before (JANUS section 5.3).

All ways to serve follow one rule: the cheapest shape that meets the targets for the last window's rate, times a
headroom. It is the rule of ``moesaic.scaling`` in a steady state: to replay arrivals for every decision takes too long
for days. The fleet that was chosen serves by that replay (``serving``). More devices serve some time after they were
asked for, and are paid from then on; fewer leave after as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import Objectives
from moesaic_lab.simulation.elastic.demand import DemandSeries
from moesaic_lab.simulation.elastic.serving import serve
from moesaic_lab.simulation.elastic.steady import StudiedFleet

HEADROOMS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)


@dataclass(frozen=True)
class DecisionRule:
    """Times of decisions, and their caution.

    Attributes:
        every_s: between decisions, and the window whose demand counts.
        headroom: the window's rate is taken so many times as high.
        delay_s: until devices that were asked for serve.
    """

    every_s: float
    headroom: float = 1.2
    delay_s: float = 60.0


@dataclass(frozen=True)
class FleetDays:
    """One fleet over the whole demand.

    Attributes:
        shapes: in force, one for each bin.
        devices: paid, one for each bin.
        attainment: part of the requests that met both targets.
        changes: of the shape.
        unmet: decisions for which no shape would have met the targets.
    """

    shapes: list[FleetShape]
    devices: list[int]
    attainment: float
    changes: int
    unmet: int

    def device_hours(self, bin_s: float) -> float:
        """Sum up the devices that were paid."""
        return sum(self.devices) * bin_s / 3600


def run_days(
    fleet: StudiedFleet,
    demand: DemandSeries,
    objectives: Objectives,
    rule: DecisionRule,
    rate_before: float,
) -> FleetDays:
    """Serve demand with a fleet that is sized by the rule.

    Args:
        fleet: the way to serve.
        demand: to be served; no decision sees what comes after it.
        objectives: targets.
        rule: of decisions.
        rate_before: requests a second in the window before the demand.
    """
    wanted, unmet = decided(fleet, demand, objectives, rule, rate_before)
    each, late = round(rule.every_s / demand.bin_s), round(rule.delay_s / demand.bin_s)
    shapes, devices = list[FleetShape](), list[int]()
    before = wanted[0]
    for shape in wanted:
        shapes += [before] * min(late, each) + [shape] * max(0, each - late)
        most = max(before.total, shape.total)
        devices += [most] * min(late, each) + [shape.total] * max(0, each - late)
        before = shape
    num_bins = len(demand.counts)
    shapes, devices = shapes[:num_bins], devices[:num_bins]
    attainment = serve(fleet, demand, shapes, objectives)
    changes = sum(a != b for a, b in pairwise(wanted))
    return FleetDays(shapes, devices, attainment, changes, unmet)


def decided(
    fleet: StudiedFleet,
    demand: DemandSeries,
    objectives: Objectives,
    rule: DecisionRule,
    rate_before: float,
) -> tuple[list[FleetShape], int]:
    """Decide at the beginning of each window; returns the shapes, and decisions that no shape would suit."""
    wanted, unmet = list[FleetShape](), 0
    for number in range(-(-len(demand.counts) // round(rule.every_s / demand.bin_s))):
        begin_s = number * rule.every_s
        rate = demand.rate(begin_s - rule.every_s, begin_s) if number else rate_before
        found = fleet.cheapest(rate * rule.headroom, demand, objectives)
        unmet += found is None
        wanted.append(found or fleet.largest())
    return wanted, unmet


def with_least_headroom(
    fleet: StudiedFleet,
    demand: DemandSeries,
    objectives: Objectives,
    rule: DecisionRule,
    rate_before: float,
    headrooms: Sequence[float] = HEADROOMS,
) -> tuple[float, FleetDays]:
    """Serve demand with the least headroom that attains the objectives; so fleets are compared at equal service.

    Args:
        fleet: the way to serve.
        demand: to be served.
        objectives: targets, and the part of the requests that shall meet them.
        rule: of decisions, but for the headroom.
        rate_before: requests a second in the window before the demand.
        headrooms: to be tried, ascending.

    Returns:
        The headroom, the largest if none attains, and the days.
    """
    for headroom in headrooms:
        trial = replace(rule, headroom=headroom)
        days = run_days(fleet, demand, objectives, trial, rate_before)
        if days.attainment >= objectives.attainment:
            break
    return headroom, days
