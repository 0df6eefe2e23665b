"""gRPC channels; keep-alive options of both ends detect a hung peer within seconds.

Each call carries a token (``moesaic.cluster.security.tokens``) if the cluster has a secret.
"""

from collections.abc import Callable
from typing import Any

import grpc

from moesaic.cluster.security.credentials import Credentials, own_credentials
from moesaic.cluster.security.scopes import Scope, scope_of
from moesaic.cluster.security.tokens import ANYONE, Tokens

AUTHORIZATION = "authorization"
BEARER = "Bearer "
CONTROL_TIMEOUT_S = 2.0  # deadline of a control call that only reads or sets something
MAX_MESSAGE_BYTES = 4 << 20

# The keepalive timeout alone does not bound how long a stopped peer goes unnoticed; the ping
# timeout does: 5 s of silence, then 2 s for the answer to a ping.
_BOTH_ENDS = [
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
CHANNEL_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.enable_http_proxy", 0),  # peers of a cluster are reached directly
    ("grpc.enable_retries", 0),  # only the caller knows if a call may be repeated
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the time one attempt to connect gets
    ("grpc.max_reconnect_backoff_ms", 2000),
]
SERVER_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share it
    # Nobody has to prove anything before a call, so a connection without one does not stay.
    ("grpc.max_connection_idle_ms", 30_000),
]


def channel(
    address: str, audience: str = ANYONE, credentials: Credentials | None = None
) -> grpc.aio.Channel:
    """Make a channel that connects when first used and reconnects by itself.

    Args:
        address: ``host:port``.
        audience: worker id of the expected service, if known; then no other service can use the
            tokens of these calls.
        credentials: those of another cluster, if not this process's own.
    """
    credentials = own_credentials() if credentials is None else credentials
    plain = _connection(address, credentials)
    return plain if credentials.tokens is None else _Proving(plain, credentials.tokens, audience)


def token_metadata(tokens: Tokens, scope: Scope, audience: str = ANYONE) -> tuple[str, str]:
    """Make the entry of a call's metadata that carries a token."""
    return AUTHORIZATION, BEARER + tokens.current(scope, audience)


def _connection(address: str, credentials: Credentials) -> grpc.aio.Channel:
    tls = credentials.tls
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, *tls.channel_options]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


class _Proving(grpc.aio.Channel):
    """A channel whose calls carry tokens; the token of a stream is checked when it begins.

    gRPC's own interceptors would cost a task and a wrapper for every call, and one more step for
    every message of a stream.
    """

    def __init__(self, plain: grpc.aio.Channel, tokens: Tokens, audience: str) -> None:
        self._plain, self._tokens, self._audience = plain, tokens, audience

    def _proving(self, method: str, call: Callable[..., Any]) -> Any:
        scope = scope_of(method)
        if scope is None:
            return call
        tokens, audience = self._tokens, self._audience

        def proving(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            proof = token_metadata(tokens, scope, audience)
            return call(*arguments, metadata=(*(metadata or ()), proof), **options)

        return proving

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._proving(method, self._plain.unary_unary(method, *arguments, **options))

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._proving(method, self._plain.unary_stream(method, *arguments, **options))

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._proving(method, self._plain.stream_unary(method, *arguments, **options))

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._proving(method, self._plain.stream_stream(method, *arguments, **options))

    async def __aenter__(self) -> grpc.aio.Channel:
        await self._plain.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._plain.__aexit__(*raised)

    async def close(self, grace: float | None = None) -> None:
        await self._plain.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._plain.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._plain.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._plain.channel_ready()
