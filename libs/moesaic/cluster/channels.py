"""gRPC connections, with the options both ends need so that a hung peer is noticed in seconds."""

import grpc

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
    ("grpc.enable_retries", 0),  # what may be repeated is for the caller to say
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
]


def channel(address: str) -> grpc.aio.Channel:
    """A channel to ``host:port``; it connects when first used and reconnects by itself."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
