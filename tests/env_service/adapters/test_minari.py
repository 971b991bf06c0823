"""Datasets of Minari, made here by its own API, become what the environment would have sent."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space

from murmur.env_service.adapters.actions import ActionLayout
from murmur.env_service.environment import make_environment
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, EnvironmentFault
from murmur.shared.wire.dataset import Dataset

minari = pytest.importorskip("minari", reason="needs the extra minari")
pytest.importorskip("h5py", reason="needs the extra minari")

SPACES: dict[str, tuple[Space[Any], Space[Any]]] = {
    "numbers": (
        Box(-9, 9, (3,)),
        Box(np.float32([-2, 0]), np.float32([2, 1])),
    ),
    "choice": (Dict({"at": Box(-9, 9, (2,)), "kind": Discrete(3)}), Discrete(3, start=1)),
    "choices": (Box(0, 255, (6, 5, 3), np.uint8), MultiDiscrete([2, 3])),
    "hybrid": (
        Box(-9, 9, (1,)),
        Dict({"arm": Discrete(3), "at": Box(-1, 1, (2,)), "free": Box(-np.inf, np.inf, (1,))}),
    ),
}


class Played(gymnasium.Env[Any, Any]):
    """An environment with spaces of the table."""

    def __init__(self, kind: str) -> None:
        self.observation_space, self.action_space = SPACES[kind]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}


def stacked(values: list[Any]) -> Any:
    """Return values of a space as Minari keeps them: arrays in dictionaries."""
    if isinstance(values[0], dict):
        return {key: stacked([value[key] for value in values]) for key in values[0]}
    return np.stack(values)


def make(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, early: int | None = None
) -> list[Any]:
    """Make the dataset `toy/KIND-v0` of three episodes; return their actions and rewards."""
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    observed, acting = SPACES[kind]
    observed.seed(1)
    acting.seed(2)
    buffers, made = [], []
    for number, steps in enumerate((4, 1, 6)):
        terminations = np.arange(steps) == (steps - 1 if number != 2 else -1)
        truncations = np.arange(steps) == (steps - 1 if number == 2 else -1)
        if early is not None and number == 2:
            terminations[early] = True
        actions = [acting.sample() for _ in range(steps)]
        rewards = np.arange(steps) + 10.0 * number
        observations = [observed.sample() for _ in range(steps + 1)]
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=stacked(observations),
                actions=stacked(actions),
                rewards=rewards.tolist(),
                terminations=terminations.tolist(),
                truncations=truncations.tolist(),
                infos={},
            )
        )
        made.append((observations, actions, rewards))
    minari.create_dataset_from_buffers(
        dataset_id=f"toy/{kind}-v0",
        buffer=buffers,
        observation_space=observed,
        action_space=acting,
        algorithm_name="random",
        author="nobody",
        author_email="nobody@example.org",
        code_permalink="https://example.org",
    )
    return made


def record(name: str, out: Path, episodes: int | None = None, **settings: Any) -> None:
    """Run `murmur record --minari`."""
    from murmur.cli.results import record as command

    options = {"environment": {"name": "gymnasium", "factory": f"{__name__}:Played"}, **settings}
    config = out.with_suffix(".yaml")
    import yaml

    config.write_text(yaml.safe_dump(options))
    command(out=out, minari=name, config=str(config), episodes=episodes)


@pytest.mark.filterwarnings("ignore")  # Minari's own
@pytest.mark.parametrize("kind", SPACES)
def test_all_of_a_dataset_is_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path / "minari", kind, monkeypatch)
    section = {"name": "gymnasium", "factory": f"{__name__}:Played", "arguments": {"kind": kind}}
    record(
        f"toy/{kind}-v0",
        tmp_path / "data",
        episodes=4,
        environment=section,
        algorithm={"name": "mappo"},
    )
    output = " ".join(capsys.readouterr().out.split())
    assert f"--episodes 4: toy/{kind}-v0 has 3 episodes, all of which are taken" in output
    dataset = Dataset(tmp_path / "data", "--out")
    assert dataset.source == {"minari": f"toy/{kind}-v0"}
    environment = make_environment(PluginConfig(**section), 1, "mappo")
    dataset.require_spec(environment.spec)
    (part,) = dataset.parts()
    order = np.argsort(part.seed)
    assert part.seed[order].tolist() == [0, 1, 2]
    assert part.length[order].tolist() == [5, 2, 7]
    starts = part.length.cumsum() - part.length
    layout = ActionLayout({"agent": SPACES[kind][1]})
    for number, (observations, actions, rewards) in enumerate(made):
        start, rows = starts[order[number]], part.length[order[number]]
        own = {name: array[start : start + rows] for name, array in part.arrays.items()}
        assert own["reward"][1:, 0].tolist() == rewards.tolist()
        assert own["discount"][-1] == (number == 2)  # truncated
        taken = layout.prepare(own["action"][:-1])
        for row, action in zip(taken, actions, strict=True):
            found = layout.convert[0](row[0])
            for key in action if isinstance(action, dict) else [None]:
                wanted = action if key is None else action[key]
                value = found if key is None else found[key]
                np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)
        if kind == "choices":
            image = own["observation/image"][:, 0]
            assert (np.moveaxis(image, 1, -1) == np.stack(observations)).all()
        elif kind == "choice":
            vector = own["observation/observation"][:, 0]
            assert np.allclose(vector[:, :2], [o["at"] for o in observations])
            assert vector[:, 2:].argmax(1).tolist() == [o["kind"] for o in observations]
        else:
            assert np.allclose(own["observation/observation"][:, 0], np.stack(observations))


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_whole_or_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "minari", "numbers", monkeypatch, early=1)
    with pytest.raises(EnvironmentFault, match="episode 2 has 6 rewards, 7 observations and 2 end"):
        record("toy/numbers-v0", tmp_path / "a", algorithm={"name": "mappo"})
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"--minari toy/other-v0: .*`minari download"):
        record("toy/other-v0", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"of one agent of Gymnasium, environment.name=spread"):
        record("toy/numbers-v0", tmp_path / "c", environment={"name": "spread"})
