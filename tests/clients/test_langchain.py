"""LangChain's ``ChatOpenAI`` against a real suite: invoke, stream, batch, structured output."""

from typing import Any, Literal

import pytest

from tests.suites import Suite

langchain_openai = pytest.importorskip("langchain_openai", reason="make test-clients installs it")
pydantic = pytest.importorskip("pydantic")

QUESTION = "Continue this text. The old prince came into the room"


class Verdict(pydantic.BaseModel):
    """The object to answer with: few enough values that a small model cannot run on."""

    topic: Literal["banking", "travel", "work"]
    urgent: bool


def chat_of(suite: Suite, max_tokens: int, **more: Any) -> "langchain_openai.ChatOpenAI":
    return langchain_openai.ChatOpenAI(
        base_url=f"{suite.url}/v1",
        api_key="none",
        model="demo",
        temperature=0,
        max_tokens=max_tokens,
        **more,
    )


@pytest.fixture
def chat(suite: Suite) -> "langchain_openai.ChatOpenAI":
    return chat_of(suite, 16, stream_usage=True)


def test_invoke_and_stream_say_the_same(chat: "langchain_openai.ChatOpenAI") -> None:
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))

    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert whole.response_metadata["finish_reason"] == "length"
    told = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert told[-1]["output_tokens"] == whole.usage_metadata["output_tokens"] == 16


def test_a_batch_has_the_answers_of_its_parts(chat: "langchain_openai.ChatOpenAI") -> None:
    questions = [f"Continue this text. The {number}th man went to" for number in range(6)]

    answers = chat.batch(questions)

    assert [answer.content for answer in answers] == [chat.invoke(q).content for q in questions]


async def test_the_asynchronous_calls_work(chat: "langchain_openai.ChatOpenAI") -> None:
    pieces = [chunk.content async for chunk in chat.astream(QUESTION)]

    assert "".join(pieces) == (await chat.ainvoke(QUESTION)).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(suite: Suite, method: str) -> None:
    chat = chat_of(suite, 128).with_structured_output(Verdict, method=method)

    assert isinstance(chat.invoke("i need to book a flight today"), Verdict)


def test_a_bound_tool_is_called_and_its_result_is_read(suite: Suite) -> None:
    tools = pytest.importorskip("langchain_core.tools")
    messages = pytest.importorskip("langchain_core.messages")

    @tools.tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        return f"It rains in {city}."

    chat = chat_of(suite, 64)
    forced = chat.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    asked = [messages.HumanMessage("what is the weather in Rome?")]
    turn = forced.invoke(asked)
    chunks = list(forced.stream(asked))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    [call] = turn.tool_calls
    result = get_weather.invoke(call)
    answer = chat.bind_tools([get_weather]).invoke([*asked, turn, result])

    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]
    assert result.content == f"It rains in {call['args']['city']}."
    assert answer.content
