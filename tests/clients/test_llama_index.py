"""LlamaIndex's ``OpenAILike`` against a real suite: texts, chats, streams, objects, tools."""

from typing import Any, Literal

import pytest

from tests.suites import Suite

openai_like = pytest.importorskip(
    "llama_index.llms.openai_like", reason="make test-clients installs it"
)
pydantic = pytest.importorskip("pydantic")
llms = pytest.importorskip("llama_index.core.llms")
tools = pytest.importorskip("llama_index.core.tools")

QUESTION = "Continue this text. The old prince came into the room"


class Verdict(pydantic.BaseModel):
    """What a message is about."""

    topic: Literal["banking", "travel", "work"]
    urgent: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def llm_of(suite: Suite, **more: Any) -> Any:
    return openai_like.OpenAILike(
        model="demo",
        api_base=f"{suite.url}/v1",
        api_key="none",
        context_window=2048,
        temperature=0,
        **{"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 128, **more},
    )


@pytest.mark.parametrize("is_chat_model", [True, False])
def test_a_stream_has_the_text_of_a_whole_completion(suite: Suite, is_chat_model: bool) -> None:
    llm = llm_of(suite, is_chat_model=is_chat_model, max_tokens=12)

    whole = llm.complete(QUESTION).text
    *_, last = llm.stream_complete(QUESTION)

    assert last.text == whole != ""


async def test_a_chat_by_the_asynchronous_client(suite: Suite) -> None:
    llm = llm_of(suite, max_tokens=12)
    asked = [llms.ChatMessage(role="system", content="Be short."), llms.ChatMessage(QUESTION)]

    whole = await llm.achat(asked)
    pieces = [piece.delta or "" async for piece in await llm.astream_chat(asked)]

    assert "".join(pieces) == whole.message.content != ""


def test_an_object_of_a_class(suite: Suite) -> None:
    sorter = llm_of(suite, should_use_structured_outputs=True).as_structured_llm(Verdict)

    assert isinstance(sorter.complete("i need to book a flight today").raw, Verdict)


def test_a_tool_is_called(suite: Suite) -> None:
    tool = tools.FunctionTool.from_defaults(get_weather)
    llm = llm_of(suite)

    answer = llm.chat_with_tools(
        [tool], "what is the weather in Rome?", tool_required=True, allow_parallel_tool_calls=False
    )

    [call] = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather"
    assert call.tool_kwargs["city"] in ("Paris", "Rome")
