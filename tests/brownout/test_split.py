"""The split of choices: the paper's examples, and what holds of every batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moesaic.brownout.split import NOBODY, Choices, Level, num_united, split_choices

# Rows that each of eight experts gets in figure 5 of the paper.
FIGURE_5 = (2, 4, 1, 5, 2, 1, 2, 3)


def one_choice_each(counts: tuple[int, ...]) -> NDArray[np.int32]:
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)[:, None]


def split(
    ids: NDArray[np.int32], threshold: float, way: int, num_experts: int = 8, **more
) -> Choices:
    weights = np.ones(ids.shape, dtype=np.float32)
    rows = np.zeros(len(ids), dtype=np.uint8)
    return split_choices(ids, weights, [Level(threshold)], rows, num_experts, way, **more)


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

    choices = split_choices(ids, weights, [Level(0.0)], np.zeros(1, dtype=np.uint8), 8, 4)

    assert choices.ids.tolist() == [[8, 5, NOBODY, NOBODY]]
    np.testing.assert_allclose(choices.weights, [[0.7, 0.3, 0, 0]], rtol=1e-6)
    assert choices.degraded.tolist() == [3]


def test_fewer_experts_weigh_as_much_as_all_did() -> None:
    ids = np.array([[0, 1], [0, 2], [0, 3]], dtype=np.int32)
    weights = np.array([[0.6, 0.2]] * 3, dtype=np.float32)

    choices = split_choices(
        ids, weights, [Level(0.5)], np.zeros(3, dtype=np.uint8), 8, 4, instead="fewer"
    )

    assert choices.ids.tolist() == [[0, NOBODY]] * 3
    np.testing.assert_allclose(choices.weights, [[0.8, 0]] * 3, rtol=1e-6)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, object]:
    num_experts, way = draw(st.integers(2, 24)), draw(st.integers(1, 8))
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
        "num_experts": num_experts,
        "way": way,
    }


@given(batches())
def test_no_weight_is_lost_and_nothing_is_served_twice(batch) -> None:
    choices = split_choices(**batch)

    np.testing.assert_allclose(
        choices.weights.sum(axis=1), batch["topk_weights"].sum(axis=1), rtol=1e-5
    )
    assert ((choices.ids == NOBODY) == (choices.weights == 0)).all()
    assert choices.ids.max() < batch["num_experts"] + num_united(batch["num_experts"], batch["way"])
    for row in choices.ids:
        real = row[row != NOBODY]
        assert len(set(real.tolist())) == len(real)
    by_united = {}
    for row, wanted in zip(choices.ids, batch["topk_ids"], strict=True):
        for expert in wanted:
            united = batch["num_experts"] + expert // batch["way"]
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


@given(batches(), st.sampled_from(("united", "nothing")))
def test_a_lower_promise_never_means_more_of_the_own_experts(batch, instead) -> None:
    shares = []
    for lowered in (0.0, 0.1, 0.3):
        levels = [
            level
            if level.threshold == 1
            else Level(max(0.0, level.threshold - lowered), level.phase)
            for level in batch["levels"]
        ]
        choices = split_choices(**{**batch, "levels": levels}, instead=instead)
        shares.append(choices.degraded.sum())

    assert shares == sorted(shares)


@given(batches())
def test_promises_hold(batch) -> None:
    """Of the choices of each level's rows, alone in their phase, the promised share is not degraded."""
    choices = split_choices(
        **{
            **batch,
            "levels": batch["levels"][:1],
            "level_of_row": np.zeros_like(batch["level_of_row"]),
        }
    )

    total = batch["topk_ids"].size
    assert choices.degraded.sum() <= total - np.ceil(batch["levels"][0].threshold * total - 1e-9)


@pytest.mark.parametrize("instead", ["united", "fewer", "nothing"])
def test_promises_of_one_phase_do_not_count_the_rows_of_another(instead) -> None:
    ids = np.array([[0]] * 9 + [[1]] * 3 + [[2]] * 2 + [[3]], dtype=np.int32)
    rows = np.array([0] * 9 + [1] * 6, dtype=np.uint8)
    weights = np.ones(ids.shape, dtype=np.float32)

    choices = split_choices(ids, weights, [Level(0.5, 0), Level(0.5, 1)], rows, 4, 2, instead)

    assert choices.ids[:12].ravel().tolist() == [0] * 9 + [1] * 3
    assert choices.degraded.tolist() == [0] * 12 + [1] * 3
