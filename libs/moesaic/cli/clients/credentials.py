"""Credentials of the commands towards a cluster's services: its secret, and certificates."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moesaic.cli.machine.state import StateFile
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    import grpc

    from moesaic.cluster.security.credentials import Credentials


def connected(address: str) -> "grpc.aio.Channel":
    """Open a channel to a service; its calls carry the cluster's credentials.

    Raises:
        CommandError: a file of credentials cannot be read.
    """
    from moesaic.cluster.rpc.channels import channel

    return channel(address, credentials=cluster_credentials())


async def answer(address: str, stub: Callable[..., Any], method: str, request: Any) -> Any:
    """Call one method of a service, and close the channel.

    Args:
        address: ``host:port``.
        stub: class of the service's stub.
        method: that reads something.
        request: its argument.

    Raises:
        grpc.aio.AioRpcError: there is no answer.
        CommandError: a file of credentials cannot be read.
    """
    from moesaic.cluster.rpc.channels import CONTROL_TIMEOUT_S

    async with connected(address) as connection:
        return await getattr(stub(connection), method)(request, timeout=CONTROL_TIMEOUT_S)


async def answer_if_any(address: str, stub: Callable[..., Any], method: str, request: Any) -> Any:
    """Call like ``answer``; None without an answer."""
    import grpc

    try:
        return await answer(address, stub, method, request)
    except grpc.aio.AioRpcError:
        return None


def cluster_credentials() -> "Credentials":
    """Read credentials from variables or files; else the secret of this directory's suite.

    Raises:
        CommandError: a file cannot be read.
    """
    from moesaic.cluster.security.credentials import Credentials
    from moesaic.cluster.security.tls import read_tls
    from moesaic.usage.variables import told

    try:
        secret = given_secret() or _secret_of_suite()
        tls = read_tls(*(told(f"tls_{part}") for part in ("cert", "key", "ca", "name")))
    except ValueError as error:
        raise CommandError(str(error), Exit.USAGE) from error
    return Credentials(secret.encode(), tls)


def _secret_of_suite() -> str:
    state_file = StateFile()
    # Another user's
    with suppress(OSError):
        if state_file.running() is not None:
            return state_file.secret_path.read_text(encoding="utf-8").strip()
    return ""


def given_secret() -> str:
    """Read the cluster's secret from a variable or a file; empty if there is neither.

    Raises:
        CommandError: the file cannot be read.
    """
    from moesaic.usage.variables import told

    try:
        return told("secret")
    except ValueError as error:
        raise CommandError(str(error), Exit.USAGE) from error
