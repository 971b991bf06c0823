"""The errors a user can cause, as one tree.

MurmurError                 printed in one line, without a traceback; the process exits with 2
├── ConfigError             an unknown key, an ill-typed value, a combination that cannot work
├── SpecError               an environment or checkpoint that does not match the run's EnvSpec
├── WireError               a message that breaks the contract of proto/rollout.proto
├── EnvironmentFault        an environment that raises or returns what its spec forbids
├── RasterError             a terrain raster that cannot be used
├── CheckpointError         a checkpoint that is missing, torn, or of another run
├── ConnectionLostError     the peer is gone and stayed gone
│   └── RunCompleteError    it is gone because its run is complete; the process exits with 0
└── ResourceError           a port, a device, a disk or memory that is not available
"""


class MurmurError(Exception):
    """Base of every error that a user can cause and fix."""


class ConfigError(MurmurError):
    """An invalid configuration."""


class SpecError(MurmurError):
    """A mismatch of two specs, or an impossible spec."""


class WireError(MurmurError):
    """A message that breaks the wire contract."""


class EnvironmentFault(MurmurError):  # noqa: N818 - EnvironmentError is a builtin
    """A violation of the environment contract."""


class RasterError(MurmurError):
    """A terrain raster that cannot be used."""


class CheckpointError(MurmurError):
    """A checkpoint that cannot be read, written or used here."""


class ConnectionLostError(MurmurError):
    """A peer that could not be reached within the configured time."""


class RunCompleteError(ConnectionLostError):
    """A learner whose run is complete; no other one came within the configured time."""


class ResourceError(MurmurError):
    """A resource of the machine that is not available: port, device, disk, memory."""
