"""Whether some more may wait is what the queue itself would say of them."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from moesaic.fairness import Claim, who_gives_way
from moesaic.prefix.fleet import Crowd, Room

UNBOUNDED = 1 << 30
KINDS = st.tuples(st.sampled_from("abc"), st.integers(-1, 2))


@dataclass(frozen=True)
class Holder:
    claim: Claim


@given(st.lists(KINDS, max_size=12), KINDS, st.integers(1, 5), st.integers(1, 12))
def test_runs_may_wait_exactly_if_the_queue_would_take_all_of_them(
    waiting: list[tuple[str, int]], newcomer: tuple[str, int], count: int, most: int
) -> None:
    crowd = Crowd()
    for tenant, priority in waiting:
        crowd.join(tenant, priority, 0)
    holders = [Holder(Claim(tenant, str(i), p, i)) for i, (tenant, p) in enumerate(waiting)]
    claim = Claim(newcomer[0], "new", newcomer[1], len(waiting))
    free = max(0, most - len(waiting))

    takes = crowd.takes(*newcomer, Room(count, 0), Room(most, UNBOUNDED))

    leaving = who_gives_way(claim, count, free, holders, lambda _: 1, among_requests=False)
    assert takes is (leaving is not None)


@given(st.lists(st.tuples(KINDS, st.integers(0, 50), st.booleans()), max_size=20))
def test_the_crowd_is_what_has_come_and_not_left(
    events: list[tuple[tuple[str, int], int, bool]],
) -> None:
    crowd = Crowd()
    for (tenant, priority), num_tokens, stays in events:
        crowd.join(tenant, priority, num_tokens)
        if not stays:
            crowd.leave(tenant, priority, num_tokens)

    assert crowd.num_requests == sum(stays for *_, stays in events)
    assert crowd.num_tokens == sum(tokens for _, tokens, stays in events if stays)


def test_tokens_are_bounded_too_and_one_prompt_is_always_taken() -> None:
    crowd, room = Crowd(), Room(10, 100)

    assert crowd.takes("a", 0, Room(1, 1000), room)
    crowd.join("a", 0, 80)
    assert crowd.takes("a", 0, Room(1, 20), room)
    assert not crowd.takes("a", 0, Room(1, 21), room)
    assert crowd.takes("b", 0, Room(1, 21), room)  # of whom less waits
    assert crowd.takes("b", 0, Room(2, 46), room)
    assert not crowd.takes("b", 0, Room(2, 54), room)  # as much as that nobody has to leave
    assert crowd.takes("a", -1, Room(1, 21), room)
    assert not crowd.takes("a", 1, Room(1, 21), room)
