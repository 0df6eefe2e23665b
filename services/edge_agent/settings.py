"""Settings of an edge agent."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.expert.settings import ExpertHostSettings


class EdgeAgentSettings(AttentionSettings, ExpertHostSettings):
    """Settings of an edge agent: those of an attention worker, and of the experts here."""

    dispatches: ClassVar[tuple[str, ...]] = ("collaborative",)
    groups: ClassVar[Mapping[str, str]] = {
        "memory_bytes": "Site",
        **AttentionSettings.groups,
        "activation_window_s": "Site",
        "weights_port": "Network",
    }

    dispatch: str = Field(  # type: ignore[assignment]  # one of the choices of attention workers
        "collaborative",
        description="place where experts are computed: here and at other sites (collaborative)",
    )
    memory_bytes: int = Field(
        0,
        ge=0,
        le=1 << 50,
        description="memory for the model: weights, KV, buffers, and as many experts as then fit; "
        "0: every expert of the model",
    )
    site: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="name of the place whose users this agent serves (default: the worker id)",
    )
    cache_bytes: int = Field(
        -1,
        ge=-1,
        le=1 << 50,
        description="part of the memory for experts that are read from files when no other site has them for less; "
        "-1: a 32nd of what experts have",
    )
    read_files: bool = Field(
        True,
        description="read experts from files while serving, where no other site has them for less",
    )
    profile_interval_s: float = Field(
        5.0, ge=0.1, le=3600, description="how often to tell the scheduler of links and memory"
    )

    @property
    def site_name(self) -> str:
        """The name of the site, once the worker id is known."""
        return self.site or self.worker_id
