"""How long an update takes with other settings: measured on made-up rows, not guessed."""

import time
from pathlib import Path
from typing import Any

import torch

from learner_service.algorithm import Algorithm, build_algorithm
from learner_service.checkpoint import CheckpointFolder, saved_spec
from learner_service.device import resolve_precision, select_device
from learner_service.precision import Precision
from learner_service.storage.rollout import RolloutStorage
from learner_service.storage.storage import OBSERVATION, Storage, Unroll
from shared.config import ExperimentConfig
from shared.spec import ACTION_MASK, AGENT_MASK, Discrete, EnvSpec
from shared.timestep import StepType

_MOST_ENVS = 256  # of a made-up unroll


def checkpoint_spec(path: Path) -> EnvSpec:
    """The spec a checkpoint was made with.

    Raises:
        CheckpointError: if it cannot be read.
    """
    return saved_spec(CheckpointFolder(path.parent, 1).load(path))


def seconds_per_row(config: ExperimentConfig, spec: EnvSpec, repeats: int = 3) -> float:
    """Time of learning for each environment row received.

    Args:
        config: the experiment.
        spec: its environment's.
        repeats: bursts of updates timed, after one that is not.

    Raises:
        MurmurError: if the settings do not fit each other.
    """
    device = select_device(config.learner)
    precision = Precision(resolve_precision(config.learner, device), device)
    algorithm = build_algorithm(config.algorithm, spec, config.network, precision, device, 0)
    storage = algorithm.make_storage(spec, None)
    envs = _MOST_ENVS
    if isinstance(storage, RolloutStorage):
        envs = min(envs, storage.envs_per_update)
    rounds: list[tuple[float, int]] = []
    for _ in range(repeats + 1):
        rows = 0
        while not storage.ready:
            rows += _fill(storage, spec, envs)
        started = time.perf_counter()
        _learn(algorithm, storage)
        rounds.append((time.perf_counter() - started, rows))
    return sum(took for took, _ in rounds[1:]) / sum(rows for _, rows in rounds[1:])


def _learn(algorithm: Algorithm[Any], storage: Storage[Any]) -> None:
    """Make all updates that are due."""
    while storage.ready:
        batch, _ = storage.take(0, 0.0)
        assert batch is not None
        scalars = algorithm.update(batch)
        storage.done(batch)
        torch.stack([s.float() for s in scalars.values()]).tolist()  # waits for the device


def _fill(storage: Storage[Any], spec: EnvSpec, envs: int) -> int:
    """Put an unroll of made-up rows; returns how many rows."""
    unroll: Unroll = storage.begin(envs, 0, 0)
    for name, array in unroll.arrays.items():
        if name == "step_type":
            array.fill_(int(StepType.MID))
        elif name in ("discount", OBSERVATION + ACTION_MASK, OBSERVATION + AGENT_MASK):
            array.fill_(1)
        elif name == "action" and isinstance(spec.action, Discrete):
            array.random_(0, spec.action.num_actions)
        elif array.is_floating_point():
            array.normal_()
        else:
            array.zero_()
    unroll.cursor, unroll.first_version = storage.length + 1, 0
    storage.put(unroll)
    return envs * storage.length
