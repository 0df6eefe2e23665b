"""A field does what it says, is refused by name, or is named as passed over: never anything else."""

import json
import re
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params
from pydantic import BaseModel, ValidationError
from transformers import GenerationConfig

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import check_extras
from moesaic.services.gateway.fields.decisions import DecisionsWire
from moesaic.services.gateway.fields.generating import ChatWire, CompletionWire
from moesaic.services.gateway.fields.known import REFUSED
from moesaic.services.gateway.fields.responses import ResponsesWire
from moesaic.services.gateway.fields.scoring import (
    ClassifyWire,
    GenerativeScoringWire,
    RerankWire,
    ScoreWire,
)
from moesaic.services.gateway.fields.tokenizing import DetokenizeWire, TokenizeWire

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
QUESTION = {"type": "predicate", "instructions": "a"}
BODIES: dict[type[BaseModel], dict[str, Any]] = {
    ChatWire: CHAT,
    CompletionWire: {"prompt": "a"},
    ResponsesWire: {"input": "a"},
    ClassifyWire: {"input": "a", "labels": ["a", "b"]},
    DecisionsWire: {"input": "a", "questions": [QUESTION]},
    ScoreWire: {"queries": "a", "documents": "b"},
    RerankWire: {"query": "a", "documents": ["b"]},
    GenerativeScoringWire: {"query": "a", "items": ["b"], "label_token_ids": [1]},
    TokenizeWire: {"prompt": "a"},
    DetokenizeWire: {"tokens": [1]},
}
# What the issue found answered with 200, and some more of each server.
CHANGING = [
    ("lora_path", "adapter"),
    ("return_hidden_states", True),
    ("documents", [{"text": "a"}]),
    ("functions", [{"name": "a"}]),
    ("thinking_token_budget", 9),
    ("vllm_xargs", {"a": 1}),
    ("echo", True),
    ("moesaic", {"anything": 1}),
    ("structured_outputs", {"whitespace_pattern": " "}),
    ("response_format", {"type": "json_object", "schema": {}}),
    ("stop_regex", "a+"),
    ("typical_p", 0.5),
    ("mirostat", 2),
    ("n_predict", 3),
    ("stop_sequences", ["a"]),
    ("do_sample", False),
    ("web_search_options", {}),
]

NESTED = ("moesaic", "structured_outputs", "response_format")


@pytest.mark.parametrize(("name", "value"), CHANGING)
def test_what_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_extras(ChatWire.model_validate({**CHAT, name: value}))

    inner = f".{next(reversed(value))}" if isinstance(value, dict) and name in NESTED else ""
    assert (refused.value.field, refused.value.code) == (f"{name}{inner}", "unsupported_parameter")


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - ChatWire.model_fields.keys()))
def test_values_that_change_nothing_are_taken_and_not_named(name: str) -> None:
    for value in (None, *REFUSED[name].neutral):
        body = ChatWire.model_validate({**CHAT, name: value})

        assert check_extras(body) == []


# Fields that clients of OpenAI, vLLM and SGLang send by default, or that do not affect an answer. The second value is
# the name in the header, if the field is ignored.
OF_NO_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"verbosity": "low"}, "verbosity"),
    ({"verbosity": "high", "store": False}, "store, verbosity"),
    ({"reasoning_effort": "xhigh"}, "reasoning_effort"),
    ({"reasoning_effort": "none"}, ""),
    ({"service_tier": "auto", "store": True}, "service_tier, store"),
    ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
    ({"safety_identifier": "a", "prompt_cache_key": "b"}, "prompt_cache_key, safety_identifier"),
    ({"prompt_cache_retention": "24h", "metadata": {}}, "metadata, prompt_cache_retention"),
    ({"modalities": ["text"], "audio": None, "web_search_options": None, "user": "ann"}, ""),
    ({"functions": [], "function_call": "none", "tools": [], "tool_choice": "none"}, ""),
    ({"tool_choice": "auto", "parallel_tool_calls": True}, ""),
    ({"stream_options": {"include_usage": False}, "logit_bias": {}, "stop": []}, ""),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options.include_obfuscation"),
    ({"max_completion_tokens": 4, "n": 1, "best_of": 1, "logprobs": False}, ""),
    ({"top_k": -1, "min_p": 0, "repetition_penalty": 1, "use_beam_search": False}, ""),
    ({"top_k": 0, "typical_p": 1, "mirostat": 0, "dry_multiplier": 0, "xtc_probability": 0}, ""),
    ({"length_penalty": 0.7, "early_stopping": True}, "early_stopping, length_penalty"),
    ({"temperature": 0, "presence_penalty": 0, "frequency_penalty": -0.0, "top_p": 0}, ""),
    ({"no_repeat_ngram_size": 0, "guidance_scale": 1.0, "num_beams": 1, "eta_cutoff": 0}, ""),
]


async def test_fields_without_effect_are_accepted_and_named_if_they_were_meant_to_have_one(
    open_house, scripts, subtests
) -> None:
    async with open_house(scripts.says("yes")) as house:
        for fields, named in OF_NO_EFFECT:
            with subtests.test(str(fields)):
                chat = await house.client.post("/v1/chat/completions", json={**CHAT, **fields})

                assert chat.status_code == 200, chat.text
                assert chat.headers.get("x-moesaic-ignored", "") == named


# Fields of other servers that do not affect an answer here: caches, speed, storage, and companions of refused fields.
WITHOUT_EFFECT = {
    *("metadata", "prediction", "safety_identifier", "service_tier", "store"),
    *("access_programs", "context_management", "image", "max_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
    *("assistant_lookbehind", "is_assistant", "num_assistant_tokens", "target_lookbehind"),
    *("num_assistant_tokens_schedule", "max_matching_ngram_size", "prompt_lookup_num_tokens"),
    *("speculation_type", "use_mtp", "cache_config", "cache_implementation", "compile_config"),
    *("continuous_batching_config", "disable_compile", "low_memory", "max_cache_len"),
    *("prefill_chunk_size", "use_cache", "bos_token_id", "decoder_start_token_id", "pad_token_id"),
    *("diversity_penalty", "early_stopping", "length_penalty"),
    *("remove_invalid_values", "renormalize_logits", "return_dict_in_generate"),
    "transformers_version",
}


def test_every_field_of_the_openai_client_is_accepted_refused_or_ignored() -> None:
    for kind, wire in (
        (chat_params.CompletionCreateParamsNonStreaming, ChatWire),
        (params.CompletionCreateParamsNonStreaming, CompletionWire),
        (responses_params.ResponseCreateParamsNonStreaming, ResponsesWire),
    ):
        fields = get_type_hints(kind).keys()
        assert fields - wire.model_fields.keys() - REFUSED.keys() <= WITHOUT_EFFECT


def test_every_generation_field_of_transformers_is_accepted_refused_or_ignored() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - ChatWire.model_fields.keys() - REFUSED.keys() <= WITHOUT_EFFECT


@pytest.mark.parametrize(
    "name", ["no_repeat_ngram_size", "penalty_alpha", "guidance_scale", "smoothing_factor"]
)
def test_samplers_of_other_servers_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not supported"):
        check_extras(ChatWire.model_validate({**CHAT, name: 3}))


def test_a_refusal_says_what_to_use_instead() -> None:
    with pytest.raises(InvalidInput, match=r"use max_tokens, or leave it out"):
        check_extras(ChatWire.model_validate({**CHAT, "n_predict": 5}))


def test_fields_within_a_message_are_found_where_they_are() -> None:
    turns = [*CHAT["messages"], {"role": "assistant", "content": "a", "audio": {"id": "a"}}]

    with pytest.raises(InvalidInput) as refused:
        check_extras(ChatWire.model_validate({"messages": turns}))

    assert refused.value.field == "messages[1].audio"


async def test_what_is_passed_over_is_named_in_a_header(open_house, scripts) -> None:
    turn = {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a", "cache": {}}]}
    body = {
        "messages": [turn],
        "metadata": {},
        "store": True,
        "logprobs": None,
        "service_tier": None,
    }
    async with open_house(scripts.says("yes")) as house:
        whole = await house.client.post("/v1/chat/completions", json=body)
        stream = await house.client.post("/v1/chat/completions", json={**body, "stream": True})
        plain = await house.client.post("/v1/chat/completions", json=CHAT)
        read = await house.client.post("/detokenize", json={"tokens": [5], "spaces": 1})

    named = "messages.content.cache, messages.name, metadata, store"
    assert whole.headers["x-moesaic-ignored"] == stream.headers["x-moesaic-ignored"] == named
    assert "x-moesaic-ignored" not in plain.headers
    assert read.headers["x-moesaic-ignored"] == "spaces"


@given(st.dictionaries(st.text(min_size=1, max_size=90), st.just(1), max_size=60))
def test_names_are_bounded_and_safe_in_a_header(extras: dict[str, Any]) -> None:
    body = TokenizeWire.model_validate({"prompt": "a"} | {f"zz{n}": v for n, v in extras.items()})

    told = ", ".join(check_extras(body))

    assert re.fullmatch(r"[A-Za-z0-9_., -]*", told)
    assert len(told) < 1500
    assert bool(told) == bool(extras)


def numbers_of(kind: type[BaseModel]) -> list[tuple[str, set[str]]]:
    """The fields of a body that take numbers or truth values and no text, with what they take."""
    found = []
    for name, schema in kind.model_json_schema()["properties"].items():
        types = {part.get("type") for part in schema.get("anyOf", [schema])}
        if types & {"integer", "number", "boolean"} and "string" not in types:
            found.append((name, types))
    return found


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_no_value_is_taken_for_another_kind(kind: type[BaseModel]) -> None:
    kind.model_validate(BODIES[kind])
    for name, types in numbers_of(kind):
        others: list[Any] = ["8", "true"]
        others += [1, 0.0] if "boolean" in types else [True, False]
        others += [8.0] if "integer" in types else []
        for value in others:
            with pytest.raises(ValidationError) as refused:
                kind.model_validate({**BODIES[kind], name: value})
            assert refused.value.errors()[0]["loc"][0] == name, (name, value)


@pytest.mark.parametrize("value", [True, "8", 8.0])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_number_of_tokens_is_an_integer(open_house, scripts, name, value) -> None:
    async with open_house(scripts.says("yes")) as house:
        response = await house.client.post("/v1/chat/completions", json={**CHAT, name: value})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


async def test_grammars_are_taken_under_the_names_that_others_have(open_house, scripts) -> None:
    asked: list[dict[str, Any]] = [
        {"regex": "a+"},
        {"ebnf": 'root ::= "a"'},
        {"grammar": 'root ::= "a"'},
        {"json_schema": '{"type": "integer"}'},
        {"json_schema": {"type": "integer"}},
    ]
    async with open_house(scripts.says("yes")) as house:
        for fields in asked:
            response = await house.client.post("/v1/chat/completions", json={**CHAT, **fields})
            assert response.status_code == 200, response.text
        two = await house.client.post("/v1/chat/completions", json={**CHAT, **asked[0], **asked[1]})
        grammars = [submit.generation.grammar for submit in house.workers[0].submits]

    assert [(g.WhichOneof("kind"), g.field) for g in grammars] == [
        ("regex", "regex"),
        ("grammar", "ebnf"),
        ("grammar", "grammar"),
        ("json_schema", "json_schema"),
        ("json_schema", "json_schema"),
    ]
    assert json.loads(grammars[-1].json_schema)["type"] == "integer"
    assert two.json()["error"]["param"] == "ebnf"


async def test_64_stop_strings_and_64_answers_are_taken(open_house, scripts) -> None:
    body = {"prompt": "a", "n": 64, "stop": [f"s{i}" for i in range(63)] + ["wor"], "max_tokens": 9}
    async with open_house(scripts.says("hello world")) as house:
        answer = (await house.client.post("/v1/completions", json=body)).json()
        many = await house.client.post("/v1/completions", json={**body, "prompt": ["a"] * 257})

    assert [choice["text"] for choice in answer["choices"]] == ["hello "] * 64
    assert many.json()["error"]["param"] == "n"


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_null_is_taken_where_the_description_says_so_and_nowhere_else(
    kind: type[BaseModel],
) -> None:
    for name, schema in kind.model_json_schema()["properties"].items():
        if "anyOf" not in schema and "type" not in schema and "$ref" not in schema:
            continue  # checked by hand
        described = {"type": "null"} in schema.get("anyOf", [])
        try:
            kind.model_validate({**BODIES[kind], name: None})
        except ValidationError:
            assert not described, name
        else:
            assert described, name


def test_null_changes_nothing_in_the_options_of_a_stream() -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    body = ChatWire.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "stream": True, "stream_options": options}
    )

    assert body.stream_options is not None
    assert not body.stream_options.include_usage
    assert not body.stream_options.continuous_usage_stats
