"""The way to degrade of a worker that computes all experts itself: it follows the policy of brownout."""

from functools import partial

import structlog
import torch

from moesaic.dispatch.rungs import Degrading, LoadedRung
from moesaic.engine.thread import EngineThread
from moesaic.errors import MoesaicError
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.rung import Rung
from moesaic.native.own_thread import on_own_thread

log = structlog.get_logger()


class RungFollower:
    """Loads the united experts of a policy beside serving, then has steps degraded by them."""

    def __init__(self, degrading: Degrading | None, thread: EngineThread) -> None:
        """``degrading`` lives on ``thread``; None: the placement says how choices are degraded."""
        self._degrading, self._thread = degrading, thread
        self._rung = Rung()

    async def follow(self, policy: BrownoutPolicy) -> None:
        """Degrade as ``policy`` says. Without its united experts rows make do with fewer, and the log says why."""
        degrading, rung = self._degrading, policy.rung
        if degrading is None or rung == self._rung:
            return
        self._rung = rung
        loaded: LoadedRung | None = None
        if rung != Rung():
            try:
                loaded = await on_own_thread(partial(degrading.rungs.load, rung))
            except (MoesaicError, MemoryError, torch.OutOfMemoryError) as error:
                log.error("rung.refused", way=rung.way, instead=rung.instead, cause=str(error))
                rung = Rung(instead="fewer")
                loaded = degrading.rungs.load(rung)
        self._thread.call(degrading.adopt, loaded)
        united_bytes = loaded.nbytes if loaded else 0
        log.info("rung.adopted", way=rung.way, instead=rung.instead, united_bytes=united_bytes)
