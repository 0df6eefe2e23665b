"""Vocabularies that the tests of calls share."""

import pytest

from tests.models.text.dialects.vocabulary import Vocabularies


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    return Vocabularies(tmp_path_factory.mktemp("vocabularies"))
