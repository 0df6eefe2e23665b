"""Facts about the fleet that numbers of workers are decided from."""

import math
from collections.abc import Iterable, Mapping

from moesaic.cluster.registry import Fleet
from moesaic.errors import NotReady
from moesaic.messages.brownout import BrownoutDecision, BrownoutPolicy
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.scaling.contract import Objectives, ShapeBounds
from moesaic.services.scheduler.epochs.patience import FLOOR_BYTES_PER_S


def active_shape(fleet: Fleet) -> FleetShape:
    """Count the workers that take work."""
    roles = [record.role for record in fleet.workers.values() if record.state == "ready"]
    return FleetShape(roles.count("attention"), roles.count("expert"))


def active_attention(fleet: Fleet) -> list[str]:
    """Name the attention workers that take requests."""
    records = fleet.workers.values()
    return [r.worker_id for r in records if r.role == "attention" and r.state == "ready"]


def is_there(wanted: FleetShape, fleet: Fleet, placement: Placement | None) -> bool:
    """Return true once a shape is reached: no worker leaves, and the placement names the active expert workers."""
    records = fleet.workers.values()
    if active_shape(fleet) != wanted:
        return False
    if any(r.state == "draining" and r.standing_by and not r.drained for r in records):
        return False
    active = {r.worker_id for r in records if r.role == "expert" and r.state == "ready"}
    placed = {worker.worker_id for worker in placement.workers} if placement else set()
    return not active or active == placed


def shape_bounds(
    policy: ScalingPolicy, most: FleetShape, records: Iterable[WorkerRecord]
) -> ShapeBounds:
    """Find the shapes that a policy allows and an actuator can bring.

    Args:
        policy: the policy in force.
        most: largest shape that the actuator can bring.
        records: all workers: expert workers must have slots for every expert.

    Raises:
        NotReady: too few expert workers are available to hold every expert.
    """
    attention = min(most.attention, policy.max_attention or most.attention)
    experts = min(most.experts, policy.max_experts or most.experts)
    fewest = fewest_expert_workers(records)
    if fewest > experts:
        cause = f"the actuator can bring {experts}: bring more, or raise --scaling-max-experts"
        if experts < most.experts:
            cause = f"the policy allows {experts}: raise its max_experts"
        raise NotReady(f"it takes {fewest} expert workers to hold every expert, and {cause}")
    return ShapeBounds(
        least=FleetShape(
            min(attention, policy.min_attention), max(fewest, min(experts, policy.min_experts))
        ),
        most=FleetShape(attention, experts),
    )


def fewest_expert_workers(records: Iterable[WorkerRecord]) -> int:
    """Count the expert workers needed to hold every expert; new ones are assumed to be like the
    others.
    """
    experts = [
        record
        for record in records
        if record.role == "expert"
        and record.slots_per_layer
        and record.num_experts
        and not record.drained
    ]
    if not experts:
        return 0
    number, lacking = 0, max(record.num_experts for record in experts)
    slots = sorted((record.slots_per_layer for record in experts), reverse=True)
    for each in slots:
        if lacking <= 0:
            break
        number, lacking = number + 1, lacking - each
    return number + max(0, math.ceil(lacking / slots[-1]))


def objectives_of(policy: ScalingPolicy, brownout: BrownoutPolicy) -> Objectives:
    """Take the targets of a policy, or those of brownout if it has none of its own."""
    return Objectives(
        ttft_s=policy.slo_ttft_s or brownout.slo_ttft_s,
        tpot_s=policy.slo_tpot_s or brownout.slo_tpot_s,
        attainment=policy.attainment,
    )


def thresholds_now(
    brownout: BrownoutPolicy,
    decisions: Iterable[BrownoutDecision],
    workers: Mapping[str, WorkerRecord],
) -> tuple[float, float]:
    """Find the least thresholds of any worker, for prompts and for answers.

    Args:
        brownout: the policy in force.
        decisions: decisions of workers, newest first.
        workers: present workers, by id.
    """
    if brownout.mode == "off":
        return 1.0, 1.0
    if brownout.mode == "manual":
        return brownout.prefill_threshold, brownout.decode_threshold
    latest: dict[str, BrownoutDecision] = {}
    for decision in decisions:
        record = workers.get(decision.worker_id)
        if record is not None and record.generation == decision.generation:
            latest.setdefault(decision.worker_id, decision)
    return (
        min((decision.prefill for decision in latest.values()), default=1.0),
        min((decision.decode for decision in latest.values()), default=1.0),
    )


def longest_load_s(fleet: Fleet) -> float:
    """The longest that some worker may take to load its experts."""
    sizes = (record.capacity * record.expert_bytes for record in fleet.workers.values())
    return max(sizes, default=0) / FLOOR_BYTES_PER_S
