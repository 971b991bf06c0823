"""Messages, generated from proto/rollout.proto by `make proto` (a test compares them); limits."""

PROTOCOL_VERSION = 6
METHOD = "/murmur.v1.Rollout/Play"
LOAD_METHOD = "/murmur.v1.Rollout/Load"

MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # to a client
MAX_OBSERVATION_BYTES = 64 * 1024 * 1024  # of the arrays of one observation or action
PART_BYTES = 1024 * 1024  # of the arrays in one message to a server
ENCODING_BYTES = 64  # by which protobuf's encoding of a message is longer than its arrays
