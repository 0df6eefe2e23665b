"""One source of the sampling fields: the wire, the engine and its reading of the wire agree with it."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.sequences import requests as engine
from moesaic.engine.sequences.sampling import draw
from moesaic.kernels.sampling import PickRules, pick_tokens, pick_tokens_reference
from moesaic.services.attention.wire import MAX_TOP_LOGPROBS as MOST_OF_A_WORKER
from moesaic.services.attention.wire import decode_submit
from moesaic.services.gateway.fields.generating import (
    INT64,
    MAX_TOP_LOGPROBS,
    SAMPLED,
    ChatWire,
    CompletionWire,
    GenerationWire,
    SamplingWire,
)
from moesaic.services.gateway.fields.known import REFUSED
from moesaic.v1 import attention_pb2 as pb

BY_HAND = {"seed", "bad_words"}  # what workers get of them is made, not copied
VOCAB_SIZE = 1000
ALL = set(SAMPLED) | BY_HAND
floats = {"width": 32, "allow_nan": False}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2, **floats),
    "top_p": st.floats(0.5, 1, **floats),
    "top_k": st.integers(-1, 99),
    "min_p": st.floats(0, 1, **floats),
    "repetition_penalty": st.floats(0.5, 10, **floats),
    "presence_penalty": st.floats(-2, 2, **floats),
    "frequency_penalty": st.floats(-2, 2, **floats),
    "logit_bias": st.dictionaries(st.integers(0, 999), st.floats(-100, 100, **floats), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, 999), max_size=3, unique=True).map(sorted),
}


def read_back(sampling: pb.Sampling) -> engine.Sampling:
    """What a worker's engine is asked for."""
    generation = pb.Generation(max_tokens=1, sampling=sampling)
    submit = pb.Submit(request_id="r", token_ids=[1], generation=generation)
    task = decode_submit(submit, 0, VOCAB_SIZE, ()).task
    assert isinstance(task, engine.GenerationTask)
    return task.sampling


def test_bodies_the_wire_and_the_engine_have_the_same_fields() -> None:
    assert {field.name for field in pb.Sampling.DESCRIPTOR.fields} == ALL
    assert {field.name for field in dataclasses.fields(engine.Sampling)} == ALL
    assert SamplingWire.model_fields.keys() >= ALL
    assert VALUES.keys() == SAMPLED.keys()


def test_no_sampling_field_is_refused_by_name() -> None:
    assert not ALL & REFUSED.keys()
    for refusal in REFUSED.values():
        if refusal.instead in ALL:
            assert refusal.instead in GenerationWire.model_fields


def test_what_is_left_out_reaches_the_engine_as_nothing_special() -> None:
    sampling = read_back(CompletionWire(prompt="a").sampling(0, ()))

    assert sampling == engine.Sampling(temperature=1.0)


@given(asked=st.fixed_dictionaries({}, optional=VALUES), seed=st.integers(-INT64, INT64 - 1))
def test_what_is_asked_reaches_the_engine_as_asked(asked: dict[str, Any], seed: int) -> None:
    body = CompletionWire.model_validate({"prompt": "a", **asked})

    sampling = read_back(body.sampling(seed, [pb.Word(token_ids=[5, 6])]))

    told = {name: getattr(sampling, name) for name in asked}
    told |= {name: list(value) for name, value in told.items() if name == "allowed_token_ids"}
    told |= {name: dict(value) for name, value in told.items() if name == "logit_bias"}
    assert told == asked | ({"top_k": max(0, asked["top_k"])} if "top_k" in asked else {})
    assert sampling.seed == seed
    assert sampling.bad_words == ((5, 6),)


@pytest.mark.parametrize("top_p", [0, 0.0, -0.0, 1e-300])
def test_a_top_p_of_0_keeps_only_the_most_likely_token(top_p: float) -> None:
    sampling = read_back(CompletionWire(prompt="a", top_p=top_p, temperature=2).sampling(3, ()))
    logits = torch.randn(64, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[::2].round_()  # of equal ones, the token with the lowest id
    rules = [PickRules(2.0, 0, sampling.top_p, 0.0, draw(3, position)) for position in range(64)]

    assert pick_tokens(logits, rules) == logits.argmax(dim=-1).tolist()
    assert pick_tokens_reference(logits, rules) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("seed", [INT64, INT64 + 7, -INT64 - 1])
def test_a_seed_beyond_64_bits_wraps(seed: int) -> None:
    told = CompletionWire(prompt="a").sampling(seed, ())

    assert told.seed == (seed + INT64) % (2 * INT64) - INT64


def test_bodies_have_what_else_a_worker_is_told_of_a_generation() -> None:
    made_here = {"sampling", "grammar", "patience_ms", "num_resumed_tokens", "top_logprobs"}
    told = {field.name for field in pb.Generation.DESCRIPTOR.fields} - made_here

    assert told <= GenerationWire.model_fields.keys()
    for body in (ChatWire, CompletionWire):
        assert "logprobs" in body.model_fields


def test_bodies_ask_for_no_more_log_probabilities_than_workers_tell() -> None:
    assert MAX_TOP_LOGPROBS == MOST_OF_A_WORKER
