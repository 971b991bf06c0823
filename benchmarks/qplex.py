"""The game that QPLEX was published with (environment `matrix`, game `qtran`), beside QMIX.

    python -m benchmarks.qplex        three seeds

The payoff is 8 if both agents take their first action, -12 if only one does, else 0 (Wang et al.
2021, "QPLEX", arXiv:2008.01062; of Son et al. 2019). All actions are random, as published, so that
nothing but the values decides what is played greedily. Real trainings, synchronous on one core; the
team's reward is the sum of both agents', so values are halved to compare them with payoffs.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import murmur
from benchmarks._commands import named_cases, save_run
from benchmarks._trainings import SYNC_LEARNER
from murmur.benchmarks.effort import Effort
from murmur.env_service.envs.matrix import Config as MatrixConfig
from murmur.env_service.envs.matrix import MatrixGame
from murmur.learner_service.algorithms.qmix import Qmix
from murmur.learner_service.checkpoint.contents import saved_spec
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import build_algorithm
from murmur.results import run_command
from murmur.shared.config import PluginConfig

DESCRIPTION = "QPLEX beside QMIX on its published game (optimum 8)"

_ENVIRONMENT: dict[str, Any] = {"game": "qtran", "episode_steps": 1}
_REPLAY = {  # an update for each episode and the batch and capacity are the authors'
    "update_interval": 2,  # rows: an episode has two
    "batch_size": 32,
    "capacity_rows": 10_000,
    "start_rows": 64,
    "unroll_steps": 2,
}
ALGORITHMS = ("qplex", "qmix")
UPDATES = 4000


def configuration(name: str, seed: int, updates: int) -> dict[str, Any]:
    """Return the configuration of a training."""
    return {
        "run": {"seed": seed, "max_updates": updates},
        "environment": {"name": "matrix", **_ENVIRONMENT},
        "env_server": {
            "num_workers": 1,
            "envs_per_worker": 16,
            "sessions_per_worker": 1,
            "metrics_port": 0,
        },
        "algorithm": {
            "name": name,
            "gamma": 0.0,
            "lr": 1e-3,
            "epsilon_end": 1.0,
            "replay": _REPLAY,
        },
        "network": {"name": "mlp", "hidden": [64, 64]},
        "learner": SYNC_LEARNER,
    }


def trained(config: dict[str, Any]) -> Qmix:
    """Train and return the algorithm as it was saved last."""
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        latest = murmur.train(config, run=Path(folder) / "run", progress=False).latest()
        state = CheckpointFolder(latest.parent, 1).load(latest)
    cpu = torch.device("cpu")
    options, network = PluginConfig(**config["algorithm"]), PluginConfig(**config["network"])
    spec, precision = saved_spec(state), Precision("fp32", cpu)
    algorithm = build_algorithm(options, spec, network, precision, cpu, 0)
    assert isinstance(algorithm, Qmix)
    algorithm.load_state_dict(state["algorithm"])
    return algorithm


@torch.no_grad()
def score(name: str, seed: int, updates: int) -> dict[str, Any]:
    """Train once; return the payoff of greedy play and all values, as payoffs.

    Both are by the latest weights, not by their mean, which `murmur evaluate` plays.
    """
    started = time.monotonic()
    algorithm = trained(configuration(name, seed, updates))
    payoffs = torch.from_numpy(MatrixGame(MatrixConfig(**_ENVIRONMENT), 1).payoffs)
    joint = torch.cartesian_prod(*(torch.arange(n) for n in payoffs.shape))
    observation = {"observation": torch.ones(len(joint), 2, 1)}
    first, second = algorithm.make_policy().act(observation, None)["action"][0].tolist()
    q = algorithm._outputs(algorithm.values.agents, observation)
    values = algorithm._mix(algorithm.values, q, joint, observation).view(payoffs.shape) / 2
    return {
        "greedy, latest weights": float(payoffs[first, second]),
        "largest error": round(float((values - payoffs).abs().max()), 2),
        "values": "; ".join(" ".join(f"{x:.1f}" for x in row) for row in values.tolist()),
        "seconds": round(time.monotonic() - started),
    }


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train each algorithm from three seeds, one after the other."""
    seeds = effort.choose((1,), (1,), (1, 2, 3))
    updates = effort.choose(20, UPDATES, UPDATES)
    result: dict[str, Any] = {"optimum": 8.0, "updates": updates}
    for name in ALGORITHMS[: effort.choose(1, 2, 2)]:
        result[name] = [score(name, seed, updates) for seed in seeds]
        print(f"{name}: {result[name]}", file=sys.stderr, flush=True)
    return {**result, "load_average": psutil.getloadavg()[0]}


def main() -> None:
    """Run all and save the result."""
    named_cases(__doc__)
    save_run("qplex", run)


if __name__ == "__main__":
    run_command(main)
