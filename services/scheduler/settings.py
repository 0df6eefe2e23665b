"""Settings of the scheduler, each with the description that ``--help`` shows."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, field_validator

from moesaic.errors import InvalidInput
from moesaic.messages.brownout import BrownoutMode
from moesaic.settings import ServiceSettings


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler."""

    groups: ClassVar[Mapping[str, str]] = {
        "settle_s": "Placement",
        "brownout": "Brownout",
        **ServiceSettings.groups,
    }

    settle_s: float = Field(
        1.0,
        ge=0,
        le=60,
        description="seconds without a newcomer before the first placement is made",
    )
    prepare_timeout_s: float = Field(
        120.0, gt=0, le=3600, description="longest wait for workers to load a placement"
    )
    load_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="part of the time in which workers load experts for a placement that can "
        "wait; the rest is for serving",
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
    replan_gain: float = Field(
        0.03,
        ge=0,
        le=1,
        description="least predicted gain for which experts are moved, as a part of the work of "
        "the busiest worker; 0: any",
    )

    brownout: BrownoutMode = Field(
        "off",
        description="when workers may degrade what they compute: never (off), at thresholds that operators set "
        "(manual), by measured latencies as in BrownoutServe (paper), or by predicted ones, shedding where "
        "that does not suffice (auto); once an operator has set one, that wins",
    )

    @field_validator("placement_policy")
    @classmethod
    def _is_known(cls, policy: str) -> str:
        # Imported here because it brings numpy, for which the help need not wait.
        from moesaic.placement.policies import require_policy

        try:
            return require_policy(policy)
        except InvalidInput as error:
            raise ValueError(error.fix) from error
