"""What a service has to do now, from what it counts."""

import asyncio
import time
from typing import Any

import grpc

from moesaic.cli.credentials import connected
from moesaic.cluster.channels import CONTROL_TIMEOUT_S
from moesaic.v1 import admin_pb2, admin_pb2_grpc

RATE_S = 0.5  # between the samples that a rate is made from
# Where ``AdminService.GetStats`` has what a service has to do, by role.
GAUGES = {
    "gateway": {"running": "moesaic_inflight"},
    "attention": {
        "running": "moesaic_num_requests_running",
        "waiting": "moesaic_num_requests_waiting",
        "kv_blocks": "moesaic_kv_blocks",
        "kv_blocks_used": "moesaic_kv_blocks_used",
    },
}
RATES = {
    "gateway": {"tokens_per_s": "moesaic_inter_token_latency_seconds_count"},  # while they come
    "attention": {"tokens_per_s": "moesaic_step_rows_sum"},
    "expert": {"rows_per_s": "moesaic_expert_rows_total"},
}


async def service_load(role: str, admin_address: str, within_s: float = RATE_S) -> dict[str, Any]:
    """What a service has to do now; rates are of ``within_s`` seconds. Empty if it does not answer.

    Returns:
        What there is of ``running`` and ``waiting`` requests, ``kv_blocks`` and ``kv_blocks_used``,
        ``tokens_per_s`` (generated, of all workers together: gateway; computed, those of prompts too:
        attention worker) and ``rows_per_s`` (of every layer: expert worker).
    """
    if role not in RATES:
        return {}
    async with connected(admin_address) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)

        async def sample() -> tuple[float, dict[str, float]]:
            request = admin_pb2.GetStatsRequest()
            reply = await stub.GetStats(request, timeout=CONTROL_TIMEOUT_S)
            return time.monotonic(), dict(reply.values)

        try:
            before_s, before = await sample()
            await asyncio.sleep(within_s)
            now_s, now = await sample()
        except grpc.aio.AioRpcError:
            return {}
    load: dict[str, Any] = {
        name: int(now[series]) for name, series in GAUGES.get(role, {}).items() if series in now
    }
    for name, series in RATES.get(role, {}).items():
        made = max(0.0, _sum_of(series, now) - _sum_of(series, before))  # less: it was restarted
        load[name] = round(made / (now_s - before_s), 1)
    return load


def _sum_of(series: str, values: dict[str, float]) -> float:
    """A counter over all its labels."""
    return sum(
        value for name, value in values.items() if name == series or name.startswith(series + "{")
    )
