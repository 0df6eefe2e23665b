"""Agents of ``pydantic_ai`` against a real suite, by three APIs: a tool, its result, an answer."""

from typing import Any, Literal

import pytest

from tests.suites import Suite

pydantic_ai = pytest.importorskip("pydantic_ai", reason="make test-clients installs it")
pydantic = pytest.importorskip("pydantic")

SETTINGS = {"temperature": 0, "max_tokens": 120, "parallel_tool_calls": False}


class Verdict(pydantic.BaseModel):
    """What a message is about."""

    topic: Literal["banking", "travel", "work"]
    urgent: bool


@pytest.fixture(params=["chat", "responses", "messages"])
def model(suite: Suite, request: pytest.FixtureRequest) -> Any:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if request.param == "messages":
        return AnthropicModel(
            "demo", provider=AnthropicProvider(base_url=suite.url, api_key="none")
        )
    kind = OpenAIResponsesModel if request.param == "responses" else OpenAIChatModel
    return kind("demo", provider=OpenAIProvider(base_url=f"{suite.url}/v1", api_key="none"))


async def test_a_loop_goes_from_a_call_over_its_result_to_an_answer(model: Any) -> None:
    asked: list[str] = []

    def settings(_: Any) -> Any:
        """The demo model calls only where it must, and must not for ever."""
        return {**SETTINGS, "tool_choice": "auto" if asked else "required"}

    agent = pydantic_ai.Agent(model, model_settings=settings)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"It rains in {city}."

    run = await agent.run("what is the weather in Rome?")

    kinds = [part.part_kind for message in run.all_messages() for part in message.parts]
    assert kinds == ["user-prompt", "tool-call", "tool-return", "text"]
    assert asked[0] in ("Paris", "Rome")
    assert run.output


async def test_an_output_that_is_a_class_comes_as_a_call(model: Any) -> None:
    agent = pydantic_ai.Agent(model, output_type=Verdict, model_settings=SETTINGS)

    verdict = (await agent.run("i need to book a flight today")).output

    assert isinstance(verdict, Verdict)


async def test_a_stream_brings_the_same_output(model: Any) -> None:
    agent = pydantic_ai.Agent(model, output_type=Verdict, model_settings=SETTINGS)
    whole = (await agent.run("i need to book a flight today")).output

    async with agent.run_stream("i need to book a flight today") as stream:
        assert await stream.get_output() == whole
