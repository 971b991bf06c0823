"""gRPC channel and server options, equal on both sides: limits and keepalive; the one method."""

import ipaddress
import os
from collections.abc import Callable
from typing import Any

import grpc

from murmur.shared.process.addresses import bare_host, is_own
from murmur.shared.rpc import ENCODING_BYTES, MAX_MESSAGE_BYTES, METHOD, PART_BYTES

MAX_HELLO_BYTES = 1024 * 1024
# gRPC assembles a message before the server sees it, from any client. So what it takes of one
# stream is small: a Hello, or one part of an observation (murmur.shared.wire.codec). What a whole
# observation takes is set aside only for a session that was admitted (see
# murmur.learner_service.serving.admission).
_MAX_RECEIVED_BYTES = PART_BYTES + ENCODING_BYTES

# Statuses of a refusal for good; a client reconnects after every other one.
FINAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
# Details of the status UNAVAILABLE that ends streams.
STOPPING, RUN_COMPLETE = "the learner is stopping; reconnect", "the run is complete"

# A peer that hangs without closing its socket is found after at most 10 + 5 s. The ping timeout
# is what counts: keepalive_timeout_ms alone took 60 s to notice a stopped process (grpcio 1.85).
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS = [
    *_KEEPALIVE,
    ("grpc.max_send_message_length", _MAX_RECEIVED_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS = [
    *_KEEPALIVE,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_RECEIVED_BYTES),
    # A connection that never says who it is does not stay for the two minutes that are usual.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Nor does one that has no stream; clients reconnect when they need one.
    ("grpc.max_connection_idle_ms", 60_000),
    # Must be below the clients' keepalive_time_ms, else the server drops them (GOAWAY).
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two learners on one port would share the sessions between them.
    ("grpc.so_reuseport", 0),
]
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # that gRPC takes, the first first


def channel_options(address: str) -> list[tuple[str, int]]:
    """Return the options of a channel to host:port. Channels to this machine use no proxy."""
    return [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)] if is_own(address) else CHANNEL_OPTIONS


def proxy_in_use(address: str) -> str:
    """Return the environment variable, with its value, that sends a channel through a proxy.

    gRPC takes lower-case names only, and uses no proxy for hosts in no_grpc_proxy or no_proxy.

    Args:
        address: host:port of the channel.

    Returns:
        name=value; empty: the channel connects directly.
    """
    variable = next((name for name in PROXY_VARIABLES if os.environ.get(name)), "")
    excluded = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""  # noqa: SIM112
    host = address.removeprefix("dns:///").rpartition(":")[0]
    direct = any(_covers(part.strip(), bare_host(host)) for part in excluded.split(","))
    if not variable or direct or is_own(address):
        return ""
    return f"{variable}={os.environ[variable]}"


def _covers(part: str, host: str) -> bool:
    """Return whether an entry of no_proxy, the end of a name or a network, covers a host."""
    if "/" not in part:
        return bool(part) and host.endswith(part)
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(part, strict=False)
    except ValueError:
        return False


def stream_handler(
    play: Callable[..., Any],
    deserialize: Callable[[bytes], Any] | None = None,
    serialize: Callable[[Any], bytes] | None = None,
) -> "grpc.GenericRpcHandler[Any, Any]":
    """Serve METHOD by `play`, called for each stream; by default messages stay bytes."""
    handler = grpc.stream_stream_rpc_method_handler(play, deserialize, serialize)
    _, service, method = METHOD.split("/")
    return grpc.method_handlers_generic_handler(service, {method: handler})
