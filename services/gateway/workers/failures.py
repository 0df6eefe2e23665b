"""Failures of a request at its workers, or on the way from them to the client."""

from moesaic.errors import MoesaicError, PeerLost
from moesaic.v1.attention_pb2 import Failure


class WorkFailed(MoesaicError):
    """A worker answered with a failure; the fields are the worker's."""

    def __init__(self, failure: Failure) -> None:
        self.code = failure.code or "internal_error"  # type: ignore[misc]  # of this one failure
        self.http_status = failure.http_status or 500  # type: ignore[misc]  # of this one failure
        self.retryable = failure.retryable  # type: ignore[misc]  # of this one failure
        self.retry_after_s = failure.retry_after_s or None
        self.field = failure.field or None
        super().__init__(failure.message)


class WorkerLost(PeerLost):
    """An attention worker was lost, with all runs that it had.

    Attributes:
        blame: the part of each of these runs in the loss. It is 0 where the worker was paused or cut off, which no
            run does.
    """

    def __init__(self, cause: str, blame: float) -> None:
        self.blame = blame
        super().__init__("an attention worker", cause)


class SlowClient(MoesaicError):
    """The client reads its stream slower than tokens are made."""

    code = "slow_client"
    http_status = 408

    def __init__(self) -> None:
        super().__init__("the client reads too slowly; its request was cancelled")
