"""Records of the processes in the cluster."""

from typing import Annotated, Literal

import msgspec

Role = Literal["gateway", "attention", "expert", "scheduler", "edge-agent"]
WorkerState = Literal["starting", "ready", "draining", "standby"]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, tag="worker.v1"):
    """One registered process; the value of its lease key.

    An expert worker is ``ready`` when it can take a placement, an attention worker when it can take
    requests. An edge agent is both. One on ``standby`` could, and is given nothing.
    """

    worker_id: str
    generation: int  # grows with every start of this worker id
    role: Role
    state: WorkerState
    admin_address: str  # gRPC, host:port
    data_address: str = ""  # UCXX, host:port; empty if it receives no tensors
    weights_address: str = ""  # UCXX, host:port: where others may fetch the experts of this worker
    metrics_address: str = ""  # HTTP, host:port
    node: str = ""  # label of the machine: the host name, unless told otherwise
    pid: int = 0
    version: str = ""
    model_digest: str = ""  # workers: of configuration and weights
    dtype: str = (
        ""  # workers: of weights and activations; empty: made by a version that did not tell it
    )
    quantization: str = ""  # workers: the form that linear layers and experts are held in; the same
    config_digest: str = ""  # of config.json; empty: made by a version that did not tell it
    slots_per_layer: int = 0  # expert workers: capacity
    ridge_rows: int = 0  # expert workers: rows of an expert that take as long as its weights
    num_experts: int = 0  # expert workers: experts per layer of the model they have
    layers: list[int] = []  # expert workers: the decoder layers that have experts
    expert_bytes: int = 0  # expert workers: memory of one expert
    united: dict[int, str] = {}  # expert workers: digests of their files of united experts, by way
    max_expert_bytes: int = 0  # expert workers: most memory for experts, old ones too; 0: no limit
    num_slots: int = (
        0  # edge agents: capacity over all layers together; 0: ``slots_per_layer`` of each
    )
    site: str = ""  # edge agents: the place whose users they serve
    dispatch: str = ""  # attention workers: local, routed, gathered, all-to-all or collaborative
    max_request_tokens: int = 0  # attention workers: prompt and answer together; 0: not told
    max_num_seqs: int = 0  # attention workers: sequences in one step
    max_num_batched_tokens: int = 0  # attention workers: rows in one step
    kv_tokens: int = 0  # attention workers: tokens that its KV blocks hold
    row_bytes: int = 0  # attention workers: of the hidden state of one row
    share: str = ""  # attention workers: the experts that others may pull from it, like 0/2
    standing_by: bool = False  # it is on standby, or drains in order to be
    drained: bool = False  # operators had it drained, or it stops: it is not there to be activated

    @property
    def holds_experts(self) -> bool:
        """True for workers that a placement can name."""
        return self.role in ("expert", "edge-agent")

    @property
    def capacity(self) -> int:
        """Experts that a placement may put here, over all layers together."""
        per_layer = min(self.slots_per_layer, self.num_experts) * len(self.layers)
        return min(self.num_slots, per_layer) if self.num_slots else per_layer

    @property
    def most_held(self) -> int:
        """Experts that there may be here, over all layers together, while a placement replaces another."""
        if not self.max_expert_bytes:
            return 2 * self.capacity
        return self.max_expert_bytes // max(1, self.expert_bytes)

    @property
    def takes_requests(self) -> bool:
        """True for workers that gateways send requests to."""
        return self.role in ("attention", "edge-agent")


class Generation(msgspec.Struct, frozen=True, kw_only=True, tag="generation.v1"):
    """Number of starts of a worker id; it is kept beside the lease, and longer."""

    generation: Annotated[int, msgspec.Meta(ge=0)]


class Weights(msgspec.Struct, frozen=True, kw_only=True, tag="weights.v1"):
    """The weights that workers must have to join the cluster, in the numbers in which they hold them."""

    digest: str  # of configuration and weights
    dtype: str = ""  # of weights and activations; empty: told by a version that did not know it
    quantization: str = ""  # the form that linear layers and experts are held in; empty: the same
    worker_id: str = ""  # of a worker that has them

    def unlike(self, other: "Weights") -> str:
        """Say how the weights of another worker differ, naming both; empty if they do not."""
        mine, its = self.worker_id or "another worker", other.worker_id or "another worker"
        if self.digest != other.digest:
            return f"those of {mine} have digest {self.digest[:16]}, those of {its} {other.digest[:16]}"
        numbers = [w for w in (self, other) if w.dtype]
        if len({(w.dtype, w.quantization) for w in numbers}) < 2:
            return ""
        return f"{mine} has {self.flags}, {its} {other.flags}: start all workers of a cluster with the same"

    @property
    def flags(self) -> str:
        """The flags that workers hold their weights by."""
        return f"--dtype {self.dtype} --quantization {self.quantization}"


class RegistryHint(msgspec.Struct, frozen=True, kw_only=True, tag="registry-hint.v1"):
    """A worker's record changed or went away; read the records again."""

    worker_id: str
    generation: int
    event: Literal["joined", "changed", "left"]
