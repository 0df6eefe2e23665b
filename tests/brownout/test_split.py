"""The split of choices: the paper's examples, and what holds of every batch."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moesaic.brownout.split import NOBODY, Choices, Layer, Level, split_choices, staying
from moesaic.messages.substitution import Instead, Substitution

# Rows that each of eight experts gets in figure 5 of the paper.
FIGURE_5 = (2, 4, 1, 5, 2, 1, 2, 3)


def one_choice_each(counts: tuple[int, ...]) -> NDArray[np.int32]:
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)[:, None]


def layer_of(num_experts: int, way: int, instead: str = "united", **more) -> Layer:
    return Layer(num_experts, Substitution(way=way, instead=instead), **more)


def split(
    ids: NDArray[np.int32], threshold: float, way: int, instead: str = "united", **more
) -> Choices:
    weights = np.ones(ids.shape, dtype=np.float32)
    rows = np.zeros(len(ids), dtype=np.uint8)
    layer = layer_of(8, way, instead, **more)
    return split_choices(ids, weights, [Level(threshold)], rows, layer)


def rows_by_expert(choices: Choices) -> dict[int, int]:
    ids, counts = np.unique(choices.ids[choices.ids != NOBODY], return_counts=True)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def test_popular_experts_stay_and_two_united_ones_serve_the_others() -> None:
    """Figure 5a: ways of four."""
    choices = split(one_choice_each(FIGURE_5), 0.6, way=4)

    assert rows_by_expert(choices) == {1: 4, 3: 5, 7: 3, 8 + 0: 3, 8 + 1: 5}
    assert choices.degraded.sum() == 8


def test_an_expert_that_would_go_alone_stays() -> None:
    """Figure 5b: ways of three, of whose last only expert 6 would go."""
    choices = split(one_choice_each(FIGURE_5), 0.6, way=3)

    assert rows_by_expert(choices) == {1: 4, 3: 5, 7: 3, 6: 2, 8 + 0: 3, 8 + 1: 3}


def test_full_brownout_leaves_the_others_out() -> None:
    choices = split(one_choice_each(FIGURE_5), 0.6, way=4, instead="nothing")

    assert rows_by_expert(choices) == {1: 4, 3: 5, 7: 3}
    assert choices.weights.sum() == 12


def test_choices_of_a_row_for_one_group_are_one_with_the_sum_of_their_weights() -> None:
    ids = np.array([[0, 5, 1, 2]], dtype=np.int32)
    weights = np.array([[0.4, 0.3, 0.2, 0.1]], dtype=np.float32)

    choices = split_choices(ids, weights, [Level(0.0)], np.zeros(1, dtype=np.uint8), layer_of(8, 4))

    assert choices.ids.tolist() == [[8, 5, NOBODY, NOBODY]]
    np.testing.assert_allclose(choices.weights, [[0.7, 0.3, 0, 0]], rtol=1e-6)
    assert choices.degraded.tolist() == [3]


def test_fewer_experts_weigh_as_much_as_all_did() -> None:
    ids = np.array([[0, 1], [0, 2], [0, 3]], dtype=np.int32)
    weights = np.array([[0.6, 0.2]] * 3, dtype=np.float32)

    rows = np.zeros(3, dtype=np.uint8)
    choices = split_choices(ids, weights, [Level(0.5)], rows, layer_of(8, 4, "fewer"))

    assert choices.ids.tolist() == [[0, NOBODY]] * 3
    np.testing.assert_allclose(choices.weights, [[0.8, 0]] * 3, rtol=1e-6)


def test_of_fewer_experts_each_row_keeps_its_heaviest() -> None:
    ids = np.array([[0, 1], [0, 2], [3, 4]], dtype=np.int32)
    weights = np.array([[0.6, 0.2], [0.3, 0.5], [0.4, 0.4]], dtype=np.float32)

    rows = np.zeros(3, dtype=np.uint8)
    choices = split_choices(ids, weights, [Level(0.0)], rows, layer_of(8, 4, "fewer"))

    # The second row does not keep expert 0, although the first one does.
    assert choices.ids.tolist() == [[0, NOBODY], [NOBODY, 2], [3, NOBODY]]
    np.testing.assert_allclose(choices.weights, [[0.8, 0], [0, 0.8], [0.8, 0]], rtol=1e-6)

    ids[2] = [4, 0]
    choices = split_choices(ids, weights, [Level(0.5)], rows, layer_of(8, 4, "fewer"))

    # Expert 0 stays for all; that does not cost a row its heaviest, of equal ones the lowest.
    assert choices.ids.tolist() == [[0, NOBODY], [0, 2], [NOBODY, 0]]


@st.composite
def batches(
    draw: st.DrawFn, instead: str | None = "united", *, may_lose: bool = False
) -> dict[str, object]:
    num_experts, way = draw(st.integers(2, 24)), draw(st.integers(1, 8))
    instead = draw(st.sampled_from(get_args(Instead)) if instead is None else st.just(instead))
    top_k, num_rows = draw(st.integers(1, min(6, num_experts))), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    popular = rng.random(num_experts) ** 3 + 0.01
    ids = np.array(
        [
            rng.choice(num_experts, top_k, replace=False, p=popular / popular.sum())
            for _ in range(num_rows)
        ],
        dtype=np.int32,
    )
    shares = st.sampled_from((0.0, 0.2, 0.4, 0.5, 0.75, 0.9, 1.0))
    levels = draw(st.lists(st.builds(Level, shares, st.integers(0, 1)), min_size=1, max_size=4))
    return {
        "topk_ids": ids,
        "topk_weights": rng.random(ids.shape, dtype=np.float32),
        "levels": levels,
        "level_of_row": rng.integers(0, len(levels), num_rows).astype(np.uint8),
        "layer": layer_of(
            num_experts,
            way,
            instead,
            lost=rng.random(num_experts) < 0.2 if may_lose and draw(st.booleans()) else None,
            homes=rng.integers(0, min(4, num_experts), num_experts).astype(np.int32)
            if draw(st.booleans())
            else None,
        ),
    }


@given(batches())
def test_no_weight_is_lost_and_nothing_is_served_twice(batch) -> None:
    choices = split_choices(**batch)

    np.testing.assert_allclose(
        choices.weights.sum(axis=1), batch["topk_weights"].sum(axis=1), rtol=1e-5
    )
    assert ((choices.ids == NOBODY) == (choices.weights == 0)).all()
    num_experts, substitution = batch["layer"].num_experts, batch["layer"].substitution
    assert choices.ids.max() < num_experts + substitution.num_united(num_experts)
    for row in choices.ids:
        real = row[row != NOBODY]
        assert len(set(real.tolist())) == len(real)
    by_united = {}
    for row, wanted in zip(choices.ids, batch["topk_ids"], strict=True):
        for expert in wanted:
            united = num_experts + expert // substitution.way
            assert expert in row or united in row
            if expert not in row:
                by_united.setdefault(int(united), set()).add(int(expert))
    # One expert alone gives its rows to nobody.
    assert all(len(experts) > 1 for experts in by_united.values())


@given(batches())
def test_at_a_threshold_of_one_nothing_changes(batch) -> None:
    exact = [Level(1.0, level.phase) for level in batch["levels"]]

    choices = split_choices(**{**batch, "levels": exact})

    assert choices.ids.tobytes() == batch["topk_ids"].tobytes()
    assert choices.weights.tobytes() == batch["topk_weights"].tobytes()
    assert not choices.degraded.any()


@given(batches())
def test_rows_that_were_promised_everything_get_it_whatever_runs_beside_them(batch) -> None:
    choices = split_choices(**batch)

    exact = np.array([level.threshold == 1 for level in batch["levels"]])[batch["level_of_row"]]
    assert (choices.ids[exact] == batch["topk_ids"][exact]).all()
    assert (choices.weights[exact] == batch["topk_weights"][exact]).all()
    assert not choices.degraded[exact].any()


@given(batches(instead=None, may_lose=True))
def test_a_lower_promise_never_means_more_of_the_own_experts(batch) -> None:
    shares = []
    for lowered in (0.0, 0.1, 0.3):
        levels = [
            level
            if level.threshold == 1
            else Level(max(0.0, level.threshold - lowered), level.phase)
            for level in batch["levels"]
        ]
        choices = split_choices(**{**batch, "levels": levels})
        shares.append(choices.degraded.sum())

    assert shares == sorted(shares)


@given(batches())
def test_promises_hold(batch) -> None:
    """Of the choices of each level's rows, alone in their phase, the promised share is not degraded."""
    ids, threshold = batch["topk_ids"], batch["levels"][0].threshold
    choices = split_choices(
        **{
            **batch,
            "levels": batch["levels"][:1],
            "level_of_row": np.zeros_like(batch["level_of_row"]),
        }
    )

    kept = np.array(
        [expert in row for row, wanted in zip(choices.ids, ids, strict=True) for expert in wanted]
    )
    assert kept.sum() >= threshold * len(kept) - 1e-6 * len(kept)


@given(batches(instead=None, may_lose=True))
def test_lost_experts_serve_nobody(batch) -> None:
    lost = batch["layer"].lost
    choices = split_choices(**batch)

    if lost is not None:
        assert not np.isin(choices.ids, np.flatnonzero(lost)).any()
        assert (choices.degraded >= lost[batch["topk_ids"]].sum(axis=1)).all()


@given(batches("fewer", may_lose=True))
def test_of_fewer_experts_each_row_has_its_heaviest_and_none_loses_weight(batch) -> None:
    lost = batch["layer"].lost
    choices = split_choices(**batch)
    weights = batch["topk_weights"]
    if lost is not None:
        weights = np.where(lost[batch["topk_ids"]], 0, weights)
    heaviest = weights.argmax(axis=1)
    for row, choice in enumerate(heaviest):  # drawn weights differ, and none is 0
        if weights[row, choice]:
            assert choices.ids[row, choice] == batch["topk_ids"][row, choice]

    possible = np.ones(len(batch["topk_ids"]), bool)
    if lost is not None:
        possible = ~lost[batch["topk_ids"]].all(axis=1)
    assert ((choices.ids != NOBODY).any(axis=1) == possible).all()
    np.testing.assert_allclose(
        choices.weights.sum(axis=1)[possible],
        batch["topk_weights"].sum(axis=1)[possible],
        rtol=1e-5,
    )


def test_an_expert_that_is_lost_leaves_its_rows_to_its_united_one_alone() -> None:
    lost = np.array([False, True, *[False] * 6])

    choices = split(one_choice_each(FIGURE_5), 1.0, way=4, lost=lost)

    assert rows_by_expert(choices) == {0: 2, 8: 4, 2: 1, 3: 5, 4: 2, 5: 1, 6: 2, 7: 3}


def test_what_is_degraded_goes_from_the_instance_with_most_to_compute() -> None:
    """Of figure 5's rows; one worker has the three most popular experts."""
    homes = np.array([1, 0, 1, 0, 1, 1, 1, 0], dtype=np.int32)

    by_tokens = split(one_choice_each(FIGURE_5), 0.6, way=4)
    by_instances = split(one_choice_each(FIGURE_5), 0.6, way=4, homes=homes)

    assert sorted(rows_by_expert(by_tokens)) == [1, 3, 7, 8, 9]
    # 3 and 0 come first, then 1 and 4: 13 rows of 20. Expert 2 would go alone.
    assert sorted(rows_by_expert(by_instances)) == [0, 1, 2, 3, 4, 9]


@given(st.integers(2, 32), st.integers(1, 5), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_no_instance_keeps_two_experts_more_than_it_must(
    num_experts, num_homes, share, seed
) -> None:
    rng = np.random.default_rng(seed)
    homes = rng.integers(0, min(num_homes, num_experts), num_experts).astype(np.int32)
    ids = (rng.random((40, 1)) ** 2 * num_experts).astype(np.int32)
    rows, layer = np.zeros(40, np.uint8), layer_of(num_experts, 1, "nothing", homes=homes)

    stay = staying(ids, [Level(share)], rows, layer)

    chosen = np.unique(ids)
    kept = np.bincount(homes[stay], minlength=num_homes)
    has = np.bincount(homes[chosen], minlength=num_homes)
    assert all(kept[h] >= min(has[h], kept.max() - 1) for h in range(num_homes))


@pytest.mark.parametrize("instead", ["united", "nothing"])
def test_promises_of_one_phase_do_not_count_the_rows_of_another(instead) -> None:
    ids = np.array([[0]] * 9 + [[1]] * 3 + [[2]] * 2 + [[3]], dtype=np.int32)
    rows = np.array([0] * 9 + [1] * 6, dtype=np.uint8)
    weights = np.ones(ids.shape, dtype=np.float32)

    choices = split_choices(
        ids, weights, [Level(0.5, 0), Level(0.5, 1)], rows, layer_of(4, 2, instead)
    )

    assert choices.ids[:12].ravel().tolist() == [0] * 9 + [1] * 3
    assert choices.degraded.tolist() == [0] * 12 + [1] * 3
