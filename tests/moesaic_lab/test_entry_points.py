"""What the lab adds to the product is what its modules call their baselines."""

from moesaic.plugins import plugins
from moesaic_lab.placement.policies import BASELINES as PLACEMENTS
from moesaic_lab.routing.policies import BASELINES as ROUTERS
from moesaic_lab.scheduling.policies import SCHEDULES


def test_every_baseline_is_an_entry_point() -> None:
    assert {name: each.load() for name, each in plugins("placement_policies").items()} == PLACEMENTS
    assert {name: each.load() for name, each in plugins("router_policies").items()} == ROUTERS
    assert {each.load() for each in plugins("expert_schedulings").values()} <= {*SCHEDULES.values()}
