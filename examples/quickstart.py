"""Train three agents, stop when they are good enough, act with what they learned: half a minute.

python examples/quickstart.py
"""

from typing import Any

import numpy as np

import murmur


def stop_when_good(run: murmur.Run, record: dict[str, Any]) -> None:
    """Stop the training once the mean return of an evaluation exceeds -80."""
    if record["kind"] == "evaluation" and record["metrics"]["return"]["mean"] > -80:
        run.stop()


run = murmur.train(
    "spread",
    {"run.max_updates": 200, "evaluation.every_updates": 10},
    seed=1,
    callbacks=[stop_when_good],
)
print(run.evaluations()[["seconds", "updates", "return", "return.low", "return.high"]])

policy = murmur.load(run)
env = murmur.make_env(run.config, num_envs=4)
seeds = np.arange(4, dtype=np.uint64)
timestep = env.reset(seeds)
returns = np.zeros(4)
while not (ended := timestep.step_type == murmur.StepType.LAST).all():
    timestep = env.step(policy.act(timestep), ended, seeds)
    returns += timestep.reward.sum(axis=1)
print("returns of four episodes:", returns.round(1))
