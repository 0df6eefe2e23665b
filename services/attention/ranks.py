"""The ranks of one attention instance: the first starts the others, and is lost with any of them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

import structlog
import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's list of names lacks it

from moesaic.addresses import host_port
from moesaic.cluster.lifecycle import EXIT_UNHEALTHY, EXIT_USAGE, exit_with
from moesaic.cluster.own_addresses import check_exposure, own_address
from moesaic.cluster.parents import die_with
from moesaic.cluster.security.credentials import Credentials, own_credentials
from moesaic.engine.thread import EngineThread
from moesaic.errors import UnusableSettings
from moesaic.loopback import plain_host
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.division import Division, divide
from moesaic.models.layers.decoder import Decoder
from moesaic.models.tensor_parallel.follower import Follower
from moesaic.models.tensor_parallel.group import RankGroup
from moesaic.models.tensor_parallel.leader import lead
from moesaic.models.tensor_parallel.meeting import (
    file_store,
    meeting_file,
    own_address_towards,
    stay_on_interface,
)
from moesaic.models.weights.served import find_served_model
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.rank_store import RemoteStore, serving_store
from moesaic.services.attention.settings import AttentionSettings
from moesaic.telemetry.logs import configure_logging
from moesaic.transport.device_memory import device_named

log = structlog.get_logger()

LOOPBACK = "127.0.0.1"
_MODEL = "model"  # key in the place where ranks meet
_END_S = 10.0
# Settings that every rank of an instance has alike.
_SHARED = ("model", "dtype", "quantization", "log_level", "tensor_parallel")


def division_of(settings: AttentionSettings, config: ModelConfig) -> Division | None:
    """Return this process's part of its instance; None if there is one rank.

    Raises:
        UnusableSettings: the model cannot be divided so.
    """
    if settings.tensor_parallel == 1:
        return None
    return divide(config, settings.tensor_parallel_rank, settings.tensor_parallel)


@dataclass(frozen=True)
class MeetingRanks:
    """The ranks of an instance that are loading."""

    _group: "asyncio.Future[RankGroup]"

    async def led(self, decoder: Decoder, thread: EngineThread) -> Decoder:
        """Wait for all ranks, and compute with them on ``thread``."""
        group = await self._group
        return await thread.build(lead, decoder, group)


@asynccontextmanager
async def ranks(
    settings: AttentionSettings, division: Division, config_digest: str
) -> AsyncIterator[MeetingRanks]:
    """Start the other ranks, unless they are started elsewhere; leaving ends them.

    Args:
        settings: of the first.
        division: of the first.
        config_digest: of the model that all have.

    Raises:
        UnusableSettings: the address where they are to meet cannot be listened on.
    """
    ending = False

    def lose(error: Exception, status: int = EXIT_UNHEALTHY) -> None:
        # Else ranks leave because they are told to.
        if not ending:
            _end_at_once(error, status)

    meet = _meet_elsewhere if settings.tensor_parallel_address else _meet_here
    async with meet(settings, division, lose) as store:
        await on_own_thread(store.set, _MODEL, config_digest)
        device = device_named(settings.device)
        joining = asyncio.ensure_future(
            on_own_thread(RankGroup, 0, division.ranks, store, device, lose_instance)
        )
        try:
            yield MeetingRanks(joining)
        finally:
            ending = True
            if joining.done():
                await on_own_thread(joining.result().close)


@asynccontextmanager
async def _meet_here(
    settings: AttentionSettings, division: Division, lose: Callable[..., None]
) -> AsyncIterator[Store]:
    """Start the other ranks on this machine; leaving waits for their end."""
    stay_on_interface(LOOPBACK)
    with meeting_file() as path:
        children = [await _start(settings, rank, path) for rank in range(1, division.ranks)]
        watching = [
            asyncio.create_task(_watch(each, rank, lose)) for rank, each in enumerate(children, 1)
        ]
        try:
            yield file_store(path, division.ranks)
        finally:
            for watch in watching:
                watch.cancel()
            for child in children:
                await _end(child)


@asynccontextmanager
async def _meet_elsewhere(
    settings: AttentionSettings, division: Division, lose: Callable[..., None]
) -> AsyncIterator[Store]:
    """Serve the place where ranks that are started one by one meet."""
    name, port = _host_and_port(settings.tensor_parallel_address)
    host = await own_address(name, "tensor_parallel_address")
    check_exposure(settings, host, "tensor-parallel-address")
    stay_on_interface(host)
    identity = settings.identity("attention")
    async with serving_store(identity, host, port, lose) as bound:
        store = RemoteStore(host_port(host, int(bound)), own_credentials())
        try:
            yield store
        finally:
            await asyncio.to_thread(store.leave)


def follow(settings: AttentionSettings) -> NoReturn:
    """Be one of the ranks behind the first, to its end; exits as services do."""
    try:
        _follow(settings)
    except Exception as error:
        exit_with(error)
    sys.exit(0)


def _follow(settings: AttentionSettings) -> None:
    rank = settings.tensor_parallel_rank
    configure_logging("attention", f"{settings.identity('attention')}.{rank}", settings.log_level)
    device = device_of(settings)
    config, checkpoint = find_served_model(settings)
    division = divide(config, rank, settings.tensor_parallel)
    share_threads(division)
    store = _store_of_the_first(settings)
    if store.get(_MODEL).decode() != config.config_digest:
        raise UnusableSettings("model", "is not the one that the first rank has")
    dtype: torch.dtype = getattr(torch, settings.dtype)
    decoder = Decoder.load(
        checkpoint, config, dtype, device, settings.quantization, division=division
    )
    group = RankGroup(rank, division.ranks, store, device, lose_instance)
    log.info("rank.ready", rank=rank, ranks=division.ranks)
    Follower(decoder, group).run()
    if isinstance(store, RemoteStore):
        store.leave()
    group.close()


def _store_of_the_first(settings: AttentionSettings) -> Store:
    """Go to the place where the ranks meet, and use the network that leads there."""
    if settings.tensor_parallel_address.startswith("/"):
        stay_on_interface(LOOPBACK)
        return file_store(settings.tensor_parallel_address, settings.tensor_parallel)
    host, port = _host_and_port(settings.tensor_parallel_address)
    try:
        stay_on_interface(own_address_towards(host, port))
    except OSError as error:
        raise UnusableSettings(
            "tensor_parallel_address", f"{host} cannot be reached: {error}"
        ) from error
    store = RemoteStore(settings.tensor_parallel_address, Credentials.of(settings))
    store.stay(settings.tensor_parallel_rank, lose_instance)
    return store


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return plain_host(host), int(port)


def share_threads(division: Division | None) -> None:
    """Take this rank's part of the threads that compute."""
    if division:
        torch.set_num_threads(max(1, torch.get_num_threads() // division.ranks))


def device_of(settings: AttentionSettings) -> torch.device:
    """Return the device of this rank: of GPUs, the one so many behind that of the first."""
    device = device_named(settings.device)
    if device.type == "cuda" and not settings.tensor_parallel_address:
        return torch.device("cuda", (device.index or 0) + settings.tensor_parallel_rank)
    return device


def lose_instance(error: Exception) -> NoReturn:
    """End this process at once: without all of its ranks an instance has lost parts of its KV.

    Its requests go on elsewhere, as those of any worker that is killed.
    """
    _end_at_once(error, EXIT_UNHEALTHY)


def _end_at_once(error: Exception, status: int) -> NoReturn:
    log.error("rank.lost", cause=str(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _start(
    settings: AttentionSettings, rank: int, meeting: str
) -> asyncio.subprocess.Process:
    own = {name: getattr(settings, name) for name in _SHARED}
    own |= {
        "tensor_parallel_rank": rank,
        "tensor_parallel_address": meeting,
        "device": str(device_of(settings.model_copy(update={"tensor_parallel_rank": rank}))),
        "threads": settings.threads,
        "worker_id": settings.identity("attention"),
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "moesaic.services.attention",
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the first, which ends the others when its work is done
        preexec_fn=die_with(os.getpid()),
    )


async def _watch(child: asyncio.subprocess.Process, rank: int, lose: Callable[..., None]) -> None:
    status = await child.wait()
    lost = RuntimeError(f"rank {rank} has ended with status {status}")
    # What no restart of the rank can mend, no restart of the instance can.
    lose(lost, EXIT_USAGE if status == EXIT_USAGE else EXIT_UNHEALTHY)


async def _end(child: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_END_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
