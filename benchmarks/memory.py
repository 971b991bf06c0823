"""Memory of the real processes: a worker with 32 terrain environments, a learner without a GPU."""

from typing import Any

import psutil

from murmur.benchmarks._processes import Processes
from murmur.benchmarks.effort import Effort

DESCRIPTION = (
    "memory of a worker with 32 terrain environments (target ≤ 600 MB resident) and of a CPU "
    "learner with the full-size networks after some updates (target ≤ 2 GB)"
)


def experiment(*, small: bool = False) -> dict[str, Any]:
    """Return the reference mission with full-size networks and one worker; or a small one."""
    network = {"channels": [256, 256, 256], "hidden": [256]}
    if small:
        network = {"channels": [4, 4, 4], "hidden": [4]}
    network |= {"kernels": [5, 4, 4], "strides": [1, 1, 1]}
    algorithm = {"batch_size": 60, "batch_number": 1, "data_passes": 1} if small else {}
    return {
        "environment": {"name": "terrain"},
        "env_server": {"num_workers": 1, "envs_per_worker": 2 if small else 32},
        "network": {"name": "cnn", **network},
        "algorithm": {"name": "coma", "advantage": "critic", **algorithm},
        "learner": {"device": "cpu"},
    }


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure megabytes by process, resident and of its own (USS), after some updates."""
    with Processes(experiment(small=effort is Effort.SMOKE)) as processes:
        processes.wait_for_updates(effort.choose(1, 2, 10), timeout_s=600)
        result: dict[str, Any] = {
            "learner": _megabytes(processes.learner),
            "worker": _megabytes(processes.workers[0]),
        }
    result["load_average"] = psutil.getloadavg()[0]
    return result


def _megabytes(process: psutil.Process) -> dict[str, float]:
    memory = process.memory_full_info()
    return {"resident_mb": memory.rss / 1e6, "own_mb": memory.uss / 1e6}
