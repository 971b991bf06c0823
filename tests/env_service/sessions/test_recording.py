"""The newest evaluated episode is kept whole, and at a bounded cost."""

from pathlib import Path

import numpy as np
import pytest

from murmur.env_service.environment import make_environment, random_action
from murmur.env_service.pictures import find_painter
from murmur.env_service.sessions import recording
from murmur.env_service.sessions.recording import EpisodeRecorder, read_episode
from murmur.shared.config.files import load
from murmur.shared.wire.timestep import StepType


def play(recorder: EpisodeRecorder, name: str, seed: int = 1) -> list[dict[str, np.ndarray]]:
    """An episode of copy 0, shown to the recorder; the states it had."""
    environment = make_environment(load(name, [], {}).environment, 2)
    seeds = draws = np.array([seed, seed + 1], np.uint64)
    timestep, states = environment.reset(seeds), []
    nothing = np.zeros(2, np.bool_)
    while True:
        recorder.take(environment, timestep)
        try:
            states.append({k: np.array(v) for k, v in environment.render_state(0).items()})
        except NotImplementedError:
            states.append({})
        if timestep.step_type[0] == StepType.LAST:
            environment.close()
            return states
        draws = draws + np.uint64(1)
        action = random_action(environment.spec, draws, timestep.observation.get("action_mask"))
        timestep = environment.step(action, nothing, seeds)


@pytest.mark.parametrize(
    "name", ["spread", "snakes-greedy", pytest.param("terrain-demo", marks=pytest.mark.long)]
)
def test_an_episode_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """terrain's paths grow with every row."""
    file = tmp_path / "episode.npz"
    states = play(EpisodeRecorder(file), name)
    rows = read_episode(file)
    assert len(rows) == len(states)
    for row, state in zip(rows, states, strict=True):
        assert row.state.keys() == state.keys()
        for key, array in state.items():
            np.testing.assert_array_equal(row.state[key], array)
            assert row.state[key].dtype == array.dtype
    assert rows[-1].metrics
    assert find_painter(rows) is not None


def test_the_next_episode_waits_until_the_last_is_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "episode.npz"
    recorder = EpisodeRecorder(file)
    play(recorder, "spread", 1)
    first = file.read_bytes()
    monkeypatch.setattr(recording, "SHARE", 1.0)
    play(recorder, "spread", 2)
    assert file.read_bytes() == first
    recorder = EpisodeRecorder(file)
    play(recorder, "spread", 3)
    assert file.read_bytes() != first


def test_a_large_episode_is_thinned_and_keeps_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_MOST_BYTES", 8 * recording._ROW_BYTES)
    file = tmp_path / "episode.npz"
    states = play(EpisodeRecorder(file), "spread")
    rows = read_episode(file)
    assert len(rows) <= 8
    np.testing.assert_array_equal(rows[0].state["agents"], states[0]["agents"])
    np.testing.assert_array_equal(rows[-1].state["agents"], states[-1]["agents"])


def test_a_torn_file_is_no_episode(tmp_path: Path) -> None:
    file = tmp_path / "episode.npz"
    play(EpisodeRecorder(file), "spread")
    for content in (file.read_bytes()[:-30], b"", b"no zip"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"torn|pickled"):
            read_episode(file)


def test_without_pictures_or_room_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "matrix.yaml").write_text("environment: {name: matrix}")
    play(EpisodeRecorder(tmp_path / "episode.npz"), str(tmp_path / "matrix.yaml"))
    play(EpisodeRecorder(tmp_path / "gone" / "episode.npz"), "spread")  # reported in the log
    assert [path.name for path in tmp_path.iterdir()] == ["matrix.yaml"]
