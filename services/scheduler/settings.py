"""What the scheduler is told."""

from pydantic import Field

from moesaic.settings import ServiceSettings


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler."""

    settle_s: float = Field(
        1.0,
        ge=0,
        le=60,
        description="seconds without a newcomer before the first placement is made",
    )
    prepare_timeout_s: float = Field(
        120.0, gt=0, le=3600, description="longest wait for workers to load a placement"
    )
