from hypothesis import given
from hypothesis import strategies as st

from moesaic.dispatch.collaborative.costs import LinkProfile, PeerCosts
from moesaic.dispatch.collaborative.sources import FILES, FileCost, choose_sources

FAST = LinkProfile(rtt_s=1e-4, bytes_per_s=1e9)
SLOW = LinkProfile(rtt_s=1e-2, bytes_per_s=1e6)
ROW_BYTES = 2048


def test_rows_go_to_the_holder_that_is_done_first() -> None:
    sources = choose_sources({7: 10}, {7: (0, 1)}, {0: SLOW, 1: FAST}, None, ROW_BYTES)

    assert sources == {1: [7]}


def test_a_busy_holder_is_passed_over() -> None:
    busy = LinkProfile(rtt_s=1e-4, bytes_per_s=1e9, message_s=0.5)

    assert choose_sources({7: 1}, {7: (0, 1)}, {0: busy, 1: SLOW}, None, ROW_BYTES) == {1: [7]}


def test_many_rows_are_divided_among_holders() -> None:
    link = LinkProfile(rtt_s=1e-3, bytes_per_s=1e6)
    wanted = dict.fromkeys(range(8), 100)

    sources = choose_sources(
        wanted, dict.fromkeys(range(8), (0, 1)), {0: link, 1: link}, None, ROW_BYTES
    )

    assert [len(sources[0]), len(sources[1])] == [4, 4]


def test_few_rows_share_one_message() -> None:
    wanted = dict.fromkeys(range(3), 1)

    sources = choose_sources(
        wanted, dict.fromkeys(range(3), (0, 1)), {0: FAST, 1: FAST}, None, ROW_BYTES
    )

    assert len(sources) == 1


def test_files_serve_what_no_peer_holds_and_what_a_link_would_take_longer_for() -> None:
    files = FileCost(load_s=0.001)

    assert choose_sources({1: 1}, {}, {}, files, ROW_BYTES) == {FILES: [1]}
    assert choose_sources({1: 1}, {1: (0,)}, {0: SLOW}, files, ROW_BYTES) == {FILES: [1]}
    assert choose_sources({1: 1}, {1: (0,)}, {0: FAST}, files, ROW_BYTES) == {0: [1]}


@given(
    st.dictionaries(st.integers(0, 9), st.integers(1, 50)),
    st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 3), unique=True).map(tuple)),
    st.sets(st.integers(0, 3)),
    st.booleans(),
)
def test_each_expert_has_one_source_that_holds_it(
    wanted: dict[int, int],
    holders: dict[int, tuple[int, ...]],
    live: set[int],
    with_files: bool,
) -> None:
    files = FileCost(load_s=0.01) if with_files else None

    sources = choose_sources(wanted, holders, dict.fromkeys(live, FAST), files, ROW_BYTES)

    chosen = [expert for experts in sources.values() for expert in experts]
    assert len(chosen) == len(set(chosen))
    for source, experts in sources.items():
        for expert in experts:
            assert source == FILES or (source in live and source in holders[expert])
    possible = {e for e in wanted if with_files or live & set(holders.get(e, ()))}
    assert set(chosen) == possible


def test_costs_follow_a_link_and_a_peer_that_change() -> None:
    costs = PeerCosts()
    for _ in range(20):
        costs.probed(0.001, 65536 / 0.002)
        for rows in (1, 10, 100):
            costs.exchanged(
                rows, ROW_BYTES, costs.profile.transfer_s(rows * ROW_BYTES) + rows * 1e-4
            )
    known = costs.profile

    assert abs(known.rtt_s - 0.001) < 1e-5
    assert abs(known.bytes_per_s / (65536 / 0.002) - 1) < 0.01
    assert abs(known.row_s / 1e-4 - 1) < 0.05

    for _ in range(30):
        costs.probed(0.02, 65536 / 0.1)
    assert costs.profile.rtt_s > 0.015
    assert costs.profile.bytes_per_s < 2 * 65536 / 0.1


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 1)), min_size=1, max_size=60))
def test_no_learnt_cost_is_negative(exchanges: list[tuple[int, float]]) -> None:
    costs = PeerCosts()
    costs.probed(1e-4, 1e8)

    for rows, seconds in exchanges:
        costs.exchanged(rows, ROW_BYTES, seconds)

        assert costs.profile.message_s >= 0
        assert costs.profile.row_s >= 0
