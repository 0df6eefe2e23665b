"""A load on a server of OpenAI's API, whoever made it."""

import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from moesaic.cli.load.generator import CHAT, COMPLETIONS, LoadClient, TimedRequest
from moesaic.cli.load.prompts import WORDS, LoadPrompt
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.loopback import is_loopback

if TYPE_CHECKING:
    import httpx

ROUTES = {"openai": COMPLETIONS, "vllm": COMPLETIONS, "openai-chat": CHAT}
ANSWER_S = 6 * 3600.0  # longest wait for an answer


@dataclass(frozen=True)
class LoadServer:
    """A server and how it is asked.

    Attributes:
        url: of the server, without the route.
        backend: a key of ``ROUTES``, which says how prompts are sent.
        route: of all requests.
        model: that is asked for.
        headers: of all requests.
        extra: further fields of all bodies.
    """

    url: str
    backend: str
    route: str
    model: str
    headers: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: LoadPrompt) -> dict[str, Any]:
        """Make the body of a request."""
        most = {"max_tokens": prompt.answer_tokens}
        asked: dict[str, Any] = {"prompt": prompt.content}
        if self.backend == "openai-chat":
            asked = {"messages": [{"role": "user", "content": prompt.content}]}
            most = {"max_completion_tokens": prompt.answer_tokens}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **asked, **most, **stream, **self.extra}

    def client(self) -> LoadClient:
        """Make a client of it.

        Raises:
            CommandError: its URL is wrong.
        """
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            text = f"{self.url}: give the address of a server, such as http://127.0.0.1:8000"
            raise CommandError(text, Exit.USAGE)
        is_safe = parts.scheme == "https"
        return LoadClient(
            port or (443 if is_safe else 80),
            parts.path.rstrip("/") + self.route,
            host=parts.hostname,
            tls=_context(parts.hostname) if is_safe else None,
            answer_s=ANSWER_S,
        )


def _context(host: str) -> ssl.SSLContext:
    """Make the context of a connection; as in all commands, a server on this machine needs no known authority."""
    context = ssl.create_default_context()
    if is_loopback(host):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def loaded(
    server: LoadServer,
    prompts: Sequence[LoadPrompt],
    due: Sequence[float],
    most: int | None,
    warmups: int,
) -> tuple[list[TimedRequest], float]:
    """Send a load, after requests that warm the server up.

    Args:
        server: that is asked.
        prompts: one for each request.
        due: seconds, in order.
        most: requests in flight; None: any number.
        warmups: times that the first prompt is sent before.

    Returns:
        The requests with their answers, and the seconds that the load took.
    """
    bodies = [server.body(each) for each in prompts]
    client = server.client()

    def headers(_: int) -> Mapping[str, str]:
        return server.headers

    try:
        await client.open_loop([0.0] * warmups, lambda _: bodies[0], headers, most=most)
        started = time.perf_counter()
        requests = await client.open_loop(due, bodies.__getitem__, headers, most=most)
        # Reading the answers is not part of the load.
        last_s = max((each.end_s for each in requests), default=0.0)
        return requests, min(last_s or 1e-9, time.perf_counter() - started)
    finally:
        client.close()


def tokens_of(client: "httpx.Client", model: str, text: str) -> list[int]:
    """Ask a server for the tokens of a text by ``/tokenize``; none if it has no such route."""
    asked = {"model": model, "prompt": text, "add_special_tokens": False}
    response = client.post("/tokenize", json=asked)
    if not response.is_success:
        return []
    try:
        return [int(each) for each in response.json()["tokens"]]
    except (ValueError, KeyError, TypeError):
        return []


def pool_of(client: "httpx.Client", model: str) -> list[int]:
    """Learn tokens of a server's vocabulary that random prompts can be drawn from; none if it does not tell."""
    return sorted({*tokens_of(client, model, " ".join(WORDS))})


def spelt(client: "httpx.Client", model: str, prompts: Sequence[LoadPrompt]) -> list[LoadPrompt]:
    """Turn prompts of tokens into texts by ``/detokenize``, for routes that take texts only."""
    found = []
    for prompt in prompts:
        content = prompt.content
        if not isinstance(content, str):
            response = client.post("/detokenize", json={"model": model, "tokens": content})
            response.raise_for_status()
            content = str(response.json()["prompt"])
        found.append(LoadPrompt(content, prompt.prompt_tokens, prompt.answer_tokens))
    return found
