"""Options about when requests are sent."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from moesaic.cli.load.arrivals import RampUp
from moesaic.cli.terminal.options import option
from moesaic.cli.terminal.outcome import CommandError, Exit

PANEL = "Traffic"


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """The times at which requests are sent.

    Raises:
        CommandError: a rate is not above 0, or rates contradict each other.
    """

    request_rate: Annotated[float, option("Requests a second; inf: all at once.", panel=PANEL)] = (
        math.inf
    )
    burstiness: Annotated[
        float,
        option(
            "Shape of the Gamma distribution of gaps; 1: Poisson, less: more bursty.", panel=PANEL
        ),
    ] = 1.0
    max_concurrency: Annotated[
        int | None,
        option(
            "Most requests in flight. With a rate of inf, each client waits for its answer.",
            min=1,
            panel=PANEL,
        ),
    ] = None
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None,
        option("Growth of the rate from the first request to the last.", panel=PANEL),
    ] = None
    ramp_up_start_rps: Annotated[
        float | None, option("First rate, in requests a second.", panel=PANEL)
    ] = None
    ramp_up_end_rps: Annotated[
        float | None, option("Last rate, in requests a second.", panel=PANEL)
    ] = None
    self_timed: Annotated[
        bool | None,
        option(
            "Send requests when the file says, not at a rate; only and by default with "
            "timed_trace. Unlike vLLM, the first one is sent at once.",
            switch="--self-timed/--no-self-timed",
            panel=PANEL,
        ),
    ] = None
    num_warmups: Annotated[
        int,
        option("Requests before the measurement, with the first prompt.", min=0, panel=PANEL),
    ] = 0

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness", "ramp_up_start_rps", "ramp_up_end_rps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                flag = name.replace("_", "-")
                raise CommandError(f"--{flag}: must be above 0, got {value:g}", Exit.USAGE)
        _ = self.ramp_up
        if self.ramp_up_strategy and self.request_rate != math.inf:
            text = "--request-rate: leave it out, --ramp-up-strategy sets the rate"
            raise CommandError(text, Exit.USAGE)

    @property
    def ramp_up(self) -> RampUp | None:
        """The rates of a ramp-up; None: there is none."""
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise CommandError("--ramp-up-strategy: give it with the rates", Exit.USAGE)
            return None
        if start is None or end is None:
            text = "--ramp-up-strategy: give --ramp-up-start-rps and --ramp-up-end-rps as well"
            raise CommandError(text, Exit.USAGE)
        if not start <= end < math.inf:
            text = f"--ramp-up-end-rps: must be finite and at least {start:g}, got {end:g}"
            raise CommandError(text, Exit.USAGE)
        return RampUp(self.ramp_up_strategy, start, end)
