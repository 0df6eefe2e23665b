"""``moesaic generate``: an answer, streamed to standard output."""

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
    from moesaic.cli.clients.streams import text_pieces, think

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
                for piece in text_pieces(response.iter_lines(), think):
                    print(piece, end="", flush=True)
    except KeyboardInterrupt:
        raise CommandError("interrupted", Exit.INTERRUPTED) from None
    finally:
        if streaming:
            print()
