"""Settings of an edge agent."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.expert.settings import ExpertHostSettings


class EdgeAgentSettings(AttentionSettings, ExpertHostSettings):
    """Settings of an edge agent: those of an attention worker, and of the experts here."""

    groups: ClassVar[Mapping[str, str]] = {
        "memory_bytes": "Site",
        **AttentionSettings.groups,
        "activation_window_s": "Site",
        "weights_port": "Network",
    }

    dispatch: Literal["collaborative"] = Field(  # type: ignore[assignment]  # attention workers have others
        "collaborative",
        description="place where experts are computed: here and at other sites (collaborative)",
    )
    memory_bytes: int = Field(
        0,
        ge=0,
        le=1 << 50,
        description="memory for the model: weights, KV, buffers, and as many experts as fit into the "
        "rest; 0: all experts",
    )
    site: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="name of the site whose users this agent serves (default: the worker id)",
    )
    read_files: bool = Field(
        True,
        description="read experts from files while serving, if that costs less than another site",
    )

    @property
    def site_name(self) -> str:
        """The name of the site, once the worker id is known."""
        return self.site or self.worker_id
