from collections import Counter

import numpy as np
import pytest

from moesaic.prefix.flops import AttentionFlops, ModelFlops
from moesaic.prefix.router import PrefixRouter, RouterLimits
from moesaic.simulation.arrivals import ArrivalTrace
from moesaic.simulation.planning import SimulatedRequest
from moesaic.simulation.prefix_routing import PrefixRouting
from moesaic.simulation.routing import FleetRouter, LeastOutstanding
from tests.simulation.fleets import drawn_trace, fleet_of

FLOPS = ModelFlops([AttentionFlops(1000, 1)], 1000, 100)
NEVER = 1 << 60


def prefix_routing(saturation: int = NEVER, max_queued: int = 999) -> PrefixRouting:
    limits = RouterLimits(block_size=16, max_blocks=1000, max_queued=max_queued, max_wait_s=5.0)
    return PrefixRouting(PrefixRouter(FLOPS, limits), saturation, expected_answer_tokens=50)


def request(number: int, prompt: int = 10) -> SimulatedRequest:
    return SimulatedRequest(number, prompt, 5)


def test_a_request_goes_to_the_worker_that_has_the_fewest() -> None:
    router = LeastOutstanding()
    for worker in range(3):
        router.joined(worker, 0.0)
    requests = [request(number) for number in range(6)]

    for each in requests:
        [(_, each.worker)] = router.submitted(each, 0.0)
    router.ended(requests[4], 1.0)

    assert Counter(each.worker for each in requests) == {0: 2, 1: 2, 2: 2}
    assert router.submitted(request(6), 1.0)[0][1] == requests[4].worker


def test_requests_wait_for_the_first_worker() -> None:
    router = LeastOutstanding()

    assert not router.submitted(request(0), 0.0)
    assert [worker for _, worker in router.joined(7, 1.0)] == [7]


@pytest.mark.parametrize("make_router", [LeastOutstanding, prefix_routing])
def test_workers_get_about_as_many_requests_and_all_are_served(
    make_router: type[LeastOutstanding],
) -> None:
    trace = drawn_trace(per_s=20.0)
    router: FleetRouter = make_router()
    fleet = fleet_of(trace, 4, router=router)
    fleet.loop.at(20.0, lambda _: fleet.resize(3))

    fleet.loop.run()

    assert fleet.figures().ended == len(trace)
    early = np.bincount(fleet.records.worker[trace.at_s < 20], minlength=4)
    assert early.min() > 0.7 * early.max()
    assert set(fleet.records.worker[trace.at_s > 20].tolist()) == {0, 1, 2}


def test_saturated_workers_get_requests_once_they_have_room() -> None:
    router = prefix_routing(saturation=FLOPS.span(0, 100))
    router.joined(0, 0.0)
    first, second = request(0, 200), request(1, 200)

    [(_, first.worker)] = router.submitted(first, 0.0)
    assert not router.submitted(second, 0.1)

    assert router.next_overdue_s() == pytest.approx(5.1)
    assert list(router.began(first, 1.0)) == [(second, 0)]


def test_a_fleet_sends_requests_that_have_waited_too_long_to_saturated_workers() -> None:
    trace = ArrivalTrace.of(np.zeros(4), np.full(4, 2000), np.full(4, 2))
    fleet = fleet_of(trace, router=prefix_routing(saturation=1))

    fleet.loop.run()

    assert fleet.figures().ended == 4


def test_more_than_may_wait_are_refused() -> None:
    trace = ArrivalTrace.of(np.zeros(4), np.full(4, 2000), np.full(4, 2))
    fleet = fleet_of(trace, router=prefix_routing(saturation=1, max_queued=2))

    fleet.loop.run()

    assert (fleet.figures().ended, fleet.num_refused) == (3, 1)
