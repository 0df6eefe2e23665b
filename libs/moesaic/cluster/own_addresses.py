"""Addresses of this machine for the names in the settings, before the service listens on them.

The addresses of a name (``moesaic.addresses``) are known only at run time: networks are attached,
and names published, while containers start. So a service waits for its addresses, as it waits for
Redis. It exits when an address is replaced by another, so that its supervisor restarts it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from moesaic.addresses import (
    interface_of,
    is_address,
    is_of_this_machine,
    own_addresses_of,
)
from moesaic.cluster.background import background
from moesaic.cluster.waiting import Backoff
from moesaic.errors import InvalidInput, NotReady
from moesaic.loopback import is_loopback
from moesaic.settings import ModelSettings, ServiceSettings

log = structlog.get_logger()

_HOSTS = ("host", "control_host", "data_host")
_SAY_AGAIN_S = 30.0
_LOOK_EVERY_S = 2.0

_Settings = TypeVar("_Settings", bound=ServiceSettings)


@asynccontextmanager
async def own_addresses(settings: _Settings) -> AsyncIterator[_Settings]:
    """Replace names by addresses of this machine to listen on.

    The addresses are awaited, then watched for the length of the block. An address that only
    disappears may come back, and changes nothing.

    Raises:
        InvalidInput: an address is not loopback, and there is no secret.
        ExceptionGroup: with ``NotReady``, once a name stands for another address of this machine,
            or the address for tensors has moved to another interface. UCX would go on using the old one.
    """
    hosts = {setting: getattr(settings, setting, "") for setting in _HOSTS}
    names = {setting: host for setting, host in hosts.items() if host and not is_address(host)}
    in_use = {setting: await own_address(name, setting) for setting, name in names.items()}
    found = settings.model_copy(update=in_use)
    _check_places(found)
    if not names:
        yield found
        return
    log.info("addresses.found", **in_use)
    async with background(_watch(names, in_use), "addresses"):
        yield found


def _check_places(settings: ServiceSettings) -> None:
    planes = {"control_host": settings.control}
    if isinstance(settings, ModelSettings):
        planes["data_host"] = settings.data
    for setting, place in planes.items():
        flag = setting if getattr(settings, setting) else "host"
        check_exposure(settings, place.host, flag.replace("_", "-"))


def check_exposure(settings: ServiceSettings, host: str, flag: str) -> None:
    """Refuse to listen for orders and tensors from other machines without a secret.

    Raises:
        InvalidInput: ``host``, from the setting ``flag``, is not loopback, and there is no secret.
    """
    if settings.secret.get_secret_value() or is_loopback(host):
        return
    raise InvalidInput(
        "--secret (MOESAIC_SECRET)",
        f"is required to listen on {host} (--{flag}), where other machines could send it commands. "
        "Give all services of the cluster the same secret ('openssl rand -hex 32' makes one), or "
        "listen on 127.0.0.1",
    )


async def own_address(name: str, setting: str) -> str:
    """Wait for an address of this machine under ``name``, and log the wait.

    Args:
        name: a name, or an address, which is returned as it is.
        setting: the setting that holds the name, for messages.
    """
    if is_address(name):
        return name
    backoff, say_at = Backoff(), time.monotonic()
    while not (own := await asyncio.to_thread(own_addresses_of, name)):
        if time.monotonic() >= say_at:
            waiting_for = f"an address of this machine under the name {name} ({setting})"
            log.warning("service.waiting", waiting_for=waiting_for)
            say_at = time.monotonic() + _SAY_AGAIN_S
        await backoff.pause()
    return own[0]


async def _watch(names: Mapping[str, str], in_use: Mapping[str, str]) -> None:
    data_address = in_use.get("data_host")
    interface = data_address and interface_of(data_address)
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if data_address and interface_of(data_address) not in (interface, None):
            raise NotReady(f"data_host: {data_address} is no longer on {interface}; restarting")
        for setting, address in in_use.items():
            # Takes microseconds, and is mostly true.
            if is_of_this_machine(address):
                continue
            own = await asyncio.to_thread(own_addresses_of, names[setting])
            if own and address not in own:
                raise NotReady(
                    f"{setting}: the address of {names[setting]} changed from {address} "
                    f"to {own[0]}; restarting"
                )
