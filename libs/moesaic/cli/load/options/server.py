"""Options about the server, and about the fields of every request."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from moesaic.cli.terminal.options import option
from moesaic.cli.terminal.outcome import CommandError, Exit

Backend = Literal["openai", "vllm", "openai-chat", "openai-embeddings"]
ROUTES: Mapping[Backend, str] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}
SAMPLING = "Sampling"
_SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


def _field(text: str, **more: Any) -> Any:
    return option(f"{text} (default: the server's).", panel=SAMPLING, **more)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The way in which a server is asked.

    Raises:
        CommandError: a header or the further fields are wrong.
    """

    backend: Annotated[Backend, option("API: openai and vllm are completions.")] = "openai"
    endpoint: Annotated[str, option("Route. Unlike vLLM, by default that of the backend.")] = ""
    model: Annotated[str, option("Model to ask (default: the first that is served).")] = ""
    served_model_name: Annotated[str, option("Its name in requests (default: --model).")] = ""
    tokenizer: Annotated[
        str,
        option(
            "Directory with tokenizer.json, or that file, to count tokens with. Unlike vLLM, by default "
            "the server counts."
        ),
    ] = ""
    header: Annotated[
        list[str] | None, option("Headers of all requests.", metavar="KEY=VALUE ...")
    ] = None
    request_id_prefix: Annotated[
        str, option("Begins the header x-request-id; a number follows (default: drawn).")
    ] = ""
    extra_body: Annotated[
        str, option("Further fields of all requests; they win.", metavar="JSON")
    ] = "{}"
    insecure: Annotated[
        bool, option("Accept any certificate of a server.", switch="--insecure")
    ] = False
    ready_check_timeout_sec: Annotated[
        int,
        option(
            "Longest wait for the server and a first answer together, in seconds; 0: no wait.",
            min=0,
        ),
    ] = 0
    ignore_eos: Annotated[
        bool,
        option(
            "Do not end answers early; always so with random and timed_trace.",
            switch="--ignore-eos",
            panel=SAMPLING,
        ),
    ] = False
    temperature: Annotated[float | None, _field("Temperature", min=0)] = None
    top_p: Annotated[float | None, _field("Share of probability to draw from", min=0, max=1)] = None
    top_k: Annotated[int | None, _field("Number of tokens to draw from")] = None
    min_p: Annotated[
        float | None, _field("Least probability, as a share of the largest", min=0, max=1)
    ] = None
    frequency_penalty: Annotated[
        float | None, _field("Penalty on a token for each time it came")
    ] = None
    presence_penalty: Annotated[float | None, _field("Penalty on a token that came")] = None
    repetition_penalty: Annotated[
        float | None, _field("Factor against a token that came", min=0)
    ] = None
    logprobs: Annotated[
        int | None, _field("Alternatives of each token in the answer, of completions", min=0)
    ] = None

    def __post_init__(self) -> None:
        # Read to refuse what is wrong.
        _ = self.headers, self.body
        if not (self.request_id_prefix.isascii() and self.request_id_prefix.isprintable()):
            raise CommandError("--request-id-prefix: write printable ASCII", Exit.USAGE)

    @property
    def is_pooling(self) -> bool:
        """Answers are embeddings, not text."""
        return self.backend == "openai-embeddings"

    @property
    def route(self) -> str:
        """Path of all requests."""
        return self.endpoint or ROUTES[self.backend]

    @property
    def headers(self) -> dict[str, str]:
        """Further headers of all requests."""
        found = {}
        for name, value in pairs("--header", self.header):
            is_sendable = (name + value).isascii() and (name + value).isprintable()
            if not is_sendable or ":" in name or " " in name:
                raise CommandError("--header: write KEY=VALUE, in printable ASCII", Exit.USAGE)
            found[name] = value
        return found

    @property
    def body(self) -> dict[str, Any]:
        """Further fields of all requests, besides ``ignore_eos``."""
        try:
            extra = json.loads(self.extra_body)
        except (ValueError, RecursionError):
            extra = None
        if not isinstance(extra, dict):
            text = '--extra-body: write a JSON object, such as {"top_k": 5}'
            raise CommandError(text, Exit.USAGE)
        fields: dict[str, Any] = {}
        if not self.is_pooling:
            fields = {name: v for name in _SAMPLED if (v := getattr(self, name)) is not None}
        if self.logprobs is not None and ROUTES[self.backend] == ROUTES["openai"]:
            fields["logprobs"] = self.logprobs
        return {**fields, **extra}


def pairs(flag: str, texts: Sequence[str] | None) -> list[tuple[str, str]]:
    """Read the values ``KEY=VALUE`` of an option.

    Raises:
        CommandError: one is written otherwise.
    """
    found = []
    for text in texts or ():
        name, has_value, value = (part.strip() for part in text.partition("="))
        if not (name and has_value):
            raise CommandError(f"{flag}: write KEY=VALUE, in printable ASCII", Exit.USAGE)
        found.append((name, value))
    return found
