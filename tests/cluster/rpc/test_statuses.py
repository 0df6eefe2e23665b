import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from moesaic import errors
from moesaic.cluster.rpc.channels import channel
from moesaic.cluster.rpc.statuses import as_error, errors_as_status
from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import admin_pb2_grpc


async def failure_of(error: Exception) -> grpc.aio.AioRpcError:
    async def failing(request: pb.GetInfoRequest, context):
        async with errors_as_status(context):
            raise error

    return await failure_of_call(failing)


async def failure_of_call(answer) -> grpc.aio.AioRpcError:
    servicer = admin_pb2_grpc.AdminServiceServicer()
    servicer.GetInfo = answer  # type: ignore[method-assign]
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with channel(f"127.0.0.1:{port}") as connection:
            stub = admin_pb2_grpc.AdminServiceStub(connection)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetInfo(pb.GetInfoRequest())
            return caught.value
    finally:
        await server.stop(0)


def status_of(info: ErrorInfo) -> bytes:
    status = Status(code=8, message="full")
    status.details.add().Pack(info)
    return status.SerializeToString()


EXAMPLES = [
    errors.InvalidInput("max_tokens", "muß at least be 1", code="context_length_exceeded"),
    errors.ModelNotFound("gpt", "demo"),
    errors.CheckpointError("model.safetensors", "is cut short", tensor="a.b"),
    errors.Overloaded("the queue is full", 2.5),
    errors.NotReady("no worker yet", 3.0, code="no_attention_worker"),
    errors.StaleEpoch(3, 5),
    errors.ExpertUnavailable(2, 4),
    errors.PlacementInfeasible(16, 1024),
    errors.DeadlineExceeded("the request", 250.0),
    errors.PeerLost("expert-1", "connection reset"),
    errors.FrameError("magic", "is not ours"),
]


def test_the_examples_are_all_the_errors_there_are():
    shared = {e for e in errors.MoesaicError.__subclasses__() if e.__module__ == errors.__name__}

    assert {type(e) for e in EXAMPLES} == shared  # services may have some of their own besides


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
async def test_an_error_arrives_as_what_it_was(error: errors.MoesaicError):
    failure = await failure_of(error)
    arrived = as_error(failure, "peer")

    assert failure.code().name == error.grpc_status
    status = rpc_status.from_call(failure)
    assert status is not None
    info, retry = ErrorInfo(), RetryInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert (info.domain, info.reason) == ("moesaic", error.code.upper())
    assert any(detail.Unpack(retry) for detail in status.details) == error.retryable
    assert retry.retry_delay.ToTimedelta().total_seconds() == getattr(error, "retry_after_s", 0.0)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize("text", ["漢" * 3000, "😀" * 900, "half a pair \ud800"])
async def test_a_long_or_odd_text_leaves_the_error_what_it_was(text: str):
    arrived = as_error(await failure_of(errors.InvalidInput("labels[0]", text)), "peer")

    assert isinstance(arrived, errors.InvalidInput)
    assert arrived.field == "labels[0]"
    assert arrived.fix[:9] == text[:9]


async def test_a_bug_becomes_internal_and_gives_nothing_away():
    failure = await failure_of(RuntimeError("canary at 0x7f00 in /srv/key"))

    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "canary" not in str(failure)
    assert type(as_error(failure, "peer")) is errors.MoesaicError


async def test_a_peer_that_is_not_there_is_lost():
    async with channel("127.0.0.1:1") as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(pb.GetInfoRequest())

    assert isinstance(as_error(caught.value, "expert-7"), errors.PeerLost)
    assert "expert-7" in str(as_error(caught.value, "expert-7"))


@pytest.mark.parametrize(
    "told",
    [
        b"\xff",
        Status(code=9).SerializeToString(),
        Status(code=8, message="full", details=[Any(value=b"\xff")]).SerializeToString(),
        status_of(ErrorInfo(metadata={"class": "Unheard", "fields": "{}"})),
        status_of(ErrorInfo(metadata={"class": "InvalidInput", "fields": '{"other": 1}'})),
    ],
)
async def test_details_that_cannot_be_read_leave_the_status(told: bytes):
    async def foreign(request: pb.GetInfoRequest, context):
        details = (("grpc-status-details-bin", told),)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details)

    failure = await failure_of_call(foreign)

    assert str(as_error(failure, "e")) == "e: full; retry after 1 s"


async def test_a_peer_that_does_not_answer_in_time_is_lost():
    async def silent(request: pb.GetInfoRequest, context):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")

    failure = await failure_of_call(silent)

    assert str(as_error(failure, "e")) == "e: no answer before the deadline"
