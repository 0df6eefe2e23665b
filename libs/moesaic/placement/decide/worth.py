"""Worth of a migration: the seconds it saves over one interval, and those it takes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.messages.placement import Placement
from moesaic.placement.decide.moves import moves, residents
from moesaic.placement.traffic.statistics import Floats


@dataclass(frozen=True)
class MigrationVerdict:
    """Predicted changes by a migration, and the decision.

    Attributes:
        cost_before_s: request time that remote rows cost in one interval if nothing moves.
        cost_after_s: the same under the new placement.
        migration_s: request time that the transfer costs.
        gain_s: saving: ``cost_before_s - cost_after_s - migration_s``.
        transfer_s: duration: the use of the busiest link, and the time between stages.
        pays: true if the migration should be done.
        reason: a sentence for people.
        local_share_before, local_share_after: part of all rows whose expert is at their origin; 1 if no
            rows are expected.
        row_s_before, row_s_after: mean seconds from a row's call of an expert to its result.
    """

    cost_before_s: float
    cost_after_s: float
    migration_s: float
    gain_s: float
    transfer_s: float
    pays: bool
    reason: str
    local_share_before: float
    local_share_after: float
    row_s_before: float
    row_s_after: float


@dataclass(frozen=True, kw_only=True)
class MigrationCase:
    """Facts of the origins, to decide about migrations (DanceMoE Eq. 3 and 4).

    The paper adds counts of calls to seconds. Here all is request time in one interval::

        C(P)  = interval_s * sum of demand[n, l, e] * (remote_s[n] - local_s[n]), e not on n under P
        D     = max over n of moved_bytes[n] / (bytes_per_s[n] * load_share) + rests_s
        T_mig = D * slowdown * busy_s_per_s

    A migration pays if ``C(new) + T_mig < C(old)``, and if what it saves is at least ``least_gain`` of
    ``C(old)``. So noise moves no experts, and none are moved back for less than that.

    For example, one origin routes 100 rows a second to experts elsewhere, each 2 ms later than at home.
    Half of them could be local, for 1 GB. In 300 s they cost ``C(old) = 300 * 100 * 0.002 = 60 s``, then
    ``C(new) = 30 s``. At 50 MB/s, of which half is used, ``D = 40 s``; requests take 10 % longer, and 2 are
    under way on average, so ``T_mig = 40 * 0.1 * 2 = 8 s``. The migration saves ``60 - 30 - 8 = 22 s``.

    ``T_mig`` is paid once, and the traffic is taken to go on: that the gain begins ``D`` later is not counted.

    Attributes:
        origins: worker ids, N.
        demand: float64 ``[N, L, E]``, rows per second; see ``OriginTraffic.demand``.
        remote_s: ``[N]``, mean seconds of a row whose expert is elsewhere, measured.
        local_s: ``[N]``, mean seconds of a row whose expert is at its origin, measured.
        bytes_per_s: ``[N]``, what each worker can receive, measured.
        rests_s: time between the stages of the migration.
        load_share: part of a link that a transfer may use, above 0 and up to 1.
        expert_bytes: of one expert's weights.
        slowdown: part by which requests take longer while experts are moved, measured; 0.1: by a tenth.
        busy_s_per_s: seconds of request time per second, all origins together: the requests under way.
        interval_s: until the next decision.
        least_gain: part of ``C(old)`` that must be saved, in ``0..1``.

    Raises:
        InvalidInput: an array has another shape or values that cannot be, or a number is out of its range.
    """

    origins: Sequence[str]
    demand: Floats
    remote_s: Floats
    local_s: Floats
    bytes_per_s: Floats
    load_share: float
    expert_bytes: int
    slowdown: float
    busy_s_per_s: float
    interval_s: float
    least_gain: float
    rests_s: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.origins)
        if not n or len(set(self.origins)) < n or self.demand.ndim != 3 or len(self.demand) != n:
            shape = self.demand.shape
            raise InvalidInput("demand", f"must be [{n}, L, E], of distinct origins, got {shape}")
        for name in ("demand", "remote_s", "local_s", "bytes_per_s"):
            values = getattr(self, name)
            if len(values) != n or not (np.isfinite(values) & (values >= 0)).all():
                raise InvalidInput(name, f"must be finite and not negative, for {n} origins")
        if not (self.bytes_per_s > 0).all():
            raise InvalidInput("bytes_per_s", "must be positive")
        for name, holds, wanted in (
            ("load_share", 0 < self.load_share <= 1, "above 0 and up to 1"),
            ("least_gain", 0 <= self.least_gain <= 1, "in 0..1"),
            ("interval_s", 0 < self.interval_s < np.inf, "positive"),
            ("slowdown", 0 <= self.slowdown < np.inf, "not negative"),
            ("rests_s", 0 <= self.rests_s < np.inf, "not negative"),
            ("busy_s_per_s", 0 <= self.busy_s_per_s < np.inf, "not negative"),
            ("expert_bytes", self.expert_bytes >= 0, "not negative"),
        ):
            if not holds:
                raise InvalidInput(name, f"must be {wanted}, got {getattr(self, name)}")

    def verdict(self, current: Placement, target: Placement) -> MigrationVerdict:
        """Decide if ``target`` should replace ``current``.

        Args:
            current: the placement in force. Workers that restarted since then hold nothing.
            target: the placement to migrate to; its layers are those of the demand, in order.

        Raises:
            InvalidInput: the layers differ in number, or a worker that is no origin must load experts.
        """
        if not len(current.layers) == len(target.layers) == self.demand.shape[1]:
            raise InvalidInput("layers", f"must be {self.demand.shape[1]}, as in the demand")
        generations = {worker.worker_id: worker.generation for worker in target.workers}
        before, after = (self._remote(p, generations) for p in (current, target))
        cost_before_s, cost_after_s = (self._cost_s(remote) for remote in (before, after))
        num_moves, transfer_s = self._transfer_s(current, target)
        migration_s = transfer_s * self.slowdown * self.busy_s_per_s
        gain_s = cost_before_s - cost_after_s - migration_s
        least_s = self.least_gain * cost_before_s
        pays = num_moves > 0 and gain_s > 0 and gain_s >= least_s
        reason = (
            f"remote rows cost {cost_before_s:.2f} s of request time in {self.interval_s:.0f} s, then "
            f"{cost_after_s:.2f} s, and {num_moves} moves cost {migration_s:.2f} s: saves "
            f"{gain_s:.2f} s, more than 0 and at least {least_s:.2f} s is wanted"
        )
        rows_per_s = float(self.demand.sum())
        return MigrationVerdict(
            cost_before_s=cost_before_s,
            cost_after_s=cost_after_s,
            migration_s=migration_s,
            gain_s=gain_s,
            transfer_s=transfer_s,
            pays=pays,
            reason=reason if num_moves else "no expert would have to move",
            local_share_before=1 - float(before.sum()) / rows_per_s if rows_per_s else 1.0,
            local_share_after=1 - float(after.sum()) / rows_per_s if rows_per_s else 1.0,
            row_s_before=self._row_s(before),
            row_s_after=self._row_s(after),
        )

    def _remote(self, placement: Placement, generations: dict[str, int]) -> Floats:
        """Rows per second from each origin to experts elsewhere, ``[N]``."""
        elsewhere: NDArray[np.bool_] = np.ones(self.demand.shape, bool)
        origin = {worker_id: n for n, worker_id in enumerate(self.origins)}
        layer_idx = {layer: idx for idx, layer in enumerate(placement.layers)}
        for layer, expert, (worker_id, generation) in residents(placement):
            restarted = generations.get(worker_id, generation) != generation
            # United experts, the last ones, stand in for others but are nobody's choice.
            if worker_id in origin and not restarted and expert < self.demand.shape[2]:
                elsewhere[origin[worker_id], layer_idx[layer], expert] = False
        remote: Floats = (self.demand * elsewhere).sum(axis=(1, 2))
        return remote

    def _cost_s(self, remote: Floats) -> float:
        return self.interval_s * float((remote * (self.remote_s - self.local_s)).sum())

    def _row_s(self, remote: Floats) -> float:
        rows = self.demand.sum(axis=(1, 2))
        seconds = float((rows * self.local_s + remote * (self.remote_s - self.local_s)).sum())
        return seconds / float(rows.sum()) if rows.any() else 0.0

    def _transfer_s(self, current: Placement, target: Placement) -> tuple[int, float]:
        received = Counter(move.worker_id for move in moves(current, target))
        if unknown := received.keys() - set(self.origins):
            raise InvalidInput("origins", f"must have {sorted(unknown)[:3]}, which load experts")
        counts = np.array([received[worker_id] for worker_id in self.origins], float)
        seconds = counts * self.expert_bytes / (self.bytes_per_s * self.load_share)
        return received.total(), float(seconds.max()) + self.rests_s
