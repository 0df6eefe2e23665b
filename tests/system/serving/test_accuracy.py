"""Labels of one token are what the model generates: a sample of ``moesaic bench accuracy``."""

from typing import Any

import pytest

from benchmarks.accuracy import SETS, LabelledSet, ask, form_of, read_set
from moesaic.services.gateway.language import Language
from tests.suites import DEMO

ROWS = 24
ONE_TOKEN = [labelled for labelled in SETS if labelled.method != "sequence"]


@pytest.fixture(scope="module")
def language() -> Language:
    return Language(DEMO)


@pytest.mark.parametrize(
    "labelled",
    [
        pytest.param(each, id=str(each.name), marks=[pytest.mark.slow] if number else [])
        for number, each in enumerate(ONE_TOKEN)
    ],
)
def test_the_label_of_a_prefill_is_what_the_model_generates(
    local: Any, language: Language, labelled: LabelledSet
) -> None:
    labels, rows = read_set(labelled, ROWS)
    with local.client() as client:
        outcome = ask(client, form_of(language, labelled, labels), rows)

    assert outcome.rows == outcome.compared == ROWS
    assert outcome.differences == []
    assert outcome.agrees
    assert all(0 <= mass <= 1 for mass in outcome.masses)
