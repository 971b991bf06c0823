"""BenchMARL on a VMAS task: its results with the budget of our acceptance tests, on this machine.

    python -m benchmarks.benchmarl navigation mappo --seeds 1 2 3

trains one seed after another in this process, on one thread, plays 100 environments greedily after
each fifth of the budget, and writes benchmarks/results/benchmarl-<task>-<algorithm>.json and a
table (.md). Returns are means over agents: of the first episode, and of a rollout of 100 steps, in
which another episode follows where one ends early. The settings are the best that were found for
it, not its defaults, with which most runs learn nothing by then.

Not part of any extra: pip install benchmarl==1.5.2 torchrl==0.11.1 tensordict==0.11.0
"""

import argparse
import importlib.metadata
import json
import tempfile
import time
from typing import Any

import numpy as np
import torch

from benchmarks._peer_training import make_experiment
from murmur.doctor.machine import RESULTS
from murmur.results import origin_text, provenance, require_clean_source, run_command

DESCRIPTION = "train BenchMARL on a VMAS task by the budget of our acceptance tests"

_PPO = {
    "max_n_frames": 420_000,
    "lr": 3e-4,
    "gamma": 0.9,
    "on_policy_collected_frames_per_batch": 6000,
    "on_policy_n_envs_per_worker": 60,
    "on_policy_n_minibatch_iters": 10,
    "on_policy_minibatch_size": 1000,
}
_REPLAY = {
    "max_n_frames": 144_000,
    "lr": 1e-3,
    "gamma": 0.9,
    "off_policy_collected_frames_per_batch": 1200,
    "off_policy_n_envs_per_worker": 60,
    "off_policy_n_optimizer_steps": 60,
    "off_policy_train_batch_size": 128,
}
EXPERIMENT: dict[str, dict[str, Any]] = {
    "mappo": _PPO,
    "ippo": {**_PPO, "share_policy_params": False},
    "masac": _REPLAY,
    "maddpg": _REPLAY,
}
ALGORITHM: dict[str, dict[str, Any]] = {"masac": {"alpha_init": 0.02}}
_EPISODES, _EVALUATIONS = 100, 5


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("task", help="of VMAS, in lower case")
    parser.add_argument("algorithm", choices=list(EXPERIMENT))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--frames", type=int, help="instead of the acceptance test's")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.benchmarl")
    torch.set_num_threads(1)
    packages = ("benchmarl", "torchrl", "tensordict", "vmas")
    settings = dict(EXPERIMENT[arguments.algorithm])
    if arguments.frames:
        settings["max_n_frames"] = arguments.frames
    record = {
        "benchmark": "benchmarl",
        **origin,
        "peer": {name: importlib.metadata.version(name) for name in packages},
        "task": arguments.task,
        "algorithm": arguments.algorithm,
        "experiment": settings,
        "options": ALGORITHM.get(arguments.algorithm, {}),
        "seeds": {
            str(seed): trained(arguments.task, arguments.algorithm, settings, seed)
            for seed in arguments.seeds
        },
    }
    file = RESULTS / f"benchmarl-{arguments.task}-{arguments.algorithm}.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(record))
    print(f"written: {file}, .md")


def trained(task: str, algorithm: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train one seed; its evaluations, the last one's returns, and the CPU-seconds of all."""
    from benchmarl.experiment import Callback
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    curve: list[dict[str, Any]] = []

    class Play(Callback):  # type: ignore[misc]
        """Callback that plays whole rollouts beside BenchMARL's own evaluation of episodes."""

        def on_evaluation_end(self, rollouts: list[Any]) -> None:
            run = self.experiment
            with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
                played = run.test_env.rollout(
                    run.max_steps, run.policy, auto_cast_to_device=True, break_when_any_done=False
                )
            (group,) = run.group_map
            reward = ("next", group, "reward")
            episodes = [episode[reward].sum(0).mean().item() for episode in rollouts]
            steps = played[reward].sum(1).mean((1, 2)).tolist()
            curve.append({"frames": run.total_frames, "episode": episodes, "rollout": steps})

    batch = next(n for key, n in settings.items() if key.endswith("frames_per_batch"))
    batches = max(1, settings["max_n_frames"] // batch // _EVALUATIONS)
    evaluation = {"evaluation_interval": batches * batch, "evaluation_episodes": _EPISODES}
    options = ALGORITHM.get(algorithm, {})
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        experiment = make_experiment(task, algorithm, settings | evaluation, options, seed, folder)
        play = Play()
        play.experiment = experiment
        experiment.callbacks.append(play)  # given at once it would be pickled
        experiment.run()
        cpu_s = time.process_time() - started
    last = curve[-1]
    means = [{k: np.mean(v).item() for k, v in point.items()} for point in curve]
    print(f"{task}, {algorithm}, seed {seed}: {means[-1]}, {cpu_s:.0f} CPU-s", flush=True)
    return {
        "curve": means,
        "returns": {"episode": last["episode"], "rollout": last["rollout"]},
        "cpu_s": cpu_s,
    }


def table(record: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in record["peer"].items())
    lines = [
        f"`{record['command']}`",
        "",
        f"{origin_text(record)}. {versions}.",
        f"Settings: {json.dumps({**record['experiment'], **record['options']})}.",
        f"Greedy policy, {_EPISODES} environments; returns are means over agents.",
        "",
        "| task | algorithm | seed | frames | an episode | 100 steps | CPU-s |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed, run in record["seeds"].items():
        last = run["curve"][-1]
        lines.append(
            f"| {record['task']} | {record['algorithm']} | {seed} | {last['frames']:,.0f} | "
            f"{last['episode']:.3f} | {last['rollout']:.3f} | {run['cpu_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_command(main)
