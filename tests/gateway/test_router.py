from hypothesis import given
from hypothesis import strategies as st

from services.gateway.router import route


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 99)), st.sets(st.integers(0, 9)))
def test_the_least_loaded_worker_that_is_not_excluded_is_picked(load, excluded) -> None:
    picked = route(load, excluded)

    left = {key: tokens for key, tokens in load.items() if key not in excluded}
    assert picked is None if not left else left[picked] == min(left.values())
