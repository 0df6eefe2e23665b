"""``truncate_prompt_tokens`` keeps the end of a prompt, and nothing else of the answer's rules changes."""

from typing import Any

import pytest

from tests.gateway.conftest import MAX_POSITIONS

LONG = "hello world this is a story " * 200
CHAT = "/v1/chat/completions"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def test_workers_get_the_last_tokens_of_every_form_of_a_prompt(
    open_house: Any, scripts: Any
) -> None:
    whole = scripts.ids(LONG)
    rendered = f"<|im_start|>user\n{LONG}<|im_end|>\n<|im_start|>assistant\n"
    many = {"prompt": [LONG, "yes", LONG], "truncate_prompt_tokens": 7}
    async with open_house(scripts.says("yes")) as house:
        ask = house.client.post
        answers = [
            await ask("/v1/completions", json={"prompt": LONG, "truncate_prompt_tokens": 5}),
            await ask("/v1/completions", json={"prompt": whole, "truncate_prompt_tokens": 5}),
            await ask(CHAT, json=chat(LONG, truncate_prompt_tokens=9)),
            await ask("/v1/completions", json=many),
        ]
        told = [list(submit.token_ids) for submit in house.workers[0].submits]

    assert [answer.status_code for answer in answers] == [200] * 4
    assert told[:3] == [whole[-5:], whole[-5:], scripts.ids(rendered)[-9:]]
    assert sorted(told[3:]) == sorted([whole[-7:], scripts.ids("yes"), whole[-7:]])
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers[:3]] == [5, 5, 9]
    assert "x-moesaic-ignored" not in answers[0].headers


@pytest.mark.parametrize(
    ("fields", "room"),
    [({}, 16), ({"max_tokens": 40}, 40), ({"max_tokens": 0, "echo": True}, 0)],
)
async def test_minus_one_leaves_room_for_the_answer(
    open_house: Any, scripts: Any, fields: dict[str, Any], room: int
) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {"prompt": LONG, "truncate_prompt_tokens": -1, **fields}
        answer = await house.client.post("/v1/completions", json=body)
        [submit] = house.workers[0].submits

    assert answer.status_code == 200, answer.text
    assert list(submit.token_ids) == scripts.ids(LONG)[-(MAX_POSITIONS - room) :]


async def test_minus_one_in_a_chat_leaves_what_is_asked_or_one_token(
    open_house: Any, scripts: Any
) -> None:
    async with open_house(scripts.says("yes")) as house:
        for fields in ({}, {"max_completion_tokens": 30}):
            body = chat(LONG, truncate_prompt_tokens=-1, **fields)
            await house.client.post(CHAT, json=body)
        lengths = [len(submit.token_ids) for submit in house.workers[0].submits]

    assert lengths == [MAX_POSITIONS - 1, MAX_POSITIONS - 30]


async def test_an_echo_and_its_logprobs_are_of_the_kept_tokens_only(
    open_house: Any, scripts: Any
) -> None:
    kept = scripts.ids(LONG)[-4:]
    text = scripts.language.tokenizer.decode(kept)
    body = {"prompt": LONG, "truncate_prompt_tokens": 4, "echo": True, "return_token_ids": True}
    async with open_house(scripts.says("yes")) as house:
        answer = await house.client.post("/v1/completions", json=body)

    [choice] = answer.json()["choices"]
    assert choice["text"] == f"{text}yes"
    assert choice["prompt_token_ids"] == kept


async def test_a_short_prompt_stays_whole(open_house: Any, scripts: Any) -> None:
    async with open_house(scripts.says("yes")) as house:
        for most in (200, -1, None):
            body = {"prompt": "hello world", "truncate_prompt_tokens": most}
            await house.client.post("/v1/completions", json=body)
        told = [list(submit.token_ids) for submit in house.workers[0].submits]

    assert told == [scripts.ids("hello world")] * 3


async def test_items_of_generative_scoring_keep_the_end_of_query_and_item(
    open_house: Any, scripts: Any
) -> None:
    query, item = scripts.ids(LONG), scripts.ids(" yes")
    body = {"query": LONG, "items": [" yes"], "label_token_ids": [5, 6]}
    async with open_house(scripts.scores(-1.0, -2.0)) as house:
        for kept, first in ((6, False), (6, True), (-1, False)):
            fields = {"truncate_prompt_tokens": kept, "item_first": first}
            answer = await house.client.post("/generative_scoring", json=body | fields)
            assert answer.status_code == 200, answer.text
        told = [list(submit.token_ids) for submit in house.workers[0].submits]

    most = MAX_POSITIONS - 1
    assert told == [(query + item)[-6:], query[-6:], (query + item)[-most:]]


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (0, "must not be empty"),
        (-2, "-1"),
        (MAX_POSITIONS + 1, f"at most {MAX_POSITIONS}"),
        ("5", "integer"),
        (True, "integer"),
        (2.0, "integer"),
    ],
)
async def test_a_value_that_means_nothing_is_refused_by_name(
    open_house: Any, scripts: Any, kept: Any, words: str
) -> None:
    scoring = {"query": "a", "items": ["b"], "label_token_ids": [5]}
    bodies = {"/v1/completions": {"prompt": "hello"}, CHAT: chat("hello")}
    async with open_house(scripts.anything) as house:
        for path, body in {**bodies, "/generative_scoring": scoring}.items():
            answer = await house.client.post(path, json=body | {"truncate_prompt_tokens": kept})
            told = answer.json()["error"]

            assert (answer.status_code, told["param"]) == (400, "truncate_prompt_tokens"), path
            assert words in told["message"]


async def test_kept_tokens_that_leave_no_room_are_refused_as_any_prompt(
    open_house: Any, scripts: Any
) -> None:
    body = {"prompt": LONG, "truncate_prompt_tokens": MAX_POSITIONS}
    async with open_house(scripts.anything) as house:
        answer = await house.client.post("/v1/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
