"""Plans for edge agents: fewest calls to other sites, by measured demand and costs, if moving pays.

DanceMoE section III; ``placement.decide.worth`` decides the questions that the paper leaves open.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_plan
from functools import partial

import numpy as np
from msgspec.structs import replace

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.messages.decisions import Pin
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.checking import violations
from moesaic.placement.decide.moves import moves
from moesaic.placement.decide.pins import with_pins
from moesaic.placement.decide.worth import MigrationCase
from moesaic.placement.policies import AUTO, KEEP
from moesaic.placement.traffic.statistics import Floats
from moesaic.services.scheduler.epochs.staged import REST_S, stages_of
from moesaic.services.scheduler.planning.messages import Solved, SolveSites
from moesaic.services.scheduler.planning.planner import PlacementPlan, StartSolver
from moesaic.services.scheduler.planning.site_profiles import SiteProfiles
from moesaic.services.scheduler.planning.solver_client import solver
from moesaic.services.scheduler.planning.traffic import TrafficFeed

BEST, IF_THAT_FAILS = "optimal", "dance"  # what ``auto`` asks for
# Of real time, at the lowest priority. A plan that takes so long gives way to workers and operators.
SOLVE_S = 100.0
# What these ask for, agents do not tell: which experts are activated together, and batches.
OF_BATCHES = frozenset({"janus-batches", "eplb-batches"})
LEAST_ROWS = 256  # of a site, before its demand is worth a plan
NOTABLE_SHARE = 1 / 3  # of the mean demand of sites; with less a site has no say in that
# Sites that exchange tasks are seen to have changed some windows apart, and one plan is for all of them.
OTHERS_WINDOWS = 10
LEAST_GAIN = 0.1  # of what calls to other sites cost: demand is known from samples
HORIZON_S = 300.0  # over which a migration must pay, unless plans are made less often


_patient_solver: StartSolver = partial(solver, limit_s=SOLVE_S)


@dataclass(frozen=True)
class MigrationTerms:
    """Terms of migrations.

    Attributes:
        interval_s: from plan to plan.
        load_share: part of the time in which agents load.
    """

    interval_s: float
    load_share: float


class SitePlanner:
    """Makes plans for agents from their reports; it rejects plans that need missing reports."""

    def __init__(
        self,
        feed: TrafficFeed,
        profiles: SiteProfiles,
        terms: MigrationTerms,
        start_solver: StartSolver = _patient_solver,
    ) -> None:
        self._feed, self._profiles, self._terms = feed, profiles, terms
        self._start_solver = start_solver

    async def plan(
        self,
        current: Placement,
        records: Sequence[WorkerRecord],
        policy: str,
        pins: Iterable[Pin],
    ) -> PlacementPlan:
        """Plan by ``policy``. There is always a plan; if data is missing, the placement stays, with
        the reason.
        """
        stay = PlacementPlan(replace(current, epoch=0), current.epoch, policy, "")
        if policy == KEEP:
            return replace_plan(stay, reason="the policy is to keep experts where they are")
        if policy in OF_BATCHES:
            reason = f"{policy} needs the batches of expert workers, which edge agents do not tell"
            return replace_plan(stay, reason=reason)
        by_key = {record.incarnation: record for record in records}
        keys = [worker.incarnation for worker in current.workers]
        if gone := [key[0] for key in keys if key not in by_key]:
            return replace_plan(stay, reason=f"{', '.join(gone)} left")
        placed, now_s = [by_key[key] for key in keys], time.monotonic()
        names = [record.worker_id for record in placed]
        traffic = self._feed.of(current.model_digest)
        if traffic is None or not traffic.origins.seen(names).any():
            return replace_plan(stay, reason="no traffic has been seen yet")
        if settling := sorted(traffic.origins.settling(now_s) & set(names)):
            reason = f"the requests of {', '.join(settling)} have changed: waits for more of them"
            return replace_plan(stay, reason=reason)
        shifted_s = traffic.origins.last_shift_s
        if shifted_s is not None and now_s - shifted_s < OTHERS_WINDOWS * traffic.window_s:
            reason = "the requests of one site have changed: waits to see whether others' have, too"
            return replace_plan(stay, reason=reason)
        if missing := self._profiles.missing(current, now_s):
            reason = f"{', '.join(missing)} has not told what experts at other sites cost"
            return replace_plan(stay, reason=reason)
        costs = self._costs(
            names, now_s
        )  # of now: it may take minutes to solve, and agents fall silent
        demand = traffic.origins.demand(names, now_s)
        if few := _told_little(names, traffic.origins.rows(names, now_s), demand):
            return replace_plan(stay, reason=f"too few requests of {few} have been seen so far")
        stay = replace_plan(stay, batches=float(round(demand.sum(), 1)))
        for name in (BEST, IF_THAT_FAILS) if policy == AUTO else (policy,):
            stay = replace_plan(stay, policy=name)
            try:
                wanted = with_pins(await self._proposal(current, placed, demand, costs, name), pins)
                steps = await asyncio.to_thread(stages_of, current, wanted, placed)
            except MoesaicError as error:
                stay = replace_plan(stay, reason=str(error))
                continue
            rests_s = REST_S * (len(steps) - 1)
            return self._judged(stay, current, placed, wanted, demand, costs, rests_s)
        return stay

    async def _proposal(
        self,
        current: Placement,
        placed: Sequence[WorkerRecord],
        demand: Floats,
        costs: "_Costs",
        policy: str,
    ) -> Placement:
        expert_bytes = max(record.expert_bytes for record in placed)
        question = SolveSites(
            policy=policy,
            held=current.slots,
            memory=[[record.capacity * expert_bytes] for record in placed],
            demand=demand.astype("<f8").tobytes(),
            remote_cost=costs.remote_s.tolist(),
            num_layers=len(current.layers),
            num_experts=current.num_own,
            expert_bytes=expert_bytes,
        )
        async with self._start_solver() as asked:
            solved = await asked.ask(question)
        if not isinstance(solved, Solved):
            raise InvalidInput("solver", f"answered {type(solved).__name__}")
        wanted = replace(current, slots=solved.slots)
        if found := violations(wanted, placed, None):
            raise InvalidInput("solver", "; ".join(found))
        return wanted

    def _judged(
        self,
        stay: PlacementPlan,
        current: Placement,
        placed: Sequence[WorkerRecord],
        wanted: Placement,
        demand: Floats,
        costs: "_Costs",
        rests_s: float,
    ) -> PlacementPlan:
        """Compare the saving by a migration with its cost, both in seconds of requests."""
        terms, now_s = self._terms, time.monotonic()
        names = [record.worker_id for record in placed]
        case = MigrationCase(
            origins=names,
            demand=demand,
            remote_s=costs.remote_s,  # beyond what a row costs at home
            local_s=np.zeros(len(names)),
            bytes_per_s=costs.bytes_per_s,
            rests_s=rests_s,
            load_share=terms.load_share,
            expert_bytes=max(record.expert_bytes for record in placed),
            slowdown=self._profiles.slowdown,
            busy_s_per_s=self._profiles.busy_s_per_s(names, now_s),
            interval_s=max(terms.interval_s, HORIZON_S),
            least_gain=LEAST_GAIN,
        )
        verdict = case.verdict(current, wanted)
        needed = moves(current, wanted)
        return replace_plan(
            stay,
            placement=replace(wanted, epoch=0),
            reason=verdict.reason,
            worthwhile=verdict.pays,
            moves=needed,
            moved_bytes=len(needed) * case.expert_bytes,
            gain=verdict.gain_s / verdict.cost_before_s if verdict.cost_before_s else 0.0,
            seconds=verdict.transfer_s,
            local_share_before=verdict.local_share_before,
            local_share_after=verdict.local_share_after,
            row_s_before=verdict.row_s_before,
            row_s_after=verdict.row_s_after,
        )

    def _costs(self, names: Sequence[str], now_s: float) -> "_Costs":
        """Take what ``SiteProfiles.missing`` does not miss."""
        remote_s = [self._profiles.remote_s(name, now_s) for name in names]
        rates = [self._profiles.bytes_per_s(name, now_s) for name in names]
        return _Costs(np.array(remote_s, np.float64), np.array(rates, np.float64))


@dataclass(frozen=True)
class _Costs:
    """Reported costs of sites: of a choice elsewhere, and the bandwidth for experts, ``[N]`` each."""

    remote_s: Floats
    bytes_per_s: Floats


def _told_little(names: Sequence[str], rows: Floats, demand: Floats) -> str:
    """Name the sites with a notable share of the demand and too few rows to measure it; empty if none."""
    asked = demand.sum(axis=(1, 2))
    notable = asked >= NOTABLE_SHARE * asked.mean()
    return ", ".join(name for n, name in enumerate(names) if notable[n] and rows[n] < LEAST_ROWS)
