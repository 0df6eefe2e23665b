import itertools

from hypothesis import given
from hypothesis import strategies as st

from moesaic.services.gateway.generate.answers import StopFinder

TEXTS = st.text(alphabet="ab\u2028", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\u2028", min_size=1, max_size=4), max_size=4)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Grow the text by a character at a time; the first to be complete wins, the longest of several."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


@given(TEXTS, STOPS, st.booleans(), st.lists(st.integers(0, 30), max_size=6))
def test_what_is_shown_does_not_depend_on_the_pieces(text, stops, include, cuts) -> None:
    finder = StopFinder(stops, include=include)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})

    shown = "".join(finder.feed(text[a:b]) for a, b in itertools.pairwise(bounds))
    if finder.hit is None:
        shown += finder.flush()

    assert (shown, finder.hit) == oracle(text, stops, include)


@given(TEXTS, STOPS)
def test_nothing_is_withheld_that_cannot_become_a_stop(text, stops) -> None:
    finder = StopFinder(stops)

    shown = finder.feed(text)

    held = text[len(shown) :]
    assert finder.hit or not held or any(stop.startswith(held) for stop in stops)
