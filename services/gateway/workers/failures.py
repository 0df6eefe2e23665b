"""Failures of a request at its workers, or on the way from them to the client."""

from moesaic.errors import MoesaicError
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


class SlowClient(MoesaicError):
    """The client reads its stream slower than tokens are made."""

    code = "slow_client"
    http_status = 408

    def __init__(self) -> None:
        super().__init__("the client reads too slowly; its request was cancelled")
