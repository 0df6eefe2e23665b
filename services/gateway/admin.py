"""GatewayService: the operators' view of the router, and their changes to it."""

from typing import Any

import grpc
import structlog

from moesaic.cluster.rpc.statuses import errors_as_status
from moesaic.prefix.fleet import PACE
from moesaic.services.gateway.workers.routing import Routing
from moesaic.v1 import gateway_pb2 as pb
from moesaic.v1 import gateway_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger()


class GatewayAdmin(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers for one gateway."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    async def GetRouter(
        self, request: pb.GetRouterRequest, context: Context
    ) -> pb.GetRouterResponse:
        """Tell the policy in force, and the router's knowledge of each worker."""
        router = self._routing.router
        return pb.GetRouterResponse(
            policy=router.policy_name,
            num_queued=router.num_queued,
            index_blocks=len(router.fleet.index),
            workers=[
                pb.RoutedWorker(
                    worker_id=key[0],
                    accepting=worker.accepting,
                    num_requests=len(worker.jobs),
                    remaining_flops=worker.remaining,
                    ready_flops=worker.ready,
                    saturation_flops=worker.saturation,
                    caches=worker.caches,
                    committed_blocks=router.fleet.index.num_committed_at(worker.bit),
                    slowdown=worker.pace / PACE,
                    others_flops=worker.others.flops,
                )
                for key, worker in router.fleet.workers.items()
            ],
        )

    async def SetPolicy(
        self, request: pb.SetPolicyRequest, context: Context
    ) -> pb.SetPolicyResponse:
        """Switch the policy; what waits is routed by it at once."""
        async with errors_as_status(context):
            router = self._routing.router
            router.set_policy(request.policy)
            log.info("router.policy_changed", to=router.policy_name)
            self._routing.dispatch()
            return pb.SetPolicyResponse()
