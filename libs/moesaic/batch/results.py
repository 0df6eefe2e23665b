"""Lines of a batch's output: ``{"id", "custom_id", "response", "error"}``, one for each line of the input."""

import secrets
from typing import Any

import msgspec

from moesaic.batch.requests import BadLine


class RouteAnswer(msgspec.Struct, frozen=True):
    """A route's answer, successful or not."""

    status_code: int
    request_id: str
    body: Any

    @property
    def ok(self) -> bool:
        """True if the route did as it was asked."""
        return 200 <= self.status_code < 300


class RequestFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reason for no answer."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Result(msgspec.Struct, frozen=True):
    """The outcome of one line of the input: either ``response`` or ``error``."""

    id: str
    custom_id: str | None
    response: RouteAnswer | None
    error: RequestFailure | None

    @property
    def ok(self) -> bool:
        """True if a route did as the request asked."""
        return self.response is not None and self.response.ok

    def encode(self) -> bytes:
        """Encode the line, with its end."""
        return msgspec.json.encode(self) + b"\n"


_DECODER = msgspec.json.Decoder(Result)


def decode_result(line: bytes) -> Result:
    """Read a whole line of an output.

    Raises:
        ValueError: the line is no result.
    """
    if not line.endswith(b"\n"):
        raise ValueError("the line has no end")
    return _DECODER.decode(line)


def answered(custom_id: str, answer: RouteAnswer) -> Result:
    """Make the result of a request that a route has answered."""
    return Result(_result_id(), custom_id, answer, None)


def unanswered(custom_id: str | None, code: str, message: str) -> Result:
    """Make the result of a request without an answer."""
    return Result(_result_id(), custom_id, None, RequestFailure(code, message))


def refused(line: BadLine) -> Result:
    """Make the result of a line without a request."""
    failure = RequestFailure(line.code, line.message, line.param, line.number)
    return Result(_result_id(), line.custom_id, None, failure)


class ResultTally(msgspec.Struct):
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
