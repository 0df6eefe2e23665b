import numpy as np
import pytest

from moesaic.errors import InvalidInput
from moesaic_lab.placement.activated import ActivatedExperts
from moesaic_lab.placement.drawn_routing import RoutingSkew, draw_layers

LAYERS = draw_layers(2, 512, num_experts=32, top_k=4, seed=0)


def test_drawn_rows_choose_different_experts_and_repeat_by_seed() -> None:
    again = draw_layers(2, 512, num_experts=32, top_k=4, seed=0)

    assert all((a == b).all() for a, b in zip(LAYERS, again, strict=True))
    assert all(len(set(row)) == 4 for row in LAYERS[0].tolist())


def test_more_skew_makes_the_busiest_expert_busier() -> None:
    def busiest(skew: float) -> int:
        rows = draw_layers(1, 2048, 32, 4, 0, RoutingSkew(skew=skew))[0]
        return int(np.bincount(rows.ravel()).max())

    assert busiest(0.0) < busiest(0.5) < busiest(1.0)


def test_one_row_on_as_many_instances_as_experts_activates_one_expert_each() -> None:
    single = ActivatedExperts(LAYERS, 32, "single")

    assert single.largest(instances=32, slots=1, rows=1) == 1.0


def test_many_rows_activate_every_expert_of_an_instance() -> None:
    single = ActivatedExperts(LAYERS, 32, "single")

    assert single.largest(instances=4, slots=8, rows=10_000) == 8.0


@pytest.mark.parametrize("rows", [4, 16, 64])
def test_aebs_activates_no_more_than_replicas_drawn_by_chance(rows: int) -> None:
    aebs, drawn = (ActivatedExperts(LAYERS, 32, choice) for choice in ("aebs", "random"))

    assert aebs.largest(8, 8, rows) <= drawn.largest(8, 8, rows)


def test_counts_grow_with_rows_and_shrink_with_instances() -> None:
    aebs = ActivatedExperts(LAYERS, 32)

    by_rows = [aebs.largest(6, 8, rows) for rows in (1, 4, 16, 64, 256)]
    by_instances = [aebs.largest(instances, 8, 64) for instances in (4, 6, 9, 16)]

    assert by_rows == sorted(by_rows)
    assert by_instances == sorted(by_instances, reverse=True)


def test_counts_between_lie_between() -> None:
    aebs = ActivatedExperts(LAYERS, 32)

    assert aebs.largest(8, 8, 16) <= aebs.largest(8, 8, 24) <= aebs.largest(8, 8, 32)


def test_choices_that_brownout_takes_activate_nothing() -> None:
    def popular(topk_ids: np.ndarray) -> np.ndarray:
        return np.where(topk_ids < 16, topk_ids, -1)

    kept = ActivatedExperts(LAYERS, 32, keep=popular)

    assert kept.largest(4, 8, 256) < ActivatedExperts(LAYERS, 32).largest(4, 8, 256)


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must hold 32 experts"):
        ActivatedExperts(LAYERS, 32).largest(instances=3, slots=8, rows=1)
