"""EdgeAgentService: wire -> domain -> wire."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from moesaic.cluster.rpc.statuses import errors_as_status
from moesaic.cluster.wire import filled
from moesaic.errors import NotReady
from moesaic.services.edge_agent.profile import Profiler
from moesaic.v1 import edge_agent_pb2 as pb
from moesaic.v1 import edge_agent_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
SetLimit = Callable[[int], Awaitable[int]]  # bytes -> slots


class EdgeAdmin(edge_agent_pb2_grpc.EdgeAgentServiceServicer):
    """Answers once the site is open."""

    def __init__(self) -> None:
        self._profiler: Profiler | None = None
        self._set_limit: SetLimit | None = None

    def open(self, profiler: Profiler, set_limit: SetLimit) -> None:
        """Answer from now on; ``set_limit`` changes the memory limit."""
        self._profiler, self._set_limit = profiler, set_limit

    async def GetProfile(
        self, request: pb.GetProfileRequest, context: Context
    ) -> pb.GetProfileResponse:
        """Describe links, memory, and where requests have their experts."""
        async with errors_as_status(context):
            profiler = self._opened()
            found = profiler.profile()
            slots = profiler.site.host.epochs.slots()
            return filled(
                pb.GetProfileResponse,
                found,
                num_held=sum(expert >= 0 for experts in slots.values() for expert in experts),
                links=[filled(pb.SiteLink, link) for link in found.links],
            )

    async def SetMemoryLimit(
        self, request: pb.SetMemoryLimitRequest, context: Context
    ) -> pb.SetMemoryLimitResponse:
        """Change the memory limit; repeating it changes nothing."""
        async with errors_as_status(context):
            self._opened()
            assert self._set_limit is not None
            return pb.SetMemoryLimitResponse(num_slots=await self._set_limit(request.memory_bytes))

    def _opened(self) -> Profiler:
        if self._profiler is None:
            raise NotReady("this edge agent is still loading")
        return self._profiler
