"""Old names of modules that plug-ins import: for one release they work, with a warning."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "shared.errors": "shared.process.errors",
    "shared.notices": "shared.wire.notices",
    "shared.samples": "shared.wire.samples",
    "shared.seeding": "shared.wire.seeding",
    "shared.registry": "shared.config.plugins",
    "shared.spec": "shared.wire.spec",
    "shared.symmetry": "shared.config.symmetry",
    "shared.timestep": "shared.wire.timestep",
    "learner_service.algorithms.actor": "learner_service.learning.actor",
    "learner_service.algorithms.base": "learner_service.learning.base",
    "learner_service.algorithms.off_policy": "learner_service.learning.off_policy",
    "learner_service.algorithms.on_policy": "learner_service.learning.on_policy",
    "learner_service.algorithms.options": "learner_service.learning.options",
    "learner_service.algorithms.returns": "learner_service.learning.returns",
    "learner_service.networks.building": "learner_service.layers.building",
    "learner_service.networks.inputs": "learner_service.layers.inputs",
    "learner_service.layers.layers": "learner_service.layers.stacked",
    "learner_service.layers.mlp": "learner_service.layers.stacked",
    "learner_service.layers.snapshot": "learner_service.layers.casting",
    "learner_service.learning.imitation": "learner_service.learning.minibatches",
    "learner_service.learning.value_norm": "learner_service.learning.returns",
    "learner_service.storage.unroll": "learner_service.storage.storage",
    "shared.wire.row_check": "shared.wire.codec",
    "learner_service.runtime": "learner_service.device",
    "learner_service.runtime.precision": "learner_service.device.precision",
}


class OldNames(MetaPathFinder, Loader):
    """Finds the modules of MOVED."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an old name, None for any other."""
        if name not in MOVED:
            return None
        return ModuleSpec(name, self, is_package=any(m.startswith(f"{name}.") for m in MOVED))

    def exec_module(self, module: ModuleType) -> None:
        """Fill the old module with what the new one holds: the same classes, not copies."""
        new = MOVED[module.__name__]
        warnings.warn(
            f"{module.__name__} is now {new}; the old name goes with the next release",
            FutureWarning,
            stacklevel=2,
        )
        found = vars(import_module(new))
        vars(module).update({name: found[name] for name in found if not name.startswith("__")})


# First: a folder of bytecode that a former version left would be found as an empty package.
sys.meta_path.insert(0, OldNames())
