"""What one attention worker does beside its steps: it measures links when its turn has come, and keeps
time with the others for trials."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from moesaic.dispatch.exchange.contacts import Contact
from moesaic.dispatch.exchange.judge import Judge
from moesaic.dispatch.exchange.measure import next_seq
from moesaic.dispatch.exchange.orders import Attend, encode
from moesaic.dispatch.exchange.sending import Nodes, Reach
from moesaic.dispatch.exchange.trials import ATTEND_EVERY_S, Beat, Slot, Trial
from moesaic.errors import DeadlineExceeded, MoesaicError, PeerLost
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

log = structlog.get_logger()

_IDLE_S = 4.0  # without a layer; then there is nothing to attend to
_SLOT_STEPS = 3  # at least, of a slot
_TURN_S = 0.1  # between questions whether it is our turn to measure
_RETRY_S = (1.0, 60.0)  # after a measurement that failed; twice as long each time
_PING_S = 1.0  # who is too busy for a ping is not asked: an answer that is missing costs its link
_ANSWER_S = 60.0
_CLOCK_S = 30.0  # for which what is known of another's clock is good
_LATER = float("inf")

NearLink = Callable[[Contact, float], Awaitable[Link]]


class Attendance:
    """Asks the first live expert worker, who conducts. Lives on the engine thread's event loop."""

    def __init__(
        self, network: Network, worker_id: str, node: str, judge: Judge, reach_near: NearLink
    ) -> None:
        """Attend on behalf of ``judge``.

        Args:
            network: of this engine thread.
            worker_id: of this attention worker.
            node: that it is on.
            judge: learns what links cost, and wants trials.
            reach_near: gives a link to a neighbour, within some seconds.
        """
        self._network, self._worker_id, self._node = network, worker_id, node
        self._judge, self._reach_near = judge, reach_near
        self._neighbours: Sequence[Contact] = ()
        self._reach: Reach | None = None
        self._nodes = Nodes((), ())
        self._used_s = self._decided_s = -_LATER
        self._step_s = 0.0
        self._measured: object = None  # the links of which costs are known
        self._measure_from_s, self._retry_s = 0.0, _RETRY_S[0]
        self._trial: Trial | None = None
        self._offset_s, self._trip_s, self._clock_s = 0.0, _LATER, -_LATER  # the conductor's clock
        self._conductor = ""
        self._running: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Future[list[Frame | MoesaicError]]] = set()

    def see(self, reach: Reach, nodes: Nodes, now_s: float, step_s: float) -> None:
        """Note that a layer is exchanged, with these workers, in steps that take so long; attend."""
        self._reach, self._nodes, self._used_s, self._step_s = reach, nodes, now_s, step_s
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    def set_neighbours(self, neighbours: Sequence[Contact]) -> None:
        """Learn to whom links inside the node can be measured."""
        self._neighbours = neighbours

    def decided(self, now_s: float) -> None:
        """Note that this worker has chosen a way: others need no trials."""
        self._decided_s = now_s

    @property
    def is_settled(self) -> bool:
        """Whether this worker is sure of the fastest way, or chooses none."""
        chooses = asyncio.get_running_loop().time() < self._decided_s + _IDLE_S
        return not chooses or self._judge.chooser.is_settled

    def slot(self, now_s: float) -> Slot | None:
        """Where in a trial this is."""
        return self._trial.slot(now_s + self._offset_s) if self._trial is not None else None

    def changes_in_s(self, now_s: float) -> float:
        """After which time there is another slot."""
        there_s, trial = now_s + self._offset_s, self._trial
        if trial is None or there_s >= trial.end_s:
            return _LATER
        slot = trial.slot(there_s)
        return (slot.ends_s if slot is not None else trial.start_s) - there_s

    async def close(self) -> None:
        """Stop."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            pause_s = ATTEND_EVERY_S
            if self._reach is None or loop.time() > self._used_s + _IDLE_S:
                continue
            try:
                if self._wants_to_measure(loop.time()):
                    pause_s = await self._measure(self._reach, self._nodes)
                elif loop.time() < self._decided_s + _IDLE_S:
                    await self._keep_time(self._reach)
            except MoesaicError as error:
                log.debug("conductor.silent", cause=str(error))
            except Exception:  # a later try may do better
                log.exception("exchange.upkeep_failed")

    def _wants_to_measure(self, now_s: float) -> bool:
        return self._measured != self._links() and now_s >= self._measure_from_s

    def _links(self) -> object:
        """What tells links apart: epochs with the same workers have the same."""
        workers = self._reach.placement.workers if self._reach is not None else []
        asked = [
            [(workers[n].worker_id, workers[n].generation) for n in node]
            for node in self._nodes.others
        ]
        return asked, list(self._neighbours)

    async def _measure(self, reach: Reach, nodes: Nodes) -> float:
        """Learn what links cost, if it is our turn; how long to wait until the next try."""
        links = self._links()
        beat = await self._ask(reach, measures=True)
        if not beat.may_measure:
            return _TURN_S
        loop = asyncio.get_running_loop()
        try:
            near = [await self._reach_near(contact, _PING_S) for contact in self._neighbours[:1]]
            await self._judge.measure(self._network, reach, nodes, near)
            self._measured, self._retry_s = links, _RETRY_S[0]
        except Exception as error:  # what others answer may be of any kind
            log.warning("links.not_measured", cause=repr(error))
            self._measure_from_s = loop.time() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_S[1])
        await self._ask(reach)  # the next one's turn
        return 0.0

    async def _keep_time(self, reach: Reach) -> None:
        loop = asyncio.get_running_loop()
        trial, chooser = self._trial, self._judge.chooser
        over = trial is None or loop.time() + self._offset_s >= trial.end_s
        if over and trial is not None:
            self._trial = None
            chooser.finish_trial()
        slot_s = chooser.wished_slot_s(loop.time()) if over else 0.0
        if slot_s:  # workers meet when steps begin
            slot_s = max(slot_s, _SLOT_STEPS * self._step_s)
        beat = await self._ask(reach, slot_s)
        self._trial, self._judge.senders = beat.trial, beat.nodes

    async def _ask(self, reach: Reach, slot_s: float = 0.0, measures: bool = False) -> Beat:
        """What the conductor says.

        Raises:
            MoesaicError: it does not answer.
        """
        loop, link = asyncio.get_running_loop(), reach.links[reach.live[0]]
        await link.probe(0, _PING_S)
        sent_s = loop.time()
        request = Frame(
            kind=FrameKind.REQUEST,
            epoch=reach.placement.epoch,
            seq=next_seq(),
            body=encode(Attend(self._worker_id, self._node, slot_s, measures)),
        )
        asking = asyncio.ensure_future(self._network.exchange([(link, request)], _ANSWER_S))
        self._asking.add(
            asking
        )  # to its end, whatever happens here: cancelling would cost the link
        asking.add_done_callback(self._asking.discard)
        [outcome] = await asyncio.shield(asking)
        if isinstance(outcome, PeerLost | DeadlineExceeded):
            raise outcome
        if isinstance(outcome, MoesaicError):  # a version that does not conduct
            return Beat(0.0)
        beat = msgspec.msgpack.decode(outcome.body, type=Beat)
        self._set_clock(link.peer, beat.now_s, sent_s, loop.time())
        return beat

    def _set_clock(self, conductor: str, there_s: float, sent_s: float, now_s: float) -> None:
        """The quickest trip says best what time it is there."""
        trip_s = now_s - sent_s
        stale = conductor != self._conductor or now_s > self._clock_s + _CLOCK_S
        if stale or trip_s <= self._trip_s:
            self._conductor, self._trip_s, self._clock_s = conductor, trip_s, now_s
            self._offset_s = there_s - (sent_s + now_s) / 2
