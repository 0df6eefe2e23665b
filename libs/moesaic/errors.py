"""Errors, told apart by the caller's next action. Facts are fields; the text is made from them.

Each boundary translates once: ``http_status`` and ``code`` at the gateway, ``grpc_status`` in
``moesaic.cluster.rpc.statuses``.
"""

import errno
from typing import ClassVar

# Errors of reading a file that another try may not have: a file server that is away, no memory, too many open files.
_PASSING = {
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.EBUSY,
}


class MoesaicError(Exception):
    """Base of all errors that a boundary translates."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


class InvalidInput(MoesaicError):
    """The caller must correct one field."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, field: str, fix: str, *, code: str = "invalid_request") -> None:
        self.field, self.fix = field, fix
        self.code = code  # type: ignore[misc]  # a narrower stable code, such as context_length_exceeded
        super().__init__(f"{field}: {fix}")


class UnusableSettings(InvalidInput):
    """A process can never start with this setting: to start it again is no use."""


class InUse(InvalidInput):
    """A port, or room on a disk or in memory, is taken now: another one will do, or a later try."""

    retryable = True


class ModelNotFound(MoesaicError):
    """No model of this name is served here."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"

    def __init__(self, model: str, served: str) -> None:
        self.model, self.served = model, served
        super().__init__(f"model: {model!r} is not served here; use {served!r}")


class CheckpointError(MoesaicError):
    """A model directory, file or tensor is damaged or of a wrong form."""

    code = "invalid_checkpoint"
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, file: str, problem: str, *, tensor: str | None = None) -> None:
        self.file, self.tensor, self.problem = file, tensor, problem
        super().__init__(f"{file}: {f'tensor {tensor}: ' if tensor else ''}{problem}")

    @classmethod
    def unreadable(
        cls, file: str, error: OSError, *, tensor: str | None = None
    ) -> "CheckpointError":
        """Make the error that a file cannot be read."""
        kind = PassingCheckpointError if error.errno in _PASSING else CheckpointError
        return kind(file, f"cannot be read: {error.strerror or error}", tensor=tensor)


class PassingCheckpointError(CheckpointError):
    """A model's file cannot be read now, or has been replaced: a process that starts later may read it."""

    retryable = True


class Overloaded(MoesaicError):
    """Try again after ``retry_after_s``."""

    code = "overloaded"
    http_status = 503
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, what: str, retry_after_s: float = 1.0) -> None:
        self.what, self.retry_after_s = what, retry_after_s
        super().__init__(f"{what}; retry after {retry_after_s:g} s")


class NotReady(MoesaicError):
    """A part that the request needs is not there yet, or is draining."""

    code = "not_ready"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True

    def __init__(self, what: str, retry_after_s: float = 1.0, *, code: str = "not_ready") -> None:
        self.what, self.retry_after_s = what, retry_after_s
        self.code = code  # type: ignore[misc]  # no_attention_worker, draining, placement_changing
        super().__init__(what)


class StaleEpoch(MoesaicError):
    """The placement has moved on: refresh it and retry once."""

    code = "placement_changing"
    http_status = 503
    grpc_status = "ABORTED"
    retryable = True

    def __init__(self, sent: int, current: int) -> None:
        self.sent, self.current = sent, current
        super().__init__(f"epoch {sent} was sent, {current} is in force")


class ExpertUnavailable(MoesaicError):
    """No live replica holds this expert; another holder, or a later try, may."""

    code = "expert_unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True

    def __init__(self, layer: int, num_experts: int = 1, cause: str = "no live replica") -> None:
        self.layer, self.num_experts, self.cause = layer, num_experts, cause
        self.retry_after_s = 1.0
        super().__init__(f"{num_experts} expert(s) of layer {layer} cannot be reached: {cause}")


class PlacementInfeasible(MoesaicError):
    """The experts do not fit into the available slots."""

    code = "placement_infeasible"
    http_status = 503
    grpc_status = "FAILED_PRECONDITION"

    def __init__(
        self,
        missing_slots: int,
        missing_bytes: int,
        fix: str = "start more expert workers or give them more slots",
    ) -> None:
        self.missing_slots, self.missing_bytes, self.fix = missing_slots, missing_bytes, fix
        super().__init__(f"{missing_slots} expert slots ({missing_bytes} bytes) are missing; {fix}")


class DeadlineExceeded(MoesaicError):
    """The caller's deadline has passed."""

    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"

    def __init__(self, what: str, budget_ms: float, fix: str = "") -> None:
        self.what, self.budget_ms = what, budget_ms
        super().__init__(f"{what} did not finish within {budget_ms:.0f} ms{fix and '; '}{fix}")

    @classmethod
    def of_request(cls, budget_ms: float) -> "DeadlineExceeded":
        """The error of a request from outside, whose time several may limit."""
        fix = "its limit is the least of moesaic.deadline_ms, x-request-timeout-ms and --request-timeout-s"
        return cls("the request", budget_ms, fix)


class PeerLost(MoesaicError):
    """A peer's connection broke, or no answer came in time; the connection is gone."""

    code = "worker_lost"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True

    def __init__(self, peer: str, cause: str) -> None:
        self.peer, self.cause = peer, cause
        self.retry_after_s = 1.0
        super().__init__(f"{peer}: {cause}")


class FrameError(MoesaicError):
    """A frame is foreign, damaged, or answers another request: its connection must be dropped."""

    code = "bad_frame"
    grpc_status = "DATA_LOSS"

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"frame {field}: {problem}")
