"""Checks before links are made between agents: what that needs, and what would go around them."""

import shutil
from collections.abc import Iterable

from moesaic.cli.machine.links.cables import LinkFailed, call
from moesaic.cli.terminal.outcome import CommandError, Exit

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}  # of Debian, by command


def check_links(redis_url: str, settings: Iterable[str]) -> None:
    """Check that agents can have network namespaces of their own, and that all of them can serve.

    Args:
        redis_url: the user's own Redis; empty: the suite's.
        settings: flags of services, each with its value.

    Raises:
        CommandError: ``--link`` cannot be had, with the reason and the fix.
    """
    for command, package in PACKAGES.items():
        if shutil.which(command) is None:
            raise _refused(f"command {command} not found; install {package}, or omit the option")
    try:
        call("unshare", "--net", "--ipc", "true")
    except LinkFailed as error:
        raise _refused(
            f"network namespaces cannot be created ({error}); run as root, in a container with "
            "--privileged, or omit the option"
        ) from error
    if redis_url and not redis_url.startswith("unix://"):
        raise _refused(
            "agents in separate networks cannot reach other hosts; unset REDIS_URL to start a "
            "server for the suite"
        )
    for setting in settings:
        flag = setting.partition("=")[0]
        if flag in ("--transports", "--node"):
            raise CommandError(
                f"{flag}: --link sends tensors over its links; omit one of the two options",
                Exit.USAGE,
            )


def _refused(why: str) -> CommandError:
    return CommandError(f"--link: {why}", Exit.USAGE)
