"""Command line and Python API of murmur: the only code that knows both services.

    import murmur

    run = murmur.train("formation", {"run.max_minutes": 3})
    policy = murmur.load(run)

Names are imported when they are first used: `import murmur` itself imports neither torch nor an
environment. See docs/python.md.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from murmur.shared import old_names as old_names

if TYPE_CHECKING:
    from murmur.api import compare as compare
    from murmur.api import config as config
    from murmur.api import make_env as make_env
    from murmur.api import sweep as sweep
    from murmur.api import train as train
    from murmur.env_service.environment import VectorEnvironment as VectorEnvironment
    from murmur.env_service.sessions.evaluation_result import EvaluationResult as EvaluationResult
    from murmur.runs.policy import Policy as Policy
    from murmur.runs.policy import load as load
    from murmur.runs.run import Run as Run
    from murmur.shared.config.experiment import ExperimentConfig as ExperimentConfig
    from murmur.shared.process.errors import MurmurError as MurmurError
    from murmur.shared.wire.timestep import StepType as StepType
    from murmur.shared.wire.timestep import TimeStep as TimeStep

_NAMES = {
    "murmur.api": ("compare", "config", "make_env", "sweep", "train"),
    "murmur.env_service.environment": ("VectorEnvironment",),
    "murmur.env_service.sessions.evaluation_result": ("EvaluationResult",),
    "murmur.runs.policy": ("Policy", "load"),
    "murmur.runs.run": ("Run",),
    "murmur.shared.config.experiment": ("ExperimentConfig",),
    "murmur.shared.process.errors": ("MurmurError",),
    "murmur.shared.wire.timestep": ("StepType", "TimeStep"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)

# How a connection ends is said in murmur's own lines. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    """Import a name of the API on first use.

    Raises:
        AttributeError: if there is no such name.
        ConfigError: if it needs what is not installed, with the command that installs it.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'murmur' has no attribute '{name}'")
    from murmur.shared.config.extras import advising

    with advising():
        found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the API's names, for completion."""
    return [*globals(), *__all__]
