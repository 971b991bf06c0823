"""Recorded episodes: the rows that were played, each once, by seed."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from murmur.env_service.sessions.evaluate import run_baseline, run_policy
from murmur.env_service.sessions.record_transitions import TransitionRecorder
from murmur.shared.process.errors import EnvironmentFault
from murmur.shared.wire.dataset import Dataset, DatasetWriter, Episodes
from murmur.shared.wire.spec import EnvSpec
from tests.env_service.tiny_learner import Policy, TinyLearner, experiment


class Told(gymnasium.Env[Any, Any]):
    """Shows seed, age and last action, and pays their sum; lasts 2 + seed % 5 steps.

    An even seed terminates, an odd one is truncated; seed 16 raises in its second step.
    """

    observation_space, action_space = Box(-1, 99, (3,)), Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed = seed or 0
        self.age, self.last = 0, -1
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.age, self.last = self.age + 1, int(action)
        if self.seed == 16 and self.age == 2:
            raise RuntimeError("cursed")
        over, even = self.age == 2 + self.seed % 5, self.seed % 2 == 0
        return self._seen(), float(self._seen().sum()), over and even, over and not even, {}

    def _seen(self) -> Any:
        return np.array([self.seed, self.age, self.last], np.float32)


TOLD = {"name": "gymnasium", "factory": f"{__name__}:Told"}


def recorded(folder: Path) -> list[Episodes]:
    return list(Dataset(folder, "--out").parts())


def require_played(parts: list[Episodes], seeds: list[int]) -> None:
    """Check every row of every episode by the rules of Told."""
    assert sorted(int(s) for part in parts for s in part.seed) == sorted(seeds)
    for part in parts:
        first = 0
        for seed, rows in zip(part.seed.tolist(), part.length.tolist(), strict=True):
            own = {name: array[first : first + rows] for name, array in part.arrays.items()}
            first += rows
            assert rows == 3 + seed % 5
            view, action = own["observation/observation"][:, 0], own["action"][:, 0]
            assert (view[:, 0] == seed).all()
            assert view[:, 1].tolist() == list(range(rows))
            assert view[1:, 2].tolist() == action[:-1].tolist()
            assert action[-1] == 0
            assert own["reward"][1:, 0].tolist() == view[1:].sum(-1).tolist()
            assert own["discount"][:-1].tolist() == [1] * (rows - 1)
            assert own["discount"][-1] == (seed % 2 != 0)


@pytest.mark.parametrize("copies", [2, 6, 64])
def test_every_episode_is_recorded_once(copies: int, tmp_path: Path) -> None:
    config = experiment("", environment=TOLD, envs_per_worker=copies)
    counts: list[int] = []
    with DatasetWriter(tmp_path / "data", {}, {}) as writer:
        recorder = TransitionRecorder(writer, counts.append)
        run_baseline(config, "random", 70, 20, None, recorder)
    require_played(recorded(tmp_path / "data"), list(range(20, 90)))
    assert counts == list(range(1, 71))


def test_what_is_recorded_over_the_wire_is_what_was_answered(tmp_path: Path) -> None:
    def act(spec: EnvSpec, num_envs: int) -> Policy:
        return lambda t: (t.observation["observation"][..., 1] % 5).astype(np.int32)

    with TinyLearner(policy=act) as learner, DatasetWriter(tmp_path / "data", {}, {}) as writer:
        config = experiment("", environment=TOLD, envs_per_worker=4)
        run_policy(config, learner.address, 7, 20, None, TransitionRecorder(writer))
    (part,) = recorded(tmp_path / "data")
    require_played([part], list(range(20, 27)))
    last = part.length.cumsum() - 1
    wanted = part.arrays["observation/observation"][:, :, 1] % 5
    wanted[last] = 0
    assert part.arrays["action"].tolist() == wanted.tolist()


def test_broken_streams_and_failed_episodes_leave_no_copy(tmp_path: Path) -> None:
    with TinyLearner(end_after=4) as learner, DatasetWriter(tmp_path / "a", {}, {}) as writer:

        def heal(*_: Any) -> None:
            if len(learner.sessions) == 2:
                learner.end_after = None

        config = experiment("", environment=TOLD, envs_per_worker=2)
        run_policy(config, learner.address, 6, 20, heal, TransitionRecorder(writer))
    require_played(recorded(tmp_path / "a"), list(range(20, 26)))
    with DatasetWriter(tmp_path / "b", {}, {}) as writer:
        config = experiment("", environment=TOLD, envs_per_worker=4)
        run_baseline(config, "random", 5, 14, None, TransitionRecorder(writer))
    require_played(recorded(tmp_path / "b"), [14, 15, 17, 18, 19])


def test_a_recording_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    config = experiment("", environment=TOLD, max_faults_per_minute=0)
    with (
        pytest.raises(EnvironmentFault, match="1 fault within a minute"),
        DatasetWriter(tmp_path / "data", {}, {}) as writer,
    ):
        run_baseline(config, "random", 5, 14, None, TransitionRecorder(writer))
    assert list(tmp_path.iterdir()) == []
