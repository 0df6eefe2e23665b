"""LangChain against a real suite, by three APIs: invoke, stream, batch, structured output, tools."""

from collections.abc import Callable
from typing import Any, Literal

import pytest

from tests.suites import Suite

langchain_openai = pytest.importorskip("langchain_openai", reason="make test-clients installs it")
langchain_anthropic = pytest.importorskip("langchain_anthropic")
messages = pytest.importorskip("langchain_core.messages")
tools = pytest.importorskip("langchain_core.tools")
pydantic = pytest.importorskip("pydantic")

QUESTION = "Continue this text. The old prince came into the room"
FEW = 6  # tokens, before the demo model ends its answer
Chat = Callable[..., Any]


class Verdict(pydantic.BaseModel):
    """The object to answer with: few enough values that a small model cannot run on."""

    topic: Literal["banking", "travel", "work"]
    urgent: bool


@tools.tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


@pytest.fixture(params=["chat", "responses", "messages"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def chat_of(suite: Suite, api: str) -> Chat:
    """Make LangChain's model for an API."""

    def made(max_tokens: int, **more: Any) -> Any:
        shared = {"model": "demo", "api_key": "none", "max_tokens": max_tokens, "temperature": 0}
        if api == "messages":
            return langchain_anthropic.ChatAnthropic(base_url=suite.url, **shared, **more)
        responses = api == "responses"
        return langchain_openai.ChatOpenAI(
            base_url=f"{suite.url}/v1", use_responses_api=responses, **shared, **more
        )

    return made


def test_invoke_and_stream_say_the_same(chat_of: Chat) -> None:
    chat = chat_of(FEW, stream_usage=True)
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))

    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert len(chunks) > 2
    assert streamed.text == whole.text != ""
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == FEW
    told = whole.response_metadata
    reasons = (told.get("finish_reason"), told.get("stop_reason"), told.get("incomplete_details"))
    assert any(
        reason in ("length", "max_tokens", {"reason": "max_output_tokens"}) for reason in reasons
    )


def test_a_batch_has_the_answers_of_its_parts(chat_of: Chat) -> None:
    chat = chat_of(16)
    questions = [f"Continue this text. The {number}th man went to" for number in range(4)]

    answers = chat.batch(questions)

    assert [answer.text for answer in answers] == [chat.invoke(q).text for q in questions]


# LangChain keeps one connection for all models of an address, and it belongs to one loop.
@pytest.mark.asyncio(loop_scope="module")
async def test_the_asynchronous_calls_work(chat_of: Chat) -> None:
    chat = chat_of(16)
    pieces = [chunk.text async for chunk in chat.astream(QUESTION)]

    assert "".join(pieces) == (await chat.ainvoke(QUESTION)).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(chat_of: Chat, method: str) -> None:
    chat = chat_of(128).with_structured_output(Verdict, method=method)

    assert isinstance(chat.invoke("i need to book a flight today"), Verdict)


def test_a_bound_tool_is_called_and_its_result_is_read(chat_of: Chat, api: str) -> None:
    chat = chat_of(64)
    must = "any" if api == "messages" else "required"
    forced = chat.bind_tools([get_weather], tool_choice=must, parallel_tool_calls=False)
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
    assert answer.text
