"""Places of a tenant, taken by its requests as they come and go."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.services.gateway.access import Places


class Request:
    """Takes places for so many works whenever it may."""

    def __init__(self, places: Places, works: int) -> None:
        self.places, self.left, self.held = places, works, 0
        self.awake = True

    def wake(self) -> None:
        self.awake = True

    def look(self) -> None:
        self.awake = False
        while self.left and self.places.take(self):
            self.left -= 1
            self.held += 1

    def end_one(self) -> None:
        self.held -= 1
        self.awake = True  # it has news
        self.places.give_back(self)
        if not self.left and not self.held:
            self.places.leave(self)


@given(
    most=st.integers(1, 5),
    works=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    ending=st.randoms(use_true_random=False),
)
def test_no_more_than_all_places_are_taken_and_all_works_are_done(
    most: int, works: list[int], ending: random.Random
) -> None:
    places = Places()
    places.most = most
    requests = [Request(places, count) for count in works]

    while open_ones := [request for request in requests if request.left or request.held]:
        for request in open_ones:
            if request.awake:
                request.look()
        assert sum(request.held for request in requests) <= most
        running = [request for request in open_ones if request.held]
        assert running, "works wait, and none is computed"
        ending.choice(running).end_one()


def test_a_request_of_a_few_works_gets_places_beside_one_of_thousands() -> None:
    places = Places()
    places.most = 4
    huge, small = Request(places, 1000), Request(places, 2)
    huge.look()
    small.look()
    assert (huge.held, small.held) == (4, 0)

    for _ in range(2):
        huge.end_one()
        huge.look()
        small.look()

    assert (huge.held, small.held) == (2, 2)


@pytest.mark.parametrize("more", [2, None])
def test_who_wants_a_place_hears_of_it_when_there_are_more(more: int | None) -> None:
    places = Places()
    places.most = 1
    running, waiting = Request(places, 1), Request(places, 1)
    running.look()
    waiting.look()
    assert (waiting.held, waiting.awake) == (0, False)

    places.most = more

    assert waiting.awake
    waiting.look()
    assert waiting.held == 1
