"""Settings of an attention worker's ranks."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from moesaic.addresses import is_everywhere, is_host_port
from moesaic.services.attention.settings.graphs import GraphSettings


class RankSettings(GraphSettings):
    """Settings of tensor parallelism."""

    modes: ClassVar[tuple[str, ...]] = ("local", "routed", "gathered", "all-to-all")

    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="number of processes (ranks) that share the heads, KV and MLPs of this worker; on "
        "GPUs, one rank each",
    )
    tensor_parallel_rank: int = Field(
        0, ge=0, le=63, description="rank of this process; rank 0 leads and starts the others"
    )
    tensor_parallel_address: str = Field(
        "",
        description="host:port of the first rank, for ranks started one by one, as on several machines "
        "(default: the first rank starts the others on its machine)",
    )

    @model_validator(mode="after")
    def _ranks_can_meet(self) -> Self:
        ranks, rank = self.tensor_parallel, self.tensor_parallel_rank
        if rank >= ranks:
            raise ValueError(f"--tensor-parallel-rank must be less than {ranks}, got {rank}")
        address = self.tensor_parallel_address
        if rank and not address:
            raise ValueError("--tensor-parallel-rank needs --tensor-parallel-address")
        if address and not address.startswith("/") and not _can_meet_at(address):
            raise ValueError(
                "--tensor-parallel-address must be host:port of the first rank, IPv6 in brackets, "
                f"got {address}"
            )
        if ranks > 2 and self.deterministic:
            raise ValueError(
                f"--deterministic needs --tensor-parallel 1 or 2, got {ranks}: the order of longer sums "
                "depends on the size of a step"
            )
        return self


def _can_meet_at(address: str) -> bool:
    return is_host_port(address) and not is_everywhere(address.rpartition(":")[0])
