"""Errors as Anthropic's API tells them, also those that are found before a route is.

| Status here | Status there | Type |
|---|---|---|
| 401, 403, 404, 409, 413, 429 | the same | one for each |
| other 4xx | the same | ``invalid_request_error`` |
| 503, code ``overloaded`` | 529 | ``overloaded_error`` |
| 504 | the same | ``timeout_error`` |
| other 5xx | the same | ``api_error`` |
"""

import msgspec
from starlette.responses import Response

from moesaic.errors import Overloaded
from moesaic.services.gateway.access import is_below
from moesaic.services.gateway.http.problems import HttpProblem

PATH = "/v1/messages"
ID_HEADERS = (b"x-request-id", b"request-id")
OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# Fields of a chat, by the fields of a message that they are made of.
_FIELDS = {
    ".function.parameters": ".input_schema",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
}


class AnthropicErrorDetails(msgspec.Struct, omit_defaults=True):
    """The cause of an error for programs: the gateway's own code, and the field."""

    error_code: str | None = None
    param: str | None = None


class AnthropicError(msgspec.Struct):
    """The cause of an error."""

    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicErrorReply(msgspec.Struct, tag_field="type", tag="error"):
    """Body of every error below ``/v1/messages``, and the event ``error`` of a stream."""

    error: AnthropicError
    request_id: str


def is_anthropics(path: str) -> bool:
    """Tell if a path belongs to Anthropic's API."""
    return is_below(path, PATH)


def message_field(name: str) -> str:
    """Name the field of a message that a field of a chat was made of."""
    for ours, theirs in _FIELDS.items():
        name = name.replace(ours, theirs)
    return name


def anthropic_error(problem: HttpProblem, request_id: str) -> Response:
    """Tell a problem as an HTTP answer."""
    content = msgspec.json.encode(anthropic_body(problem, request_id))
    return Response(content, _status_of(problem), problem.headers(), "application/json")


def anthropic_body(problem: HttpProblem, request_id: str) -> AnthropicErrorReply:
    """Tell a problem as an object."""
    status, told = _status_of(problem), problem.body
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message, param = told.message, told.param
    if param is not None:
        param = message_field(param)
        message = param + message[len(told.param or "") :]
    if told.code == "context_length_exceeded":
        # Clients look for these words, and then shorten the conversation.
        message = f"prompt is too long: {message}"
    return AnthropicErrorReply(
        AnthropicError(kind, message, AnthropicErrorDetails(told.code, param)), request_id
    )


def _status_of(problem: HttpProblem) -> int:
    return OVERLOADED if problem.body.code == Overloaded.code else problem.status
