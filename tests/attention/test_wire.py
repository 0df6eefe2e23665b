"""Commands from outside and events back: what is refused before an engine sees it, what is kept."""

import struct
from typing import Any

import pytest

from moesaic.engine.sequences.requests import FinishEvent, PooledEvent, RequestKey, ScoringTask
from moesaic.errors import InvalidInput
from moesaic.services.attention.wire import decode_submit, encode_event
from moesaic.v1 import attention_pb2 as pb

GENERATION = {"max_tokens": 4}


@pytest.mark.parametrize(
    ("submit", "field"),
    [
        ({"token_ids": [5, 160], "generation": GENERATION}, "prompt"),
        (
            {"token_ids": [5], "generation": {**GENERATION, "stop_token_ids": [3, 160]}},
            "stop_token_ids",
        ),
        (
            {"token_ids": [5], "generation": {"sampling": {"logit_bias": {160: 1.0}}}},
            "logit_bias",
        ),
        (
            {"token_ids": [5], "generation": {"sampling": {"repetition_penalty": -1}}},
            "repetition_penalty",
        ),
        (
            {"token_ids": [5], "generation": {"sampling": {"presence_penalty": float("nan")}}},
            "sampling",
        ),
        (
            {"token_ids": [5], "generation": {"sampling": {"allowed_token_ids": [160]}}},
            "allowed_token_ids",
        ),
        (
            {"token_ids": [5], "generation": {"sampling": {"bad_words": [{"token_ids": [160]}]}}},
            "bad_words",
        ),
        (
            {
                "token_ids": [5],
                "generation": {"sampling": {"allowed_token_ids": [1]}, "min_tokens": 1},
            },
            "min_tokens",
        ),
        (
            {
                "token_ids": [5],
                "generation": {"sampling": {"allowed_token_ids": [1]}, "grammar": {"regex": "a"}},
            },
            "allowed_token_ids",
        ),
        ({"token_ids": [5], "generation": {"num_resumed_tokens": 2}}, "num_resumed_tokens"),
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


def test_what_a_command_asks_for_beside_its_work_is_kept() -> None:
    terms = {"priority": -2, "cache_salt": "ours", "min_threshold": 0.75}
    submit = pb.Submit(token_ids=[5], generation=pb.Generation(max_tokens=1), **terms)

    request = decode_submit(submit, stream=1, vocab_size=160, eos_token_ids=(1,))

    assert (request.priority, request.cache_salt, request.min_threshold) == (-2, "ours", 0.75)


def test_the_last_word_says_how_much_was_cached() -> None:
    key = RequestKey("r")

    told = encode_event(FinishEvent(key, "stop", 40, 1, epochs=(), cached_tokens=32))

    assert (told.finished.prompt_tokens, told.finished.cached_tokens) == (40, 32)


@pytest.mark.parametrize(("told", "store_kv"), [({"store_kv": False}, False), ({}, None)])
def test_a_scoring_that_does_not_say_whether_to_store_kv_leaves_it_open(
    told: dict[str, bool], store_kv: bool | None
) -> None:
    scoring = pb.Scoring(candidates=[pb.Candidate(token_ids=[3])], **told)
    request = decode_submit(pb.Submit(token_ids=[5], scoring=scoring), 1, 160, (2,))

    assert request.task == ScoringTask(((3,),), store_kv)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_to_pool_and_its_vector_survive_the_wire(pooling: Any) -> None:
    work = pb.Embedding(pooling=f"POOLING_{pooling.upper()}", store_kv=True)
    request = decode_submit(pb.Submit(token_ids=[1, 2], embedding=work), 0, 10, ())
    told = encode_event(PooledEvent(request.key, (1.5, -0.25)))

    assert request.task == ScoringTask((), True, pooling)
    assert struct.unpack("<2f", told.pooled.values) == (1.5, -0.25)


def test_an_unknown_way_to_pool_is_refused() -> None:
    with pytest.raises(InvalidInput, match="last, mean"):
        decode_submit(pb.Submit(token_ids=[1], embedding=pb.Embedding()), 0, 10, ())
