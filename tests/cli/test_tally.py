import pytest

from moesaic.cli.files.tally import LabelCount, RowsTally


def test_labels_are_counted() -> None:
    tally = RowsTally()
    for predicted, truth in [("a", "a"), ("a", "b"), ("b", "b"), ("a", None)]:
        tally.add(predicted, truth)

    assert (tally.answered, tally.judged, tally.correct) == (4, 3, 2)
    assert tally.labels == {"a": LabelCount(1, 2, 1), "b": LabelCount(2, 1, 1)}


def test_without_known_labels_there_is_no_accuracy() -> None:
    tally = RowsTally()
    tally.add("a", None)

    assert tally.accuracy is None
    assert tally.interval is None


@pytest.mark.parametrize(
    ("correct", "judged", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 100, 0.7222, 0.8749)],
)
def test_the_interval_is_wilsons(correct: int, judged: int, low: float, high: float) -> None:
    tally = RowsTally(judged=judged, correct=correct)

    assert tally.interval == pytest.approx((low, high), abs=1e-4)
