"""The room for compiled grammars is bounded, and no tenant's flood takes another's share of it."""

from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.sequences.grammar import GrammarCache

ROOM = 12
TENANTS = ("a", "b", "c")
SHARE = ROOM // len(TENANTS)
USES = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 9)), max_size=60)


def size(number: int) -> int:
    """Bytes of a grammar; some are larger than all the room."""
    return (1, 1, 1, 2, 2, 3, 4, 7, 12, 13)[number]


def use(cache: GrammarCache[int], tenant: str, number: int) -> bool:
    """Ask for a grammar as a request does, and tell whether it was kept."""
    source = "regex", str(number)
    if (kept := cache.get(source, tenant)) is not None:
        assert kept == number
        return True
    cache.put(source, tenant, number, size(number))
    return False


@given(USES)
def test_what_is_kept_has_room(uses: list[tuple[str, int]]) -> None:
    cache: GrammarCache[int] = GrammarCache(ROOM)

    for tenant, number in uses:
        use(cache, tenant, number)
        assert cache.num_bytes <= ROOM


@given(USES)
def test_a_tenant_within_its_share_keeps_its_grammars(uses: list[tuple[str, int]]) -> None:
    cache: GrammarCache[int] = GrammarCache(ROOM)
    mine = [0, 1, 3]  # these three just fill a share
    assert sum(map(size, mine)) == SHARE
    for number in mine:
        use(cache, "modest", number)

    for tenant, number in uses:  # three others, who may use the same grammars too
        if tenant != "c":
            use(cache, tenant, number)

    assert all(cache.get(("regex", str(number)), "modest") == number for number in mine)
