"""Messages about modules that a plug-in needs and that cannot be imported, with the fix."""

import os
import pkgutil
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

from murmur.shared.config.extras import extra_of, install_command
from murmur.shared.config.plugin_folders import folders_in_use
from murmur.shared.old_names import new_name

# Module -> distribution. Only what is named here is ever recommended: anyone can register a
# distribution with the name of a missing module.
_DISTRIBUTIONS = {
    "ale_py": "ale-py",
    "magent2": "magent2",
    "minigrid": "minigrid",
    "shimmy": "shimmy",
    "supersuit": "SuperSuit",
}


def import_advice(module_name: str, error: ImportError) -> str:
    """Explain why a module cannot be imported and what to do."""
    missing = error.name or ""
    top, package = missing.partition(".")[0], module_name.partition(".")[0]
    if module_name.startswith("pettingzoo.mpe"):
        return (
            f"cannot import '{module_name}': PettingZoo keeps these in mpe2; write "
            f"mpe2{module_name.removeprefix('pettingzoo.mpe')}"
        )
    if hidden := hidden_advice(top):
        return f"cannot import '{module_name}': {error}; {hidden}"
    own = new_name(missing)
    if own is not None and _is_there(own):
        return f"cannot import '{module_name}': {error}; murmur's own is '{own}'"
    if not isinstance(error, ModuleNotFoundError):
        text = " ".join(str(error).split())
        return f"importing '{module_name}' raised {type(error).__name__}: {text}"
    if missing != package and f"{module_name}.".startswith(f"{missing}."):
        return f"cannot import '{module_name}': {_near(missing)}"
    if missing == package:
        return (
            f"cannot import '{module_name}': there is no package '{package}'; {_how(top)}"
            f"{_looked_in()}"
        )
    return f"'{module_name}' needs '{top}', which is not installed; {_how(top)}"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def hidden_advice(top: str) -> str:
    """Report a user's file or folder that another module hides; "" if none is hidden."""
    file = getattr(sys.modules.get(top), "__file__", None)
    if not file:
        return ""
    folder = os.path.dirname(file)
    imported = os.path.realpath(file), os.path.realpath(folder)
    for own in (os.path.join(f, x) for f in folders_in_use() for x in (top, f"{top}.py")):
        if os.path.exists(own) and os.path.realpath(own) not in imported:
            kind = "folder" if os.path.isdir(own) else "file"
            whose = "murmur's own package" if top == "murmur" else "the package"
            return f"the {kind} {own} is hidden by {whose} '{top}' at {folder}: rename the {kind}"
    return ""


def _how(top: str) -> str:
    """Return the command or advice that installs a missing module."""
    if extra := extra_of(top):
        return install_command(extra)
    if top in _DISTRIBUTIONS:
        return f"pip install {_DISTRIBUTIONS[top]}"
    return "install what provides it, or run from the folder that holds it"


def _looked_in() -> str:
    """List the folders that were searched for a user's own file."""
    folders = [f if os.path.isdir(f) else f"{f}, which does not exist" for f in folders_in_use()]
    return f" (looked in: {'; '.join(folders)}; to change it, set run.plugin_folders)"


def _near(missing: str) -> str:
    """Name the closest module of the package that lacks `missing`, or all its modules."""
    parent, _, wanted = missing.rpartition(".")
    folders = getattr(import_module(parent), "__path__", None)
    if folders is None:
        return f"'{parent}' is no package; write {parent}:NAME"
    known = [m.name for m in pkgutil.iter_modules(folders)]
    close = get_close_matches(wanted, known, 1)
    hint = f"did you mean '{parent}.{close[0]}'?" if close else f"known: {', '.join(known)}"
    return f"'{parent}' has no '{wanted}'; {hint}"
