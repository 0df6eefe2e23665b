"""Names in the settings become addresses of this machine, before anything listens on them.

Where names stand for (``moesaic.addresses``) is known only at run time: networks are attached, and
their names are published, while containers start already. So a service waits for its addresses, as
it waits for Redis; and it ends when one of them was exchanged for another, for whatever supervises
it to start it again with the new one.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from moesaic.addresses import (
    interface_of,
    is_address,
    is_loopback,
    is_of_this_machine,
    own_addresses_of,
)
from moesaic.cluster.background import background
from moesaic.errors import InvalidInput, NotReady
from moesaic.settings import ModelSettings, ServiceSettings

log = structlog.get_logger()

_HOSTS = ("host", "control_host", "data_host")
_BACKOFF_S = (0.1, 2.0)  # first and longest wait between attempts to find an address
_SAY_AGAIN_S = 30.0
_LOOK_EVERY_S = 2.0

_Settings = TypeVar("_Settings", bound=ServiceSettings)


@asynccontextmanager
async def own_addresses(settings: _Settings) -> AsyncIterator[_Settings]:
    """The settings with an address of this machine for each name of a place to listen on.

    Waits for the addresses, then watches them for the length of the block. An address that only
    goes away may come back, and nothing happens.

    Raises:
        InvalidInput: one is not of loopback, and there is no secret that keeps others off.
        ExceptionGroup: with ``NotReady``, once a name stands for another address of this machine,
            which has lost the one in use; or once the address for tensors has come back on another
            interface, as UCX would go on asking for the one before.
    """
    hosts = {setting: getattr(settings, setting, "") for setting in _HOSTS}
    names = {setting: host for setting, host in hosts.items() if host and not is_address(host)}
    in_use = {setting: await own_address(name, setting) for setting, name in names.items()}
    found = settings.model_copy(update=in_use)
    _check_exposure(found)
    if not names:
        yield found
        return
    log.info("addresses.found", **in_use)
    async with background(_watch(names, in_use), "addresses"):
        yield found


def _check_exposure(settings: ServiceSettings) -> None:
    """Refuse to let others tell this service what to do, or send it tensors, unasked."""
    if settings.secret.get_secret_value():
        return
    planes = {"control_host": settings.control}
    if isinstance(settings, ModelSettings):
        planes["data_host"] = settings.data
    for setting, place in planes.items():
        if not is_loopback(place.host):
            flag = setting if getattr(settings, setting) else "host"
            raise InvalidInput(
                "--secret (MOESAIC_SECRET)",
                f"is required to listen on {place.host} (--{flag.replace('_', '-')}), where others "
                "could give this service orders: give all services of the cluster the same "
                "secret, 'openssl rand -hex 32' makes one; or listen on 127.0.0.1",
            )


async def own_address(name: str, setting: str) -> str:
    """The address of ``name`` that this machine has; waits, and says so, until there is one.

    Args:
        name: an address stands for itself.
        setting: where it comes from, for people.
    """
    if is_address(name):
        return name
    backoff_s, say_at = _BACKOFF_S[0], time.monotonic()
    while not (own := await asyncio.to_thread(own_addresses_of, name)):
        if time.monotonic() >= say_at:
            waiting_for = f"an address of this machine under the name {name} ({setting})"
            log.warning("service.waiting", waiting_for=waiting_for)
            say_at = time.monotonic() + _SAY_AGAIN_S
        await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
        backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
    return own[0]


async def _watch(names: Mapping[str, str], in_use: Mapping[str, str]) -> None:
    data_address = in_use.get("data_host")
    interface = data_address and interface_of(data_address)
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if data_address and interface_of(data_address) not in (interface, None):
            raise NotReady(f"data_host: {data_address} has left {interface}; starting again")
        for setting, address in in_use.items():
            if is_of_this_machine(address):  # a few microseconds, and all there is mostly to do
                continue
            own = await asyncio.to_thread(own_addresses_of, names[setting])
            if own and address not in own:
                raise NotReady(
                    f"{setting}: its address under the name {names[setting]} is now {own[0]}, "
                    f"was {address}; starting again"
                )
