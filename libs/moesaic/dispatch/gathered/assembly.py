"""Assembles the parts of ``gathered`` and ``offload``."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moesaic.dispatch.gathered.dispatcher import GatheredDispatcher
from moesaic.dispatch.gathered.holders import Linked, ShareHolders
from moesaic.dispatch.gathered.mover import Mover
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.dispatch.substitution import SubstitutionLoader
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
) -> AsyncIterator[GatheredParts]:
    """Read the experts that stay in memory, and be ready to gather the rest.

    Args:
        plan: the place of each expert.
        files: reads experts in the form that they are computed in.
        gates: gates by decoder layer.
        run_on_mover: awaits a coroutine on the event loop that transfers are to run on.
        model_digest: digest of the checkpoint.
        directory: directory for the file of an offloaded share.
        network: network of that event loop, to peers; ``None`` if there are none.
        timeout_s: time limit of one pull.
        budget_bytes: memory for routed experts, those that are planned included; 0: no limit.

    Raises:
        CheckpointError: an expert cannot be read.
        InvalidInput: the file cannot be written.
    """
    async with AsyncExitStack() as parts:
        resident = await on_own_thread(files.packed, plan.layers[0], range(plan.num_experts))
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
        shares = {*plan.gathered_shares, plan.share}
        digests = {share: contents_digest(model_digest, files.layout, share) for share in shares}

        async def make_mover() -> tuple[Mover, ShareHolders | None]:
            holders = None
            if network is not None:
                linked = Linked(network, digests, files.layout.nbytes, timeout_s)
                holders = ShareHolders(plan, linked)
            return Mover(plan, memory, files, shard, reader, holders), holders

        mover, holders = await run_on_mover(make_mover())
        parts.push_async_callback(lambda: run_on_mover(mover.close()))
        held = shard.rows if isinstance(shard, MemoryShard) else {}
        dispatcher = GatheredDispatcher(
            plan,
            files.layout,
            gates,
            resident,
            held,
            memory,
            mover.start,
            _substitutions(plan, files, budget_bytes),
        )
        digest = digests[plan.share]
        server = PullServer(plan.gathered_layers, plan.held.layer_bytes, shard, digest, reader)
        yield GatheredParts(plan, dispatcher, mover, shard, server, holders)


def _substitutions(plan: GatherPlan, files: ExpertFiles, budget_bytes: int) -> SubstitutionLoader:
    def bring(layer: int, expert: int) -> GatedMLP:
        return files.layout.view(files.packed(layer, [expert])[0])

    left = (budget_bytes - plan.total_bytes) // plan.expert_bytes if budget_bytes else None
    return SubstitutionLoader(files.experts, plan.layers, plan.num_experts, bring, left)
