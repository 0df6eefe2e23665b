"""Settings of steps that a GPU captures."""

from typing import ClassVar

from pydantic import Field

from moesaic.services.attention.settings.modes import ModeSettings


class GraphSettings(ModeSettings):
    """Settings of ``local`` and ``routed`` on a CUDA device."""

    modes: ClassVar[tuple[str, ...]] = ("local", "routed")

    decode_graphs: bool = Field(
        True,
        description="capture decode steps as CUDA graphs (routed: a graph for each layer up to its "
        "exchange); without, steps are slower, and the start is faster and takes less memory. No effect on "
        "a CPU",
    )
