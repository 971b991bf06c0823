"""`murmur record`: what it writes, and what it refuses."""

from pathlib import Path

import pytest

from murmur.cli.results import record
from murmur.env_service.environment import make_environment
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import Dataset


def test_a_baselines_episodes_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "datasets" / "new"
    record(out=out, baseline="assignment", config="spread", episodes=5, first_seed=7)
    dataset = Dataset(out, "--out")
    assert dataset.source == {"baseline": "assignment", "first_seed": 7}
    assert (dataset.num_episodes, dataset.num_transitions) == (5, 125)
    dataset.require_spec(make_environment(PluginConfig(name="spread"), 1).spec)
    (part,) = dataset.parts()
    assert sorted(part.seed.tolist()) == [7, 8, 9, 10, 11]
    said = capsys.readouterr().out
    assert "125 transitions of 5 episodes" in said.replace("\n", " ")
    assert "5/5" in said
    with pytest.raises(ConfigError, match="new exists; name another folder, or remove it"):
        record(out=out, baseline="random", config="spread", episodes=1)


def test_one_policy_is_recorded_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--baseline and --learner: give one of them"):
        record(out=tmp_path / "new", baseline="random", learner="127.0.0.1:1", config="spread")
    with pytest.raises(ConfigError, match="has no baseline 'asignment'; did you mean 'assignment'"):
        record(out=tmp_path / "new", baseline="asignment", config="spread")
    assert list(tmp_path.iterdir()) == []
