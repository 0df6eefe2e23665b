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
        description="seconds without a newcomer before the first placement is made",
    )
    prepare_timeout_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="longest wait for workers to prepare a placement, beside what loading takes at "
        "20 MB/s; one that loads no byte for a minute is given up",
    )
    load_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="part of the time in which workers that serve load experts for a placement that "
        "can wait, each rest 20 s at most; those that join an ordinary suite do not rest",
    )
    min_epoch_interval_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="shortest time between placements that can wait; those that experts or "
        "leaving workers need are made at once",
    )
    placement_policy: str = Field(
        "auto",
        description="what re-places experts by traffic: auto replays the recent traffic and takes "
        "the best, keep leaves them where they are; or a policy by name, such as eplb or "
        "janus-batches; once an operator has set one, that wins",
    )
    replan_interval_s: float = Field(
        60.0, gt=0, le=86400, description="how often to see whether another placement is better"
    )

    brownout: BrownoutMode = Field(
        "off",
        description="when workers may degrade what they compute: never (off), at thresholds that operators set "
        "(manual), by measured latencies as in BrownoutServe (paper), or by predicted ones, shedding where "
        "that does not suffice (auto); once an operator has set one, that wins",
    )

    scaling: ScalingMode = Field(
        "off",
        description="numbers of workers: as operators want them (off), with advice that is only reported (advise), or "
        "changed by predictions (auto); once an operator has set one, that wins",
    )
    scaling_actuator: ActuatorName = Field(
        "standby",
        description="where workers come from: those on standby, containers of a compose project, or pods of "
        "Deployments of Kubernetes",
    )
    scaling_max_attention: int = Field(
        1,
        ge=1,
        le=MOST_WORKERS,
        description="most attention workers that actuators compose and kubernetes may bring",
    )
    scaling_max_experts: int = Field(
        4,
        ge=0,
        le=MOST_WORKERS,
        description="most expert workers that actuators compose and kubernetes may bring",
    )
    scaling_compose_socket: str = Field(
        "unix:///var/run/docker.sock",
        description="API of the container engine, unix:///path or tcp://host:port; whoever may use it owns the host",
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
