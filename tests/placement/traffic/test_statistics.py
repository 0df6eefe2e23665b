from collections.abc import Callable
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import InvalidInput
from moesaic.messages.activation import MAX_SAMPLED_BATCHES, MAX_SENT_PAIRS, ActivationWindow
from moesaic.placement.traffic.recorder import MAX_PAIRED_EXPERTS, ActivationRecorder
from moesaic.placement.traffic.statistics import LayerTraffic
from tests.placement.drawn import statistics_of


def distinct(num_rows: int, num_experts: int, top_k: int, seed: int) -> Any:
    """Rows of distinct experts, some of them chosen more often."""
    rng = np.random.default_rng(seed)
    scores = rng.random((num_rows, num_experts)) * np.linspace(1, 2, num_experts)
    return np.argsort(-scores, axis=1)[:, :top_k]


def window_of(recorder: ActivationRecorder) -> ActivationWindow:
    return recorder.take(1.0).window(worker_id="expert-0", generation=1, model_digest="d", epoch=3)


def small_window() -> ActivationWindow:
    recorder = ActivationRecorder(4)
    recorder.record(0, np.array([[0, 1], [1, 3]]))
    return window_of(recorder)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), max_size=8),
    shape=st.tuples(st.integers(2, 12), st.integers(1, 4)),
    seed=st.integers(0, 999),
)
def test_a_window_says_exactly_what_was_recorded(
    sizes: list[int], shape: tuple[int, int], seed: int
) -> None:
    num_experts, top_k = shape[0], min(shape)
    batches = [distinct(size, num_experts, top_k, seed + i) for i, size in enumerate(sizes)]
    recorder = ActivationRecorder(num_experts)
    for batch in batches:
        recorder.record(5, batch.astype(np.uint8))

    window = msgspec.msgpack.decode(
        msgspec.msgpack.encode(window_of(recorder)), type=ActivationWindow
    )

    seen = statistics_of([window], num_experts).traffic([5])[0]
    expected = LayerTraffic.of_batches(batches, num_experts)
    for name in ("tokens", "active_batches", "coactivation", "rows", "batches", "sampled"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(expected, name))


def test_co_activation_counts_the_rows_that_chose_both() -> None:
    batches = [distinct(30, 6, 3, 1), distinct(9, 6, 3, 2)]

    found = LayerTraffic.of_batches(batches, 6).coactivation

    for i, j in combinations(range(6), 2):
        both = sum({i, j} <= set(row) for batch in batches for row in batch.tolist())
        assert found[i, j] == found[j, i] == both
    assert not found.diagonal().any()


def test_long_windows_keep_a_few_batches_evenly() -> None:
    recorder = ActivationRecorder(1000)
    for number in range(1000):  # each of an expert of its own
        recorder.record(0, np.array([[number]]))

    sampled = statistics_of([window_of(recorder)], 1000).layers[0].sampled

    assert MAX_SAMPLED_BATCHES // 2 <= len(sampled) <= MAX_SAMPLED_BATCHES
    assert np.flatnonzero(sampled.any(axis=0)).tolist() == list(range(0, 1000, 32))


def test_pairs_that_are_not_sent_are_estimated_and_add_up() -> None:
    num_experts, top_k = 200, 8
    batch = distinct(500, num_experts, top_k, 0)
    recorder = ActivationRecorder(num_experts)
    recorder.record(0, batch)

    seen = statistics_of([window_of(recorder)], num_experts).traffic([0])[0]

    exact = LayerTraffic.of_batches([batch], num_experts).coactivation
    assert seen.coactivation.sum() == pytest.approx(exact.sum(), rel=1e-4)
    least_sent = np.sort(exact[np.triu_indices(num_experts, 1)])[-MAX_SENT_PAIRS]
    assert (seen.coactivation == exact)[exact > least_sent].all()


def test_too_many_experts_for_a_table_of_pairs_are_taken_as_independent() -> None:
    num_experts = MAX_PAIRED_EXPERTS + 8
    batch = distinct(50, num_experts, 4, 0)
    recorder = ActivationRecorder(num_experts)
    recorder.record(0, batch)

    window = window_of(recorder)

    assert window.layers[0].pair_first == []
    seen = statistics_of([window], num_experts).traffic([0])[0]
    assert seen.coactivation.sum() / 2 == pytest.approx(50 * 6, rel=1e-4)


def test_ids_that_are_no_experts_count_for_nothing() -> None:
    recorder = ActivationRecorder(3)
    recorder.record(0, np.array([[-1, 2], [3, 0]]))
    recorder.record(0, np.zeros((0, 2), np.int32))

    layer = window_of(recorder).layers[0]

    assert (layer.tokens, layer.rows, layer.batches, layer.pair_total) == ([1, 0, 1], 2, 1, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {"num_experts": 5},
        lambda w: {"window_s": float("nan")},
        lambda w: {"window_s": float("inf")},
        lambda w: {"window_s": -1.0},
        lambda w: {"layers": [w.layers[0], w.layers[0]]},
    ],
)
def test_a_window_that_cannot_be_true_is_refused(
    change: Callable[[ActivationWindow], dict[str, Any]],
) -> None:
    window = small_window()

    with pytest.raises(InvalidInput):
        statistics_of([msgspec.structs.replace(window, **change(window))], 4)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 10**30},
        {"rows": -1},
        {"batches": 3},
        {"tokens": [1, 2, 0]},
        {"tokens": [1, 3, 0, 1]},
        {"tokens": [1, -2, 0, 1]},
        {"tokens": [1, float("nan"), 0, 1]},
        {"active_batches": [2, 1, 0, 1]},
        {"pair_first": [3, 1], "pair_second": [1, 3]},
        {"pair_first": [0, 0], "pair_second": [1, 1]},
        {"pair_second": [1, 4]},
        {"pair_count": [2, 1]},
        {"pair_count": [1]},
        {"pair_total": 1},
        {"pair_total": 10**30},
        {"sampled": [b""]},
        {"sampled": [b"\x01"] * (MAX_SAMPLED_BATCHES + 1)},
        {"sampled": [bytes(8)] * 2},  # of one batch
        {"sampled": [bytes([3, 0] * 4)]},  # of two rows
    ],
)
def test_a_layer_that_cannot_be_true_is_refused(change: dict[str, Any]) -> None:
    window = small_window()
    layer = msgspec.structs.replace(window.layers[0], **change)

    with pytest.raises(InvalidInput):
        statistics_of([msgspec.structs.replace(window, layers=[layer])], 4)


def test_old_traffic_fades_and_shares_stay() -> None:
    before = statistics_of([small_window()], 4)

    half = before.decayed(0.5)

    assert half.layers[0].tokens.tolist() == [0.5, 1.0, 0.0, 0.5]
    with pytest.raises(InvalidInput):
        before.decayed(float("nan"))


def test_a_window_without_samples_counts_as_any_other() -> None:
    window = small_window()
    bare = msgspec.structs.replace(window.layers[0], sampled=[])

    seen = statistics_of([msgspec.structs.replace(window, layers=[bare])], 4).layers[0]

    assert seen.sampled.shape == (0, 4)
    assert seen.tokens.tolist() == [1, 2, 0, 1]


def test_samples_have_the_rows_of_every_expert() -> None:
    recorder = ActivationRecorder(3)
    recorder.record(0, np.array([[0, 1], [1, 2], [1, 0]]))
    recorder.record(0, np.tile([0, 2], (70_000, 1)))

    sampled = statistics_of([window_of(recorder)], 3).layers[0].sampled

    assert sampled.tolist() == [[2, 3, 1], [65_535, 0, 65_535]]
