"""The promise of every dispatcher to the engine."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.kernels.promised import PromisedRows
from moesaic.messages.substitution import Substitution


@dataclass(frozen=True)
class Step:
    """One forward pass. It pins one placement epoch for all its layers.

    A dispatcher may give a subclass, with its own view of the placement, and gets it back.
    """

    step_id: bytes  # 16 bytes; unique where frames carry it
    epoch: int
    substitution: Substitution | None = None  # how choices may be degraded; None: they cannot be
    # Some experts are served by united ones alone: all rows need promises, and none may be promised everything.
    has_lost: bool = False
    placed_in: str = ""  # W3C: the span in which the placement was made; empty: it is not traced


class Dispatcher(Protocol):
    """Brings hidden states to the routed experts and back, on the engine thread's event loop."""

    def begin_step(self) -> Step:
        """Pin the newest placement whose experts can all be reached.

        Raises:
            NotReady: there is none at the moment; a later try may succeed.
        """
        ...

    def end_step(self, step: Step) -> None:
        """Let go of a step's placement; the step has run, failed, or never started."""
        ...

    def dispatch(
        self,
        step: Step,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Awaitable[Tensor]:
        """The gate-weighted sum of each row's routed experts.

        Args:
            step: from ``begin_step``.
            layer: index of the decoder layer.
            hidden_states: ``[T, H]``, normed. In the last layer ``T`` may be less than in the others, never 0.
            promised: the same rows, of a step with a substitution; counts choices that are degraded. None: none is.

        Returns:
            ``[T, H]``, same dtype.

        Raises:
            ExpertUnavailable: some expert could not be reached; the step may be run again.
            StaleEpoch: the pinned placement was retired; begin a new step.
        """
        ...

    async def reachable(self) -> None:
        """Wait until ``begin_step`` may succeed."""
        ...

    @property
    def waiting_for(self) -> list[str]:
        """Reasons why ``begin_step`` would fail now, for people; empty when there are none."""
        ...
