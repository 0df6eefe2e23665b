"""For every value of every field of a family's class, logits equal those of transformers, or an error names a field."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.parity.cases import Served
from benchmarks.parity.configurations import CLASSES
from moesaic.errors import CheckpointError
from moesaic.models.configuration.config import load_config
from tests.models.configuration.alterations import PROMPT, Alteration, alterations, reference

TOLERANCE = 1e-4  # of the standard deviation of logits, or of 1
SAMPLED = 251  # every so many of the valid alterations


def found_of(alteration: Alteration, directory: Path) -> str:
    """Return the result of an alteration: ``equal``, ``refused``, ``no reference``, ``short``, or the fault."""
    expected = reference(alteration, directory)
    try:
        if expected is None:
            load_config(directory)
            return "no reference"
        served = Served(directory)
    except CheckpointError as error:
        fields = (*alteration.file, *alteration.changes, "are not part of")
        named = any(name in str(error) for name in fields)
        return "refused" if named else f"names no field: {error}"
    if served.config.max_positions < len(PROMPT):
        return "short"
    logits = served.forward([(PROMPT, 0, list(range(4)))])
    if logits.shape != expected.shape:
        return f"{list(logits.shape)} instead of {list(expected.shape)}"
    error_of_it = float((logits - expected).abs().max())
    most = TOLERANCE * max(1.0, float(expected.std()))
    return "equal" if error_of_it <= most else f"off by {error_of_it}"


def compare(some: Iterable[Alteration]) -> Counter[str]:
    """Count the results of alterations; fail if one is a fault."""
    counted, wrong = Counter[str](), list[str]()
    for alteration in some:
        with TemporaryDirectory() as directory:
            found = found_of(alteration, Path(directory))
        if found in ("equal", "refused", "no reference", "short"):
            counted[found] += 1
        else:
            wrong.append(f"{alteration}: {found}")
    assert not wrong, "\n".join(wrong)
    return counted


@pytest.mark.parametrize("family", CLASSES)
def test_a_sample_of_altered_configurations_means_what_it_means_in_transformers(
    family: str,
) -> None:
    usual = [each for each in alterations(family) if not each.odd]
    # The first ones are unchanged files of the family's class; the others are a sample of all.
    sample = [*usual[:2], *usual[len(family) * 7 :: SAMPLED]]

    counted = compare(sample)

    assert counted["equal"] >= 2
    assert len(sample) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("family", CLASSES)
def test_every_altered_configuration_means_what_it_means_in_transformers(family: str) -> None:
    counted = compare(alterations(family))

    print(f"{family}: {dict(counted)}")
    assert counted["equal"] > 400
