"""``moesaic top``: the state of a suite in the terminal, from second to second."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.terminal.options import UrlOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def top(
    url: UrlOption = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the state once, without clearing the screen.")
    ] = False,
) -> None:
    """Watch the load, experts, brownout and requests of a suite; Ctrl-C ends it.

    It shows what the page /console of the gateway shows, by the same API.
    """
    import asyncio
    from contextlib import suppress

    from moesaic.cli.clients.gateway import gateway_url, reported

    address = gateway_url(url)
    with suppress(KeyboardInterrupt), reported(address):
        asyncio.run(_show(address, once=once))


async def _show(url: str, *, once: bool) -> None:
    import httpx
    from rich.console import Console
    from rich.live import Live

    from moesaic.cli.clients.gateway import client_settings
    from moesaic.cli.terminal.outcome import CommandError, Exit
    from moesaic.cli.terminal.top_screen import screen

    console = Console()
    async with httpx.AsyncClient(**client_settings(url)) as client:
        if once or not console.is_terminal:
            response = await client.get("/v1/moesaic/state")
            response.raise_for_status()
            console.print(screen(response.json()))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for state in _states(client):
                live.update(screen(state, console.height), refresh=True)
    # Above the screen it would be gone with it.
    raise CommandError(f"the gateway at {url} has stopped", Exit.UNHEALTHY)


async def _states(client: Any) -> "AsyncIterator[dict[str, Any]]":
    """Give the states of a suite as they come."""
    import json

    async with client.stream("GET", "/v1/moesaic/events") as response:
        if response.is_error:
            await response.aread()
            response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))
