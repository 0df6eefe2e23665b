"""The state of the cluster as ``/v1/moesaic`` tells it: what the console and ``moesaic top`` show."""

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    """Latencies in seconds, of the requests of the last ``Traffic.window_s``."""

    p50_s: float
    p90_s: float
    p99_s: float


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of this gateway.

    Attributes:
        window_s: time that rates and latencies are of; 0: nothing was measured yet.
        requests_per_s: requests that ended.
        tokens_per_s: tokens and scores that were sent.
        inflight: requests in flight.
        queued: sequences that wait for an attention worker.
        ttft: time to the first token or score; absent if there was none.
        itl: time between tokens of one answer.
        e2e: time from the first byte of a request to the last byte of its answer.
    """

    window_s: float
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    inflight: int = 0
    queued: int = 0
    ttft: Quantiles | None = None
    itl: Quantiles | None = None
    e2e: Quantiles | None = None


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a worker that takes requests.

    Attributes:
        running: sequences in steps.
        waiting: sequences that have not begun.
        kv_blocks: blocks of KV cache.
        kv_blocks_used: those in use.
        rows_per_s: rows computed, prompts and answers; absent after one sample.
        mode: mode of brownout.
        prefill_threshold: share of choices whose own experts serve; 1: exact.
        decode_threshold: the same, of generated tokens.
        degraded_share: share of late choices that other experts served, or none.
        shedding: new requests are refused.
        ttft_p90_s: 90th percentile of TTFT that brownout measured; absent if it did not.
        tpot_p90_s: likewise for TPOT.
    """

    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_used: int
    rows_per_s: float | None = None
    mode: str = "off"
    prefill_threshold: float = 1.0
    decode_threshold: float = 1.0
    degraded_share: float = 0.0
    shedding: bool = False
    ttft_p90_s: float | None = None
    tpot_p90_s: float | None = None


class ServiceState(msgspec.Struct, frozen=True, kw_only=True):
    """A registered process.

    Attributes:
        id: its worker id.
        role: gateway, scheduler, attention, expert or edge-agent.
        state: starting, ready, draining or standby.
        node: machine, as the cluster names it.
        site: site of an edge agent.
        version: version of the program.
        generation: number that grows with every start.
        experts: replicas of experts in its slots, over all layers.
        layers: layers whose experts it has in slots.
        expert_share: its share of the cluster's recent rows, if replicas share theirs evenly.
        layer_bytes_per_s: hidden states that it sends for one layer to each worker with experts of it. All rows are
            assumed to go directly. Absent for workers that send none, and after one sample.
        load: load of a worker that takes requests; absent while nobody has asked it.
    """

    id: str
    role: str
    state: str
    node: str = ""
    site: str = ""
    version: str = ""
    generation: int = 0
    experts: int = 0
    layers: int = 0
    expert_share: float | None = None
    layer_bytes_per_s: float | None = None
    load: WorkerLoad | None = None


class LinkState(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two edge agents, as the first of them has measured it.

    Attributes:
        source: id of the agent that has measured.
        target: id of the other one.
        rtt_s: round trip of an empty message; absent: not known.
        bytes_per_s: rate of the link; absent: not known.
    """

    source: str
    target: str
    rtt_s: float | None = None
    bytes_per_s: float | None = None


class SiteState(msgspec.Struct, frozen=True, kw_only=True):
    """An edge agent's site.

    Attributes:
        id: id of the agent.
        site: name of the site.
        memory_used_bytes: memory of the model.
        memory_limit_bytes: its limit; 0: none.
        held: experts in slots.
        local_share: share of choices whose experts are at this site; absent before the first.
    """

    id: str
    site: str
    memory_used_bytes: int
    memory_limit_bytes: int
    held: int
    local_share: float | None = None


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """A request in flight.

    Attributes:
        id: request id.
        route: template of its path.
        tenant: owner of its key.
        age_s: seconds since its first byte.
        waits_for: what it waits for now, in words.
        prompt_tokens: tokens of its prompts; 0: not known yet.
        tokens: tokens of its answers so far.
        workers: ids of the workers that have parts of it.
    """

    id: str
    route: str
    tenant: str
    age_s: float
    waits_for: str
    prompt_tokens: int
    tokens: int
    workers: list[str]


class DecisionState(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of the scheduler, or of a worker about brownout.

    Attributes:
        id: unique name.
        kind: placement, scaling or brownout.
        at: seconds since 1970.
        cause: cause of the decision.
        change: what it changes, in short.
        adopted: whether it was carried out.
        reason: reason, for people.
        predicted: predicted effect; empty: none.
        measured: measured effect; empty: not yet.
    """

    id: str
    kind: str
    at: float
    cause: str
    change: str
    adopted: bool
    reason: str
    predicted: str = ""
    measured: str = ""


class BrownoutState(msgspec.Struct, frozen=True, kw_only=True):
    """The policy of brownout that is in force.

    Attributes:
        mode: off, manual, paper or auto.
        slo_ttft_s: target of TTFT.
        slo_tpot_s: target of TPOT.
        min_prefill_threshold: least threshold of prompts.
        min_decode_threshold: least threshold of generated tokens.
    """

    mode: str
    slo_ttft_s: float
    slo_tpot_s: float
    min_prefill_threshold: float
    min_decode_threshold: float


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of workers.

    Attributes:
        mode: off, advise or auto.
        attention: active attention workers.
        experts: active expert workers.
        wanted_attention: wanted attention workers; absent: no action yet.
        wanted_experts: wanted expert workers.
        trouble: what keeps the last action from being carried out.
    """

    mode: str
    attention: int
    experts: int
    wanted_attention: int | None = None
    wanted_experts: int | None = None
    trouble: str = ""


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """All that changes from second to second.

    Attributes:
        at: seconds since 1970 by the gateway's clock.
        model: name of the model in the API.
        ready: whether requests are taken.
        waiting_for: what is missing, for people.
        epoch: epoch of the placement; 0: there is none.
        gateway: id of the gateway that tells this.
        traffic: requests of this gateway.
        services: all registered processes.
        links: links between edge agents.
        sites: sites of edge agents.
        requests: requests in flight at this gateway, the oldest first, at most ``MOST_REQUESTS``.
        brownout: policy in force; absent without a scheduler.
        scaling: numbers of workers; absent without a scheduler.
        decisions: newest first.
    """

    at: float
    model: str
    ready: bool
    waiting_for: list[str]
    epoch: int
    gateway: str
    traffic: Traffic
    services: list[ServiceState]
    links: list[LinkState]
    sites: list[SiteState]
    requests: list[RequestState]
    brownout: BrownoutState | None = None
    scaling: FleetState | None = None
    decisions: list[DecisionState]


class ExpertMap(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of each layer: their holders and their load.

    Attributes:
        epoch: epoch of the placement; 0: there is none.
        layers: decoder layers with experts.
        num_experts: experts of a layer; the united ones of brownout come last.
        num_united: united ones among them.
        workers: ids of the holders.
        holders: by layer and expert, indices into ``workers``.
        share: by layer and expert, the share of the layer's recent rows; empty before the first.
    """

    epoch: int
    layers: list[int]
    num_experts: int
    num_united: int
    workers: list[str]
    holders: list[list[list[int]]]
    share: list[list[float]]
