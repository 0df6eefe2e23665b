"""``moesaic token``: tokens with which other tools call a cluster's services."""

import re
from typing import Annotated, Literal

import typer

from moesaic.cli.terminal.outcome import CommandError, Exit

_AUDIENCE = re.compile(r"\*|[A-Za-z0-9._-]{1,128}")  # ids made of host names are the longest


def token(
    scope: Annotated[
        Literal["data", "admin"],
        typer.Option(
            help="Calls that the token allows: data for serving and reading, admin for all calls."
        ),
    ] = "admin",
    audience: Annotated[
        str, typer.Option(help="Worker id of the only service that accepts it (default: all do).")
    ] = "*",
    seconds: Annotated[int, typer.Option(min=1, max=86400, help="Lifetime in seconds.")] = 300,
) -> None:
    """Print a token for calls over gRPC by other tools, such as grpcurl.

    The token is made from the secret of the suite that was started here, or from MOESAIC_SECRET:
    grpcurl -plaintext -H "authorization: Bearer $(moesaic token)" ADDRESS:PORT list
    """
    from moesaic.cli.clients.credentials import cluster_credentials

    if not _AUDIENCE.fullmatch(audience):
        raise CommandError(
            f"--audience {audience[:100]!r}: must be a worker id, of letters, digits, '.', '_' and '-'",
            Exit.USAGE,
        )
    tokens = cluster_credentials().tokens
    if tokens is None:
        raise CommandError(
            "no secret to make a token from: run this in the directory of a suite, or set "
            "MOESAIC_SECRET",
            Exit.UNHEALTHY,
        )
    print(tokens.new(scope, audience, seconds))
