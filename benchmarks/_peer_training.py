"""Trainings of peers: BenchMARL's experiments, and a process of `time_to_score`.

    python -m benchmarks._peer_training FOLDER

trains as FOLDER/asked.json says, keeps policies in FOLDER/policy-<steps>.pt meanwhile, then plays
them and writes FOLDER/scores.json, steps -> score. Before the training it imports nothing of
murmur: a peer's start is on the clock, too.
"""

# ruff: noqa: ANN401 - the libraries have no types to speak of

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Act = Callable[[NDArray[Any]], NDArray[Any]]  # observations [N, A, ...] -> actions for `step`
_HIDDEN = [128, 128]


def make_experiment(
    task: str,
    algorithm: str,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    seed: int,
    folder: str,
) -> Any:
    """Make BenchMARL's experiment on a task of VMAS.

    Args:
        task: name of the task, in lower case.
        algorithm: name of the algorithm.
        settings: values over those of BenchMARL's experiment.
        options: values over those of BenchMARL's algorithm.
        seed: seed of the experiment.
        folder: folder for its files.
    """
    from benchmarl.algorithms import algorithm_config_registry
    from benchmarl.environments import VmasTask
    from benchmarl.experiment import Experiment, ExperimentConfig
    from benchmarl.models.mlp import MlpConfig

    config = ExperimentConfig.get_from_yaml()
    for name, value in settings.items():
        setattr(config, name, value)
    config.loggers, config.render = [], False
    config.save_folder = folder
    algorithm_config = algorithm_config_registry[algorithm].get_from_yaml()
    for name, value in options.items():
        setattr(algorithm_config, name, value)
    network = MlpConfig(_HIDDEN, torch.nn.Linear, torch.nn.Tanh)
    return Experiment(
        task=VmasTask[task.upper()].get_from_yaml(),
        algorithm_config=algorithm_config,
        model_config=network,
        critic_model_config=network,
        seed=seed,
        config=config,
    )


class Kept:
    """Policies that are kept at an interval of environment steps.

    Attributes:
        folder: folder of the files.
        files: files by environment steps.
    """

    def __init__(self, folder: Path, interval: int) -> None:
        """Keep the first one after an interval."""
        self.folder = folder
        self.files: dict[int, Path] = {}
        self._interval = interval
        self._next = interval

    def offer(self, steps: int, policy: torch.nn.Module, *, last: bool = False) -> None:
        """Keep the policy after an interval, and the last one."""
        if steps < self._next and not (last and steps not in self.files):
            return
        self.files[steps] = self.folder / f"policy-{steps}.pt"
        torch.save(policy.state_dict(), self.files[steps])
        self._next = (steps // self._interval + 1) * self._interval


class Restored:
    """A kept policy, loaded into the peer's network when it plays first."""

    def __init__(self, file: Path, policy: torch.nn.Module, act: Act) -> None:
        """Prepare to play."""
        self._file = file
        self._policy = policy
        self._act = act
        self._loaded = False

    def act(self, timestep: Any) -> NDArray[Any]:
        """Return greedy actions for [environments, agents]."""
        if not self._loaded:
            self._policy.load_state_dict(torch.load(self._file, weights_only=True))
            self._loaded = True
        return self._act(timestep.observation["observation"])


def train_benchmarl(asked: Mapping[str, Any], kept: Kept) -> tuple[torch.nn.Module, Act]:
    """Train BenchMARL on a task of VMAS; return its policy and the function that acts."""
    from benchmarl.experiment import Callback
    from tensordict import TensorDict
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    class Keep(Callback):  # type: ignore[misc]
        """Callback that keeps policies after updates."""

        def on_train_end(self, training_td: Any, group: str) -> None:
            kept.offer(self.experiment.total_frames, self.experiment.policy)

    settings = {**asked["settings"], "max_n_frames": asked["steps"], "evaluation": False}
    experiment = make_experiment(
        asked["game"], asked["algorithm"], settings, {}, asked["seed"], str(kept.folder)
    )
    keep = Keep()
    keep.experiment = experiment
    experiment.callbacks.append(keep)  # given at once it would be pickled
    experiment.run()
    kept.offer(experiment.total_frames, experiment.policy, last=True)
    (group,) = experiment.group_map

    def act(observation: NDArray[Any]) -> NDArray[Any]:
        seen = {group: {"observation": torch.from_numpy(observation.copy())}}
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            chosen = experiment.policy(TensorDict(seen, batch_size=[len(observation)]))
        action: NDArray[Any] = chosen[group, "action"].numpy()
        return action

    return experiment.policy, act


def train_stable_baselines3(asked: Mapping[str, Any], kept: Kept) -> tuple[torch.nn.Module, Act]:
    """Train Stable-Baselines3 on a task of Gymnasium; return its policy and what acts."""
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Keep(BaseCallback):  # type: ignore[misc]
        """Callback that keeps policies after updates."""

        def _on_rollout_start(self) -> None:
            kept.offer(self.num_timesteps, self.model.policy)

        def _on_step(self) -> bool:
            return True

    options = {name: _scheduled(value) for name, value in asked["settings"].items()}
    environments = make_vec_env(asked["game"], options.pop("n_envs", 1), seed=asked["seed"])
    make = getattr(stable_baselines3, asked["algorithm"].upper())
    model = make("MlpPolicy", environments, seed=asked["seed"], device="cpu", **options)
    model.learn(asked["steps"], callback=Keep())
    kept.offer(model.num_timesteps, model.policy, last=True)
    discrete = hasattr(environments.action_space, "n")

    def act(observation: NDArray[Any]) -> NDArray[Any]:
        chosen, _ = model.predict(observation[:, 0], deterministic=True)
        action = np.asarray(chosen if discrete else model.policy.scale_action(chosen))
        return action[:, None]

    return model.policy, act


def _scheduled(value: Any) -> Any:
    """Return a function of the remaining share of a training for "lin_<start>", else the value."""
    if not isinstance(value, str):
        return value
    start = float(value.removeprefix("lin_"))
    return lambda left: left * start


PEERS = {"BenchMARL": train_benchmarl, "Stable-Baselines3": train_stable_baselines3}


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    asked = json.loads((folder / "asked.json").read_text())
    torch.set_num_threads(1)
    kept = Kept(folder, asked["interval"])
    policy, act = PEERS[asked["peer"]](asked, kept)

    from benchmarks.time_to_score import TASKS, play

    task = TASKS[asked["task"]]
    restored = [Restored(file, policy, act) for file in kept.files.values()]
    scores = play(task.experiment(), restored, task.follow)
    found = dict(zip(kept.files, scores, strict=True))
    (folder / "scores.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
