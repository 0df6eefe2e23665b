"""Predictions count what is really sent: an oracle writes down every message of small exchanges."""

from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.dispatch.two_phase.choice.costs import (
    WAYS,
    LinkCost,
    LinkCosts,
    RoundShape,
    Way,
    predict,
    slowest,
    traffic,
)

OWN = 0  # the attention workers' node; expert nodes are 1, 2, ...
ROWS, THERE, BACK = 12, 2, 4  # bytes of a row there, of its sum


class Sent(NamedTuple):
    source: int
    target: int
    nbytes: int


def messages(case: Way, members: int, own: int, nodes: tuple[int, ...]) -> Iterator[Sent]:
    """Every message between workers, from node to node; rows are equally many for each member."""
    share = ROWS // members
    workers = [(OWN, n) for n in range(own)]
    workers += [(node, n) for node, count in enumerate(nodes, start=1) for n in range(count)]
    if case == "direct":
        for _ in range(members):
            for node, _ in workers:
                yield Sent(OWN, node, share * THERE)
                yield Sent(node, OWN, share * BACK)
        return
    for _ in range(members - 1):  # to the one that gathers, and back
        yield Sent(OWN, OWN, share * THERE)
        yield Sent(OWN, OWN, share * BACK)
    for node, n in workers:
        if node == OWN:
            yield Sent(OWN, OWN, ROWS * THERE)
            yield Sent(OWN, OWN, ROWS * BACK)
        elif n == 0:
            yield Sent(OWN, node, ROWS * THERE)
            yield Sent(node, OWN, ROWS * BACK)
        else:
            yield Sent(OWN if case == "reduce" else node, node, ROWS * THERE)
            yield Sent(node, node, ROWS * BACK)
            if case == "reduce":
                yield Sent(node, node, 0)  # come, give me your sum


SMALL = [
    (members, own, nodes)
    for members in (1, 2, 3, 4)
    for own in (0, 1, 2)
    for count in (0, 1, 2, 3)
    for nodes in combinations_with_replacement((1, 2, 3), count)
    if own or nodes
]


@pytest.mark.parametrize("case", WAYS)
def test_counts_are_those_of_the_messages_written_down(case: Way) -> None:
    for members, own, nodes in SMALL:
        moved = traffic(case, RoundShape(members, nodes, own, ROWS * THERE, ROWS * BACK))

        sent = list(messages(case, members, own, nodes))
        inter = [s for s in sent if s.source != s.target]
        intra = [s for s in sent if s.source == s.target == OWN]
        far = [[s for s in sent if s.source == s.target == n] for n in range(1, len(nodes) + 1)]
        assert moved.inter.messages == len(inter)
        assert moved.inter.nbytes == sum(s.nbytes for s in inter)
        assert moved.intra.messages == len(intra)
        assert moved.intra.nbytes == sum(s.nbytes for s in intra)
        assert moved.far.nbytes == max((sum(s.nbytes for s in node) for node in far), default=0)
        assert moved.far.messages == max((len(node) for node in far), default=0)


link_costs = st.builds(
    LinkCost,
    latency_s=st.floats(0, 0.1),
    message_s=st.floats(0, 0.01),
    bytes_per_s=st.floats(1e5, 1e11),
)
shapes = st.builds(
    RoundShape,
    members=st.integers(1, 16),
    instances=st.lists(st.integers(1, 8), max_size=4).map(tuple),
    own_instances=st.integers(0, 4),
    request_bytes=st.integers(0, 1 << 24),
    reply_bytes=st.integers(0, 1 << 24),
)


@given(shapes, link_costs, link_costs)
def test_no_way_is_free_and_slower_links_never_help(
    shape: RoundShape, intra: LinkCost, inter: LinkCost
) -> None:
    now = predict(shape, LinkCosts(intra, inter))
    slower = LinkCost(2 * inter.latency_s, 2 * inter.message_s, inter.bytes_per_s / 2)
    later = predict(shape, LinkCosts(intra, slower))

    assert all(later[case] >= now[case] >= 0 for case in WAYS)


@given(shapes)
def test_two_phases_never_send_more_between_nodes(shape: RoundShape) -> None:
    moved = {case: traffic(case, shape).inter for case in WAYS}

    assert moved["relay"].messages <= moved["reduce"].messages <= moved["direct"].messages
    assert moved["relay"].nbytes <= moved["reduce"].nbytes <= moved["direct"].nbytes


def test_slow_links_between_nodes_ask_for_two_phases_and_slow_ones_inside_do_not() -> None:
    shape = RoundShape(4, (4, 4), 0, 1 << 20, 1 << 20)
    fast, slow = LinkCost(1e-6, 1e-6, 1e11), LinkCost(1e-3, 1e-4, 1e8)
    between = predict(shape, LinkCosts(intra=fast, inter=slow))
    inside = predict(shape, LinkCosts(intra=slow, inter=fast))

    assert min(between, key=between.__getitem__) == "relay"
    assert min(inside, key=inside.__getitem__) == "direct"


def test_the_slowest_is_the_worst_of_each() -> None:
    assert slowest([LinkCost(1, 5, 10), LinkCost(2, 4, 20)]) == LinkCost(2, 5, 10)
