"""The gateway's REST API, as the commands use it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from moesaic.cli.clients.rest_key import API_KEY_VARIABLE, checked_api_key
from moesaic.cli.machine.state import StateFile
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.loopback import is_loopback

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0


def gateway_url(given: str | None) -> str:
    """Choose the given address, else that of this directory's suite, else the default."""
    if given:
        return given.rstrip("/")
    running = StateFile().running()
    return running.url if running else DEFAULT_URL


def client_settings(url: str) -> dict[str, Any]:
    """Give the arguments of an ``httpx`` client: address, API key from ``MOESAIC_API_KEY``, timeouts.

    Raises:
        CommandError: no header can carry the key.
    """
    key = checked_api_key(os.environ.get(API_KEY_VARIABLE, ""))
    return {
        "base_url": url,
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        "trust_env": False,  # a proxy is for other hosts than this one
        # A certificate names what others call this machine, not loopback, where HTTP needs none either.
        "verify": not is_loopback(httpx.URL(url).host),
    }


@contextmanager
def reported(url: str) -> Iterator[None]:
    """Turn failures of calls to the gateway into a ``CommandError``."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code == 401:
            raise CommandError(
                f"{url} requires an API key; set {API_KEY_VARIABLE} to the right one"
            ) from error
        status = Exit.UNHEALTHY if error.response.status_code == 503 else Exit.ERROR
        raise CommandError(problem_of(error.response)["message"], status) from error
    except httpx.ConnectError as error:
        raise CommandError(
            f"no answer from {url}; start a suite with 'moesaic up', or set MOESAIC_URL to its address",
            Exit.UNHEALTHY,
        ) from error
    except httpx.TimeoutException as error:
        raise CommandError(f"{url} did not answer in time", Exit.TIMEOUT) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"{url}: {error or type(error).__name__}", Exit.UNHEALTHY) from error


def problem_of(response: httpx.Response) -> dict[str, Any]:
    """Give the ``error`` object of an answer, with at least ``message`` and ``code``."""
    try:
        error = response.json()["error"]
        return {**error, "message": str(error["message"]), "code": error.get("code")}
    except (ValueError, KeyError, TypeError):
        return {"message": f"status {response.status_code} from {response.url}", "code": None}


def first_model(client: httpx.Client) -> str:
    """Ask for the id of the first model that the gateway serves."""
    response = client.get("/v1/models")
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])
