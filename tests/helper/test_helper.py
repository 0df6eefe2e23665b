"""Helper processes: limits give verdicts, and whatever a stranger does to a process gives none."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import NotReady
from moesaic.helper.helper import Helper
from moesaic.helper.limits import TooMuch
from tests.helper.work import LIMITS

ROOT = Path(__file__).parents[2]
USED = ["hold", 0]


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Helper:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Helper("tests.helper.work", [], LIMITS)


@pytest.mark.parametrize("question", [None, 7, 10**40, 0.5, "é\ud800\0", {"a": [{"b": None}]}])
def test_questions_and_answers_are_whatever_json_can_hold(helper: Helper, question: Any) -> None:
    assert helper.ask(question) == question


def test_one_process_answers_one_question_after_the_other(helper: Helper) -> None:
    assert helper.ask(["pid"]) == helper.ask(["pid"]) != os.getpid()


def test_threads_share_as_many_processes_as_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    helper = Helper("tests.helper.work", [], LIMITS, most=2)

    with ThreadPoolExecutor(8) as threads:
        pids = list(threads.map(lambda _: helper.ask(["pid"]), range(64)))

    assert 1 <= len(set(pids)) <= 2


@pytest.mark.parametrize(
    ("question", "limit"),
    [
        (["spin"], "time"),
        (["hold the interpreter"], "time"),
        (["hold", 64 << 20], "memory"),
        (["text", 1 << 17], "memory"),  # longer than the longest answer
        (["no part of an answer", "x" * 3_000_000], "memory"),
        (["signal", signal.SIGSEGV], "crash"),
        (["signal", signal.SIGABRT], "crash"),
    ],
)
def test_too_much_work_is_told_by_its_limit_and_the_next_question_is_answered(
    helper: Helper, question: list[Any], limit: str
) -> None:
    for _ in range(2):
        with pytest.raises(TooMuch) as verdict:
            helper.ask(question)
        assert verdict.value.limit == limit

    assert helper.ask("still there") == "still there"


@pytest.mark.parametrize(
    "question",
    [
        ["signal", signal.SIGKILL],  # also what the system does when memory runs out
        ["signal", signal.SIGTERM],
        ["signal", signal.SIGHUP],
        ["signal", signal.SIGSTOP],
        ["signal", signal.SIGPROF],  # as if its time were used up
        ["fail"],
    ],
)
def test_a_process_that_others_end_or_stop_gives_no_verdict(
    helper: Helper, question: list[Any]
) -> None:
    for _ in range(2):
        with pytest.raises(NotReady) as failure:
            helper.ask(question)
        assert failure.value.retry_after_s > 0

    assert helper.ask("still there") == "still there"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_one_crash_is_no_verdict(helper: Helper, number: int) -> None:
    helper.ask(USED)

    assert helper.ask(["signal if used", number]) == ["signal if used", number]


def test_memory_that_earlier_questions_hold_is_no_verdict(helper: Helper) -> None:
    twenty = ["hold", 20 << 20]

    assert [helper.ask(twenty), helper.ask(twenty)] == [1, 1]  # by two processes


def test_a_process_that_was_ended_between_two_questions_is_replaced(helper: Helper) -> None:
    first = helper.ask(["pid"])
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # until it has ended

    assert helper.ask(["pid"]) != first


def test_a_stopped_process_is_replaced(helper: Helper) -> None:
    first = helper.ask(["pid"])
    os.kill(first, signal.SIGSTOP)

    with pytest.raises(NotReady, match="stopped"):
        helper.ask(["pid"])

    assert helper.ask(["pid"]) != first


def test_ctrl_c_in_a_terminal_does_not_end_a_process(helper: Helper) -> None:
    assert helper.ask(["signal", signal.SIGINT]) == ["signal", signal.SIGINT]


def test_a_process_knows_no_secrets(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_API_KEYS", "secret")
    monkeypatch.setenv("REDIS_URL", "secret")

    assert "secret" not in helper.ask(["environment"]).values()


def test_processes_end_with_their_helper(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Helper("tests.helper.work", [], LIMITS)
    pid = own.ask(["pid"])

    # Not by a collection of garbage: that of gRPC's objects, which other tests leave, may wait for ever.
    del own

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_helper_that_cannot_start_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(NotReady):
            Helper("moesaic.helper.absent", [], LIMITS).ask(1)
    monkeypatch.setattr(sys, "executable", "/absent")
    with pytest.raises(NotReady, match="can be started"):
        Helper("tests.helper.work", [], LIMITS).ask(1)
