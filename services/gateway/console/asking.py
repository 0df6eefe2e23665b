"""Asks workers and the scheduler for their loads, policies and decisions, some at a time."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from moesaic.cluster.rpc.channels import CONTROL_TIMEOUT_S, channel
from moesaic.messages.registry import WorkerRecord
from moesaic.services.gateway.console import decisions
from moesaic.services.gateway.console.state import (
    BrownoutState,
    DecisionState,
    FleetState,
    WorkerLoad,
)
from moesaic.v1 import (
    attention_pb2,
    attention_pb2_grpc,
    edge_agent_pb2,
    edge_agent_pb2_grpc,
    scheduler_pb2_grpc,
)
from moesaic.v1 import scheduler_pb2 as pb

# Workers asked in one turn: a large cluster is asked in several turns, and costs no more.
MOST_ASKED = 8
# Turns between two looks at the traffic of experts, which changes slowly.
EXPERTS_TURNS = 3
NUM_DECISIONS = 20


class Asking:
    """Facts that the cluster has told. Services that do not answer keep their last word.

    Attributes:
        loads: loads of workers, by worker id and generation.
        profiles: profiles of edge agents, by worker id.
        activations: rows of each expert lately; None: not told yet.
        brownout: policy in force; None: not told yet.
        scaling: numbers of workers; None: not told yet.
        decisions: newest first.
    """

    def __init__(self) -> None:
        self.loads: dict[tuple[str, int], WorkerLoad] = {}
        self.profiles: dict[str, edge_agent_pb2.GetProfileResponse] = {}
        self.activations: pb.SchedulerServiceGetActivationsResponse | None = None
        self.brownout: BrownoutState | None = None
        self.scaling: FleetState | None = None
        self.decisions: list[DecisionState] = []
        self._rows: dict[tuple[str, int], tuple[float, int]] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turn = self._next = 0

    async def ask(self, records: Sequence[WorkerRecord]) -> None:
        """Ask the scheduler that leads and up to ``MOST_ASKED`` workers."""
        await self._forget(records)
        workers = [record for record in records if record.takes_requests]
        first = self._next % len(workers) if workers else 0
        self._next = first + MOST_ASKED
        turn = (workers[first:] + workers[:first])[:MOST_ASKED]
        await asyncio.gather(*map(self._ask_worker, turn), self._ask_scheduler(records))
        self._turn += 1

    async def close(self) -> None:
        """Close all channels."""
        for each in self._channels.values():
            await each.close(None)

    async def _forget(self, records: Iterable[WorkerRecord]) -> None:
        """Forget processes that are gone."""
        addresses = {record.admin_address for record in records}
        lives = {record.incarnation for record in records}
        ids = {worker_id for worker_id, _ in lives}
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close(None)
        self.loads = {life: load for life, load in self.loads.items() if life in lives}
        self._rows = {life: rows for life, rows in self._rows.items() if life in lives}
        self.profiles = {name: found for name, found in self.profiles.items() if name in ids}

    def _channel(self, record: WorkerRecord) -> grpc.aio.Channel:
        found = self._channels.get(record.admin_address)
        if found is None:
            found = self._channels[record.admin_address] = channel(record.admin_address)
        return found

    async def _ask_worker(self, record: WorkerRecord) -> None:
        stub = attention_pb2_grpc.AttentionServiceStub(self._channel(record))
        found = await _answer(stub.GetLoad, attention_pb2.GetLoadRequest())
        if found is not None:
            self._take_load(record, found)
        if record.role == "edge-agent":
            agent = edge_agent_pb2_grpc.EdgeAgentServiceStub(self._channel(record))
            profile = await _answer(agent.GetProfile, edge_agent_pb2.GetProfileRequest())
            if profile is not None:
                self.profiles[record.worker_id] = profile

    def _take_load(self, record: WorkerRecord, found: attention_pb2.GetLoadResponse) -> None:
        now_s, life = time.monotonic(), record.incarnation
        rate = None
        if life in self._rows:
            then_s, rows = self._rows[life]
            rate = round((found.num_rows - rows) / max(now_s - then_s, 1e-3), 1)
        self._rows[life] = now_s, found.num_rows
        brownout = found.brownout
        self.loads[life] = WorkerLoad(
            running=found.num_running,
            waiting=found.num_waiting,
            kv_blocks=found.kv_blocks_total,
            kv_blocks_used=found.kv_blocks_used,
            rows_per_s=rate,
            mode=brownout.mode or "off",
            prefill_threshold=brownout.prefill_threshold,
            decode_threshold=brownout.decode_threshold,
            degraded_share=brownout.degraded_share,
            shedding=brownout.shedding,
            ttft_p90_s=brownout.ttft_p90_s if brownout.HasField("ttft_p90_s") else None,
            tpot_p90_s=brownout.tpot_p90_s if brownout.HasField("tpot_p90_s") else None,
        )

    async def _ask_scheduler(self, records: Iterable[WorkerRecord]) -> None:
        """Ask the leader."""
        leader = next((r for r in records if r.role == "scheduler" and r.state == "ready"), None)
        if leader is None:
            return
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel(leader))
        placed, brownout, scaling = await asyncio.gather(
            _answer(stub.GetDecisions, pb.GetDecisionsRequest(limit=NUM_DECISIONS)),
            _answer(stub.GetBrownout, pb.GetBrownoutRequest(limit=NUM_DECISIONS)),
            _answer(stub.GetScaling, pb.GetScalingRequest(limit=NUM_DECISIONS)),
        )
        self.brownout = decisions.brownout_state(brownout) if brownout else self.brownout
        self.scaling = decisions.fleet_state(scaling) if scaling else self.scaling
        if placed and brownout and scaling:
            self.decisions = decisions.newest_first(placed, brownout, scaling)
        if self._turn % EXPERTS_TURNS == 0:
            request = pb.SchedulerServiceGetActivationsRequest()
            self.activations = await _answer(stub.GetActivations, request) or self.activations


async def _answer(call: Any, request: Any) -> Any:
    """Call a service; None without an answer."""
    try:
        return await call(request, timeout=CONTROL_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
