"""Many rows are relayed to other nodes, few go directly, unless the operator names a way."""

import pytest

from moesaic.dispatch.two_phase.nodes import Nodes
from moesaic.dispatch.two_phase.way import MANY_ROWS, WAYS, Way, way_of

ALONE, PAIRS = Nodes((0, 1), ()), Nodes((), ((0, 1), (2, 3)))
ONE_EACH = Nodes((), ((0,), (1,)))


@pytest.mark.parametrize(
    ("rows", "way"), [(0, "direct"), (MANY_ROWS - 1, "direct"), (MANY_ROWS, "relay")]
)
def test_the_rows_of_a_node_decide(rows: int, way: Way) -> None:
    assert way_of("auto", PAIRS, rows, has_neighbours=True) == way
    assert way_of("auto", PAIRS, rows, has_neighbours=False) == way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [0, MANY_ROWS])
def test_a_way_that_is_named_is_gone_with_any_number_of_rows(way: Way, rows: int) -> None:
    assert way_of(way, PAIRS, rows, has_neighbours=True) == way


@pytest.mark.parametrize("mode", ["auto", *WAYS])
def test_rows_go_directly_where_nothing_can_be_shared(mode: Way) -> None:
    assert way_of(mode, ALONE, MANY_ROWS, has_neighbours=True) == "direct"
    assert way_of(mode, ONE_EACH, MANY_ROWS, has_neighbours=False) == "direct"


def test_neighbours_share_also_with_nodes_of_one_worker() -> None:
    assert way_of("auto", ONE_EACH, MANY_ROWS, has_neighbours=True) == "relay"
