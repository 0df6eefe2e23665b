"""Layers come in the order in which steps compute them, and no buffer is written to while it is used."""

from hypothesis import given
from hypothesis import strategies as st

from moesaic.dispatch.gathered.ring import Fill, Ring


class Transfers:
    """Fills that end when they are told to, each behind the one before it in its buffer."""

    def __init__(self) -> None:
        self.started: list[Fill] = []
        self.orders = 0

    def start(self, fill: Fill) -> None:
        self.orders += 1
        self.started.append(fill)

    def settle(self, upto: Fill) -> None:
        """End everything up to ``upto``."""
        while not upto.done.done():
            fill = self.started.pop(0)
            assert fill.after is None or fill.after.done.done()
            fill.after = None
            fill.done.set_result(None)


@given(
    num_layers=st.integers(1, 9),
    num_buffers=st.integers(1, 9),
    steps=st.lists(st.integers(0, 9), max_size=12),
)
def test_whole_and_broken_steps_find_each_layer_in_a_slot_of_its_own(
    num_layers: int, num_buffers: int, steps: list[int]
) -> None:
    layers = list(range(10, 10 + num_layers))
    transfers = Transfers()
    ring = Ring(layers, min(num_buffers, num_layers), transfers.start)
    ring.prime()

    for length in steps:
        for layer in layers[:length]:
            fill = ring.enter(layer)
            transfers.settle(fill)
            assert fill.layer == layer
            assert fill.done.result() is None
            assert all(f.buffer != fill.buffer for f in transfers.started if f.wanted)
            ring.leave(fill)
        if length < num_layers:
            ring.enter(layers[0])


@given(num_layers=st.integers(1, 9), num_steps=st.integers(1, 5))
def test_with_room_for_all_layers_each_comes_once(num_layers: int, num_steps: int) -> None:
    transfers = Transfers()
    ring = Ring(range(num_layers), num_layers, transfers.start)
    ring.prime()

    for _ in range(num_steps):
        for layer in range(num_layers):
            fill = ring.enter(layer)
            transfers.settle(fill)
            ring.leave(fill)

    assert transfers.orders == num_layers


def test_a_failed_fill_is_tried_again() -> None:
    transfers = Transfers()
    ring = Ring([1, 2, 3], 2, transfers.start)
    ring.prime()
    failed = ring.enter(1)
    failed.done.set_exception(OSError("gone"))

    again = ring.enter(1)

    assert again is not failed
    assert again.layer == 1
