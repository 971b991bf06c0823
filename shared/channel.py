"""gRPC channel and server options, equal on both sides: limits and keepalive."""

MAX_MESSAGE_BYTES = 256 * 1024 * 1024

# A peer that hangs without closing its socket is found after at most 10 + 5 s. The ping timeout
# is what counts: keepalive_timeout_ms alone took 60 s to notice a stopped process (grpcio 1.85).
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_LIMITS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
CHANNEL_OPTIONS = [*_KEEPALIVE, *_LIMITS]
SERVER_OPTIONS = [
    *_KEEPALIVE,
    *_LIMITS,
    # Must be below the clients' keepalive_time_ms, else the server drops them (GOAWAY).
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two learners on one port would share the sessions between them.
    ("grpc.so_reuseport", 0),
]
