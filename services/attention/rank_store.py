"""The store of ranks on several machines, behind gRPC that asks for the cluster's secret.

The first rank serves it. Each rank also holds a call, ``Stay``, that breaks when the other end is gone:
gloo alone can wait without end for a lost machine.
"""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import grpc
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's list of names lacks it

from moesaic.cluster.rpc.channels import CHANNEL_OPTIONS, token_metadata
from moesaic.cluster.rpc.server import listen, new_server
from moesaic.cluster.security.credentials import Credentials, own_credentials
from moesaic.cluster.waiting import Changes
from moesaic.errors import UnusableSettings
from moesaic.models.tensor_parallel.group import JOIN_PATIENCE
from moesaic.v1 import ranks_pb2 as pb
from moesaic.v1 import ranks_pb2_grpc

Lose = Callable[[Exception], Any]
_LAST_MESSAGES_S = 5.0
_ANSWER_S = 30.0
_NUMBER = re.compile(rb"-?[0-9]{1,18}")


class RankStore(ranks_pb2_grpc.RankStoreServiceServicer):
    """The values, and who stays. Lives on one event loop."""

    def __init__(self, lost: Lose) -> None:
        """``lost`` is called if a rank is gone before ``end``."""
        self._values: dict[str, bytes] = {}
        self._changes, self._ending, self._lost = Changes(), asyncio.Event(), lost

    def end(self) -> None:
        """Let all ranks go."""
        self._ending.set()

    async def Set(self, request: Any, context: Any) -> pb.RankStoreServiceSetResponse:
        """See the service; values are set in one turn of the event loop."""
        now = self._values.get(request.key)
        if not request.HasField("expected") or request.expected == (now or b""):
            now = self._values[request.key] = request.value
            self._changes.note_change()
        return pb.RankStoreServiceSetResponse(value=now or b"")

    async def Get(self, request: Any, context: Any) -> pb.RankStoreServiceGetResponse:
        """See the service."""
        try:
            async with asyncio.timeout(max(0.0, request.timeout_s)):
                while not all(key in self._values for key in request.keys):
                    await self._changes.changed()
        except TimeoutError:
            return pb.RankStoreServiceGetResponse()
        return pb.RankStoreServiceGetResponse(values=[self._values[key] for key in request.keys])

    async def Add(self, request: Any, context: Any) -> pb.RankStoreServiceAddResponse:
        """See the service."""
        held = self._values.get(request.key, b"0")
        if not _NUMBER.fullmatch(held):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.key} is no number")
        value = int(held) + request.amount
        self._values[request.key] = str(value).encode()
        self._changes.note_change()
        return pb.RankStoreServiceAddResponse(value=value)

    async def Delete(self, request: Any, context: Any) -> pb.RankStoreServiceDeleteResponse:
        """See the service."""
        existed = self._values.pop(request.key, None) is not None
        return pb.RankStoreServiceDeleteResponse(existed=existed)

    async def Stay(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """See the service; a call that breaks loses the instance."""
        try:
            await self._ending.wait()
        except asyncio.CancelledError:
            if not self._ending.is_set():
                self._lost(ConnectionError(f"rank {request.rank} is gone"))
            raise
        yield pb.RankStoreServiceStayResponse()


@asynccontextmanager
async def serving_store(worker_id: str, host: str, port: int, lost: Lose) -> AsyncIterator[str]:
    """Serve a store for the length of the block, with this process's credentials.

    Yields:
        Its port.

    Raises:
        UnusableSettings: the address cannot be listened on.
    """
    credentials = own_credentials()
    server, store = new_server(credentials, worker_id), RankStore(lost)
    ranks_pb2_grpc.add_RankStoreServiceServicer_to_server(store, server)
    try:
        bound = listen(server, host, port, credentials.tls)
    except RuntimeError as error:
        raise UnusableSettings(
            "tensor_parallel_address", f"cannot be listened on: {error}"
        ) from error
    await server.start()
    try:
        yield str(bound)
    finally:
        store.end()
        await server.stop(_LAST_MESSAGES_S)


class RemoteStore(Store):
    """A store of torch's, for any thread: each call asks the server at ``address``."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        """Connect when first asked; the first rank may start later."""
        super().__init__()
        options, tls = CHANNEL_OPTIONS, credentials.tls
        self._channel = (
            grpc.insecure_channel(address, options=options)
            if tls is None
            else grpc.secure_channel(
                address, tls.channel_credentials(), options=[*options, *tls.channel_options]
            )
        )
        self._calls = ranks_pb2_grpc.RankStoreServiceStub(self._channel)
        self._tokens, self._left = credentials.tokens, threading.Event()

    def set(self, key: str, value: bytes | str) -> None:
        """See ``Store.set``."""
        self._ask(self._calls.Set, pb.RankStoreServiceSetRequest(key=key, value=_bytes(value)))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """See ``Store.compare_set``."""
        request = pb.RankStoreServiceSetRequest(
            key=key, value=_bytes(desired), expected=_bytes(expected)
        )
        found: bytes = self._ask(self._calls.Set, request).value
        return found

    def get(self, key: str) -> bytes:
        """See ``Store.get``; it waits for the value."""
        return self._get([key], JOIN_PATIENCE)[0]

    def wait(self, keys: list[str], timeout: timedelta = JOIN_PATIENCE) -> None:
        """See ``Store.wait``."""
        self._get(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """See ``Store.check``."""
        return len(self._found(keys, timedelta())) == len(keys)

    def add(self, key: str, amount: int) -> int:
        """See ``Store.add``."""
        request = pb.RankStoreServiceAddRequest(key=key, amount=amount)
        return int(self._ask(self._calls.Add, request).value)

    def delete_key(self, key: str) -> bool:
        """See ``Store.delete_key``."""
        request = pb.RankStoreServiceDeleteRequest(key=key)
        return bool(self._ask(self._calls.Delete, request).existed)

    def stay(self, rank: int, lost: Lose) -> None:
        """Stay in the instance, on a thread of its own; ``lost`` is called if the first rank is gone."""

        def staying() -> None:
            request = pb.RankStoreServiceStayRequest(rank=rank)
            try:
                for _ in self._calls.Stay(request, metadata=self._metadata(), wait_for_ready=True):
                    self._left.set()
            except grpc.RpcError as error:
                if not self._left.is_set():
                    lost(ConnectionError(f"the first rank is gone: {_cause(error)}"))

        threading.Thread(target=staying, name="ranks-stay", daemon=True).start()

    def leave(self) -> None:
        """End all calls."""
        self._left.set()
        self._channel.close()

    def _get(self, keys: Iterable[str], timeout: timedelta) -> list[bytes]:
        keys = list(keys)
        found = self._found(keys, timeout)
        if len(found) < len(keys):
            raise RuntimeError(f"{', '.join(keys)} not set within {timeout.total_seconds():.0f} s")
        return found

    def _found(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        wait_s = timeout.total_seconds()
        request = pb.RankStoreServiceGetRequest(keys=keys, timeout_s=wait_s)
        return list(self._ask(self._calls.Get, request, wait_s).values)

    def _ask(self, call: Any, request: Any, wait_s: float = 0.0) -> Any:
        try:
            return call(
                request,
                timeout=wait_s + _ANSWER_S,
                metadata=self._metadata(),
                wait_for_ready=True,
            )
        except grpc.RpcError as error:  # torch's stores raise RuntimeError
            raise RuntimeError(f"the store of the first rank: {_cause(error)}") from error

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self._tokens is None else (token_metadata(self._tokens, "admin"),)


def _cause(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
