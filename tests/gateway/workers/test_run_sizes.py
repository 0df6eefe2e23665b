"""The size of a run, by which a gateway starts few large ones in one round of its loop."""

import pytest

from moesaic.services.gateway.workers.run import Run
from moesaic.v1.attention_pb2 import Candidate, Generation, Sampling, Scoring, Word

LISTS = {
    "allowed": Sampling(allowed_token_ids=range(1000)),
    "biased": Sampling(logit_bias=dict.fromkeys(range(1000), 1.0)),
    "bad words": Sampling(bad_words=[Word(token_ids=range(100))] * 10),
}


@pytest.mark.parametrize("name", LISTS)
def test_whatever_a_command_for_an_answer_lists_counts(name: str) -> None:
    work = Generation(sampling=LISTS[name])

    assert Run([1] * 7, work, token_ids=[2] * 5).size == 1012


def test_candidates_count() -> None:
    work = Scoring(candidates=[Candidate(token_ids=range(50))] * 20)

    assert Run([1] * 7, work).size == 1007
