"""Settings of steps that a GPU captures."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from moesaic.services.attention.settings.modes import ModeSettings


class GraphSettings(ModeSettings):
    """Settings of ``local`` and ``routed`` on a CUDA device."""

    modes: ClassVar[tuple[str, ...]] = ("local", "routed")

    decode_graph_tokens: int = Field(
        0,
        ge=0,
        le=1 << 24,
        description="largest context, in tokens, of decode steps captured as CUDA graphs (routed: a "
        "graph for each layer up to its exchange); 0: none",
    )

    @model_validator(mode="after")
    def _only_on_a_gpu(self) -> Self:
        if self.decode_graph_tokens and self.device == "cpu":
            raise ValueError("--decode-graph-tokens needs a CUDA --device, got cpu")
        return self
