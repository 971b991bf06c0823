"""What a factory's path names: attributes of packages, games of turns, folders of the user's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from murmur.env_service.adapters.factory import AdapterConfig, create, find_factory
from murmur.env_service.adapters.kinds import recognise
from murmur.runs.settings import environment_factory
from murmur.shared.config.import_advice import import_advice
from murmur.shared.process.errors import ConfigError

ROOT = Path(__file__).parents[3]
WALK = """
import gymnasium, numpy as np
class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        self.age = 0
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.age += 1
        return np.zeros(1, np.float32), 0.0, False, self.age > 5, {}
"""


def test_a_module_may_be_an_attribute_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "robots"
    (package / "envs").mkdir(parents=True)
    (package / "__init__.py").write_text("from robots.envs import mujoco_v1")
    (package / "envs" / "__init__.py").touch()
    (package / "envs" / "mujoco_v1.py").write_text("class Inner:\n    parallel_env = dict\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_factory("robots.mujoco_v1:Inner.parallel_env") is dict
    with pytest.raises(ConfigError, match=r"'robots' has no 'mujoco_v2'"):
        find_factory("robots.mujoco_v2:parallel_env")


@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
def test_parallelizable_turns_are_wrapped() -> None:
    assert recognise("pettingzoo.classic.rps_v2:env", {}) == "pettingzoo"
    environment = environment_factory("mpe2.simple_spread_v3:env", [])(2)
    assert environment.spec.num_agents == 3
    environment.close()


@pytest.mark.system
@pytest.mark.parametrize("entry", ["script", "module", "path"])
def test_own_packages_win_over_the_working_directory(entry: str, tmp_path: Path) -> None:
    for name in ("shared", "env_service"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    (tmp_path / "walk.py").write_text(WALK)
    script = str(Path(sys.executable).with_name("murmur"))
    command = [script] if entry == "script" else [sys.executable, "-m", "murmur"]
    paths = [str(ROOT), *["."] * (entry == "path")]
    result = subprocess.run(
        [*command, "check-env", "walk:Walk"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(reversed(paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "keeps the contract" in result.stdout


def test_a_hidden_folder_is_named_not_a_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "murmur").mkdir()
    (tmp_path / "murmur" / "maps.py").touch()
    (tmp_path / "chase.py").write_text("import murmur.maps")
    (tmp_path / "hunt.py").write_text("from murmur import maps")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("chase:Chase", "hunt:Hunt", "murmur.maps:Maps"):
        with pytest.raises(ConfigError) as caught:
            find_factory(path)
        words = str(caught.value)
        assert f"the folder {tmp_path / 'murmur'} is hidden by murmur's own package" in words
        assert "rename the folder" in words
        assert "pip install" not in words


def test_an_environment_that_lacks_a_package_names_our_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Gymnasium does where mujoco is not installed."""
    (tmp_path / "hops.py").write_text(
        "def make(legs):\n"
        "    try:\n"
        "        raise ModuleNotFoundError('No module named mujoco', name='mujoco')\n"
        "    except ImportError as e:\n"
        "        raise RuntimeError('run `pip install gymnasium[mujoco]`') from e\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = AdapterConfig(factory="hops:make", arguments={"legs": 1})
    with pytest.raises(ConfigError, match=r"make\(legs=1\)' needs 'mujoco', .*\[mujoco\]"):
        create(config)


def test_only_listed_packages_are_recommended() -> None:
    for name, advised in (("pygame", True), ("gymnasium_robotics", True), ("pygam", False)):
        words = import_advice(
            "own.env", ModuleNotFoundError(f"No module named '{name}'", name=name)
        )
        assert ("pip install" in words) == advised
        assert f"needs '{name}', which is not installed" in words


def test_an_environment_that_cannot_be_asked_to_draw_is_told_how() -> None:
    config = AdapterConfig(factory="gymnasium.spaces:Discrete", arguments={"n": 2})
    with pytest.raises(ConfigError, match=r"it must take the keyword argument render_mode"):
        create(config, render_mode="rgb_array")
    with pytest.raises(ConfigError, match=r"its keyword arguments are environment\.arguments"):
        create(config, modes=1)
