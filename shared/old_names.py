"""Old names of modules that plug-ins import: for one release they work, with a warning.

The finder of old names is asked after all others, so that a user's own `shared` is the user's.
"""

import os
import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
else:  # it only says what methods there are, and importing it takes as long as `import murmur`
    Loader = object

PACKAGES = {
    "shared": "murmur.shared",
    "env_service": "murmur.env_service",
    "learner_service": "murmur.learner_service",
}
MOVED = {
    **PACKAGES,
    "shared.errors": "murmur.shared.process.errors",
    "shared.samples": "murmur.shared.wire.samples",
    "shared.seeding": "murmur.shared.wire.seeding",
    "shared.registry": "murmur.shared.config.plugins",
    "shared.spec": "murmur.shared.wire.spec",
    "shared.symmetry": "murmur.shared.config.symmetry",
    "shared.timestep": "murmur.shared.wire.timestep",
    "learner_service.algorithms.actor": "murmur.learner_service.learning.actor",
    "learner_service.algorithms.base": "murmur.learner_service.learning.base",
    "learner_service.algorithms.off_policy": "murmur.learner_service.learning.off_policy",
    "learner_service.algorithms.on_policy": "murmur.learner_service.learning.on_policy",
    "learner_service.algorithms.options": "murmur.learner_service.learning.options",
    "learner_service.algorithms.returns": "murmur.learner_service.learning.returns",
    "learner_service.networks.building": "murmur.learner_service.layers.building",
    "learner_service.networks.inputs": "murmur.learner_service.layers.inputs",
    "learner_service.runtime": "murmur.learner_service.device",
    "learner_service.runtime.precision": "murmur.learner_service.device.precision",
}
# Modules whose frames lie between an import statement and the finders that `hand_over` asks.
HANDING_OVER = (__name__, *PACKAGES)


def new_name(old: str) -> str | None:
    """Return the new name of a module, None if it is not one of an old package."""
    head, tail = old, ""
    while head:
        if head in MOVED:
            return MOVED[head] + tail
        head, dot, last = head.rpartition(".")
        tail = f"{dot}{last}{tail}"
    return None


class _OldPackage(ModuleType):
    """A package by its old name. Its own path is empty: its modules are found by OldNames."""

    _warned = False

    def __init__(self, new: str) -> None:
        """Take the new package's name."""
        super().__init__(new)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a module
        """Look a name up in the new package."""
        found = getattr(import_module(self.__name__), name)
        if not (self._warned or name.startswith("__")):
            self._warned = True
            assert self.__spec__ is not None
            _warn(self.__spec__.name)
        return found


class OldNames(Loader):
    """Finds old packages and their modules, which are the new ones: the same classes, no copies."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an old name; None for any other, also one in a user's package."""
        parent = name.rpartition(".")[0]
        new = new_name(name)
        if new is None or (parent and not isinstance(sys.modules.get(parent), _OldPackage)):
            return None
        from importlib.util import find_spec

        found = find_spec(new)
        if found is None:
            return None
        return ModuleSpec(name, self, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module to fill, which has its new name."""
        is_package = spec.submodule_search_locations is not None
        return _OldPackage(str(new_name(spec.name))) if is_package else None

    def exec_module(self, module: ModuleType) -> None:
        """Import the new module; put it in the old one's place unless that is a package."""
        assert module.__spec__ is not None
        old = module.__spec__.name
        new = import_module(str(new_name(old)))
        if not isinstance(module, _OldPackage):
            sys.modules[old] = new
            _warn(old)


def _warn(old: str) -> None:
    """Warn of an old name where it is imported."""
    warnings.warn(
        f"{old} is now {new_name(old)}; the old name goes with the next release",
        FutureWarning,
        stacklevel=3,
    )


OLD_NAMES = OldNames()
if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
    sys.meta_path.append(OLD_NAMES)


def hand_over(package: str) -> None:
    """Replace a folder of the checkout, imported by its old name, by what the name stands for.

    The checkout's root is on sys.path in an editable installation, and for what runs in it. A
    user's own package comes first, as if the root were not there, then the new package.
    """
    own = os.path.dirname(os.path.realpath(__file__))
    root = os.path.dirname(own)
    elsewhere = [entry for entry in sys.path if os.path.realpath(entry) != root]
    for finder in [*sys.meta_path, OLD_NAMES]:
        spec = finder.find_spec(package, elsewhere if finder is PathFinder else None)
        origin = os.path.realpath(spec.origin or "") if spec is not None else ""
        if spec is None or origin == os.path.join(root, package, "__init__.py"):
            continue
        from importlib.util import module_from_spec

        module = sys.modules[package] = module_from_spec(spec)
        if spec.loader is not None:  # a folder without __init__.py has none
            spec.loader.exec_module(module)
        return
