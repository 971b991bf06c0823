"""Why a module that an environment's factory needs cannot be imported, and what to do."""

import os
import pkgutil
import sys
from difflib import get_close_matches
from importlib import import_module

from shared.extras import extra_of, install_command

OWN_PACKAGES = ("shared", "env_service", "learner_service", "murmur")
# Module -> distribution. Only what is named here is ever recommended: anybody can register a
# distribution with the name of a missing module.
_DISTRIBUTIONS = {
    "ale_py": "ale-py",
    "gymnasium_robotics": "gymnasium-robotics",
    "magent2": "magent2",
    "minigrid": "minigrid",
    "mujoco": "mujoco",
    "pygame": "pygame",
    "rware": "rware",
    "shimmy": "shimmy",
    "supersuit": "SuperSuit",
}


def import_advice(module_name: str, error: ImportError) -> str:
    """Why a module cannot be imported and what to do."""
    missing = error.name or ""
    top, package = missing.partition(".")[0], module_name.partition(".")[0]
    if module_name.startswith("pettingzoo.mpe"):
        return (
            f"cannot import '{module_name}': PettingZoo keeps these in mpe2; write "
            f"mpe2{module_name.removeprefix('pettingzoo.mpe')}"
        )
    if hidden := _hidden_folder(top):
        whose = "murmur's own package" if top in OWN_PACKAGES else "the package"
        return (
            f"cannot import '{module_name}': {error}; the folder {hidden} is hidden by {whose} "
            f"'{top}' at {os.path.dirname(str(sys.modules[top].__file__))}: rename the folder"
        )
    if not isinstance(error, ModuleNotFoundError):
        text = " ".join(str(error).split())
        return f"importing '{module_name}' raised {type(error).__name__}: {text}"
    if missing != package and f"{module_name}.".startswith(f"{missing}."):
        return f"cannot import '{module_name}': {_near(missing)}"
    if missing == package:
        return f"cannot import '{module_name}': there is no package '{package}'; {_how(top)}"
    return f"'{module_name}' needs '{top}', which is not installed; {_how(top)}"


def _how(top: str) -> str:
    """How to get a module that is missing."""
    if extra := extra_of(top):
        return install_command(extra)
    if top in _DISTRIBUTIONS:
        return f"pip install {_DISTRIBUTIONS[top]}"
    return "install what provides it, or run from the folder that holds it"


def _near(missing: str) -> str:
    """What a package has instead of a module."""
    parent, _, wanted = missing.rpartition(".")
    folders = getattr(import_module(parent), "__path__", None)
    if folders is None:
        return f"'{parent}' is no package; write {parent}:NAME"
    known = [m.name for m in pkgutil.iter_modules(folders)]
    close = get_close_matches(wanted, known, 1)
    hint = f"did you mean '{parent}.{close[0]}'?" if close else f"known: {', '.join(known)}"
    return f"'{parent}' has no '{wanted}'; {hint}"


def _hidden_folder(top: str) -> str:
    """The user's folder or file of that name here, if another package of the name is imported."""
    file = getattr(sys.modules.get(top), "__file__", None)
    if not file:
        return ""
    for own in (os.path.abspath(top), os.path.abspath(f"{top}.py")):
        if os.path.exists(own) and os.path.realpath(own) not in (
            os.path.realpath(file),
            os.path.realpath(os.path.dirname(file)),
        ):
            return own
    return ""
