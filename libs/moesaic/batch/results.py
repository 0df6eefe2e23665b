"""Lines of a batch's output: ``{"id", "custom_id", "response", "error"}``, one for each line of the input."""

import secrets
from typing import Any

import msgspec

from moesaic.batch.requests import BadLine


class Answer(msgspec.Struct, frozen=True):
    """What a route answered, well or not."""

    status_code: int
    request_id: str
    body: Any

    @property
    def ok(self) -> bool:
        """Whether it is what was asked for."""
        return 200 <= self.status_code < 300


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why there is no answer."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Result(msgspec.Struct, frozen=True):
    """What came of one line of the input; either ``response`` or ``error`` is there."""

    id: str
    custom_id: str | None
    response: Answer | None
    error: Failure | None

    @property
    def ok(self) -> bool:
        """Whether the request was answered as it was meant."""
        return self.response is not None and self.response.ok

    def encode(self) -> bytes:
        """The line, with its end."""
        return msgspec.json.encode(self) + b"\n"


_DECODER = msgspec.json.Decoder(Result)


def decode_result(line: bytes) -> Result:
    """Read a whole line of an output.

    Raises:
        ValueError: it is none.
    """
    if not line.endswith(b"\n"):
        raise ValueError("the line has no end")
    return _DECODER.decode(line)


def answered(custom_id: str, answer: Answer) -> Result:
    """The result of a request that a route has answered."""
    return Result(_result_id(), custom_id, answer, None)


def unanswered(custom_id: str | None, code: str, message: str) -> Result:
    """The result of a request without an answer."""
    return Result(_result_id(), custom_id, None, Failure(code, message))


def refused(line: BadLine) -> Result:
    """The result of a line that is no request."""
    failure = Failure(line.code, line.message, line.param, line.number)
    return Result(_result_id(), line.custom_id, None, failure)


class Tally(msgspec.Struct):
    """Counts over results."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total(self) -> int:
        """Results so far."""
        return self.completed + self.failed

    def add(self, result: Result) -> None:
        """Count one result, with the ``usage`` in it."""
        if not result.ok:
            self.failed += 1
            return
        self.completed += 1
        usage = _within(result.response and result.response.body, "usage")
        for prompt, completion in (("prompt", "completion"), ("input", "output")):
            self.prompt_tokens += _count(usage, f"{prompt}_tokens")
            self.completion_tokens += _count(usage, f"{completion}_tokens")
            details = _within(usage, f"{prompt}_tokens_details")
            self.cached_tokens += _count(details, "cached_tokens")


def _within(value: Any, field: str) -> Any:
    return value.get(field) if isinstance(value, dict) else None


def _count(value: Any, field: str) -> int:
    count = _within(value, field)
    return count if isinstance(count, int) else 0


def _result_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
