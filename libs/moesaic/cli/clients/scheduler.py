"""Calls to the scheduler, with its errors as exit statuses."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from moesaic.cli.terminal.console import print_json
from moesaic.cli.terminal.options import policy_flag
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

T = TypeVar("T")

CALL_S = 5.0
PLAN_S = 240.0  # a plan that takes longer is none: of edge servers, the solver has 100 s for each of two policies


def scheduler_address(given: str) -> str:
    """Choose the address that was given, or that of the suite which runs in this directory.

    Raises:
        CommandError: there is none.
    """
    from moesaic.cli.machine.state import StateFile

    suite = StateFile().running()
    processes = suite.processes if suite else []
    found = given or next((p.admin_address for p in processes if p.role == "scheduler"), "")
    if not found:
        raise CommandError(
            "nothing runs in this directory; start a suite with 'moesaic up', "
            "or name a scheduler with --scheduler",
            Exit.UNHEALTHY,
        )
    return found


def calling(work: Coroutine[Any, Any, T], flags: Mapping[str, str] | None = None) -> T:
    """Run calls to the scheduler to their end.

    Args:
        work: the calls.
        flags: of fields that options have set. An error then names the flag.

    Raises:
        CommandError: with status 2 for a wrong request, 3 if the scheduler cannot be reached or does
            not lead, 4 after a timeout, else 1.
    """
    import asyncio

    import grpc

    from moesaic.cluster.rpc.statuses import as_error
    from moesaic.errors import InvalidInput, NotReady, PeerLost, StaleEpoch

    try:
        return asyncio.run(work)
    except grpc.aio.AioRpcError as failure:
        error = as_error(failure, "scheduler")
        late = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if isinstance(error, StaleEpoch):
            text = f"made for epoch {error.sent}, but {error.current} is in force: plan again"
            raise CommandError(text) from failure
        text, status = str(error), Exit.ERROR
        if isinstance(error, InvalidInput) and error.field in (flags or {}):
            text = f"{(flags or {})[error.field]}: {error.fix}"
        if isinstance(error, InvalidInput) or failure.code() in (
            grpc.StatusCode.UNAUTHENTICATED,  # the text says what to do
            grpc.StatusCode.PERMISSION_DENIED,
        ):
            status = Exit.USAGE
        elif isinstance(error, (PeerLost, NotReady)) or failure.code() is grpc.StatusCode.NOT_FOUND:
            status = Exit.TIMEOUT if late else Exit.UNHEALTHY
        raise CommandError(text, status) from failure


@asynccontextmanager
async def scheduler_stub(address: str) -> AsyncIterator["SchedulerServiceAsyncStub"]:
    """A stub of the scheduler for the length of the block."""
    from moesaic.cli.clients.credentials import connected
    from moesaic.v1 import scheduler_pb2_grpc

    async with connected(address) as connection:
        yield scheduler_pb2_grpc.SchedulerServiceStub(connection)


async def answers(address: str, *requests: Any, timeout_s: float = CALL_S) -> list[Any]:
    """Send requests to the scheduler at ``address``, one after the other; each names its method.

    Raises:
        grpc.aio.AioRpcError: one of them failed.
    """
    async with scheduler_stub(address) as stub:
        return [
            await getattr(stub, _method_of(request))(request, timeout=timeout_s)
            for request in requests
        ]


def call(scheduler: str, *requests: Any, timeout_s: float = CALL_S) -> Any:
    """Send requests to the scheduler that was given, or to that of this directory's suite.

    Returns:
        The answer; a list if there are several requests.

    Raises:
        CommandError: as ``scheduler_address`` and ``calling``.
    """
    found = calling(answers(scheduler_address(scheduler), *requests, timeout_s=timeout_s))
    return found[0] if len(requests) == 1 else found


def print_policy(
    scheduler: str, request: Any, as_text: Callable[[Any], str], as_json: bool
) -> None:
    """Set a policy, and print the one that is in force then.

    Args:
        scheduler: as given.
        request: with the parts that change.
        as_text: writes a policy in a line.
        as_json: print JSON.

    Raises:
        CommandError: as ``call``.
    """
    from moesaic.cli.clients.decisions import as_dict

    flags = {each.name: policy_flag(each.name) for each in request.policy.DESCRIPTOR.fields}
    [found] = calling(answers(scheduler_address(scheduler), request), flags)
    policy = found.policy
    if as_json:
        print_json(as_dict(policy))
    else:
        print(as_text(policy))


def _method_of(request: Any) -> str:
    return type(request).__name__.removeprefix("SchedulerService").removesuffix("Request")
