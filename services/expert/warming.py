"""Warm-up of an expert worker at its start."""

from moesaic.cluster.service import Process
from moesaic.engine.thread import EngineThread
from moesaic.experts.host import ExpertHost
from moesaic.kernels.warm_up import WARMING
from moesaic.services.expert.settings import ExpertSettings


async def warm_kernels(
    process: Process[ExpertSettings], host: ExpertHost, thread: EngineThread
) -> None:
    """Run the kernels of later batches once; on a CPU there is nothing to compile."""
    if process.settings.device == "cpu":
        return
    with process.status.waiting(WARMING):
        await thread.run(host.warm_up(process.settings.warm_up_rows))
