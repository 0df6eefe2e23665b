"""A chat in a real terminal, with a gateway that answers by the words of each message."""

import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.clients.conversation import Talk
from moesaic.cli.terminal.outcome import CommandError
from tests.cli.conftest import command, environment
from tests.http_servers import JsonHandler, JsonServer, serving
from tests.waiting import HANG_S, MOST_POLL_S

MOESAIC = {
    "epochs": [{"epoch": 3, "tokens": 9}],
    "cached_tokens": 4,
    "quality": {"mean_threshold": 0.9, "degraded_share": 0.25},
}
STEERING = "\x1b]0;title\x07"
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}


class Gateway(JsonServer):
    """Echoes messages; ``endless`` never ends by itself, and ``refused`` is an error."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.hung_up = threading.Event()
        self.model = "demo"


class Handler(JsonHandler):
    server: Gateway

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": self.server.model}]})

    def do_POST(self) -> None:
        body = self.body()
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["Authorization"])
        text = body["messages"][-1]["content"]
        if text == "refused":
            self.answer(503, {"error": {"message": "overloaded", "code": "overloaded"}})
            return
        if text == "steering error":
            self.answer(503, {"error": {"message": f"over{STEERING}loaded", "code": "overloaded"}})
            return
        self.send_response(200)
        if "seeed" in body:
            self.send_header("x-moesaic-ignored", "seeed")
        if text == "think":
            self.send_header(
                "x-moesaic-ignored", "a\x9bb"
            )  # a header has no other control characters
        self.end_headers()
        if text == "endless":
            self._endless()
            return
        if text == "think":
            self.event({"choices": [{"delta": {"reasoning": f"so{STEERING} so"}}]})
        for piece in ("You said: ", text):
            self.event({"choices": [{"delta": {"content": piece}, "finish_reason": None}]})
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "moesaic": MOESAIC}
        self.event(end)
        self.event({"choices": [], "usage": USAGE})

    def _endless(self) -> None:
        try:
            while True:
                self.event({"choices": [{"delta": {"content": "on "}, "finish_reason": None}]})
        except OSError:
            self.server.hung_up.set()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with serving(Gateway()) as gateway:
        yield gateway


class Terminal:
    """A pseudo-terminal with the chat in it."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._shown, self._ended = "", False
        self.pid, self._end = pty.fork()
        if not self.pid:
            os.chdir(directory)
            os.execvpe(sys.executable, command("chat", *arguments), environment(TERM="dumb"))

    def types(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, wanted: str, again: str = "") -> str:
        """Read until a text shows; what came up to its end is read then.

        Args:
            wanted: the text.
            again: keys that are pressed once more whenever nothing shows.
        """
        while wanted not in self._shown:
            ready, _, _ = select.select([self._end], [], [], MOST_POLL_S if again else HANG_S)
            if again and not ready:
                self.types(again)
                continue
            assert ready, f"{wanted!r} did not show: {self._shown!r}"
            try:
                self._shown += os.read(self._end, 1 << 16).decode(errors="replace")
            except OSError:  # it has ended
                pytest.fail(f"{wanted!r} did not show: {self._shown!r}")
        before, _, self._shown = self._shown.partition(wanted)
        return before + wanted

    def status(self) -> int:
        """Read what is left, and return the exit status."""
        with suppress(OSError):  # the end
            while select.select([self._end], [], [], HANG_S)[0] and os.read(self._end, 1 << 16):
                pass
        return self.close()

    def close(self) -> int:
        """Hang up, wait for the chat's end, and return its exit status."""
        self._ended = True
        os.close(self._end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)
            self.close()


@pytest.fixture
def terminal(gateway: Gateway, tmp_path: Path) -> Iterator[Terminal]:
    with Terminal(tmp_path, gateway.url) as made:
        made.until(">>> ")
        yield made


def test_answers_stream_and_the_conversation_goes_on(gateway: Gateway, terminal: Terminal) -> None:
    terminal.types("hello\r")
    terminal.until("You said: hello")
    terminal.until(">>> ")
    terminal.types("again\r")
    terminal.until("You said: again")
    terminal.until(">>> ")
    terminal.types("\x04")

    assert terminal.status() == 0
    assert [each["content"] for each in gateway.bodies[1]["messages"]] == [
        *("hello", "You said: hello", "again")
    ]


def test_ctrl_c_stops_the_answer_and_not_the_chat(gateway: Gateway, terminal: Terminal) -> None:
    terminal.types("endless\r")
    terminal.until("on on on ")
    terminal.types("\x03")
    terminal.until("stopped")
    terminal.until(">>> ")

    # The gateway computes no further.
    assert gateway.hung_up.wait(HANG_S)
    # Python does not see one that comes between the prompt and its wait for keys.
    terminal.until("Ctrl-D leaves", again="\x03")
    terminal.until(">>> ")
    terminal.types("hello\r")
    terminal.until("You said: hello")
    terminal.until(">>> ")
    terminal.types("\x04")
    assert terminal.status() == 0
    roles = [each["role"] for each in gateway.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_a_message_may_have_several_lines(gateway: Gateway, terminal: Terminal) -> None:
    terminal.types("one\\\r")
    terminal.until("... ")
    terminal.types("two\r")
    terminal.until(">>> ")
    terminal.types('"""a\r')
    terminal.until("... ")
    terminal.types('b"""\r')
    terminal.until(">>> ")

    assert [body["messages"][-1]["content"] for body in gateway.bodies] == ["one\ntwo", "a\nb"]
    terminal.types("\x04")
    assert terminal.status() == 0


def test_the_history_brings_a_message_back(gateway: Gateway, terminal: Terminal) -> None:
    terminal.types("hello\r")
    terminal.until(">>> ")
    terminal.types("\x10\r")  # what the arrow up does
    terminal.until(">>> ")
    terminal.types("\x04")

    assert terminal.status() == 0
    assert [body["messages"][-1]["content"] for body in gateway.bodies] == ["hello", "hello"]


def test_failures_are_told_and_the_chat_goes_on(gateway: Gateway, terminal: Terminal) -> None:
    for text, says in (
        ("refused", "moesaic: overloaded"),
        ("/sytem be brief", "unknown command, did you mean /system?"),
        ("/params temperature", "write name=value"),
        ("/params stream=false", "is the chat's own"),
    ):
        terminal.types(text + "\r")
        terminal.until(says)
        terminal.until(">>> ")
    terminal.types("hello\r")
    terminal.until("You said: hello")
    terminal.until(">>> ")
    terminal.types("\x04")

    assert terminal.status() == 0
    assert gateway.bodies[-1]["messages"] == [{"role": "user", "content": "hello"}]


def test_the_text_of_a_model_does_not_steer_the_terminal(terminal: Terminal) -> None:
    # What is echoed to the terminal is written with ^, an answer would be as it is.
    terminal.types("\x16\x1b]0;title\x16\x07\r")
    shown = terminal.until("You said: ") + terminal.until(">>> ")
    terminal.types("\x04")

    assert terminal.status() == 0
    assert "]0;title" in shown.partition("You said: ")[2]
    assert "\x1b" not in shown.partition("You said: ")[2]


def test_names_and_errors_of_a_server_do_not_steer_the_terminal(
    gateway: Gateway, tmp_path: Path
) -> None:
    gateway.model = f"de{STEERING}mo"
    terminal = Terminal(tmp_path, gateway.url)
    shown = terminal.until("leaves") + terminal.until(">>> ")
    terminal.types("steering error\r")
    shown += terminal.until("loaded") + terminal.until(">>> ")
    terminal.types("\x04")

    assert terminal.status() == 0
    assert "de]0;titlemo at" in shown
    assert "over]0;titleloaded" in shown
    assert "\x1b]0" not in shown


def test_each_stream_is_harmless_where_a_terminal_shows_it(gateway: Gateway) -> None:
    own, end = pty.openpty()
    with os.fdopen(own, "rb", buffering=0) as terminal, os.fdopen(end, "wb") as stderr:
        done = subprocess.run(
            command("chat", gateway.url),
            input=f"think\nplain{STEERING}\n",
            env=environment(TERM="dumb"),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        shown = terminal.read(1 << 16).decode()

    assert done.returncode == 0, shown
    assert "so]0;title so" in shown
    assert "the server ignored: ab" in shown
    # A pipe gets each byte as it is.
    assert done.stdout == f"You said: think\nYou said: plain{STEERING}\n"


def piped(gateway: Gateway, text: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command("chat", gateway.url),
        input=text,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_each_line_of_a_pipe_is_a_turn(gateway: Gateway) -> None:
    lines = "/system be brief\n/params temperature=0.2 stop=x seeed=1\nhello\n\n//path\n/clear\nnew"
    done = piped(gateway, lines + "\n/stats\n", MOESAIC_API_KEY="key")

    assert done.returncode == 0
    assert done.stdout.startswith("You said: hello\nYou said: /path\nYou said: new\n")
    assert "the server ignored: seeed" in done.stderr
    first, second, third = gateway.bodies
    assert first["messages"][0] == {"role": "system", "content": "be brief"}
    assert (first["temperature"], first["stop"], first["model"]) == (0.2, "x", "demo")
    assert len(second["messages"]) == 4
    assert [each["content"] for each in third["messages"]] == ["be brief", "new"]
    assert gateway.keys == ["Bearer key"] * 3
    for name, value in (
        *(("prompt tokens", "5"), ("cached tokens", "4"), ("answer tokens", "2")),
        *(("epoch", "3"), ("degraded share", "25.0%")),
    ):
        [line] = [line for line in done.stdout.splitlines() if name in line]
        assert line.strip("| ").split("|")[1].strip() == value
    assert "first token" in done.stdout


def test_the_first_failure_ends_a_pipe(gateway: Gateway) -> None:
    done = piped(gateway, "refused\nhello\n")

    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "moesaic: overloaded\n"
    assert len(gateway.bodies) == 1


def test_parameters_are_set_together_or_not_at_all() -> None:
    talk = Talk(client=None, model="demo")  # type: ignore[arg-type]
    talk.set_parameters('temperature=0.5 stop=["a"]')

    with pytest.raises(CommandError, match="/params top_p"):
        talk.set_parameters("temperature=1 top_p")
    assert talk.parameters == {"temperature": 0.5, "stop": ["a"]}

    talk.set_parameters("temperature=")
    assert talk.parameters == {"stop": ["a"]}


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e999", '{"a":[NaN]}', '"\\ud800"', '{"\\udfff":1}']
)
def test_a_parameter_that_no_request_can_carry_is_refused(value: str) -> None:
    talk = Talk(client=None, model="demo")  # type: ignore[arg-type]

    with pytest.raises(CommandError, match="/params temperature: no request can carry this"):
        talk.set_parameters(f"stop=x temperature={value}")
    assert talk.parameters == {}
