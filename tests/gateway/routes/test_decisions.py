"""``/v1/decisions``: questions in, answers with probabilities out, through real prompts."""

import math
from typing import Any

import openai
import pytest

INPUT = "this is a story about a house"
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "It is about music.", "name": "music"},
    {
        "type": "choice",
        "instructions": "What is it about?",
        "choices": [{"value": "travel"}, {"value": "music", "description": "songs"}],
    },
    {
        "type": "choice",
        "instructions": "Is it a story?",
        "choices": [{"value": True}, {"value": False}],
    },
    {
        "type": "score",
        "instructions": "How long is it?",
        "levels": [{"label": "short"}, {"label": "middling"}, {"label": "long"}],
    },
]


async def test_each_question_is_answered_in_its_own_shape(open_house, scripts, language) -> None:
    script = scripts.scores(math.log(0.2), math.log(0.6), math.log(0.1))
    async with open_house(script) as house:
        body = {"model": "tiny", "input": INPUT, "questions": QUESTIONS}
        response = await house.client.post("/v1/decisions", json=body)
        submits = house.workers[0].submits

    answer = response.json()
    predicate, choice, truth, score = answer["answers"]
    assert predicate == {
        "type": "predicate",
        "name": "music",
        "probability": pytest.approx(0.25),
        "label_mass": pytest.approx(0.8),
    }
    assert (choice["type"], choice["name"], choice["choice"]) == ("choice", None, "music")
    assert [entry["value"] for entry in choice["probabilities"]] == ["travel", "music"]
    assert choice["confidence"] == pytest.approx(0.75)
    assert truth["choice"] is False
    assert score["score"] == pytest.approx((0.6 + 2 * 0.1) / 0.9)
    assert [entry["label"] for entry in score["probabilities"]] == ["short", "middling", "long"]
    assert [entry["value"] for entry in score["probabilities"]] == [0, 1, 2]
    assert score["label_mass"] == pytest.approx(0.9)
    assert answer["model"] == "tiny"
    assert answer["moesaic"]["prompt_version"] == language.dialogue.wording.version
    tokens = sum(len(submit.token_ids) for submit in submits)
    assert answer["usage"] == {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }


async def test_the_questions_begin_with_the_input_and_candidates_are_exact(
    open_house, scripts, language
) -> None:
    async with open_house(scripts.scores(-1.0, -2.0, -3.0)) as house:
        messages = [
            {"role": "system", "content": "Be fair."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": INPUT}]},
        ]
        body = {"input": messages, "questions": QUESTIONS}
        await house.client.post("/v1/decisions", json=body)
        submits = house.workers[0].submits

    prompts = [language.tokenizer.decode(list(submit.token_ids)) for submit in submits]
    shared = f"user\nSystem: Be fair.\n\nUser: {INPUT}\n\n"
    assert all(prompt.replace("<|im_start|>", "").startswith(shared) for prompt in prompts)
    assert "A. travel\nB. music (songs)" in prompts[1]
    assert "0. short\n1. middling\n2. long" in prompts[3]
    candidates = [[list(c.token_ids) for c in s.scoring.candidates] for s in submits]
    assert candidates[0] == [scripts.ids("yes"), scripts.ids("no")]
    assert candidates[1] == [scripts.ids("A"), scripts.ids("B")]
    assert candidates[3] == [scripts.ids(digit) for digit in "012"]


async def test_a_model_that_cannot_look_letters_up_is_asked_for_the_words(
    open_house, scripts, language, monkeypatch
) -> None:
    monkeypatch.setattr(language, "classify_methods", ("token", "sequence"))
    async with open_house(scripts.scores(-1.0, -2.0, -3.0)) as house:
        body = {"input": INPUT, "questions": QUESTIONS[3:]}
        await house.client.post("/v1/decisions", json=body)
        [submit] = house.workers[0].submits

    end = language.config.eos_token_ids[0]
    assert "short; middling; long" in language.tokenizer.decode(list(submit.token_ids))
    assert [list(c.token_ids) for c in submit.scoring.candidates] == [
        [*scripts.ids(label), end] for label in ("short", "middling", "long")
    ]


async def test_the_openai_client_reads_the_answers(open_house, scripts) -> None:
    async with (
        open_house(scripts.scores(-2.0, -1.0, -3.0)) as house,
        openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none") as client,
    ):
        decision = await client.decisions.create(
            model="tiny",
            input=INPUT,
            questions=QUESTIONS,
            prompt_cache_key="mine",
            safety_identifier="somebody",
        )
        salts = {submit.cache_salt for submit in house.workers[0].submits}

    predicate, choice, truth, score = decision.answers
    assert predicate.type == "predicate"
    assert predicate.probability == pytest.approx(1 / (1 + math.e))
    assert (choice.type, choice.choice) == ("choice", "music")
    assert (truth.type, truth.choice) == ("choice", False)
    assert score.type == "score"
    assert decision.usage.input_tokens == decision.usage.total_tokens
    assert salts == {"mine"}
