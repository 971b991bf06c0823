"""Command line and Python API of murmur: the only code that knows both services.

    import murmur

    run = murmur.train("formation", {"run.max_minutes": 3})
    policy = murmur.load(run)

Names are imported when they are first used: `import murmur` itself imports neither torch nor an
environment. See docs/python.md.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env_service.environment import VectorEnvironment as VectorEnvironment
    from env_service.sessions.evaluation_result import EvaluationResult as EvaluationResult
    from murmur.api import compare as compare
    from murmur.api import config as config
    from murmur.api import make_env as make_env
    from murmur.api import sweep as sweep
    from murmur.api import train as train
    from murmur.runs.policy import Policy as Policy
    from murmur.runs.policy import load as load
    from murmur.runs.run import Run as Run
    from shared.config.experiment import ExperimentConfig as ExperimentConfig
    from shared.process.errors import MurmurError as MurmurError
    from shared.wire.timestep import StepType as StepType
    from shared.wire.timestep import TimeStep as TimeStep

_HOMES = {
    "EvaluationResult": "env_service.sessions.evaluation_result",
    "ExperimentConfig": "shared.config.experiment",
    "MurmurError": "shared.process.errors",
    "Policy": "murmur.runs.policy",
    "Run": "murmur.runs.run",
    "StepType": "shared.wire.timestep",
    "TimeStep": "shared.wire.timestep",
    "VectorEnvironment": "env_service.environment",
    "compare": "murmur.api",
    "config": "murmur.api",
    "load": "murmur.runs.policy",
    "make_env": "murmur.api",
    "sweep": "murmur.api",
    "train": "murmur.api",
}
__all__ = sorted(_HOMES)
_OWN = ("shared", "env_service", "learner_service")

# How a connection ends is said in murmur's own lines. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _prefer_own_packages() -> None:
    """Find `shared` and the services beside this package, not in a folder of the user's.

    Whatever comes earlier in sys.path (the working directory with `python -m`, PYTHONPATH) and
    has a package of such a name moves to the end, where an environment's module is still found.
    Worker processes start with this process's sys.path.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    _refuse_foreign_packages(root)
    names = [f"{name}{end}" for name in _OWN for end in ("", ".py")]
    earlier = sys.path[: sys.path.index(root)] if root in sys.path else list(sys.path)
    hiding = [
        path
        for path in earlier
        if os.path.realpath(path) != os.path.realpath(root)
        and any(os.path.exists(os.path.join(path, name)) for name in names)
    ]
    if not hiding:
        return
    for path in hiding:
        sys.path.remove(path)
    if root not in sys.path:
        sys.path.append(root)
    sys.path.extend(hiding)


def _refuse_foreign_packages(root: str) -> None:
    """Check that no package of one of our names has been imported from elsewhere.

    Raises:
        ImportError: naming the package and its place.
    """
    for name in _OWN:
        module = sys.modules.get(name)
        if module is None:
            continue
        places = list(getattr(module, "__path__", [])) or [str(module.__file__)]
        own = os.path.realpath(os.path.join(root, name))
        if own not in map(os.path.realpath, places):
            raise ImportError(
                f"murmur needs its own package '{name}' ({own}), but '{name}' has been imported "
                f"from {places[0]} before: rename that one"
            )


_prefer_own_packages()


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    """Import a name of the API on first use.

    Raises:
        AttributeError: if there is no such name.
        ConfigError: if it needs what is not installed, with the command that installs it.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'murmur' has no attribute '{name}'")
    from shared.config.extras import advising

    with advising():
        found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the API's names, for completion."""
    return [*globals(), *__all__]
