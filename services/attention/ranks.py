"""The ranks of one attention instance: the first starts the others, and is lost with any of them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

import structlog
import torch

from moesaic.addresses import host_port
from moesaic.cluster.lifecycle import EXIT_UNHEALTHY
from moesaic.cluster.parents import die_with
from moesaic.engine.thread import EngineThread
from moesaic.errors import UnusableSettings
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.division import Division, divide
from moesaic.models.layers.decoder import Decoder
from moesaic.models.tensor_parallel.follower import Follower
from moesaic.models.tensor_parallel.group import RankGroup, meeting_at, meeting_point
from moesaic.models.tensor_parallel.leader import lead
from moesaic.models.weights.served import find_served_model
from moesaic.native.own_thread import on_own_thread
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
    """The ranks of an instance that are loading.

    Attributes:
        division: of the first.
        address: where they meet.
    """

    division: Division
    address: str
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
    host, _, port = settings.tensor_parallel_address.rpartition(":")
    try:
        store = await on_own_thread(meeting_point, host or LOOPBACK, int(port or 0))
    except RuntimeError as error:
        raise UnusableSettings(
            "tensor_parallel_address", f"cannot be listened on: {error}"
        ) from error
    store.set(_MODEL, config_digest)
    address = host_port(host or LOOPBACK, store.port)
    device = device_named(settings.device)
    joining = asyncio.ensure_future(
        on_own_thread(RankGroup, 0, division.ranks, store, device, lose_instance)
    )
    others = () if host else range(1, division.ranks)
    children = [await _start(settings, rank, address) for rank in others]
    watching = [asyncio.create_task(_watch(child, rank)) for rank, child in enumerate(children, 1)]
    try:
        yield MeetingRanks(division, address, joining)
    finally:
        for watch in watching:
            watch.cancel()
        if joining.done():
            await on_own_thread(joining.result().close)
        for child in children:
            await _end(child)


def follow(settings: AttentionSettings) -> NoReturn:
    """Be one of the ranks behind the first, to its end."""
    rank = settings.tensor_parallel_rank
    configure_logging("attention", f"{settings.identity('attention')}.{rank}", settings.log_level)
    device = device_of(settings)
    config, checkpoint = find_served_model(settings)
    division = divide(config, rank, settings.tensor_parallel)
    share_threads(division)
    store = meeting_at(settings.tensor_parallel_address)
    if store.get(_MODEL).decode() != config.config_digest:
        raise UnusableSettings("model", "is not the one that the first rank has")
    dtype: torch.dtype = getattr(torch, settings.dtype)
    decoder = Decoder.load(
        checkpoint, config, dtype, device, settings.quantization, division=division
    )
    group = RankGroup(rank, division.ranks, store, device, lose_instance)
    log.info("rank.ready", rank=rank, ranks=division.ranks)
    Follower(decoder, group).run()
    group.close()
    sys.exit(0)


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
    log.error("rank.lost", cause=str(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_UNHEALTHY)


async def _start(
    settings: AttentionSettings, rank: int, address: str
) -> asyncio.subprocess.Process:
    own = {name: getattr(settings, name) for name in _SHARED}
    own |= {
        "tensor_parallel_rank": rank,
        "tensor_parallel_address": address,
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


async def _watch(child: asyncio.subprocess.Process, rank: int) -> None:
    status = await child.wait()
    lose_instance(RuntimeError(f"rank {rank} has ended with status {status}"))


async def _end(child: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_END_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
