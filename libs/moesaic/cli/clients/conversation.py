"""A conversation with a model: its messages, its parameters, and what is known of its last answer."""

import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moesaic.cli.clients.streams import text_pieces
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    import httpx

ROUTE = "/v1/chat/completions"
_OURS = ("messages", "model", "n", "stream", "stream_options")


@dataclass
class TurnFacts:
    """Facts about one answer; times are seconds of one clock.

    Attributes:
        asked_s: the request was sent.
        first_s: its first text or reasoning came; 0: none yet.
        ended_s: its last event came.
        usage: of the answer, as OpenAI's API has it; empty if the answer was stopped.
        moesaic: the provenance of the answer; empty from other servers.
        ignored: names of parameters that had no effect.
    """

    asked_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    moesaic: dict[str, Any] = field(default_factory=dict)
    ignored: str = ""

    def see(self, event: dict[str, Any]) -> None:
        """Take the facts of one event."""
        self.ended_s = time.monotonic()
        deltas = (choice.get("delta") or {} for choice in event["choices"])
        if not self.first_s and any(
            each.get("content") or each.get("reasoning") for each in deltas
        ):
            self.first_s = self.ended_s
        self.usage = event.get("usage") or self.usage
        self.moesaic = event.get("moesaic") or self.moesaic

    def rows(self) -> list[tuple[str, str]]:
        """Write the facts as pairs of a name and a value; what is not known is left out."""
        count = self.usage.get("completion_tokens", 0)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        epochs = [str(each["epoch"]) for each in self.moesaic.get("epochs", [])]
        quality = self.moesaic.get("quality") or {}
        rate = (count - 1) / (self.ended_s - self.first_s) if self.ended_s > self.first_s else 0.0
        known = {
            "prompt tokens": self.usage.get("prompt_tokens"),
            "cached tokens": cached,
            "answer tokens": count or None,
            "first token": f"{self.first_s - self.asked_s:.3f} s" if self.first_s else None,
            "tokens/s": f"{rate:.1f}" if count > 1 and rate else None,
            "epoch": ", ".join(epochs) or None,
            "degraded share": f"{quality['degraded_share']:.1%}" if quality else None,
        }
        return [(name, str(value)) for name, value in known.items() if value is not None]


class Talk:
    """Messages and parameters for a model, and the last turn."""

    def __init__(self, client: "httpx.Client", model: str) -> None:
        self._client, self._model = client, model
        self._messages: list[dict[str, str]] = []
        self.system = ""
        self.parameters: dict[str, Any] = {}
        self.last: TurnFacts | None = None

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self._messages = []

    def set_parameters(self, text: str) -> None:
        """Set parameters of requests, such as ``temperature=0.2``; one without a value is unset.

        Args:
            text: pairs between spaces; values are JSON, or else texts.

        Raises:
            CommandError: a pair is wrong; then none is set.
        """
        changed = dict(self.parameters)
        for pair in text.split():
            name, found, value = pair.partition("=")
            if not found or not name or name in _OURS:
                why = "is the chat's own" if name in _OURS else "write name=value"
                raise CommandError(f"/params {pair}: {why}, such as temperature=0.2", Exit.USAGE)
            changed.pop(name, None)
            if value:
                changed[name] = _value(name, value)
        self.parameters = changed

    def ask(self, text: str, think: Callable[[str], None]) -> Generator[str, None, None]:
        """Send a message, and give the pieces of its answer.

        An answer that the caller stops stays in the conversation as far as it came. A message without any
        answer does not.

        Args:
            text: of the user.
            think: is told each piece of reasoning.

        Raises:
            httpx.HTTPError: the call failed.
            CommandError: the stream holds an error, or ends too early.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": text}
        body = {
            **self.parameters,
            "model": self._model,
            "messages": [*system, *self._messages, asked],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        turn = self.last = TurnFacts(time.monotonic())
        said: list[str] = []
        try:
            with self._client.stream("POST", ROUTE, json=body) as response:
                if not response.is_success:
                    response.read()
                    response.raise_for_status()
                turn.ignored = response.headers.get("x-moesaic-ignored", "")
                for piece in text_pieces(response.iter_lines(), think, turn.see):
                    said.append(piece)
                    yield piece
        finally:
            if said:
                self._messages += [asked, {"role": "assistant", "content": "".join(said)}]


def _value(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        why = "give a finite number, or a text of whole characters"
        raise CommandError(
            f"/params {name}: no request can carry this: {why}", Exit.USAGE
        ) from None
    return value
