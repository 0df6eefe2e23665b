"""Lists of origins, methods and headers in the settings, for web pages that may call the gateway."""

import json
import re
from contextlib import suppress

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*A-Z]+")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def listed(text: str) -> tuple[str, ...]:
    """Take a list apart: names between commas, or vLLM's form, a JSON list of strings."""
    with suppress(ValueError):
        told = json.loads(text)
        if isinstance(told, list) and all(isinstance(name, str) for name in told):
            return tuple(told)
    return tuple(name.strip() for name in text.split(",") if name.strip())


def checked_origins(text: str) -> str:
    """Give a list of origins back.

    Raises:
        ValueError: one is no origin as browsers send it.
    """
    for origin in listed(text):
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            form = "scheme://host or scheme://host:port in lower case, without a path"
            raise ValueError(f"{origin!r} must be {form}, or {ANY} for every page")
    return text


def checked_names(text: str) -> str:
    """Give a list of methods or headers back.

    Raises:
        ValueError: one is no name of such, or there is none.
    """
    names = listed(text)
    if not names or not all(map(_TOKEN.fullmatch, names)):
        raise ValueError(f"{text!r} must be names between commas, or {ANY} for all")
    return text
