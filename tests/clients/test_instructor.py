"""``instructor`` against a real suite: objects by calls, whole and growing."""

from typing import Any, Literal

import pytest

from tests.suites import Suite

instructor = pytest.importorskip("instructor", reason="make test-clients installs it")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "i need to book a flight today"}],
    "temperature": 0,
    "max_tokens": 128,
}


class Verdict(pydantic.BaseModel):
    """What a message is about."""

    topic: Literal["banking", "travel", "work"]
    urgent: bool


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS"])
def test_an_object_of_the_class_comes_back(suite: Suite, mode: str) -> None:
    with openai.OpenAI(base_url=f"{suite.url}/v1", api_key="none") as caller:
        client = instructor.from_openai(caller, mode=instructor.Mode[mode])
        verdict = client.create(response_model=Verdict, max_retries=0, **ASKED)

    assert isinstance(verdict, Verdict)


def test_an_object_grows_to_the_same(suite: Suite) -> None:
    with openai.OpenAI(base_url=f"{suite.url}/v1", api_key="none") as caller:
        client = instructor.from_openai(caller, mode=instructor.Mode.TOOLS)
        whole = client.create(response_model=Verdict, max_retries=0, **ASKED)
        *_, last = client.create_partial(response_model=Verdict, max_retries=0, **ASKED)

    assert last.model_dump() == whole.model_dump()
