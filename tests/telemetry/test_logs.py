import json
import logging
from pathlib import Path

import numpy as np
import pytest
import structlog

from moesaic.errors import InvalidInput
from moesaic.telemetry.logs import configure_logging, set_level


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def written(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_event_is_one_json_line_that_names_its_process(capsys):
    configure_logging("expert", "expert-1", "info")
    structlog.contextvars.bind_contextvars(request_id="r1")

    structlog.get_logger().info("replica.loaded", slot_id=7)

    (line,) = written(capsys)
    assert list(line)[:5] == ["ts", "level", "event", "service", "instance"]
    assert (line["level"], line["event"], line["service"]) == ("info", "replica.loaded", "expert")
    assert (line["slot_id"], line["request_id"]) == (7, "r1")


def test_secrets_and_credentials_are_hidden_wherever_they_stand(capsys):
    configure_logging("gateway", "g", "info")

    structlog.get_logger().info(
        "settings.read",
        api_key="canary",
        Authorization="Bearer canary",
        headers={"x-auth-token": "canary"},
        redis_url="redis://user:canary@host/0",
        prompt_tokens=5,
        token_ids=[1, 2],
    )

    (line,) = written(capsys)
    assert "canary" not in json.dumps(line)
    assert (line["prompt_tokens"], line["token_ids"]) == (5, [1, 2])
    assert line["redis_url"] == "redis://***@host/0"


def test_the_level_can_be_changed_for_loggers_that_exist(capsys):
    configure_logging("expert", "e", "info")
    bound = structlog.get_logger().bind(worker_id="w")
    bound.debug("unheard")

    set_level("debug")
    bound.debug("heard")

    assert [line["event"] for line in written(capsys)] == ["heard"]
    with pytest.raises(InvalidInput, match="level: must be one of debug"):
        set_level("loud")


def test_libraries_are_heard_from_warning_up(capsys):
    configure_logging("expert", "e", "info")

    logging.getLogger("asyncio").info("chatter")
    logging.getLogger("asyncio").error("task %s died", "x")

    (line,) = written(capsys)
    assert line["event"] == "library.logged"
    assert (line["logger"], line["message"], line["level"]) == ("asyncio", "task x died", "error")


def test_a_place_in_a_library_has_its_say_once_in_a_while(capsys, monkeypatch):
    configure_logging("expert", "e", "info")
    stranger = logging.getLogger("uvicorn.error")

    def complain(created: float, text: str) -> None:
        record = stranger.makeRecord(stranger.name, logging.WARNING, "h11.py", 7, text, (), None)
        record.created = created
        stranger.handle(record)

    for number in range(1000):
        complain(100.0 + number / 1000, f"bad request {number}")
    stranger.warning("another place")
    complain(111.0, "bad request again")
    complain(50.0, "the clock was set back")

    lines = written(capsys)
    assert [line["message"] for line in lines] == [
        "bad request 0",
        "another place",
        "bad request again",
        "the clock was set back",
    ]
    assert [line.get("left_out", 0) for line in lines] == [0, 0, 999, 0]


def test_a_traceback_is_part_of_its_line(capsys):
    configure_logging("expert", "e", "info")

    try:
        raise ValueError("boom")
    except ValueError:
        structlog.get_logger().exception("call.failed")

    (line,) = written(capsys)
    assert line["level"] == "error"
    assert "ValueError: boom" in line["exception"]


def test_texts_and_numbers_that_json_does_not_have_cost_no_line(capsys):
    configure_logging("expert", "e", "info")

    log = structlog.get_logger()
    log.info("odd", number=float("nan"), thing=Path("/x"), reading=np.float64(0.5), raw=b"x")
    log.info("odd", text="half \ud83d", thing=Path("/x"))

    number, text = written(capsys)
    assert (number["number"], number["thing"]) == (None, "/x")
    assert (number["reading"], number["raw"]) == (0.5, "b'x'")
    assert (text["text"], text["thing"]) == ("half \ud83d", "/x")
