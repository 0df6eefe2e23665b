"""Streamed answers of the gateway, as text."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import typer

from moesaic.cli.terminal.console import harmless
from moesaic.cli.terminal.outcome import CommandError, Exit


def think(piece: str) -> None:
    """Show a piece of reasoning on standard error, dim on a terminal."""
    typer.echo(typer.style(harmless(piece, sys.stderr), dim=True), err=True, nl=False)


def text_pieces(
    lines: Iterable[str],
    think: Callable[[str], None] = lambda piece: None,
    see: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Iterator[str]:
    """Give the text in a stream of server-sent events, piece by piece.

    Args:
        lines: of the stream.
        think: is told each piece of reasoning, and a line's end behind the last one.
        see: is told every event that is no error.

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
        see(event)
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
