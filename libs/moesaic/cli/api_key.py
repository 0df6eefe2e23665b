"""The key that REST callers send, and when a gateway must not do without one."""

import ipaddress

from moesaic.cli.outcome import CommandError, Exit

API_KEY_VARIABLE = "MOESAIC_API_KEY"


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


def check_exposure(host: str, api_key: str, no_auth: bool) -> None:
    """Make sure that nobody opens a gateway to the network without meaning to.

    Raises:
        CommandError: ``host`` is not loopback, there is no key, and nobody asked for that.
    """
    if not (api_key or no_auth or _is_loopback(host)):
        raise CommandError(
            f"--host {host}: others could use the gateway; set {API_KEY_VARIABLE} to the key they "
            "must send, or serve everyone with --no-auth",
            Exit.USAGE,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
