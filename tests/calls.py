"""gRPC calls to the services of a suite, which want to be shown its secret."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from moesaic.cluster.rpc.channels import channel, token_metadata
from moesaic.cluster.security.credentials import Credentials


class Proof(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Adds to calls what shows that their caller knows the secret of a cluster."""

    def __init__(self, credentials: Credentials) -> None:
        assert credentials.tokens is not None
        self._entry = token_metadata(credentials.tokens, "admin")

    def intercept_unary_unary(self, continuation: Any, call: Any, request: Any) -> Any:
        proven = call._replace(metadata=(*(call.metadata or ()), self._entry))
        return continuation(proven, request)


def credentials_of(run: Path) -> Credentials:
    """Return the credentials that the services of a suite ask for, given its run directory."""
    return Credentials((run / "secret").read_text(encoding="utf-8").strip().encode())


def channel_to(address: str, credentials: Credentials) -> "grpc.aio.Channel":
    """A channel to one service."""
    return channel(address, credentials=credentials)


@contextmanager
def blocking_channel(address: str, credentials: Credentials) -> Iterator[grpc.Channel]:
    """Open a channel for tests without a loop; for unary calls."""
    with grpc.insecure_channel(address) as plain:
        yield grpc.intercept_channel(plain, Proof(credentials))
