"""No body holds the event loop, whatever field is full of whatever there is. The bodies are made from the types of
requests, so that a new field is tried of itself; ``moesaic bench refusals`` measures the time that larger ones take.

Time is counted in calls here: of errors that are reported, and of functions that run where the event loop does.
"""

import asyncio
import sys
from types import FrameType
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from benchmarks.refusals.bodies import BodyLimits, large_bodies
from moesaic.errors import InvalidInput
from moesaic.services.gateway.app import body_types
from moesaic.services.gateway.fields.generating import MAX_LOGIT_BIASES
from moesaic.services.gateway.routes.json_route import SHORT_BYTES, decode_body

KINDS = {kind: path for path, kind in reversed(list(body_types()))}
SMALL = BodyLimits(1 << 13, 1 << 11, 1 << 10, 1 << 9)
LARGE = BodyLimits(16 * SHORT_BYTES, 1 << 17, 1 << 16, 1 << 15)
MOST_ERRORS = 64
WITH_ANY_NAMES = ("logit_bias", "metadata")
MOST_CALLS = 60_000
EVERY = 31  # one body of so many


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_few_errors_are_reported_of_any_body(kind: type[BaseModel]) -> None:
    for name, content in large_bodies(kind, SMALL):
        most = MOST_ERRORS
        if name.startswith(WITH_ANY_NAMES):  # which are looked at as far as they may go
            most += MAX_LOGIT_BIASES
        assert num_errors(kind, content) <= most, name


def test_describing_the_types_again_and_again_changes_nothing() -> None:
    for kind in KINDS:  # each description of the API asks the types for theirs
        before = str(kind.model_json_schema())
        assert all(str(TypeAdapter(kind).json_schema()) == before for _ in range(20))


def num_errors(kind: type[BaseModel], content: bytes) -> int:
    try:
        kind.model_validate(decode_body(content))
    # It holds more values than any body may.
    except InvalidInput:
        return 1
    except ValidationError as error:
        return error.error_count()
    return 0


class Calls:
    """Counts calls of functions between one round of the event loop and the next."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._loop = asyncio.get_running_loop()

    def count(self, frame: FrameType, event: str, argument: Any) -> None:
        self._now += event in ("call", "c_call")

    def round(self) -> None:
        self.most, self._now = max(self.most, self._now), 0
        self._round = self._loop.call_soon(self.round)

    def __enter__(self) -> "Calls":
        self.round()
        sys.setprofile(self.count)  # of this thread, which the event loop runs in
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._round.cancel()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_long_work_on_a_body_leaves_the_event_loop(
    open_house, scripts, kind, tmp_path
) -> None:
    headers = {"content-type": "application/json"}
    async with open_house(scripts.anything, files_dir=str(tmp_path)) as house:
        for name, content in list(large_bodies(kind, LARGE))[::EVERY]:
            with Calls() as calls:
                response = await house.client.post(KINDS[kind], content=content, headers=headers)

            assert response.status_code < 500, (name, response.text)
            assert calls.most <= MOST_CALLS, name
