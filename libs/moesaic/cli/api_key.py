"""The keys that REST callers send, and when a gateway must not do without one."""

from pathlib import Path

from moesaic.addresses import is_loopback
from moesaic.cli.outcome import CommandError, Exit

API_KEY_VARIABLE = "MOESAIC_API_KEY"
KEYS_FILE_VARIABLE = "MOESAIC_API_KEYS_FILE"


def checked_api_key(key: str) -> str:
    """The key itself, once it is sure that an HTTP header can carry it; it may be empty.

    Raises:
        CommandError: naming ``MOESAIC_API_KEY``, without its value.
    """
    if key.isascii() and key.isprintable():
        return key
    raise CommandError(
        f"{API_KEY_VARIABLE}: only printable ASCII characters fit into an HTTP header", Exit.USAGE
    )


def check_exposure(host: str, wants_key: bool, no_auth: bool) -> None:
    """Make sure that nobody opens a gateway to the network without meaning to.

    Raises:
        CommandError: ``host`` is not loopback, there is no key, and nobody asked for that.
    """
    if not (wants_key or no_auth or is_loopback(host)):
        raise CommandError(
            f"--host {host}: others could use the gateway; set {API_KEY_VARIABLE} to the key they "
            "must send, name the keys of several tenants with --api-keys-file, or serve everyone "
            "with --no-auth",
            Exit.USAGE,
        )


def checked_keys_file(path: str) -> str:
    """Where the file of keys is, for processes in any directory; empty if there is none.

    Raises:
        CommandError: it is not what it must be.
    """
    if not path:
        return ""
    from moesaic.api_keys import read_api_keys
    from moesaic.errors import InvalidInput

    try:
        read_api_keys(Path(path))
    except InvalidInput as error:
        raise CommandError(str(error), Exit.USAGE) from error
    return str(Path(path).absolute())
