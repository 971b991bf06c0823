"""Modules that have moved are found by their old names, with a warning, for one release."""

import subprocess
import sys
from importlib import import_module

import pytest

from shared.old_names import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_module(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} is now {MOVED[old]}"):
        found = import_module(old)
    new = vars(import_module(MOVED[old]))
    public = [name for name in new if not name.startswith("_")]
    assert all(getattr(found, name) is new[name] for name in public)


def test_a_plugin_of_the_last_release_is_imported() -> None:
    plugin = (
        "from learner_service.algorithms.actor import ActorAlgorithm\n"
        "from learner_service.algorithms.base import AlgorithmConfig\n"
        "from learner_service.algorithms.returns import lambda_returns\n"
        "from learner_service.networks.inputs import InputShape\n"
        "from learner_service.runtime.precision import Precision\n"
        "from learner_service.storage.rollout import Batch, transitions\n"
        "from shared.config import PluginConfig, Section\n"
        "from shared.spec import ArraySpec, EnvSpec\n"
        "from shared.timestep import StepType, TimeStep\n"
    )
    done = subprocess.run([sys.executable, "-c", plugin], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "shared.spec is now shared.wire.spec" in done.stderr
