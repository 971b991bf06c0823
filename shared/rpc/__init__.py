"""Generated from proto/rollout.proto by `make proto`; a test compares the two."""

PROTOCOL_VERSION = 6
METHOD = "/murmur.v1.Rollout/Play"
LOAD_METHOD = "/murmur.v1.Rollout/Load"
