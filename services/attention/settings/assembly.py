"""Settings of experts that come layer by layer."""

from typing import ClassVar

from pydantic import Field

from moesaic.services.attention.settings.modes import ModeSettings


class AssemblySettings(ModeSettings):
    """Settings of ``gathered``, and of ``local`` if it offloads."""

    modes: ClassVar[tuple[str, ...]] = ("local", "gathered")

    offload: bool = Field(
        False,
        description="keep experts in a file, and only a few layers of experts in memory",
    )
    offload_dir: str = Field(
        "", description="directory of the file of --offload (default: the user's cache directory)"
    )
    expert_memory_bytes: int = Field(
        0,
        ge=0,
        description="memory limit of gathered or offloaded experts on the device that computes, checked "
        "at start; 0: no limit",
    )
