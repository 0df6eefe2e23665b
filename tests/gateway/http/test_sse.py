import json

from hypothesis import given
from hypothesis import strategies as st

from moesaic.services.gateway.generate import deliver

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2028\u2029\x85\r\n"))


@given(TEXTS)
def test_an_event_is_one_line_that_holds_the_value(text: str) -> None:
    event = deliver.event({"text": text}).decode()

    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    assert len(event.removesuffix("\n\n").splitlines()) == 1
    assert json.loads(event.removeprefix("data: ")) == {"text": text}
