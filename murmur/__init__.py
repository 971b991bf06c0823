"""The front door: one command line; the only code that knows both services."""

import os
import sys

_OWN = ("shared", "env_service", "learner_service")


def _prefer_own_packages() -> None:
    """Find `shared` and the services beside this package, not in a folder of the user's.

    Whatever comes earlier in sys.path (the working directory with `python -m`, PYTHONPATH) and
    has a package of such a name moves to the end, where an environment's module is still found.
    Worker processes start with this process's sys.path.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
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


_prefer_own_packages()
