"""A quick guess of a shape's later tokens under steady load, to look at good shapes first. Forecasts decide."""

from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import RecentDemand, ServingLimits, StepRows, StepTimes

_ROUNDS = 30
_STEADY = 1e-4  # change of a batch


class SteadyState:
    """Seconds between tokens of fleets whose workers all have the mean load."""

    def __init__(
        self, demand: RecentDemand, times: StepTimes, limits: ServingLimits, headroom: float
    ) -> None:
        """Take the means of some demand that is not empty, ``headroom`` times as dense."""
        self._times, self._limits = times, limits
        self._answer = max(1.0, float(demand.answer_tokens.mean()))
        self._prompt = max(1.0, float(demand.prompt_tokens.mean()))
        self._tokens_per_s = demand.requests_per_s * headroom * self._answer
        self._known: dict[FleetShape, float] = {}

    def token_s(self, shape: FleetShape) -> float:
        """Return the mean time between tokens; of an overloaded fleet, longer the more it is overloaded.

        By Little's law, as many generations are in flight as arrive while one lasts. The time of
        steps depends on that number. The least number for which both hold is found from below.
        """
        if shape not in self._known:
            self._known[shape] = self._solve(shape)
        return self._known[shape]

    def _solve(self, shape: FleetShape) -> float:
        per_worker, most = self._tokens_per_s / shape.attention, float(self._limits.max_num_seqs)
        batch, seconds = 0.0, self._step_s(1.0, shape)
        for _ in range(_ROUNDS):
            after = per_worker * seconds
            if after >= most:
                seconds = self._step_s(most, shape)
                return seconds * max(1.0, per_worker * seconds / most)
            if after - batch <= _STEADY * after:
                break
            batch, seconds = after, self._step_s(max(1.0, after), shape)
        return seconds

    def _step_s(self, batch: float, shape: FleetShape) -> float:
        """Return the time of a step with these answers, and the rows of prompts that keep up with them."""
        room = max(0.0, self._limits.max_num_batched_tokens - batch)
        prompts = min(room, batch * self._prompt / self._answer)
        keys, prompt_keys = batch * (self._prompt + self._answer / 2), prompts * self._prompt / 2
        return self._times.step(StepRows(prompts, batch, keys, prompt_keys), shape).seconds
