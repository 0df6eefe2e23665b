"""Records of the processes in the cluster."""

from typing import Annotated, Literal

import msgspec

from moesaic.errors import InvalidInput
from moesaic.messages.bounds import Count, Name, SmallCount
from moesaic.messages.wire import PROTOCOL

MOST_EXPERTS = 1 << 20  # of a model, over all layers; twenty times those of the largest
_FewExperts = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
_Share = Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,4}/[0-9]{1,4})?\Z")]

Role = Literal["gateway", "attention", "expert", "scheduler", "edge-agent"]
WorkerState = Literal["starting", "ready", "draining", "standby"]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, tag="worker.v1"):
    """One registered process; the value of its lease key.

    An expert worker is ``ready`` when it can take a placement, an attention worker when it can take
    requests. An edge agent is both. A worker on ``standby`` could take work, and gets none.
    """

    worker_id: Name
    generation: Count  # grows with every start of this worker id
    role: Role
    state: WorkerState
    admin_address: Name  # gRPC, host:port
    data_address: Name = ""  # UCXX, host:port; empty if it receives no tensors
    weights_address: Name = ""  # UCXX, host:port: where others may fetch the experts of this worker
    metrics_address: Name = ""  # HTTP, host:port
    node: Name = ""  # label of the machine: the host name, unless told otherwise
    pid: SmallCount = 0
    version: Name = ""  # of the program
    protocol: SmallCount = (
        1  # of what it says to others: ``wire.PROTOCOL``; 1 where a record does not tell
    )
    model_digest: Name = ""  # workers: of configuration and weights
    # workers: of weights and activations; empty: made by a version that did not tell it
    dtype: Name = ""
    # workers: the form that linear layers and experts are held in; the same
    quantization: Name = ""
    # of config.json and end tokens that only the tokenizer names; empty: of a version without this field
    config_digest: Name = ""
    slots_per_layer: _FewExperts = 0  # expert workers: capacity
    ridge_rows: SmallCount = 0  # expert workers: rows of an expert that take as long as its weights
    num_experts: _FewExperts = 0  # workers: experts per layer of the model they have
    layers: list[SmallCount] = []  # expert workers: the decoder layers that have experts
    expert_bytes: Count = 0  # expert workers: memory of one expert
    # expert workers: digests of their files of united experts, by way
    united: dict[SmallCount, Name] = {}
    # expert workers: most memory for experts, old ones too; 0: no limit
    max_expert_bytes: Count = 0
    # edge agents: capacity over all layers together; 0: ``slots_per_layer`` of each
    num_slots: SmallCount = 0
    site: Name = ""  # edge agents: the place whose users they serve
    dispatch: Name = ""  # attention workers: local, routed, gathered, all-to-all or collaborative
    max_request_tokens: SmallCount = 0  # attention workers: prompt and answer together; 0: not told
    max_num_seqs: SmallCount = 0  # attention workers: sequences in one step
    max_num_batched_tokens: SmallCount = 0  # attention workers: rows in one step
    kv_tokens: Count = 0  # attention workers: tokens that its KV blocks hold
    top_k: _FewExperts = 0  # attention workers: experts of a row
    step_target_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0  # attention workers
    row_bytes: Count = 0  # attention workers: of the hidden state of one row
    share: _Share = ""  # attention workers: the experts that others may pull from it, like 0/2
    standing_by: bool = False  # it is on standby, or drains in order to be
    drained: bool = False  # operators had it drained, or it stops: it is not there to be activated

    def checked(self) -> "WorkerRecord":
        """Return the record itself, if placements can be made of it.

        Raises:
            InvalidInput: names the first wrong field, and its allowed values.
        """
        if sorted(set(self.layers)) != self.layers:
            raise InvalidInput("layers", "must ascend, each once")
        if self.num_experts * len(self.layers) > MOST_EXPERTS:
            raise InvalidInput("num_experts", f"must be {MOST_EXPERTS} over all layers at most")
        if self.share and int(self.share.partition("/")[0]) >= int(self.share.partition("/")[2]):
            raise InvalidInput("share", f"must be like 0/2, the first of two, got {self.share!r}")
        return self

    @property
    def unlike_us(self) -> str:
        """Say how it differs from this process in protocol; empty if it does not, and so can be used."""
        if self.protocol == PROTOCOL:
            return ""
        program = f" (moesaic {self.version})" if self.version else ""
        return f"not used: {self.worker_id} speaks protocol {self.protocol}{program}, this cluster {PROTOCOL}"

    @property
    def incarnation(self) -> tuple[str, int]:
        """One start of this worker: its id and generation."""
        return self.worker_id, self.generation

    @property
    def holds_experts(self) -> bool:
        """True for workers that a placement can name."""
        return self.role in ("expert", "edge-agent")

    @property
    def capacity(self) -> int:
        """Most experts that a placement may put here, over all layers together."""
        per_layer = min(self.slots_per_layer, self.num_experts) * len(self.layers)
        return min(self.num_slots, per_layer) if self.num_slots else per_layer

    @property
    def most_held(self) -> int:
        """Most experts in memory here while one placement replaces another, over all layers together."""
        if not self.max_expert_bytes:
            return 2 * self.capacity
        return self.max_expert_bytes // max(1, self.expert_bytes)

    @property
    def takes_requests(self) -> bool:
        """True for workers that gateways send requests to."""
        return self.role in ("attention", "edge-agent")


class Generation(msgspec.Struct, frozen=True, kw_only=True, tag="generation.v1"):
    """Number of starts of a worker id; it is kept beside the lease, and longer."""

    generation: Count


class Weights(msgspec.Struct, frozen=True, kw_only=True, tag="weights.v1"):
    """The weights, with their number formats, that workers must have to join the cluster."""

    digest: Name  # of configuration and weights
    dtype: Name = ""  # of weights and activations; empty: told by a version that did not know it
    quantization: Name = ""  # the form that linear layers and experts are held in; empty: the same
    worker_id: Name = ""  # of a worker that has them

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

    worker_id: Name
    generation: Count
    event: Literal["joined", "changed", "left"]
