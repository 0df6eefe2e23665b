"""Errors as callers see them: one OpenAI-shaped body, one status, headers that say whether a retry helps."""

import math
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from itertools import pairwise
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from moesaic.errors import InvalidInput, ModelNotFound, MoesaicError

NO_OBJECT = "must be a JSON object, sent with content-type application/json"
MAX_PROBLEMS = 10
MAX_INPUT_CHARS = 200
MAX_MESSAGE_CHARS = 1000
_NOT_FIELDS = re.compile(r"^(function-(wrap|before|after|plain)|list\[|dict\[|\w*\[)|^str$|^int$")
_KINDS = ("predicate", "choice", "score")  # of questions: a validator names them behind the index
# Addresses, file paths and pointers are nobody's business outside.
_PRIVATE = re.compile(
    r"(\w+://\S+)|(\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b)|(\b[\w.-]+:\d{2,5}\b)|((?<![\w/])(/[\w.@+-]+){2,}/?)|(0x[0-9a-fA-F]+)"
)


class RouteNotEnabled(MoesaicError):
    """The route needs something that this deployment does not have."""

    code = "route_not_enabled"
    http_status = 404


class ErrorBody(msgspec.Struct):
    """The cause of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """Body of every error."""

    error: ErrorBody


class HttpProblem(msgspec.Struct):
    """An error ready to be sent."""

    status: int
    body: ErrorBody
    retryable: bool = False
    retry_after_s: float | None = None
    others: dict[str, str] = {}  # headers that its status asks for

    @property
    def content(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(ErrorReply(self.body))

    def response(self) -> Response:
        """Make the whole HTTP answer."""
        return Response(self.content, self.status, self.headers(), "application/json")

    def headers(self) -> dict[str, str]:
        """Make the headers of an error.

        ``Retry-After`` stands where waiting helps, also in milliseconds, as some clients prefer it; ``x-should-retry``
        wherever clients would guess.
        """
        headers = {"x-should-retry": "true" if self.retryable else "false"}
        if self.retryable:
            wait_s = self.retry_after_s or 1.0
            headers["retry-after"] = str(math.ceil(wait_s))
            headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers | self.others


ErrorForm = Callable[[HttpProblem, str], Response]
"""The answer that tells a problem of the request with this id, as one API has it."""


def openai_error(problem: HttpProblem, request_id: str) -> Response:
    """Tell a problem as OpenAI does: the id is in a header alone."""
    return problem.response()


def problem_of(error: MoesaicError) -> HttpProblem:
    """Translate one of our errors."""
    status = error.http_status
    param = getattr(error, "field", None) or ("model" if isinstance(error, ModelNotFound) else None)
    message = str(error)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        message = _PRIVATE.sub("…", message)
        param = None
    return HttpProblem(
        status,
        ErrorBody(message[:MAX_MESSAGE_CHARS], _type(status), param, error.code),
        # The caller may set another deadline; the gateway knows if something was sent already.
        retryable=error.retryable or status == HTTPStatus.GATEWAY_TIMEOUT,
        retry_after_s=getattr(error, "retry_after_s", None),
    )


def internal_error(request_id: str) -> HttpProblem:
    """Stand in for an error that is not ours: its text stays in the log."""
    message = f"internal error; the gateway's log has it under request id {request_id}"
    return problem(500, "internal_error", message)


def problem(status: int, code: str, message: str, *, param: str | None = None) -> HttpProblem:
    """Make an error that has no exception of its own."""
    return HttpProblem(status, ErrorBody(message, _type(status), param, code))


def invalid_fields(errors: Sequence[Any]) -> InvalidInput:
    """Make one error out of a validator's many, bounded however long the body was."""
    parts: list[str] = []
    for error in errors[:MAX_PROBLEMS]:
        name = field_name(error["loc"])
        text = _reason(error)
        given = error.get("input")
        if error["type"] != "missing" and isinstance(given, (str, int, float, bool)):
            shown = given[:MAX_INPUT_CHARS] if isinstance(given, str) else given
            text += f", got {repr(shown)[:MAX_INPUT_CHARS]}"
        parts.append(f"{name}: {text}"[:MAX_MESSAGE_CHARS])
    more = f" (and {len(errors) - MAX_PROBLEMS} more)" if len(errors) > MAX_PROBLEMS else ""
    field, _, first = parts[0].partition(": ")
    return InvalidInput(field, "; ".join([first, *parts[1:]])[:MAX_MESSAGE_CHARS] + more)


def invalid_body(error: ValidationError) -> InvalidInput:
    """Make one error out of a validator's, whose paths begin within the body."""
    told = error.errors(include_url=False)
    return invalid_fields([{**one, "loc": ("body", *one["loc"])} for one in told])


def field_name(loc: Sequence[str | int]) -> str:
    """Name a field, such as ``messages[0].content``, by a validator's path, which begins with ``body`` or the like."""
    name = ""
    for before, step in pairwise(loc):
        if isinstance(step, int):
            name += f"[{step}]"
        elif isinstance(before, int) and step in _KINDS:
            continue
        elif not _NOT_FIELDS.match(step) and not step[:1].isupper():
            name += f".{step[:60]}" if name else step[:60]
    return name or "body"


def _reason(error: Any) -> str:
    if error["type"] in ("model_type", "dict_type"):
        return NO_OBJECT if field_name(error["loc"]) == "body" else "must be a JSON object"
    text = str(error["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _type(status: int) -> str:
    special = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return special.get(status, "invalid_request_error" if status < 500 else "server_error")
