"""The Responses API by the ``openai`` client and the Agents SDK, against a real suite that stores responses."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest

from tests.clients.test_openai import GREEDY as CHAT_GREEDY
from tests.suites import Suite, running

QUESTION = (
    "Anna was in the garden. Tom worked as a baker. Then Anna went to the mill.\n\nWhere is Anna?"
)
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 64}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """A suite whose gateway keeps responses."""
    directory = tmp_path_factory.mktemp("responses")
    with running(directory, settings={"MOESAIC_FILES_DIR": str(directory / "files")}) as suite:
        yield suite


@pytest.fixture
def client(storing: Suite) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{storing.url}/v1", api_key="none") as client:
        yield client


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(messages=messages, **{**CHAT_GREEDY, "max_tokens": 64})

    whole = client.responses.create(input=QUESTION, **GREEDY)
    with client.responses.stream(input=QUESTION, **GREEDY) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()

    assert whole.output_text == "".join(deltas) == final.output_text
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert "mill" in whole.output_text


def test_a_conversation_goes_on_by_the_id_of_its_last_response(client: openai.OpenAI) -> None:
    first = client.responses.create(input=QUESTION, **GREEDY)
    second = client.responses.create(
        input="Where is Anna?", previous_response_id=first.id, **GREEDY
    )
    sent = client.responses.create(
        input=[
            {"role": "user", "content": QUESTION},
            *[item.to_dict() for item in first.output],
            {"role": "user", "content": "Where is Anna?"},
        ],
        store=False,
        **GREEDY,
    )

    assert second.output_text == sent.output_text
    assert second.usage.input_tokens == sent.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert len(list(client.responses.input_items.list(second.id))) == 3
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(sent.id)


def test_a_call_its_result_and_the_answer(client: openai.OpenAI) -> None:
    asked = {"tools": [WEATHER], **GREEDY}
    first = client.responses.create(
        input="what is the weather in Rome?",
        tool_choice="required",
        parallel_tool_calls=False,
        **asked,
    )
    [call] = first.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    answer = client.responses.create(
        input=[result], previous_response_id=first.id, tool_choice="none", **asked
    )

    assert answer.output_text
    kinds = [item.type for item in client.responses.input_items.list(answer.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]


def test_a_streamed_call_is_put_together(client: openai.OpenAI) -> None:
    with client.responses.stream(
        input="what is the weather in Rome?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        **GREEDY,
    ) as stream:
        kind = "response.function_call_arguments.delta"
        deltas = [event.delta for event in stream if event.type == kind]
        [call] = stream.get_final_response().output

    assert call.arguments == "".join(deltas)
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


def test_a_class_is_the_form_of_an_answer(client: openai.OpenAI) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Verdict(pydantic.BaseModel):
        topic: Literal["banking", "travel", "work"]
        urgent: bool

    asked = {"input": "i need to book a flight today", "text_format": Verdict, **GREEDY}
    whole = client.responses.parse(**asked)
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()

    assert isinstance(whole.output_parsed, Verdict)
    assert streamed.output_parsed == whole.output_parsed


@pytest.fixture
def agents(storing: Suite) -> Any:
    """The SDK, with this suite as its OpenAI."""
    agents = pytest.importorskip("agents", reason="make test-clients installs it")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{storing.url}/v1", api_key="none")
    agents.set_default_openai_client(client, use_for_tracing=False)
    return agents


def agent_of(agents: Any, asked: list[str], **more: Any) -> Any:
    """An agent that has to call its tool once, and then answers."""

    @agents.function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"It rains in {city}."

    settings = agents.ModelSettings(
        temperature=0, max_tokens=120, tool_choice="required", parallel_tool_calls=False
    )
    return agents.Agent(
        name="weather",
        instructions="Help.",
        model="demo",
        tools=[get_weather],
        model_settings=settings,
        **more,
    )


@pytest.mark.parametrize("by_id", [False, True])
async def test_an_agent_calls_reads_and_answers(agents: Any, by_id: bool) -> None:
    asked: list[str] = []
    agent = agent_of(agents, asked)
    question = "what is the weather in Rome?"

    run = await agents.Runner.run(agent, question, max_turns=3, auto_previous_response_id=by_id)

    assert asked[0] in ("Paris", "Rome")
    kinds = [item.type for item in run.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert run.final_output


async def test_a_streamed_run_brings_the_same(agents: Any) -> None:
    asked: list[str] = []
    agent = agent_of(agents, asked)
    whole = await agents.Runner.run(agent, "what is the weather in Rome?", max_turns=3)

    run = agents.Runner.run_streamed(agent, "what is the weather in Rome?", max_turns=3)
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]

    assert run.final_output == "".join(deltas) == whole.final_output
    assert asked[0] == asked[1]


async def test_an_agent_whose_output_is_a_class(agents: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Verdict(pydantic.BaseModel):
        topic: Literal["banking", "travel", "work"]
        urgent: bool

    agent = agents.Agent(
        name="sorter",
        model="demo",
        output_type=Verdict,
        model_settings=agents.ModelSettings(temperature=0, max_tokens=64),
    )

    run = await agents.Runner.run(agent, "i need to book a flight today")

    assert isinstance(run.final_output, Verdict)
