"""The JSON of a request's body. Its values are counted before it is decoded, so that no body takes long."""

import json
from typing import Any

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.services.gateway.http.surrogates import check_unicode

# Decoding and checking hold the GIL, so these bounds are those of time: each is worth about 40 ms.
MAX_VALUES = 1 << 19  # of any kind: token ids of four contexts of 128 k
MAX_NESTED = 1 << 16  # lists, objects and fields of these


class InvalidJson(MoesaicError):
    """A body that cannot be read."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(f"the body is not valid JSON: {reason}")


def decode_body(body: bytes) -> Any:
    """Decode a body.

    Raises:
        InvalidInput: it holds too much, or a lone surrogate.
        InvalidJson: it is not JSON in UTF-8.
    """
    try:
        text = body.decode("utf-8-sig")
        _check_counts(text)
        value = json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg[:1].lower()}{error.msg[1:]}"
        place = f"at line {error.lineno} column {error.colno}"
        raise InvalidJson(f"{reason} {place}") from error
    except UnicodeDecodeError as error:
        raise InvalidJson("it is not UTF-8") from error
    except ValueError as error:
        raise InvalidJson("a number has too many digits") from error
    except RecursionError as error:
        raise InvalidJson("it is nested too deeply") from error
    if "\\u" in text:  # else there is no way to write a surrogate
        check_unicode(value)
    return value


def _check_counts(text: str) -> None:
    """Count as if all text were JSON's own; if that is too much, count again without the strings."""
    if _is_small(text):
        return
    rest = text.replace("\\\\", "").replace('\\"', "")
    if rest.count('"') <= 2 * MAX_VALUES and _is_small("".join(rest.split('"')[::2])):
        return
    fix = f"may hold at most {MAX_VALUES} values, {MAX_NESTED} of them lists, objects or fields"
    raise InvalidInput("body", fix)


def _is_small(text: str) -> bool:
    num_nested = text.count("[") + text.count("{") + text.count(":")
    return num_nested <= MAX_NESTED and text.count(",") <= MAX_VALUES
