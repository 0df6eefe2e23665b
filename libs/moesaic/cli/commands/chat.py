"""``moesaic chat``: a conversation in the terminal."""

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.terminal.console import harmless, print_table, say
from moesaic.cli.terminal.options import UrlArgument, valid_text
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.cli.clients.conversation import Talk

PROMPT, MORE, BLOCK = ">>> ", "... ", '"""'
HELP = '''\
/system TEXT             set the system message; without TEXT: remove it
/clear                   forget the conversation, but not the system message
/params temperature=0.2  set parameters of requests; 'temperature=' unsets one; without any: show them
/stats                   tokens, times and origin of the last answer
/help                    this list
A line that ends with \\ goes on in the next one. """ begins and ends a text of several lines.
A message that begins with / is written with //. Ctrl-C stops an answer, Ctrl-D leaves.'''


def chat(
    url: UrlArgument = None,
    model: Annotated[
        str, typer.Option(help="Model to ask (default: the first that is served).")
    ] = "",
    system: Annotated[str, typer.Option(help="System message.", callback=valid_text)] = "",
) -> None:
    """Chat with the model of a running suite; /help lists commands.

    From a pipe or a file, each line is a message, and the first failure ends the command.
    """
    import httpx

    from moesaic.cli.clients.conversation import Talk
    from moesaic.cli.clients.gateway import client_settings, first_model, gateway_url, reported

    address = gateway_url(url)
    talks = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        with httpx.Client(**client_settings(address)) as client:
            with reported(address):
                model = model or first_model(client)
            conversation = Talk(client, model)
            conversation.system = system
            if talks:
                say(f"{model} at {address}; /help lists commands, Ctrl-D leaves")
            for text in _typed() if talks else _piped():
                _turn(conversation, text, address, talks)
    except KeyboardInterrupt:
        raise CommandError("interrupted", Exit.INTERRUPTED) from None


def _turn(conversation: "Talk", text: str, address: str, talks: bool) -> None:
    """Do what a message or a command says; in a terminal, a failure is told and the chat goes on."""
    from moesaic.cli.clients.gateway import reported

    try:
        if text.startswith("/") and not text.startswith("//"):
            _command(conversation, text)
            return
        with reported(address):
            _answer(conversation, text.removeprefix("/"))
    except CommandError as error:
        if not talks:
            raise
        say(f"moesaic: {error}")
    except KeyboardInterrupt:
        if not talks:
            raise
        say("stopped")


def _answer(conversation: "Talk", text: str) -> None:
    """Print the answer to a message as it comes."""
    from moesaic.cli.clients.streams import think

    pieces = conversation.ask(text, think)
    printed = False
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                printed = True
                print(harmless(piece, sys.stdout), end="", flush=True)
    finally:
        if printed:
            print(flush=True)
    if conversation.last and conversation.last.ignored:
        say(f"the server ignored: {conversation.last.ignored}")


def _command(conversation: "Talk", text: str) -> None:
    """Do what a command of the chat says.

    Raises:
        CommandError: there is no such command, or its text is wrong.
    """
    from moesaic.usage.nearest import proposal

    name, _, rest = text.strip().partition(" ")
    if name == "/system":
        conversation.system = rest.strip()
    elif name == "/clear":
        conversation.clear()
    elif name == "/params":
        conversation.set_parameters(rest)
        if not rest.strip():
            print_table(("parameter", "value"), conversation.parameters.items())
    elif name == "/stats":
        rows = conversation.last.rows() if conversation.last else []
        print_table(("last answer", ""), rows)
    elif name == "/help":
        print(HELP)
    else:
        known = ("/system", "/clear", "/params", "/stats", "/help")
        fix = proposal(name, known) or "; /help lists them"
        raise CommandError(f"{name}: unknown command{fix}", Exit.USAGE)


def _piped() -> Iterator[str]:
    """Give each line of standard input that is not empty."""
    for line in sys.stdin:
        if text := line.strip():
            yield _valid(text)


def _typed() -> Iterator[str]:
    """Give each message or command that a person types, with a history of the session."""
    with contextlib.suppress(ImportError):
        # Makes ``input`` edit lines and remember them.
        import_module("readline")
    while True:
        try:
            text = _message().strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            say("Ctrl-D leaves")
            continue
        if text:
            yield text


def _message() -> str:
    """Read a message of one line, or of several."""
    line = input(PROMPT)
    if line.lstrip().startswith(BLOCK):
        lines = [line.lstrip().removeprefix(BLOCK)]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(input(MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return _valid("\n".join(lines))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(MORE))
    return _valid("\n".join(lines))


def _valid(text: str) -> str:
    """Replace bytes that are no text, which no request can carry."""
    return text.encode(errors="replace").decode()
