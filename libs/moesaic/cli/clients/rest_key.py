"""The variables that hold keys of the REST API, and the check of a key that is sent."""

from moesaic.cli.terminal.outcome import CommandError, Exit

API_KEY_VARIABLE = "MOESAIC_API_KEY"
KEYS_FILE_VARIABLE = "MOESAIC_API_KEYS_FILE"


def checked_api_key(key: str) -> str:
    """Return ``key``, which may be empty, if an HTTP header can carry it.

    Raises:
        CommandError: naming ``MOESAIC_API_KEY``, without its value.
    """
    if key.isascii() and key.isprintable():
        return key
    raise CommandError(
        f"{API_KEY_VARIABLE}: only printable ASCII characters fit into an HTTP header", Exit.USAGE
    )
