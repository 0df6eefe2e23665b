"""What the commands show the services of a cluster: its secret, and certificates."""

from contextlib import suppress
from typing import TYPE_CHECKING

from moesaic.cli.outcome import CommandError, Exit
from moesaic.cli.state import StateFile

if TYPE_CHECKING:
    import grpc

    from moesaic.cluster.credentials import Credentials


def connected(address: str) -> "grpc.aio.Channel":
    """A channel to a service; its calls carry what this cluster's services want to see.

    Raises:
        CommandError: what was given to show cannot be read.
    """
    from moesaic.cluster.channels import channel

    return channel(address, credentials=cluster_credentials())


def cluster_credentials() -> "Credentials":
    """What was given by variables or files, else that of the suite which runs in this directory.

    Raises:
        CommandError: a file that was given cannot be read.
    """
    from moesaic.cluster.credentials import Credentials
    from moesaic.cluster.tls import read_tls
    from moesaic.variables import told

    try:
        secret = given_secret() or _secret_of_suite()
        tls = read_tls(*(told(f"tls_{part}") for part in ("cert", "key", "ca", "name")))
    except ValueError as error:
        raise CommandError(str(error), Exit.USAGE) from error
    return Credentials(secret.encode(), tls)


def _secret_of_suite() -> str:
    state_file = StateFile()
    with suppress(OSError):  # it is another user's
        if state_file.running() is not None:
            return state_file.secret_path.read_text(encoding="utf-8").strip()
    return ""


def given_secret() -> str:
    """The cluster's secret as a variable or a file gives it; empty if neither does.

    Raises:
        CommandError: the file cannot be read.
    """
    from moesaic.variables import told

    try:
        return told("secret")
    except ValueError as error:
        raise CommandError(str(error), Exit.USAGE) from error
