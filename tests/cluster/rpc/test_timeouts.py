from moesaic.cluster import leadership, registry
from moesaic.cluster.redis import connection as redis_clients
from moesaic.cluster.rpc import channels


def test_what_waits_inside_ends_before_what_waits_outside():
    assert redis_clients.COMMAND_TIMEOUT_S < registry.RENEW_S
    # One renewal may fail to reach Redis, and so may the next, before the lease is lost.
    assert 2 * (registry.RENEW_S + redis_clients.COMMAND_TIMEOUT_S) <= registry.LEASE_S
    assert 2 * (leadership.RENEW_S + redis_clients.COMMAND_TIMEOUT_S) <= leadership.LEASE_S
    assert redis_clients.BLOCK_S <= registry.RENEW_S
    options = dict(channels.CHANNEL_OPTIONS)
    assert options["grpc.http2.ping_timeout_ms"] <= 1000 * channels.CONTROL_TIMEOUT_S
