"""``moesaic generate``: an answer, streamed to standard output."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import typer

from moesaic.cli.terminal.options import UrlOption, valid_text
from moesaic.cli.terminal.outcome import CommandError, Exit


def generate(
    prompt: Annotated[str, typer.Argument(help="Text for the model.", callback=valid_text)],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=2, help="Randomness; 0 always chooses the most likely token."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue PROMPT without the chat template.")
    ] = False,
    url: UrlOption = None,
) -> None:
    """Stream the model's answer to PROMPT; separate reasoning goes to standard error."""
    import httpx

    from moesaic.cli.clients.gateway import client_settings, first_model, gateway_url, reported

    address = gateway_url(url)
    body: dict[str, Any] = {"max_tokens": max_tokens, "stream": True}
    if temperature is not None:
        body["temperature"] = temperature
    if raw:
        route = "/v1/completions"
        body["prompt"] = prompt
    else:
        route = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": prompt}]
    streaming = False
    try:
        with reported(address), httpx.Client(**client_settings(address)) as client:
            body["model"] = first_model(client)
            with client.stream("POST", route, json=body) as response:
                if not response.is_success:
                    response.read()
                    response.raise_for_status()
                streaming = True
                for piece in text_pieces(response.iter_lines(), _think):
                    print(piece, end="", flush=True)
    except KeyboardInterrupt:
        raise CommandError("interrupted", Exit.INTERRUPTED) from None
    finally:
        if streaming:
            print()


def _think(piece: str) -> None:
    """Show a piece of reasoning, dim on a terminal."""
    typer.echo(typer.style(piece, dim=True), err=True, nl=False)


def text_pieces(
    lines: Iterable[str], think: Callable[[str], None] = lambda piece: None
) -> Iterator[str]:
    """Give the text in a stream of server-sent events, piece by piece.

    Args:
        lines: of the stream.
        think: is told each piece of reasoning, and a line's end behind the last one.

    Raises:
        CommandError: the stream holds an error, or ends before the answer does.
    """
    finished = thinking = False
    for line in lines:
        field, _, data = line.partition(":")
        if field != "data" or data.strip() == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise CommandError(str(event["error"]["message"]))
        for choice in event["choices"]:
            finished = finished or choice.get("finish_reason") is not None
            delta = choice.get("delta", {})
            if thought := delta.get("reasoning"):
                think(thought)
                thinking = True
            if piece := delta.get("content") or choice.get("text"):
                if thinking:
                    think("\n")
                    thinking = False
                yield piece
    if thinking:
        think("\n")
    if not finished:
        raise CommandError("the connection closed before the answer was complete", Exit.UNHEALTHY)
