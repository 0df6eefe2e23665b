"""Checks before a gateway is opened: a key where others reach it, and a sound file of keys."""

from pathlib import Path

from moesaic.addresses import own_addresses_of
from moesaic.cli.clients.rest_key import API_KEY_VARIABLE
from moesaic.cli.terminal.outcome import CommandError, Exit, correcting
from moesaic.loopback import is_loopback


def check_exposure(host: str, wants_key: bool, no_auth: bool) -> None:
    """Refuse to open a gateway to the network by accident.

    Raises:
        CommandError: ``host`` is not loopback, nor a name for that, and there is neither a key nor ``--no-auth``.
    """
    if not (wants_key or no_auth or is_loopback(host) or is_loopback(_address_of(host))):
        raise CommandError(
            f"--host {host}: others could use the gateway; set {API_KEY_VARIABLE} to a key, "
            "give the keys of several tenants with --api-keys-file, or serve everyone with --no-auth",
            Exit.USAGE,
        )


def _address_of(name: str) -> str:
    """Look up where a gateway under this name listens: the first of its addresses that this machine has."""
    return next(iter(own_addresses_of(name)), "")


def checked_keys_file(path: str) -> str:
    """Check the file of keys, and make its path good in any directory.

    Returns:
        The absolute path; empty if ``path`` is.

    Raises:
        CommandError: the file cannot be read, or an entry is wrong.
    """
    if not path:
        return ""
    from moesaic.api_keys import read_api_keys

    with correcting():
        read_api_keys(Path(path))
    return str(Path(path).absolute())
