"""Old names are the new modules, with a warning, and leave a user's own package alone."""

import os
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from murmur.shared.config.import_advice import import_advice
from murmur.shared.old_names import MOVED, PACKAGES, new_name

ROOT = Path(__file__).parents[2]


def run(code: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, which is first on sys.path."""
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=240,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_module(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            monkeypatch.delitem(sys.modules, name)
    new = import_module(MOVED[old])
    public = [name for name in vars(new) if not name.startswith("_")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = import_module(old)
        assert all(getattr(found, name) is vars(new)[name] for name in public)
    words = [str(warning.message) for warning in caught]
    expected = f"{old} is now {MOVED[old]}; the old name goes with the next release"
    assert words == [expected] * bool(public)  # a package warns when something of it is used


PLUGIN = """\
import murmur
from learner_service.algorithms.actor import ActorAlgorithm
from learner_service.algorithms.base import AlgorithmConfig
from learner_service.algorithms.returns import lambda_returns
from learner_service.networks.inputs import InputShape

from learner_service.runtime.precision import Precision
from learner_service.storage.rollout import Batch, transitions
from shared.config import PluginConfig, Section
from shared.spec import ArraySpec, EnvSpec
from shared.wire import timestep as steps

import env_service.environment
import murmur.env_service.environment
import murmur.shared.wire.spec

assert EnvSpec is murmur.shared.wire.spec.EnvSpec
assert steps is murmur.shared.wire.timestep
assert env_service.environment is murmur.env_service.environment
assert env_service.environment.VectorEnvironment is murmur.VectorEnvironment
assert not [m for m in __import__("sys").modules.values() if m.__name__.startswith("shared")]
"""


@pytest.mark.parametrize("place", ["checkout", "elsewhere"])
def test_a_plugin_of_the_last_release_is_imported(place: str, tmp_path: Path) -> None:
    # In the checkout's root the folders are found by their old names.
    done = run(PLUGIN, ROOT if place == "checkout" else tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stderr.count("the old name goes with the next release")
    assert said == done.stderr.count("FutureWarning") == 10
    assert "shared.spec is now murmur.shared.wire.spec" in done.stderr
    assert "<string>:2: FutureWarning: learner_service.algorithms.actor is now" in done.stderr


@pytest.mark.parametrize("first", ["import murmur", "import env_service.environment", "pass"])
@pytest.mark.parametrize("name", ["shared.wire.spec", "shared.config", "env_service"])
def test_no_folder_of_the_checkout_is_imported_twice(first: str, name: str) -> None:
    code = (
        f"{first}\nimport sys, {name}\nassert sys.modules['{name}'].__name__ == 'murmur.{name}'\n"
        "files = [getattr(m, '__file__', None) for m in {id(m): m for m in sys.modules.values() "
        "if not type(m).__name__.startswith('_Old')}.values()]\n"
        f"own = [f for f in files if f and f.startswith({str(ROOT)!r})]\n"
        "assert len({__import__('os').path.realpath(f) for f in own}) == len(own), own\n"
    )
    done = run(code, ROOT, "-W", "ignore")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_not_there_is_not_found_by_its_old_name(tmp_path: Path) -> None:
    code = "import murmur\nimport {}"
    for name in ("shared.nonsense", "shared.wire.nonsense", "learner_service.runtime.nonsense"):
        done = run(code.format(name), tmp_path)
        assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: No module named '{name}'"
    assert new_name("learner_service.runtime.memory") == "murmur.learner_service.device.memory"
    assert new_name("shares.wire") is None


def test_the_advice_names_what_a_users_own_package_hides() -> None:
    error = ModuleNotFoundError("No module named 'shared.wire'", name="shared.wire")
    assert import_advice("walk", error).endswith("; murmur's own is 'murmur.shared.wire'")
    error = ModuleNotFoundError("No module named 'shared.maps'", name="shared.maps")
    assert "murmur.shared" not in import_advice("walk", error)
