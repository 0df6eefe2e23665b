"""Commands from outside: what is refused before an engine sees it."""

from typing import Any

import pytest

from moesaic.errors import InvalidInput
from moesaic.v1 import attention_pb2 as pb
from services.attention.wire import decode_submit

GENERATION = {"max_tokens": 4}


@pytest.mark.parametrize(
    ("submit", "field"),
    [
        ({"token_ids": [5, 160], "generation": GENERATION}, "prompt"),
        (
            {"token_ids": [5], "generation": {**GENERATION, "stop_token_ids": [3, 160]}},
            "stop_token_ids",
        ),
        ({"token_ids": [5], "scoring": {"candidates": [{"token_ids": [160]}]}}, "labels"),
        ({"token_ids": [5]}, "work"),
    ],
)
def test_a_command_that_no_model_could_follow_is_refused_by_its_field(
    submit: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        decode_submit(pb.Submit(**submit), stream=1, vocab_size=160, eos_token_ids=(1,))
    assert refusal.value.field == field
