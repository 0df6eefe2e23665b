"""Chat templates get keywords, names, parts and tools of requests, and questions come after their thoughts."""

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.services.gateway.language import Language
from tests.gateway.conftest import CONFIG, build_tokenizer

CHAT, ASKED = "/v1/chat/completions", [{"role": "user", "content": "hello"}]
IGNORED = "x-moesaic-ignored"
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
NAMES = (
    "{% for m in messages %}<{{ m.get('name') or m.role }}>{{ m.content }}{{ m.mood }}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
LAST = "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
THINKING = {
    "switch": TURNS
    + OPEN
    + "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}",
    "set": "{% if not thinking is defined %}{% set thinking = true %}{% endif %}"
    + TURNS
    + OPEN
    + "{{ '<think>' if thinking else '</think>' }}",
    "always": TURNS + OPEN + "{{ '<think>\n' }}",
    "own": LAST + "{{ m.content }}{% endfor %}" + OPEN,
    "channels": "{% for m in messages %}<{{ m.role }}>{{ '<|channel|>final<|message|>' if m.role == 'assistant' }}"
    "{{ m.content }}{% endfor %}" + OPEN,
}
ENDS = {
    "switch": "<assistant>",
    "set": "<assistant></think>",
    "always": "<assistant><think>\n\n</think>\n\n",
    "own": "<assistant><think></think>",
    "channels": "<assistant><|channel|>final<|message|>",
}
CLEAR = (
    TURNS + "{{ 'kept' if clear_thinking is defined and not clear_thinking }}{{ style | tojson }}"
)


@pytest.fixture
def template() -> Any:
    """The chat template; tests parametrise it."""
    return TURNS


@pytest.fixture
def model_directory(tmp_path: Path, template: Any) -> Path:
    tokenizer = build_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    config = {**CONFIG, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
    told = {"eos_token": "<|im_end|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    return tmp_path


@pytest.fixture
def language(model_directory: Path) -> Language:
    return Language(model_directory)


def prompt_of(scripts, submit) -> str:
    return str(scripts.language.tokenizer.decode(list(submit.token_ids), skip_special_tokens=False))


async def prompts(open_house, scripts, *bodies: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Send chats; return the worker's prompts and the names of ignored fields."""
    async with open_house(scripts.says("yes")) as house:
        answers = [await house.client.post(CHAT, json=body) for body in bodies]
        for answer in answers:
            assert answer.status_code == 200, answer.text
        submits = list(house.workers[0].submits)
    return [prompt_of(scripts, s) for s in submits], [a.headers.get(IGNORED) for a in answers]


@pytest.mark.parametrize("template", [CLEAR])
async def test_keywords_that_the_template_reads_reach_it(open_house, scripts) -> None:
    kwargs = {"clear_thinking": False, "style": {"a": [1, None, "<|im_end|>"]}}
    more = {**kwargs, "eos_token": "x", "nobody": 1}

    texts, ignored = await prompts(
        open_house,
        scripts,
        {"messages": ASKED, "chat_template_kwargs": kwargs},
        {"messages": ASKED, "chat_template_kwargs": more, "metadata": {}},
    )

    assert texts == ['<user>hellokept{"a": [1, null, "<|im_end|>"]}'] * 2
    named = "chat_template_kwargs.eos_token, chat_template_kwargs.nobody, metadata"
    assert ignored == [None, named]


@pytest.mark.parametrize("template", [TURNS + "{{ enable_thinking }} {{ thinking }}"])
async def test_a_switch_that_the_caller_gives_goes_over_the_effort(open_house, scripts) -> None:
    body = {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": True}}

    texts, _ = await prompts(open_house, scripts, body, {**body, "reasoning_effort": "none"})

    assert texts[0] == texts[1]


@pytest.mark.parametrize("template", ["{{ messages[0].content }}"])
async def test_very_many_keywords_that_nobody_knows_hold_nobody_up(open_house, scripts) -> None:
    many = {f"unknown{i}": 1 for i in range(30_000)}

    _, [named] = await prompts(
        open_house, scripts, {"messages": ASKED, "chat_template_kwargs": many}
    )

    assert named.endswith("and-more")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message"])
async def test_keywords_cannot_stand_for_fields_of_the_request(
    open_house, scripts, name: str
) -> None:
    bodies = {
        CHAT: {"messages": ASKED},
        "/tokenize": {"messages": ASKED},
        "/v1/classify": {"input": "a", "labels": ["yes", "no"]},
    }
    async with open_house(scripts.anything) as house:
        for path, body in bodies.items():
            answer = await house.client.post(path, json={**body, "chat_template_kwargs": {name: 1}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                f"chat_template_kwargs.{name}",
            )


@pytest.mark.parametrize("template", [NAMES])
async def test_names_and_other_fields_of_messages_reach_the_template(open_house, scripts) -> None:
    turns = [
        {**ASKED[0], "name": "ann", "mood": "!", "weight": 2},
        {"role": "tool", "content": "x", "name": "now"},
    ]

    texts, ignored = await prompts(open_house, scripts, {"messages": turns})

    assert texts == ["<ann>hello!<now>x"]
    assert ignored == ["messages.weight"]


@pytest.mark.parametrize("template", [TURNS + "{{ 'seen' if messages[0].role == 'observation' }}"])
async def test_roles_that_the_template_names_are_accepted(open_house, scripts) -> None:
    turn = {"role": "observation", "content": "x"}

    texts, _ = await prompts(open_house, scripts, {"messages": [turn]})
    async with open_house() as house:
        refused = await house.client.post(
            "/tokenize", json={"messages": [{**turn, "role": "robot"}]}
        )

    assert texts == ["<observation>xseen"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].role")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PARTS, "onetwo"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "one\ntwo"),
        ("{% for m in messages %}{{ m.content | trim + '.' }}{% endfor %}", "one\ntwo."),
        ("{{ messages[0].content + '.' }}", "one\ntwo."),
    ],
)
async def test_parts_are_joined_as_the_template_says(open_house, scripts, text: str) -> None:
    content = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]

    texts, _ = await prompts(
        open_house, scripts, {"messages": [{"role": "user", "content": content}]}
    )

    assert texts == [text]


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"],
)
async def test_a_template_that_reads_only_parts_gets_texts_as_parts(open_house, scripts) -> None:
    texts, _ = await prompts(open_house, scripts, {"messages": ASKED})

    assert texts == ["hello"]


@pytest.mark.parametrize("template", [TURNS + "{% if tools is not none %}Tools: {% endif %}"])
async def test_tools_are_none_without_tools(open_house, scripts) -> None:
    texts, _ = await prompts(
        open_house, scripts, {"messages": ASKED}, {"messages": ASKED, "tools": []}
    )

    assert texts == ["<user>hello"] * 2


TOOL_USE = "<tool_call>{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + TURNS


@pytest.mark.parametrize(
    "template",
    [[{"name": "default", "template": TURNS}, {"name": "tool_use", "template": TOOL_USE}]],
)
async def test_tools_choose_the_template_for_them(open_house, scripts) -> None:
    texts, _ = await prompts(
        open_house, scripts, {"messages": ASKED}, {"messages": ASKED, "tools": [TOOL]}
    )

    assert texts == ["<user>hello", "<tool_call>now<user>hello"]


@pytest.mark.parametrize("kind", THINKING)
async def test_prompts_of_questions_end_where_the_model_answers(
    open_house, scripts, model_directory, kind: str
) -> None:
    config = {"eos_token": "<|im_end|>", "chat_template": THINKING[kind]}
    (model_directory / "tokenizer_config.json").write_text(json.dumps(config))
    told = Language(model_directory)
    on = {"chat_template_kwargs": {"enable_thinking": True, "nobody": 1}}
    bodies = [
        ("/v1/classify", {"input": "a", "labels": ["yes", "no"]}),
        (
            "/v1/decisions",
            {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]},
        ),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v1/score", {"queries": "a", "documents": "b"}),
    ]
    async with open_house(scripts.anything) as house:
        house.gateway.language = told
        for path, body in bodies:
            plain, keyed = [await house.client.post(path, json=body | more) for more in ({}, on)]
            assert plain.status_code == keyed.status_code == 200, keyed.text
            assert "chat_template_kwargs.nobody" in keyed.headers[IGNORED]
        texts = [prompt_of(scripts, submit) for submit in house.workers[0].submits]

    assert {text[text.rindex("<assistant>") :] for text in texts} <= {
        ENDS[kind],
        "<assistant><think></think>",
    }
    assert texts[0].endswith(ENDS[kind])


@pytest.mark.parametrize("template", ["{{ raise_exception('no') if messages | length < 9 }}"])
async def test_a_template_that_refuses_questions_still_serves_completions(
    open_house, scripts
) -> None:
    async with open_house(scripts.says("yes")) as house:
        asked = {"input": "a", "labels": ["yes", "no"]}
        refused = await house.client.post("/v1/classify", json=asked)
        answered = await house.client.post("/v1/completions", json={"prompt": "a"})

    assert (refused.status_code, answered.status_code) == (400, 200)


@pytest.mark.parametrize("template", [None])
async def test_without_a_template_keywords_change_nothing(open_house, scripts) -> None:
    asked = {"input": "a", "labels": ["yes", "no"], "chat_template_kwargs": {"thinking": False}}
    async with open_house(scripts.anything) as house:
        answer = await house.client.post("/v1/classify", json=asked)

    assert (answer.status_code, answer.headers[IGNORED]) == (200, "chat_template_kwargs.thinking")


BEGUN = {"add_generation_prompt": False, "continue_final_message": True}
CLOSED = (
    "{% for m in messages %}<{{ m.role }}>{{ '<think></think>' if m.role == 'assistant' }}"
    "{{ m.content | trim }}<|im_end|>{% endfor %}" + OPEN
)


@pytest.mark.parametrize("template", [CLOSED])
async def test_the_model_continues_the_last_message(open_house, scripts) -> None:
    parts = [{"type": "text", "text": "well"}, {"type": "text", "text": "so <|im_end|> "}]
    begun = [{"role": "assistant", "content": content} for content in ("well then ", parts)]
    bodies = [{"messages": [*ASKED, message], **BEGUN} for message in begun]

    texts, _ = await prompts(open_house, scripts, *bodies)
    async with open_house() as house:
        listed = (await house.client.post("/tokenize", json=bodies[0])).json()["tokens"]

    start = "<user>hello<|im_end|><assistant><think></think>"
    assert texts == [f"{start}well then", f"{start}well\nso <|im_end|>"]
    assert scripts.language.tokenizer.decode(listed, skip_special_tokens=False) == texts[0]


@pytest.mark.parametrize("template", [TURNS + OPEN + "{{ '</think>' if false }}"])
@pytest.mark.parametrize(
    ("begun", "answer", "told"),
    [
        ("well", " then", (" then", None)),
        ("<think>well", " so</think>yes", ("yes", "so")),
        ("<think>well</think>", " yes", (" yes", None)),
    ],
)
async def test_a_continued_message_decides_whether_the_model_thinks(
    open_house, scripts, begun: str, answer: str, told: tuple[str, str | None]
) -> None:
    messages = [*ASKED, {"role": "assistant", "content": begun}]
    async with open_house(scripts.says(answer)) as house:
        body = (await house.client.post(CHAT, json={"messages": messages, **BEGUN})).json()

    message = body["choices"][0]["message"]
    assert (message["content"], message.get("reasoning")) == told


CHANGED = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
TWICE = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "field"),
    [
        (TURNS, None, "continue_final_message"),
        (TURNS, [], "continue_final_message"),
        (CHANGED, "well", "continue_final_message"),
        (TWICE, "well", "continue_final_message"),
        (TURNS, "\U0010fff0", "continue_final_message"),
    ],
)
async def test_a_message_that_cannot_be_continued_is_refused(
    open_house, scripts, content: Any, field: str
) -> None:
    messages = [*ASKED, {"role": "assistant", "content": content}]
    async with open_house(scripts.anything) as house:
        for path in (CHAT, "/tokenize"):
            answer = await house.client.post(path, json={"messages": messages, **BEGUN})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        both = {"messages": messages, "continue_final_message": True}
        refused = (await house.client.post(CHAT, json=both)).json()["error"]["message"]
        for off in (False, None):
            body = {"messages": ASKED, "continue_final_message": off}
            assert (await house.client.post(CHAT, json=body)).status_code == 200

    assert "needs add_generation_prompt to be false" in refused


@pytest.mark.parametrize(
    ("messages", "field", "fix"),
    [
        ([], "messages", "1"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content",
            "needs the field text",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content",
            "only text",
        ),
    ],
)
async def test_messages_without_text_are_refused_by_name(
    open_house, scripts, messages: Any, field: str, fix: str
) -> None:
    async with open_house(scripts.anything) as house:
        answers = [
            await house.client.post(path, json={"messages": messages})
            for path in (CHAT, "/tokenize")
        ]

    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert fix in error["message"]
