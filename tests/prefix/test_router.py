"""The router by examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import Overloaded
from moesaic.prefix.blocks import BlockFeed
from moesaic.prefix.fleet import PACE, Job, OthersWork
from moesaic.prefix.router import LONG_TOKENS, PrefixRouter, RouterLimits
from tests.prefix.fleets import BLOCK, FLOPS, LIMITS, SATURATION, chain, open_router, placed


def test_a_popular_prefix_spills_to_a_worker_that_is_free_and_waits_when_none_is() -> None:
    router = open_router()
    jobs = [Job(n, 20, chain([1, 1, 1, 1])) for n in range(9)]

    where = []
    for job in jobs[:6]:
        router.submit(job, 0.0)
        where += [(d.worker, d.spilled) for d in router.route(0.0)]

    # One prefill of the prefix saturates a worker here; the next one computes it once more.
    assert where[0] == (0, False)
    assert (1, True) in where
    assert router.num_queued == 6 - len(where)


def test_requests_of_several_tenants_do_not_keep_others_of_excluded_workers() -> None:
    router = open_router(workers=1)

    assert placed(router, Job("a", 2, excluded=frozenset({0})), Job("b", 2)) == [0]
    assert [job.job_id for job in router.unroutable()] == ["a"]


def test_the_shortest_uncached_prefill_goes_first_where_that_is_the_policy() -> None:
    router = open_router("shortest-prefill-first", workers=1)
    router.fleet.index.commit(1, chain([1, 1, 1]))

    router.submit(Job("long", 16), 0.0)
    router.submit(Job("cached", 16, chain([1, 1, 1, 0])), 0.0)
    router.submit(Job("short", 5), 0.0)

    assert [d.job.job_id for d in router.route(0.0)] == ["cached", "short", "long"]


def test_missing_changes_are_noticed_and_a_snapshot_begins_anew() -> None:
    router = open_router(workers=1)
    index, feed = router.fleet.index, BlockFeed(router.fleet.index, 1)
    a, b, c = chain([0, 0, 0])

    assert feed.changes(5, [c], [])  # before the snapshot: it will have it
    feed.snapshot(7, [a], first=True)
    assert feed.changes(7, [c], [])  # the snapshot had it already
    assert feed.changes(8, [b], [])
    assert index.match([a, b, c], 1)[0] == 2
    assert not feed.changes(10, [c], [])
    assert len(index) == 0
    feed.snapshot(11, [a], first=True)
    assert feed.changes(12, [], [a])
    assert len(index) == 0


def test_a_worker_that_says_too_much_loses_what_it_said_first() -> None:
    router = PrefixRouter(FLOPS, RouterLimits(BLOCK, 10, 6, 5.0))
    index = router.fleet.index
    names = [bytes([n]) for n in range(20)]
    router.fleet.join("a", SATURATION)

    index.commit(1, names)
    assert index.num_committed_at(1) == 10
    assert index.match(names[10:], 1)[0] == 10
    router.fleet.join("b", SATURATION)

    assert (index.num_committed_at(1), len(index)) == (5, 5)


@given(st.floats(0, 1e9))
def test_a_round_at_the_very_time_that_is_told_places_what_has_waited(now_s: float) -> None:
    router = open_router(workers=1)
    assert placed(router, Job("full", 30), Job("waits", 30), now_s=now_s) == [0]

    assert len(router.route(router.next_overdue_s() or 0.0)) == 1


def test_work_that_others_gave_a_worker_counts_until_it_says_otherwise() -> None:
    router = open_router()
    router.fleet.others_have(0, OthersWork(1, 100, SATURATION))

    assert placed(router, *(Job(n, 2) for n in range(3))) == [1, 1, 1]
    router.fleet.others_have(0, OthersWork())

    assert placed(router, Job("after", 2)) == [0]


@pytest.mark.parametrize("policy", ["least-requests", "least-tokens", "prefix-only"])
def test_other_policies_count_the_work_of_others_too(policy: str) -> None:
    router = open_router(policy)
    router.fleet.others_have(0, OthersWork(5, 100, 1000))

    assert placed(router, *(Job(n, 2) for n in range(3))) == [1, 1, 1]


def test_a_worker_that_transfers_slow_gets_less_and_takes_more_to_fill() -> None:
    router = open_router()
    how = {"saturation": 3 * SATURATION, "caches": True}
    router.fleet.describe(0, **how, slowdown=3.0)  # type: ignore[arg-type]
    router.fleet.describe(1, saturation=SATURATION, caches=True)

    where = placed(router, *(Job(n, 2) for n in range(5)))

    assert where == [0, 1, 1, 1, 0]
    assert not router.fleet.workers[0].saturated


@given(
    sizes=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=30, max_size=120),
    report_every=st.integers(1, 8),
    num_workers=st.integers(2, 4),
)
def test_routers_that_hear_of_each_other_s_work_keep_the_workers_even(
    sizes: list[tuple[int, int]], report_every: int, num_workers: int
) -> None:
    """Two routers, the same workers; each knows its own jobs, and what the workers say of the
    other's now and then. Nothing ends, so whatever is uneven stays."""
    routers = [PrefixRouter(FLOPS, RouterLimits(BLOCK, 100, 1000, 5.0)) for _ in range(2)]
    for router in routers:
        for key in range(num_workers):
            router.fleet.join(key, 1 << 60)
            router.fleet.accept(key, True)

    def loads() -> list[int]:
        return [sum(r.fleet.workers[key].remaining for r in routers) for key in range(num_workers)]

    largest, since = 0, 0
    for number, (which, tokens) in enumerate(sizes):
        placed(routers[which], Job(number, tokens))
        largest = max(largest, routers[which].fleet.routed[number].remaining)
        since += 1
        if since == report_every:
            since = 0
            for key in range(num_workers):
                for me, other in (routers, routers[::-1]):
                    theirs = other.fleet.workers[key]
                    told = OthersWork(len(theirs.jobs), theirs.remaining_tokens, theirs.remaining)
                    me.fleet.others_have(key, told)
            for router in routers:  # what a router knows is all that there is, counted once
                assert [
                    router.fleet.workers[key].load // PACE for key in range(num_workers)
                ] == loads()
        # Each is at most one job off what it sees, and sees all but what the other did since.
        assert max(loads()) - min(loads()) <= (2 + 2 * report_every) * largest


def test_what_others_gave_a_worker_is_forgotten_with_it() -> None:
    router = open_router()
    router.fleet.others_have(0, OthersWork(2, 10, 500))

    router.fleet.leave(0)

    router.fleet.join(0, SATURATION)
    assert router.fleet.workers[0].load == 0


def test_beside_another_tenants_flood_a_job_is_the_next_to_be_placed() -> None:
    router = open_router(workers=1)
    assert placed(router, *(Job(n, 30, tenant="a") for n in range(5))) == [0]

    router.submit(Job("b", 2, tenant="b"), 0.0)
    router.fleet.release(0)

    assert router.route(0.0)[0].job.job_id == "b"


def test_what_other_tenants_fill_workers_with_holds_nobody_back() -> None:
    router = open_router(workers=1)
    for n in range(3):
        router.submit(Job(n, 30, tenant="a"), 0.0)
    assert len(router.route(LIMITS.max_wait_s)) == 3  # overdue: far beyond saturation

    late = LIMITS.max_wait_s
    assert placed(router, Job("b", 30, tenant="b"), now_s=late) == [0]
    assert placed(router, Job("more", 30, tenant="a"), now_s=late) == []
    assert placed(router, Job("idle", 30, priority=1, tenant="c"), now_s=late) == []
    for n in range(2):
        assert placed(router, Job(("b", n), 30, tenant="b"), now_s=late) == [0]
    assert placed(router, Job("enough", 30, tenant="b"), now_s=late) == []


def test_beside_a_request_of_many_long_jobs_another_one_is_placed_soon() -> None:
    router = open_router(workers=1)
    router.submit(Job(0, LONG_TOKENS, part_of="huge"), 0.0)
    router.submit(Job(1, 30, part_of="huge"), 0.0)
    assert [decision.job.job_id for decision in router.route(0.0)] == [0]

    router.submit(Job("short", 2), 0.0)
    router.fleet.release(0)

    assert router.route(0.0)[0].job.job_id == "short"


def test_a_full_queue_lets_other_tenants_in() -> None:
    router = PrefixRouter(FLOPS, LIMITS)
    for n in range(LIMITS.max_queued):
        router.submit(Job(n, 2, tenant="a"), 0.0)

    gone = router.submit(Job("b", 2, tenant="b"), 0.0)

    assert [job.job_id for job in gone] == [LIMITS.max_queued - 1]
    assert router.num_queued == LIMITS.max_queued
    with pytest.raises(Overloaded):
        router.submit(Job("late", 2, tenant="a"), 0.0)
