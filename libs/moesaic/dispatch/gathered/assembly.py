"""Assembles the parts of ``gathered`` and ``offload``."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.dispatch.gathered.device import DeviceBuffers, DeviceStreams
from moesaic.dispatch.gathered.dispatcher import GatheredDispatcher
from moesaic.dispatch.gathered.holders import Linked, ShareHolders
from moesaic.dispatch.gathered.mover import Mover
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.dispatch.substitution import SubstitutionLoader
from moesaic.errors import InUse
from moesaic.experts.loaded import ExpertFiles
from moesaic.experts.pull.frames import contents_digest
from moesaic.experts.pull.server import PullServer
from moesaic.experts.pull.shard import MemoryShard
from moesaic.experts.pull.shard_file import FileShard, shard_file
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.models.layers.gate import Gate
from moesaic.native.own_thread import on_own_thread
from moesaic.transport.contract import Network

RunOnMover = Callable[[Any], Awaitable[Any]]  # awaits a coroutine on the mover's event loop


@dataclass(frozen=True)
class GatheredParts:
    """One worker's parts.

    The dispatcher belongs to the engine's event loop, mover, server and holders to the mover's.
    """

    plan: GatherPlan
    dispatcher: GatheredDispatcher
    mover: Mover
    shard: MemoryShard | FileShard  # that the server gives
    server: PullServer
    holders: ShareHolders | None  # of the mover


@asynccontextmanager
async def assemble(
    plan: GatherPlan,
    files: ExpertFiles,
    gates: Mapping[int, Gate],
    run_on_mover: RunOnMover,
    *,
    model_digest: str,
    directory: Path,
    network: Network | None = None,
    timeout_s: float = 2.0,
    budget_bytes: int = 0,
    streams: DeviceStreams | None = None,
) -> AsyncIterator[GatheredParts]:
    """Read the experts that stay in memory, and be ready to gather the rest.

    Args:
        plan: the place of each expert.
        files: reads experts in the form that they are computed in, for the device that computes.
        gates: gates by decoder layer.
        run_on_mover: awaits a coroutine on the event loop that transfers are to run on.
        model_digest: digest of the checkpoint.
        directory: directory for the file of an offloaded share.
        network: network of that event loop, to peers; ``None`` if there are none.
        timeout_s: time limit of one pull.
        budget_bytes: memory for routed experts, those that are planned included; 0: no limit.
        streams: streams of the device of ``files``, if that has memory of its own.

    Raises:
        CheckpointError: an expert cannot be read.
        InvalidInput: the file cannot be written, or a device has too little memory.
    """
    assert plan.on_device == (streams is not None)
    async with AsyncExitStack() as parts:
        resident = await on_own_thread(files.packed, plan.layers[0], range(plan.num_experts))
        device = None
        if streams is not None:
            parts.callback(streams.close)
            resident, buffers = _on_device(plan, resident, files.device)
            device = DeviceBuffers(buffers, streams)
        shard: MemoryShard | FileShard
        if plan.offload:
            path = await on_own_thread(shard_file, directory, plan.held, files, model_digest)
            shard = FileShard(path, plan.held)
            parts.callback(shard.close)
        else:
            shard = await on_own_thread(MemoryShard.load, plan.held, files)
        # It computes nothing
        reader = ThreadPoolExecutor(1, thread_name_prefix="shard")
        parts.callback(reader.shutdown)
        shape = len(plan.gathered), plan.expert_bytes
        memory = [torch.empty(shape, dtype=torch.uint8) for _ in range(plan.num_buffers)]
        held = shard.rows if isinstance(shard, MemoryShard) else {}
        if streams is not None:
            for locked in (*memory, *held.values()):
                streams.lock(locked)
        shares = {*plan.gathered_shares, plan.share}
        digests = {share: contents_digest(model_digest, files.layout, share) for share in shares}

        async def make_mover() -> tuple[Mover, ShareHolders | None]:
            holders = None
            if network is not None:
                linked = Linked(network, digests, files.layout.nbytes, timeout_s)
                holders = ShareHolders(plan, linked)
            return Mover(plan, memory, files, shard, reader, holders, device), holders

        mover, holders = await run_on_mover(make_mover())
        parts.push_async_callback(lambda: run_on_mover(mover.close()))
        dispatcher = GatheredDispatcher(
            plan,
            files.layout,
            gates,
            resident,
            held,
            memory,
            mover.start,
            _substitutions(plan, files, budget_bytes),
            device,
        )
        digest = digests[plan.share]
        server = PullServer(plan.gathered_layers, plan.held.layer_bytes, shard, digest, reader)
        yield GatheredParts(plan, dispatcher, mover, shard, server, holders)


def _on_device(
    plan: GatherPlan, resident: Tensor, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Bring the first layer's experts to a device, and take memory there for layers of others.

    Returns:
        The experts, and the memory of each buffer: uint8 ``[E, nbytes]``.

    Raises:
        InUse: there is too little memory.
    """
    shape = len(plan.buffered), plan.expert_bytes
    try:
        buffers = [
            torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(plan.num_buffers)
        ]
        return resident.to(device), buffers
    except torch.OutOfMemoryError as error:
        raise InUse(
            "device",
            f"{device} has no {plan.total_bytes} bytes for the experts of {1 + plan.num_buffers} layers, "
            "which take turns in its memory: use a device with more memory, or end what else runs on it",
        ) from error


def _substitutions(plan: GatherPlan, files: ExpertFiles, budget_bytes: int) -> SubstitutionLoader:
    def bring(layer: int, expert: int) -> GatedMLP:
        return files.layout.view(files.packed(layer, [expert])[0].to(files.device))

    left = (budget_bytes - plan.total_bytes) // plan.expert_bytes if budget_bytes else None
    return SubstitutionLoader(files.experts, plan.layers, plan.num_experts, bring, left)
