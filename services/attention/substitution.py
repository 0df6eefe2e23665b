"""The substitution in a worker that computes all experts itself: it follows the policy of brownout."""

from collections.abc import Callable
from functools import partial

import structlog

from moesaic.dispatch.substitution import Degrading, LoadedSubstitution
from moesaic.engine.thread import EngineThread
from moesaic.errors import MoesaicError
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.substitution import Substitution
from moesaic.native.own_thread import on_own_thread
from moesaic.telemetry.shortage import ran_out_of_memory

log = structlog.get_logger()

WarmUpDegraded = Callable[[Degrading, LoadedSubstitution], None]


class SubstitutionFollower:
    """Loads the united experts of a policy beside serving, then has steps degraded by them."""

    def __init__(
        self,
        degrading: Degrading | None,
        thread: EngineThread,
        warm_up: WarmUpDegraded = lambda degrading, loaded: None,
    ) -> None:
        """
        Args:
            degrading: lives on ``thread``; None: the placement says how choices are degraded.
            thread: of the engine.
            warm_up: runs the kernels of degraded steps once, on any thread; by default there are none.
        """
        self._degrading, self._thread, self._warm_up = degrading, thread, warm_up
        self._substitution = Substitution()

    async def follow(self, policy: BrownoutPolicy) -> None:
        """Degrade as ``policy`` says. Without its united experts rows make do with fewer, and the log says why."""
        degrading, substitution = self._degrading, policy.substitution
        if degrading is None or substitution == self._substitution:
            return
        self._substitution = substitution
        loaded: LoadedSubstitution | None = None
        if substitution != Substitution():
            try:
                loaded = await on_own_thread(partial(degrading.substitutions.load, substitution))
            except Exception as error:
                if not isinstance(error, MoesaicError) and not ran_out_of_memory(error):
                    raise
                log.error(
                    "substitution.refused",
                    way=substitution.way,
                    instead=substitution.instead,
                    cause=str(error),
                )
                substitution = Substitution(instead="fewer")
                loaded = degrading.substitutions.load(substitution)
        if loaded is not None:
            # Beside serving, and before the first step that is degraded: that comes in an overload.
            await on_own_thread(self._warm_up, degrading, loaded)
        self._thread.call(degrading.adopt, loaded)
        united_bytes = loaded.nbytes if loaded else 0
        log.info(
            "substitution.adopted",
            way=substitution.way,
            instead=substitution.instead,
            united_bytes=united_bytes,
        )
