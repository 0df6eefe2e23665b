import pytest

from moesaic.cli.files.tally import RowsTally


def test_labels_are_counted() -> None:
    tally = RowsTally()
    for predicted, truth in [("a", "a"), ("a", "b"), ("b", "b"), ("a", None)]:
        tally.add(predicted, truth)

    assert (tally.answered, tally.judged, tally.correct) == (4, 3, 2)
    assert (tally.labels["a"].precision, tally.labels["a"].recall) == (0.5, 1.0)
    assert (tally.labels["b"].precision, tally.labels["b"].recall) == (1.0, 0.5)


def test_without_known_labels_there_is_no_accuracy() -> None:
    tally = RowsTally()
    tally.add("a", None)

    assert tally.accuracy is None
    assert tally.interval is None


def test_a_label_that_never_came_has_no_rates() -> None:
    tally = RowsTally()
    tally.add("a", "b")

    assert tally.labels["a"].recall is None
    assert tally.labels["b"].precision is None


@pytest.mark.parametrize(
    ("correct", "judged", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 100, 0.7222, 0.8749)],
)
def test_the_interval_is_wilsons(correct: int, judged: int, low: float, high: float) -> None:
    tally = RowsTally(judged=judged, correct=correct)

    assert tally.interval == pytest.approx((low, high), abs=1e-4)
