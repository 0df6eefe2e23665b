"""Room in the queue: which waiting requests leave it for a newcomer. Pure."""

from collections.abc import Callable, Sequence

from moesaic.engine.sequences.sequence import AnySequence
from moesaic.engine.steps.limits import EngineLimits
from moesaic.engine.steps.waiting import WaitingQueue
from moesaic.errors import Overloaded
from moesaic.fairness import Claim, who_gives_way


def displaced_by(
    newcomer: Claim, num_tokens: int, queues: Sequence[WaitingQueue], limits: EngineLimits
) -> list[AnySequence]:
    """Find those that leave the queue, so that a request of ``num_tokens`` finds room.

    Only requests that have never run leave: the work done for the others would be lost.

    Raises:
        Overloaded: the queue is full, and nothing in it has to give way to the newcomer.
    """
    displaced: list[AnySequence] = []
    kinds = {kind for queue in queues for kind in queue.kinds}
    num_queued, queued_tokens = sum(map(len, queues)), sum(queue.num_tokens for queue in queues)

    def make_room(needs: int, free: int, amount: Callable[[AnySequence], int], full: str) -> None:
        if needs <= free:
            return
        if kinds == {(newcomer.tenant, newcomer.priority)}:  # equals do not give way
            raise Overloaded(full)
        waiting = [sequence for queue in queues for sequence in queue]
        leaving = who_gives_way(
            newcomer,
            needs,
            free,
            [sequence for sequence in waiting if sequence not in displaced],
            amount,
            may_leave=lambda sequence: sequence.num_cached is None,
            among_requests=False,
        )
        if leaving is None:
            raise Overloaded(full)
        displaced.extend(leaving)

    full = f"{num_queued} requests are waiting already"
    make_room(1, limits.max_num_queued_reqs - num_queued, lambda _: 1, full)
    most_tokens = limits.max_num_queued_tokens
    left = queued_tokens - sum(len(sequence.tokens) for sequence in displaced)
    if left and left + num_tokens > most_tokens:
        full = f"requests with {queued_tokens} tokens are waiting already"
        make_room(min(num_tokens, most_tokens), most_tokens - left, _num_tokens, full)
    return displaced


def _num_tokens(sequence: AnySequence) -> int:
    return len(sequence.tokens)
