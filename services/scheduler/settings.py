"""Settings of the scheduler, each with the description that ``--help`` shows."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from moesaic.errors import InvalidInput
from moesaic.messages.brownout import BrownoutMode
from moesaic.messages.scaling import MOST_WORKERS, ScalingMode, ScalingPolicy
from moesaic.settings import ServiceSettings

ActuatorName = Literal["standby", "compose", "kubernetes"]


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler."""

    groups: ClassVar[Mapping[str, str]] = {
        "settle_s": "Placement",
        "brownout": "Brownout",
        "scaling": "Scaling",
        **ServiceSettings.groups,
    }

    settle_s: float = Field(
        1.0,
        ge=0,
        le=60,
        description="seconds without a new worker before the first placement is made",
    )
    prepare_timeout_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="longest time for workers to prepare a placement, besides loading at 20 MB/s; a "
        "worker that loads no byte for a minute fails earlier",
    )
    load_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="share of time in which serving workers load experts for a placement that can wait, "
        "with pauses of at most 20 s; new workers load without pauses",
    )
    min_epoch_interval_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="shortest time between placements that can wait; lost experts and leaving workers "
        "get a new placement at once",
    )
    placement_policy: str = Field(
        "auto",
        description="policy that rebalances experts by traffic: auto (the best on replayed recent "
        "traffic), keep (no change), or a name such as eplb or janus-batches. A policy set "
        "by an operator wins",
    )
    replan_interval_s: float = Field(
        60.0, gt=0, le=86400, description="interval between searches for a better placement"
    )

    brownout: BrownoutMode = Field(
        "off",
        description="degraded answers under overload: never (off), at the operator's thresholds "
        "(manual), by measured latencies as in BrownoutServe (paper), or by predicted "
        "latencies and shedding (auto). A policy set by an operator wins",
    )

    scaling: ScalingMode = Field(
        "off",
        description="changes of the numbers of workers: by operators (off), with advice in reports "
        "(advise), or by predictions (auto). A policy set by an operator wins",
    )
    scaling_actuator: ActuatorName = Field(
        "standby",
        description="source of workers: those on standby, containers of a compose project, or pods of "
        "Kubernetes Deployments",
    )
    scaling_max_attention: int = Field(
        1,
        ge=1,
        le=MOST_WORKERS,
        description="largest number of attention workers with the actuators compose and kubernetes",
    )
    scaling_max_experts: int = Field(
        4,
        ge=0,
        le=MOST_WORKERS,
        description="largest number of expert workers with the actuators compose and kubernetes",
    )
    scaling_compose_socket: str = Field(
        "unix:///var/run/docker.sock",
        description="API of the container engine, unix:///path or tcp://host:port; access to it gives "
        "full control of the host",
    )
    scaling_compose_project: str = Field(
        "moesaic", description="compose project whose services attention and expert are scaled"
    )

    @property
    def scaling_policy(self) -> ScalingPolicy:
        """The policy of scaling until an operator sets one."""
        return ScalingPolicy(mode=self.scaling)

    @field_validator("placement_policy")
    @classmethod
    def _is_known(cls, policy: str) -> str:
        # Imported here because it brings numpy, for which the help need not wait.
        from moesaic.placement.policies import require_policy

        try:
            return require_policy(policy)
        except InvalidInput as error:
            raise ValueError(error.fix) from error
